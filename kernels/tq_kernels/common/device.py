"""What launch decisions need to know about a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class Target:
    """A device as the heuristic tables see it.

    Args:
        multiprocessors: Number of streaming multiprocessors.
        shared_bytes: Shared memory of one of them.
        capability: Compute capability of an NVIDIA GPU; (0, 0) for other GPUs and for the interpreter.
        small_levels: Subnormal fp16 numbers count in products (NVIDIA; AMD's MI200 takes them for 0).
    """

    multiprocessors: int
    shared_bytes: int
    capability: tuple[int, int]
    small_levels: bool

    @property
    def asm(self) -> bool:
        """Inline PTX unpacking (compute capability 8.0 and later)."""
        return self.capability[0] >= 8

    @property
    def fragments(self) -> bool:
        """Matrix units that `tl.dot` does not use (compute capability 7.5): kernels of `fragments`."""
        return self.capability == (7, 5)

    @property
    def narrow_products(self) -> bool:
        """Matrix products of 8 columns (NVIDIA; AMD's have 16 and more, and leave others to the vector ALU)."""
        return self.small_levels

    @property
    def dependent_launch(self) -> bool:
        """Programmatic dependent launch (compute capability 9.0 and later)."""
        return self.capability[0] >= 9


@triton.jit
def _nothing():
    pass


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return not isinstance(_nothing, triton.runtime.JITFunction)


override: Callable[[Target], Target] | None = None
"""Set by tests that run another card's kernels on the GPU at hand, before the first launch."""


@lru_cache
def target(device: torch.device) -> Target:
    """The `Target` of a device; for tensors on the CPU, that of the interpreter."""
    if device.type != "cuda" or interpreted():
        return Target(multiprocessors=4, shared_bytes=64 * 1024, capability=(0, 0), small_levels=True)
    properties = torch.cuda.get_device_properties(device)
    nvidia = torch.version.hip is None
    found = Target(
        multiprocessors=properties.multi_processor_count,
        shared_bytes=properties.shared_memory_per_multiprocessor,
        capability=(properties.major, properties.minor) if nvidia else (0, 0),
        small_levels=nvidia,
    )
    return found if override is None else override(found)


def matrix_type(states: torch.Tensor) -> tl.dtype:
    """The dtype of matrix operands made of `states`. The interpreter cannot multiply bf16."""
    types = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
    return tl.float32 if states.device.type == "cpu" else types[states.dtype]
