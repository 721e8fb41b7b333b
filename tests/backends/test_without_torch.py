"""What holds of the backends without PyTorch, and what their text alone can show."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import mxsim.backends

FOLDER = Path(mxsim.backends.__file__).parent
QUANTIZER = ("bits", "blocks", "elements", "nvfp4", "philox", "quantize", "scales")
# Facts of formats, checks of arguments, the names of random streams: nothing that rounds or draws.
ALLOWED = {
    "mxsim.formats": None,
    "mxsim.layout": {"Blocks", "BlockSize", "cut"},
    "mxsim.philox": {"Noise"},
    "mxsim.rounders": {"Rounder", "block_rounder"},
}


def test_mxsim_never_imports_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"  # an import of it raises
        "import mxsim, mxsim.backends, mxsim.cli\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_quantizer_takes_no_arithmetic_from_the_reference() -> None:
    for name in QUANTIZER:
        tree = ast.parse((FOLDER / f"torch_{name}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("mxsim") for alias in node.names), name
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mxsim"):
                module = node.module or ""
                if module.startswith("mxsim.backends.torch_"):
                    assert module.removeprefix("mxsim.backends.torch_") in QUANTIZER, name
                    continue
                assert module in ALLOWED, f"torch_{name}.py imports {module}"
                names = ALLOWED[module]
                assert names is None or {alias.name for alias in node.names} <= names, name


def test_the_quantizer_reads_of_a_rounder_its_arguments_only() -> None:
    tree = ast.parse((FOLDER / "torch_quantize.py").read_text())
    fields = {"format", "block_size", "scale_rule", "rounding", "nonfinite"}
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "rounder"
    }
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert used == fields
    assert "rounder" not in called
