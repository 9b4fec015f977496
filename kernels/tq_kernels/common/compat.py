"""Private API of torch and Triton that the kernels' host side uses, each with the versions it was read in."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

import torch
import triton

LAUNCH_READ_IN = ((3, 5), (3, 6), (3, 7), (3, 8), (3, 9))
"""Versions of Triton in whose source `run(x, y, z, stream, function, packed_metadata, launch_metadata, enter hook, exit
hook, *arguments)` of a compiled kernel was read, for NVIDIA and AMD."""

logger = logging.getLogger(__name__)


def current_raw_stream(device: int) -> int:
    """The current CUDA stream's handle, without a `torch.cuda.Stream` around it (torch 2.9 to 2.15)."""
    return torch._C._cuda_getCurrentRawStream(device)


def current_device() -> int:
    """The current CUDA device, without the check that CUDA is initialised (torch 2.9 to 2.15)."""
    return torch._C._cuda_getDevice()


@lru_cache
def knows_launch_of(version: str) -> bool:
    """Whether a compiled kernel of this Triton may be launched by `run`; says so once if not."""
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


def compiled_launch(compiled: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """How to launch what Triton compiled: `call(x, y, z, stream, *fixed, *arguments)`; `None` if this Triton is not
    known."""
    if not knows_launch_of(triton.__version__):
        return None
    return compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)
