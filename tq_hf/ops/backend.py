"""`TQ_HF_BACKEND`: which backend computes, where more than one could.

    unset    kernels where they run, torch elsewhere
    torch    torch everywhere: right on every device, and slow on a GPU. For a card that a kernel fails on.
    triton   as unset, but without Triton nothing starts

The variable is read once, when this module is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

import torch

VARIABLE = "TQ_HF_BACKEND"
CHOICES = ("torch", "triton")
HAS_TRITON = find_spec("triton") is not None
chosen = os.environ.get(VARIABLE, "").strip().lower()

P = ParamSpec("P")
R = TypeVar("R")


def check_choice() -> None:
    """Raise a `ValueError` if the variable says what cannot be done."""
    if chosen and chosen not in CHOICES:
        raise ValueError(f"The environment variable {VARIABLE} is {chosen!r}; it must be torch, triton, or unset.")
    if chosen == "triton" and not HAS_TRITON:
        raise ValueError(f"The environment variable {VARIABLE} is triton, and Triton is not installed: unset it.")


def explained(error: Exception, device: torch.device) -> Exception:
    """The error to raise for one that came out of a kernel's launch: if it is Triton's, one that names the way out."""
    if not _is_tritons(error):
        return error
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    return RuntimeError(
        f"A Triton kernel does not compile or launch on {card} ({type(error).__name__}: {reason}). Set the environment "
        f"variable {VARIABLE}=torch to compute without kernels, slowly, and please report this."
    )


def _is_tritons(error: Exception) -> bool:
    """Whether Triton raised it: in compiling, in loading what it compiled, or in launching that."""
    ours = type(error).__module__.split(".")[0] == "triton"
    return ours or str(error).startswith(("Triton Error", "Failed to find C compiler"))


def explains_failures(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that launches kernels on the device of the first tensor it is given."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            device = next((arg.device for arg in args if isinstance(arg, torch.Tensor)), torch.device("cuda"))
            better = explained(error, device)
            if better is error:
                raise
            raise better from error

    return call
