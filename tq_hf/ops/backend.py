"""The environment variable `TQ_HF_BACKEND`, which chooses between backends.

    unset    kernels where they run, torch elsewhere
    torch    torch everywhere: right on every device, slow on a GPU. Meant for cards on which a kernel fails.

The variable is read once, when this module is imported.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from functools import cache, wraps
from importlib.util import find_spec
from traceback import walk_tb
from types import TracebackType
from typing import ParamSpec, TypeVar

import torch

logger = logging.getLogger(__name__)

VARIABLE = "TQ_HF_BACKEND"
HAS_TRITON = find_spec("triton") is not None
NOT_ABOUT_A_KERNEL = ("out of memory", "device-side assert")
"""Parts of error messages that Triton passes on."""
MAX_FLASH_DIM = 256
"""Most channels of a head in torch's flash attention. For wider grouped heads sdpa holds all logits in float32."""
chosen = os.environ.get(VARIABLE, "").strip().lower()

P = ParamSpec("P")
R = TypeVar("R")


def check_choice() -> None:
    """Raise a `ValueError` if the variable has an unknown value."""
    if chosen not in ("", "torch"):
        raise ValueError(f"The environment variable {VARIABLE} is {chosen!r}; it must be torch or unset.")


def say_torch_computes(what: str, states: torch.Tensor, *dims: int) -> None:
    """Log that no kernel computes `what`, an operation on heads of `dims` channels, on the GPU of `states`: once per
    operation and head size. Nothing is logged if the user chose torch, or while a graph is traced."""
    if torch.compiler.is_dynamo_compiling() or chosen == "torch" or not _is_on_gpu(states):
        return
    widths = " and ".join(map(str, dict.fromkeys(dims)))
    _warn_once(
        f"{what} is computed by torch, which is right but slower: no kernel takes heads of {widths} channels in "
        f"{str(states.dtype).removeprefix('torch.')} on this GPU, or not with what this call asks for."
    )


def _is_on_gpu(states: torch.Tensor) -> bool:
    return states.is_cuda


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def explained(error: Exception, device: torch.device) -> Exception:
    """Return the error to raise for an error of a kernel's launch: if it is Triton's, one that names the way out.

    Raise the new error from the other, whose stack is removed here and logged for debugging.
    """
    if not _is_tritons(error):
        return error
    logger.debug("A Triton kernel failed.", exc_info=error)
    error.__traceback__ = error.__cause__ = error.__context__ = None
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return RuntimeError(
        f"A Triton kernel does not compile or launch on {card} ({type(error).__name__}: {_reason(error)}). Set the "
        f"environment variable {VARIABLE}=torch to compute without kernels, slowly (it is read at the start), and "
        "please report this."
    )


def _is_tritons(error: Exception) -> bool:
    """Whether Triton raised the error: in compiling, loading or launching a kernel.

    CUDA's errors about earlier launches or about memory do not count.
    """
    if isinstance(error, torch.OutOfMemoryError) or any(said in str(error) for said in NOT_ABOUT_A_KERNEL):
        return False
    own = type(error).__module__.split(".")[0] == "triton"
    own = own or str(error).startswith(("Triton Error", "Failed to find C compiler"))
    return own or _went_through_triton(error.__traceback__)


def _went_through_triton(trace: TracebackType | None) -> bool:
    """Whether an error was raised in Triton or below: no C compiler, no driver, a failed pass. Assertions of kernels in
    the interpreter do not count."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(trace)]
    inside = [name for name in modules if name.split(".")[0] == "triton"]
    return bool(inside) and "triton.runtime.interpreter" not in inside


def _reason(error: Exception) -> str:
    """Choose the most informative line of an error's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    # A compilation error begins with a place in the source and ends with what is wrong there.
    return (lines[-1] if re.match(r"at \d+:\d+:", lines[0]) else lines[0])[:200]


def explains_failures(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that launches kernels on the device of the first tensor it is given, alone or in a tuple."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            flat = (x for arg in args for x in (arg if isinstance(arg, tuple) else (arg,)))
            device = next((x.device for x in flat if isinstance(x, torch.Tensor)), torch.device("cuda"))
            better = explained(error, device)
            if better is error:
                raise
            raise better from error

    return call
