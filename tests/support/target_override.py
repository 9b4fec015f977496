"""Run another NVIDIA GPU's kernels on this one: `TQ_HF_TARGET=sm_75` (80, 86, 89), or `plain`.

`conftest.py` installs it.

PTX is forward compatible. With the variable set, every Triton kernel of the process is compiled for the named target as
far as its PTX, which is then assembled for the GPU at hand, and the heuristic tables are told the named GPU. `plain` is
the code without inline assembly, which AMD's GPUs run but to encode 2 and 3 bits, compiled for the GPU at hand.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from tq_kernels.common import device
from tq_kernels.common.device import Target

VARIABLE = "TQ_HF_TARGET"


@dataclass(frozen=True)
class OtherCard:
    """The GPU whose kernels are run.

    Args:
        capability: Its compute capability; (0, 0) for code without inline PTX.
        shared_bytes: Shared memory of one of its multiprocessors.
        small_levels: As for `tq_kernels.common.device.Target`.
    """

    capability: tuple[int, int]
    shared_bytes: int
    small_levels: bool = True


OTHER_CARDS = {
    "sm_75": OtherCard((7, 5), 64 * 1024),
    "sm_80": OtherCard((8, 0), 164 * 1024),
    "sm_86": OtherCard((8, 6), 100 * 1024),
    "sm_89": OtherCard((8, 9), 100 * 1024),
    "plain": OtherCard((0, 0), 64 * 1024, small_levels=False),
}


def wanted_card() -> OtherCard | None:
    """What the environment asks for.

    Raises:
        ValueError: For an unknown target.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return None
    if name not in OTHER_CARDS:
        raise ValueError(f"{VARIABLE}={name!r} is not a target whose kernels can be tried: one of {[*OTHER_CARDS]}.")
    return OTHER_CARDS[name]


def assemble_for(capability: int) -> None:
    """Make Triton assemble PTX for GPUs of `capability`, e.g. 90, whatever it compiled it for."""
    from triton.backends.nvidia.compiler import CUDABackend

    make_cubin, hash_of = CUDABackend.make_cubin, CUDABackend.hash

    def assemble(self: Any, source: Any, metadata: Any, options: Any, compiled_for: int) -> Any:
        return make_cubin(self, source, metadata, options, max(capability, compiled_for))

    CUDABackend.make_cubin = assemble
    # What is cached must not be taken for the named GPU's own.
    CUDABackend.hash = lambda self: f"{hash_of(self)}-on-{capability}"


@lru_cache
def pretend() -> OtherCard | None:
    """Make Triton compile for what the environment asks for; once a process.

    Raises:
        ValueError: For an unknown target, or one newer than the GPU at hand.
    """
    wanted = wanted_card()
    if wanted is None or wanted.capability == (0, 0):
        return wanted
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    real = driver.active.get_current_target()
    major, minor = wanted.capability
    if real.backend != "cuda" or real.arch < 10 * major + minor:
        raise ValueError(f"{VARIABLE}=sm_{major}{minor} needs an NVIDIA GPU at least as new, not {real.arch}.")
    assemble_for(real.arch)
    pretended = GPUTarget("cuda", 10 * major + minor, real.warp_size)
    driver.active.get_current_target = lambda: pretended
    return wanted


def overridden(target: Target) -> Target:
    """The GPU at hand as the heuristic tables then see it.

    Raises:
        ValueError: As for `pretend`.
    """
    card = pretend()
    if card is None:
        return target
    return replace(target, capability=card.capability, shared_bytes=card.shared_bytes, small_levels=card.small_levels)


def install() -> None:
    """Let all launches of this process take a GPU for the one that the environment names."""
    device.override = overridden
