#!/usr/bin/env bash
# Every check that needs a GPU, in one go of at most six minutes, without network and without
# installing anything:
#
#     benchmarks/gpu_check.sh OUT [--device cuda|cpu] [--tiny]
#
# 1. crosscheck: the backends against the corpus, on the device     OUT/crosscheck/
# 2. the benchmark of training steps                                OUT/backend.json
# 3. one pair of runs at the size of the paper                      OUT/pair/
# 4. with pytest: the tests of steps on a GPU                       OUT/tests.log
#
# A part that fails or takes too long does not keep the others from running; the exit status is 1
# if any did.  --tiny: toy sizes, to see on a CPU that it all works.
set -u
HERE=$PWD
cd "$(dirname "$0")/.."

OUT= DEVICE=cuda TINY=
while [ $# -gt 0 ]; do
    case "$1" in
        --device) DEVICE=${2:?--device needs cuda or cpu}; shift ;;
        --tiny) TINY=1 ;;
        -*) echo "unknown option $1" >&2; exit 2 ;;
        *) if [ -n "$OUT" ]; then echo "one OUT only; got $OUT and $1" >&2; exit 2; fi; OUT=$1 ;;
    esac
    shift
done
if [ -z "$OUT" ]; then echo "usage: benchmarks/gpu_check.sh OUT [--device cuda|cpu] [--tiny]" >&2; exit 2; fi
case "$DEVICE" in cuda|cpu) ;; *) echo "--device must be cuda or cpu; got $DEVICE" >&2; exit 2 ;; esac
case "$OUT" in /*) ;; *) OUT=$HERE/$OUT ;; esac
mkdir -p "$OUT" || exit 2

# The first interpreter that has what is needed and sees the device.
NEEDED='
import sys, importlib
absent = []
for name in ("torch", "numpy", "scipy", "numba", "threadpoolctl", "rich"):
    try:
        importlib.import_module(name)
    except ImportError as error:
        absent.append(f"{name} ({error})")
if absent:
    sys.exit("does not import " + ", ".join(absent))
import torch
if sys.argv[1] == "cuda" and not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} sees no GPU")
'
PYTHON=
for candidate in .venv-torch/bin/python python3; do
    if ! command -v "$candidate" >/dev/null; then
        echo "$candidate: not there"
    elif reason=$("$candidate" -c "$NEEDED" "$DEVICE" 2>&1); then
        PYTHON=$candidate
        break
    else
        echo "$candidate: ${reason##*$'\n'}"
    fi
done
if [ -z "$PYTHON" ]; then
    echo "gpu_check: no interpreter has torch, numpy, scipy, numba, threadpoolctl and rich and sees $DEVICE" >&2
    exit 1
fi
echo "interpreter: $PYTHON ($("$PYTHON" --version 2>&1)), device $DEVICE"
"$PYTHON" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)'
if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
fi

FAILED=
part() { # name, seconds, command ...
    local name=$1 limit=$2 begun=$SECONDS status
    shift 2
    echo "== $name"
    timeout --signal=INT --kill-after=15 "$limit" "$@" 2>&1 | tee "$OUT/$name.log"
    status=${PIPESTATUS[0]}
    echo "== $name: exit status $status, $((SECONDS - begun)) s"
    if [ "$status" -ne 0 ]; then FAILED="$FAILED $name"; fi
}

SIZE=() PAIR=(--seconds 90)
if [ -n "$TINY" ]; then
    SIZE=(--width 32 --depth 2 --batch 64 --schemes exact all_e4m3 --threads 1)
    PAIR=(--tiny)
fi
part crosscheck 120 "$PYTHON" -m mxsim.crosscheck --device "$DEVICE" --out "$OUT/crosscheck"
part backend 70 "$PYTHON" -m benchmarks.backend --device "$DEVICE" "${SIZE[@]}" --out "$OUT/backend.json"
part pair 100 "$PYTHON" -m benchmarks.gpu_pair --device "$DEVICE" "${PAIR[@]}" --out "$OUT/pair"
if "$PYTHON" -c "import pytest" 2>/dev/null; then
    FILTER=cuda
    if [ "$DEVICE" = cpu ]; then FILTER=bf16-cpu; fi
    part tests 40 "$PYTHON" -m pytest -p no:cacheprovider -k "$FILTER or captured" \
        tests/backends/test_torch_proxy_bounds.py tests/backends/test_torch_proxy_bits.py \
        tests/backends/test_torch_train.py
else
    echo "tests: no pytest here, left out"
fi

if [ -n "$FAILED" ]; then echo "failed:$FAILED"; exit 1; fi
echo "all parts passed in $SECONDS s"
