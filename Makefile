# Every task of the project; continuous integration runs these same targets.
PYTHON ?= python3
TIER ?= laptop
DEVICE ?= cpu
TORCH ?= torch==2.13.0
BIN := .venv/bin
RUN := $(BIN)/python

# Before .venv is made: pip's own words for an older Python name another package.
NEW_ENOUGH = $(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit(f"mxsim needs Python \
3.11 or newer, and $(PYTHON) is {sys.version.split()[0]}: make PYTHON=python3.12, for example")'

.PHONY: help study figure reproduce test crosscheck check docs wheel exhaustive format lower-bounds clean \
	distclean

study: .venv/installed            ## the main job: layer-norm-affine quantization against all the rest
	$(RUN) -m studies.ln_affine_isolation --tier $(TIER)

figure: .venv/installed           ## the main job's figure, from stored results
	$(RUN) -m figures.ln_affine_isolation --tier $(TIER)

# Studies without a cluster tier stay at the laptop's; smoke leaves the committed page alone.
OTHERS := $(if $(filter smoke,$(TIER)),smoke,laptop)
PAGE := $(if $(filter smoke,$(TIER)),results/claims_smoke/claims.md,docs/claims.md)
DIAGRAMS := lr_depth lr_width lr_format lr_init lr_optimizer lr_batch lr_teacher_gain format_block \
	activation_norm rule_rounding
PICTURES := format_codes last_bin losses activation_norm_losses bias_to_divergence interventions \
	interventions_code hybrids $(addprefix phase_,$(DIAGRAMS)) quantized_edge controller

reproduce: .venv/installed        ## the paper's claims: every study, figure and verdict (TIER=smoke: minutes)
	$(RUN) -m studies.touchy_settings --tier $(OTHERS)
	$(RUN) -m studies.interventions --tier $(OTHERS)
	$(if $(filter laptop,$(OTHERS)),$(RUN) -m studies.interventions --tier laptop_code)
	$(RUN) -m studies.quantized_edge --tier $(OTHERS)
	$(RUN) -m studies.phase_diagrams --tier $(OTHERS) --diagrams $(DIAGRAMS)
	$(RUN) -m studies.controller --tier $(OTHERS)
	$(RUN) -m studies.claims --tier $(TIER)
	$(RUN) -m figures.all --tier $(TIER) --only $(PICTURES)
	$(RUN) -m studies.claims --tier $(TIER) --page $(PAGE)

test: .venv/installed-test        ## the whole test suite
	$(RUN) -m pytest -n 2 --dist loadfile

crosscheck: .venv-torch/installed ## PyTorch's tests; every backend against one corpus (DEVICE=cuda: the GPU, too)
	.venv-torch/bin/python -m pytest tests/backends
	.venv-torch/bin/python -m mxsim.crosscheck --device $(DEVICE)

check: .venv/installed-test       ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy examples

docs: .venv/installed-docs        ## the site, docs/_build/html/index.html; a warning is an error
	$(RUN) -m sphinx -E -W --keep-going -q -d docs/_build/doctrees docs docs/_build/html

wheel: .venv/installed-test       ## build the wheel, install it elsewhere, use it in an empty folder
	$(RUN) -m tests.wheel

exhaustive: .venv/installed-test  ## every float32 through every format and scale rule: 20 minutes on two cores
	$(RUN) -m tests.exhaustive

format: .venv/installed-test      ## ruff, in place
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lower-bounds:                     ## the test suite on the oldest supported dependencies
	$(PYTHON) -m venv .venv-lower
	.venv-lower/bin/pip install --quiet -c tests/lower-bounds.txt -e '.[test]'
	.venv-lower/bin/python -m pytest -n 2 --dist loadfile

.venv/bin/python:
	@$(NEW_ENOUGH)
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml | .venv/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	@touch $@

.venv/installed-test: pyproject.toml | .venv/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@ .venv/installed

.venv/installed-docs: pyproject.toml | .venv/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[docs]'
	@touch $@ .venv/installed

.venv-torch/bin/python:
	@$(NEW_ENOUGH)
	$(PYTHON) -m venv .venv-torch

.venv-torch/installed: pyproject.toml | .venv-torch/bin/python
	.venv-torch/bin/pip install --quiet --disable-pip-version-check $(TORCH) -e '.[test,torch,witnesses]'
	@touch $@

help:                             ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## */\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

clean:                            ## compiled kernels and tool caches (after editing mxsim/bits.py, too)
	find mxsim studies figures tests -name __pycache__ -prune -exec rm -rf {} +
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist docs/_build

distclean: clean                  ## that, and the virtual environments
	rm -rf .venv .venv-lower .venv-torch
