"""Appending to a preallocated store compiles for every GPU we name, with the assertion that there is room."""

from __future__ import annotations

import pytest
from tq_kernels.decode.append import append_and_rotate

from examples.measure.compile import builds
from examples.measure.compile.sass import SHARED, code, resources
from tests.support.helpers import slow
from tests.support.kernel_cases import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")


@pytest.mark.parametrize(
    "rotates", [pytest.param(False, marks=pytest.mark.slow), True], ids=["append", "append and rotate"]
)
@pytest.mark.parametrize("arch", [slow(75), slow(80), slow(86), slow(89), 90, slow(100)])
def test_a_full_store_is_asserted_on_the_device(arch: int, rotates: bool) -> None:
    assert append_and_rotate.debug, "without it a launch compiles no assertion"
    built = builds.build_preallocated_append(arch, (4, 4), rotates=rotates)
    assert "larger `max_cache_len`" in built.asm["ttir"] and "__assertfail" in built.asm["ptx"]
    assert built.metadata.shared <= SHARED[arch] * 1024 - 1024
    # A step without a due block must not wait for the stack of the encoder, which all programs would set up.
    assert resources(built).stack <= (72 if arch == 100 else 0)


@pytest.mark.parametrize(
    ("arch", "dim"),
    [(90, 128), *[slow(arch, dim) for arch in (75, 80, 90) for dim in (64, 96, 128, 256) if (arch, dim) != (90, 128)]],
)
def test_rotating_takes_no_registers_or_memory_from_appending(arch: int, dim: int) -> None:
    alone, both = (
        builds.build_preallocated_append(arch, (4, 4), dim=dim, rotates=rotates) for rotates in (False, True)
    )
    units = [-(-resources(one).registers // 8) for one in (both, alone)]  # in which a thread is given them
    assert units[0] <= units[1]
    assert resources(both).stack <= resources(alone).stack
    assert resources(both).shared <= resources(alone).shared
    # The instructions of both kernels and a few to choose.
    added = len(code(both)) - len(code(alone))
    assert added <= 1.1 * len(code(builds.build_rotate(arch, (4, 4), dim=dim, rows=both.metadata.num_warps)))


def test_no_length_decides_what_is_compiled() -> None:
    parameters = append_and_rotate.params
    constants = [p.name for p in parameters if p.is_constexpr]
    assert len(constants) == 4 and all(name.isupper() for name in constants)
    unspecialised = [p.name for p in parameters if p.do_not_specialize]
    assert unspecialised == [p.name for p in parameters[: -len(constants)][-21:]]
