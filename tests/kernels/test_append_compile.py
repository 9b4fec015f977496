"""Appending to a preallocated store compiles for every GPU we name, with the assertion that there is room."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")

from kernel_cases import INTERPRETED  # noqa: E402
from tq_kernels.common.launcher import ALWAYS  # noqa: E402
from tq_kernels.decode.append import append_row, write_counts  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

STATES = ("keys", "values", "sink_keys", "sink_values", "window_keys", "window_values")


def compiled(kernel, arch: int, constants: dict[str, int], **options):
    types = dict.fromkeys(STATES, "*bf16") | {"state": "*i32", "step_counts": "*i32", "length": "*i64"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs={(kernel.arg_names.index(k),): v for k, v in constants.items()})
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=ALWAYS | dict(num_warps=1, **options))


@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90, 100])
def test_a_full_store_is_asserted_on_the_device(arch: int) -> None:
    assert append_row.debug, "without it a launch compiles no assertion"
    constants = {"DK": 128, "DV": 96, "TILE": 128}
    built = compiled(append_row, arch, constants, debug=True, sanitize_overflow=False)
    assert "larger `max_cache_len`" in built.asm["ttir"] and "__assertfail" in built.asm["ptx"]
    compiled(write_counts, arch, {})


def test_no_length_decides_what_is_compiled() -> None:
    numbers = [p for p in append_row.params if not p.is_constexpr and p.name not in (*STATES, "state", "step_counts")]
    assert len(numbers) == 9 and all(p.do_not_specialize for p in numbers)
    assert [p.name for p in append_row.params if p.is_constexpr] == ["DK", "DV", "TILE"]
