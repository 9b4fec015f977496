"""Appending to a preallocated store compiles for every GPU we name, with the assertion that there is room."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")

import builds  # noqa: E402
from kernel_cases import INTERPRETED  # noqa: E402
from sass import SHARED, resources  # noqa: E402
from tq_kernels.decode.preallocated import append_and_encode  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")


@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90, 100])
def test_a_full_store_is_asserted_on_the_device(arch: int) -> None:
    assert append_and_encode.debug, "without it a launch compiles no assertion"
    built = builds.build_preallocated_append(arch, (4, 4))
    assert "larger `max_cache_len`" in built.asm["ttir"] and "__assertfail" in built.asm["ptx"]
    assert built.metadata.shared <= SHARED[arch] * 1024 - 1024
    # A step without a due block must not wait for the stack of the encoder, which all programs would set up.
    assert resources(built).stack <= (72 if arch == 100 else 0)


def test_no_length_decides_what_is_compiled() -> None:
    parameters = append_and_encode.params
    constants = [p.name for p in parameters if p.is_constexpr]
    assert len(constants) == 18 and all(name.isupper() for name in constants)
    numbers = [p for p in parameters if p.do_not_specialize]
    assert [p.name for p in numbers] == [p.name for p in parameters[17:-18]]
