"""Properties of a device that launch decisions need."""

from __future__ import annotations

import logging
import re
from collections import namedtuple
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

LAUNCH_READ_IN = ((3, 5), (3, 6), (3, 7), (3, 8), (3, 9))
"""Versions of Triton with `run(x, y, z, stream, function, packed_metadata, launch_metadata, enter hook, exit hook,
*arguments)` of a compiled kernel, read in their source for NVIDIA and AMD."""

AMD, TURING, AMPERE, HOPPER = (tl.constexpr(number) for number in (1, 7, 8, 9))
"""Inline assembly of a kernel. NVIDIA's are ordered: a later one has that of the earlier ones."""

logger = logging.getLogger(__name__)


def current_raw_stream(device: int) -> int:
    """Handle of the current CUDA stream, without a `torch.cuda.Stream` around it (torch 2.9 to 2.15)."""
    return torch._C._cuda_getCurrentRawStream(device)


def current_device() -> int:
    """Current CUDA device, without the check that CUDA is initialised (torch 2.9 to 2.15)."""
    return torch._C._cuda_getDevice()


@lru_cache
def knows_launch_of(version: str) -> bool:
    """Whether a compiled kernel of this Triton may be launched by `run`; warn once if not."""
    number = re.match(r"(\d+)\.(\d+)", version)
    known = number is not None and (int(number[1]), int(number[2])) in LAUNCH_READ_IN
    if not known:
        newest = ".".join(map(str, LAUNCH_READ_IN[-1]))
        logger.warning(
            "tq_kernels knows how Triton 3.5 to %s launch kernels, and this is %s: Triton itself launches them, which "
            "takes longer for each decode step. Results are the same.",
            newest,
            version,
        )
    return known


def members(arguments: Iterable[Any]) -> list[Any]:
    """List arguments and, one by one, the members of tuples among them."""
    found: list[Any] = []
    for x in arguments:
        found += members(x) if isinstance(x, tuple) else (x,)
    return found


def compiled_launch(compiled: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """Launcher `call(x, y, z, stream, *fixed, *arguments)` of a compiled kernel, which takes members of tuples one by
    one: Triton 3.5 takes 50 ns for each member of a tuple. `None` for an unknown Triton."""
    if not knows_launch_of(triton.__version__):
        return None
    _flatten(compiled)
    return compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)


def _flatten(compiled: Any) -> None:
    compiled.src.signature = dict(enumerate(members(compiled.src.signature.values())))


def with_launcher(compiled: Any) -> Any:
    """Build what `compiled_launch` finds in Triton's cache afterwards, without the GPU. Returns the kernel."""
    if knows_launch_of(triton.__version__):
        _flatten(compiled)
        triton.runtime.driver.active.launcher_cls(compiled.src, compiled.metadata)
    return compiled


@dataclass(frozen=True)
class Target:
    """Device, as the heuristic tables see it.

    Args:
        multiprocessors: Number of streaming multiprocessors.
        shared_bytes: Shared memory of one of them.
        capability: Compute capability of an NVIDIA GPU; (0, 0) for other GPUs and for the interpreter.
        small_levels: Whether matrix products keep subnormal fp16 numbers and may have 8 columns (NVIDIA; AMD's MI200
            takes subnormal numbers for 0, and AMD's products have 16 columns and more, or use the vector ALU).
        amd: Whether this is an AMD GPU.
    """

    multiprocessors: int
    shared_bytes: int
    capability: tuple[int, int]
    small_levels: bool
    amd: bool = False

    @property
    def asm(self) -> int:
        """Inline assembly of kernels: the major compute capability from Turing on, `AMD` on AMD's GPUs, or 0."""
        return AMD.value if self.amd else self.capability[0] if self.capability[0] >= TURING.value else 0

    @property
    def fragments(self) -> bool:
        """Whether `tl.dot` does not use the matrix units (compute capability 7.5): kernels of `fragments` do."""
        return self.capability == (7, 5)

    @property
    def widest_head(self) -> int:
        """Channels of the widest heads that kernels take: wider tiles do not fit Turing's registers, nor the shared
        memory of AMD's cards."""
        return 512 if self.small_levels and not self.fragments else 256

    @property
    def dependent_launch(self) -> bool:
        """Whether there is programmatic dependent launch (compute capability 9.0 and later)."""
        return self.capability[0] >= 9


@triton.jit
def _nothing():
    pass


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return not isinstance(_nothing, triton.runtime.JITFunction)


class Constants:
    """Named tuple of constants. (A compiled function may call classes, but none of Python's functions.)"""

    def __new__(cls, names, values):
        return namedtuple(cls.__name__, names)(*map(tl.constexpr, values))


@triton.constexpr_function
def constants_of(shape):
    """`shape`, a tuple that a kernel takes as a constant, of constants: compiled, its members would be plain numbers,
    which Triton takes in few places. From 3.8 on, it is a tuple of Triton's own."""
    if triton.knobs.runtime.interpret:
        return shape
    return Constants(shape._fields if isinstance(shape, tuple) else shape.type.fields, shape)


override: Callable[[Target], Target] | None = None
"""Override of the target, set before the first launch by tests that run another card's kernels on the GPU at hand."""


@lru_cache
def target(device: torch.device) -> Target:
    """`Target` of a device; for tensors on the CPU, that of the interpreter."""
    if device.type != "cuda" or interpreted():
        return Target(multiprocessors=4, shared_bytes=64 * 1024, capability=(0, 0), small_levels=True)
    properties = torch.cuda.get_device_properties(device)
    nvidia = torch.version.hip is None
    found = Target(
        multiprocessors=properties.multi_processor_count,
        shared_bytes=properties.shared_memory_per_multiprocessor,
        capability=(properties.major, properties.minor) if nvidia else (0, 0),
        small_levels=nvidia,
        amd=not nvidia,
    )
    return found if override is None else override(found)


def matrix_type(dtype: torch.dtype, device: torch.device) -> tl.dtype:
    """dtype of matrix operands for states of `dtype`. The interpreter cannot multiply bf16."""
    types = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
    return tl.float32 if device.type == "cpu" else types[dtype]
