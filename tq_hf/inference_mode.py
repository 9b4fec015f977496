"""Tensors that outlive a call.

Under `torch.inference_mode` every new tensor is an inference tensor, which may never be written to in place outside
of it. A cache that was filled there must still serve a plain `generate()`, so what is kept is made outside.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def outside_inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Run `function` outside of inference mode and without gradients, whatever the caller is in."""
    # In this order: leaving inference mode turns gradients on.
    return torch.inference_mode(False)(torch.no_grad()(function))


def cached_table(make: Callable[P, R]) -> Callable[P, R]:
    """Keep the table that `make` returns for these arguments, which must be hashable. To `torch.compile` it is a
    constant: Dynamo warns of `lru_cache` itself, looks through it and makes the table anew in each graph."""
    kept = lru_cache(outside_inference_mode(make))

    @torch.compiler.assume_constant_result
    @wraps(make)
    def table(*args: P.args, **kwargs: P.kwargs) -> R:
        return kept(*args, **kwargs)  # type: ignore[arg-type]

    return table
