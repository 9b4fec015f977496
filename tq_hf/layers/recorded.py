"""What a model hands each layer of its cache: noted in one run, and given again to layers of other sizes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from .base import like_held

TOKEN_AXES = {"update": -2, "update_indexer": 1}
"""Methods of a cache whose tensors have an axis of tokens, and which; the batch is axis 0 of all."""
METHODS = (*TOKEN_AXES, "update_conv_state", "update_recurrent_state")


@dataclass(frozen=True)
class Call:
    """A call of a cache's method for one layer, with shapes in place of tensors.

    Args:
        method: Its name.
        likes: Shape, dtype and device of each tensor.
        options: The other arguments, but for the number of the layer.
    """

    method: str
    likes: tuple[tuple[tuple[int, ...], torch.dtype, torch.device], ...]
    options: tuple[tuple[str, Any], ...]

    def tensors(self, batch: int, tokens: int) -> list[torch.Tensor]:
        """Zeros in place of the call's tensors, for `batch` sequences of `tokens` tokens."""
        made = []
        for shape, dtype, device in self.likes:
            sizes = [batch, *shape[1:]]
            if self.method in TOKEN_AXES:
                sizes[TOKEN_AXES[self.method]] = tokens
            made.append(torch.zeros(sizes, dtype=dtype, device=device))
        return made

    def replay(self, layer: Any, batch: int, tokens: int) -> None:
        """Make the call on `layer`, one of transformers' classes."""
        tensors = self.tensors(batch, tokens)
        if self.method == "update":
            tensors = list(like_held(layer, *tensors))
        getattr(layer, self.method)(*tensors, **dict(self.options))


def record(cache: Cache) -> list[list[Call]]:
    """Note from now on what each layer of `cache` is given. Returns the lists that fill, one a layer."""
    calls: list[list[Call]] = [[] for _ in cache.layers]

    def noting(method: str, real: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(real)

        def note(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = dict(bound.arguments)
            given.pop("args", None)
            more, index = given.pop("kwargs", {}), given.pop("layer_idx")
            tensors = [given.pop(name) for name in list(given) if isinstance(given[name], torch.Tensor)]
            # What models pass on to `update` is for attention, not for the layer.
            options = {} if method == "update" else given | more
            likes = tuple((tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in tensors)
            calls[index].append(Call(method, likes, tuple(sorted(options.items()))))
            return real(*args, **kwargs)

        return note

    for method in METHODS:
        if hasattr(cache, method):
            setattr(cache, method, noting(method, getattr(cache, method)))
    return calls
