"""The rules of the format are the same on the host and in kernels."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import tq_kernels
from tq_kernels.format import due_blocks
from tq_kernels.layout import BlockLayout

import tq_hf
from tests.support.kernel_cases import INTERPRETED, child

LENGTHS = [0, 1, 4, 5, 127, 128, 131, 132, 133, 259, 260, 261, 387, 388, 2**31 - 1]
WINDOWS = [(0, 0), (4, 0), (4, 128), (0, 1), (130, 200)]


test_under_the_interpreter = child(__file__)


@pytest.mark.parametrize(("sinks", "residual"), WINDOWS)
def test_a_block_is_due_once_complete_and_wholly_older_than_the_residual(sinks: int, residual: int) -> None:
    for length in LENGTHS:
        due = due_blocks(length, sinks, residual)
        assert due == 0 or sinks + 128 * due + residual <= length
        assert sinks + 128 * (due + 1) + residual > length


@pytest.mark.skipif(INTERPRETED, reason="imports nothing of Triton")
def test_the_rules_of_the_host_need_no_triton() -> None:
    code = "sys.modules['triton'] = None; from tq_kernels.format import due_blocks; print(due_blocks(500, 4, 128))"
    hidden = (
        "import sys, importlib.util as u; found = u.find_spec; "
        "u.find_spec = lambda name, *a: None if name.split('.')[0] == 'triton' else found(name, *a); "
    )
    result = subprocess.run([sys.executable, "-c", hidden + code], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "2", result.stderr


def comparisons(source: str) -> Iterator[str]:
    """Comparisons of a number of bits with a number."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = " ".join(ast.unparse(side) for side in (node.left, *node.comparators))
            if re.search(r"(\b|_)(BITS|bits)\b", sides) and re.search(r"\b[2348]\b", sides):
                yield ast.unparse(node)


def test_no_code_compares_a_number_of_bits_with_a_number() -> None:
    """What depends on a width is a property of its `Code`: a new width takes no branch of another one."""
    assert [*comparisons("C.KEY_BITS == 3 or bits < 4 or max(bits) in (3, 4) or KEY_BITS > VALUE_BITS")] == [
        *("C.KEY_BITS == 3", "bits < 4", "max(bits) in (3, 4)")
    ]
    folders = [Path(package.__file__).parent for package in (tq_kernels, tq_hf)]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    found = {file.name: list(comparisons(file.read_text())) for file in files}
    assert len(files) > 100 and {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize("bits", [(5, 4), (4, 16), (0, 8)])
def test_a_block_of_other_widths_is_refused(bits: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="(key|value)_bits` is .*must be one of 2, 3, 4, 8"):
        BlockLayout(64, 64, *bits)


if INTERPRETED:
    import triton
    import triton.language as tl
    from tq_kernels.format import due_blocks_in_kernel

    @triton.jit
    def _due(lengths, out, sinks, residual, COUNT: tl.constexpr):
        for i in range(COUNT):
            tl.store(out + i, due_blocks_in_kernel(tl.load(lengths + i), sinks, residual))

    @pytest.mark.parametrize(("sinks", "residual"), WINDOWS)
    def test_the_rule_in_kernels_is_the_rule_on_the_host(sinks: int, residual: int) -> None:
        lengths = torch.tensor(LENGTHS, dtype=torch.int32)
        out = torch.zeros_like(lengths)
        _due[(1,)](lengths, out, sinks, residual, COUNT=len(LENGTHS))
        assert out.tolist() == [due_blocks(length, sinks, residual) for length in LENGTHS]


def constants_by_module(source: str) -> Iterator[str]:
    """Constants that compiled functions of a file name as attributes of a module."""
    tree = ast.parse(source)
    modules = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level and set(node.module or "") <= {"."}
        for alias in node.names
    }
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and "triton.jit" in map(ast.unparse, function.decorator_list):
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and node.attr.isupper() and ast.unparse(node.value) in modules:
                    yield ast.unparse(node)


def test_constants_of_kernels_are_named_directly() -> None:
    """Triton's cache knows a kernel by its source and by the constants that it names directly. Of two versions with
    other constants of a module, the second would run what was compiled for the first."""
    assert list(constants_by_module("from . import a\n@triton.jit\ndef f(x):\n    return x * a.UNIT")) == ["a.UNIT"]
    folder = Path(tq_kernels.__file__).parent
    found = {path.name: list(constants_by_module(path.read_text("utf-8"))) for path in folder.rglob("*.py")}
    assert {name: constants for name, constants in found.items() if constants} == {}
