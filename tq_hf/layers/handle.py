"""How attention finds the compressed layer behind the keys and values that a model hands it.

transformers calls attention with tensors only. So `TurboQuantLayer.update` puts a `Handle` on the keys and values that
it returns, and `turboquant_attention` calls `resolve` to get at the packed store. A tensor that the model makes of the
keys (an up-projection of latents, repeated heads, a copy on another device) has no handle: attention then reads states.

Where attention will resolve the handle, nobody needs the states, and the tensors are *lazy*. A lazy tensor has the
shape, dtype and device of the states, and becomes the states at the first operation on it. A model may compute with
what `update` returns (Doge makes a mask of its values, DiffLlama rearranges them): the result is right, and the layer
learns that the model does so. A compiler cannot trace lazy tensors; see `TurboQuantLayer`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from tq_kernels.types import KeyValue

from ..compat import METADATA, as_plain_tensors, attends_to_own_tokens, has_forward_hooks
from ..stores.base import LayerStore
from ..tensors.layer import View


class Owner(Protocol):
    """What a handle asks of its layer; see `TurboQuantLayer`."""

    store: LayerStore | None
    reader: weakref.ref[Any] | None
    is_untouched: bool
    prompt: KeyValue | None

    def dense(self, view: View) -> KeyValue:
        """The states of a view."""

    def shown_length(self, view: View) -> int:
        """Tokens of these states."""


class _NoBackward(torch.autograd.Function):
    """The first argument, whose gradient is not known. It is a new tensor without history."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(states)
        return states

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "A TurboQuantCache is for inference: gradients of keys and values after the first call are lost, and this "
            "backward pass goes through a later call. Compute the loss in one call without a cache (`use_cache=False`) "
            "or, to read a prompt once, over a `DynamicCache`."
        )


def without_backward(states: torch.Tensor, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """`states`, a new tensor made without gradients, as a function of `sources` that raises in a backward pass."""
    return _NoBackward.apply(states, *sources)


class Handle:
    """What a layer holds, for one call of the model.

    Args:
        layer: The layer.
        view: What the queries of the call attend to.
        states: The keys and values themselves, if they are there already.
    """

    is_lazy = False
    touched = False
    """Whether the model computed with the states."""
    written = False
    """Whether it wrote to them, so that attention reads them and not the store."""
    sources: tuple[torch.Tensor, ...] = ()
    """What the states would have gradients for, if those were not lost: see `without_backward`."""

    def __init__(self, layer: Owner, view: View, states: KeyValue | None = None) -> None:
        self.layer = layer
        self.view = view
        self._states = states

    def lazy(self, bases: KeyValue) -> KeyValue:
        """Lazy keys and values. `bases` have their dtype and device."""
        self.is_lazy = True
        keys: Any
        values: Any
        if bases[0].requires_grad or bases[1].requires_grad:
            keys, values = (base.as_subclass(LazyStates) for base in bases)
        else:  # in half the time
            keys, values = bases[0].detach(), bases[1].detach()
            keys.__class__ = values.__class__ = LazyStates
        keys._handle = values._handle = self
        values._index = 1
        return keys, values

    def attached(self, states: KeyValue) -> KeyValue:
        """`states`, with this handle on them."""
        for tensor in states:
            tensor._handle = self  # type: ignore[attr-defined]
        return states

    def shape(self, index: int) -> torch.Size:
        """Shape of the keys (0) or values (1)."""
        if self._states is not None:
            return self._states[index].shape
        return self.view.tensors.dense_shapes(self.layer.shown_length(self.view))[index]

    def states(self) -> KeyValue:
        """The keys and values, made at the first call. The model is said to have computed with them."""
        self.touched = True
        self.layer.is_untouched = False
        if self._states is None:
            self._states = self.dense()
        return self._states

    def dense(self) -> KeyValue:
        """The keys and values, dequantized anew."""
        if not self.sources:
            return self.layer.dense(self.view)
        with torch.no_grad():
            keys, values = self.layer.dense(self.view)
        return without_backward(keys, self.sources), without_backward(values, self.sources)


_SHAPE: Any = torch.Tensor.shape.__get__  # type: ignore[attr-defined]


class LazyStates(torch.Tensor):
    """Keys or values that are made at the first operation on them; see the module."""

    _handle: Handle
    _index = 0

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (_SHAPE, torch.Tensor.size):
            shape = args[0]._handle.shape(args[0]._index)
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            return shape if dim is None else shape[dim]
        with as_plain_tensors():
            # Compilers, too, ask for metadata: the base answers.
            if func not in METADATA:
                if args and isinstance(args[0], LazyStates) and _writes(func):
                    args[0]._handle.written = True
                args, kwargs = _real(args), _real(kwargs)
            return func(*args, **kwargs)


def _writes(func: Any) -> bool:
    """Whether an operation changes its first argument: `x[i] = y`, or a name that ends in one underscore."""
    name = func.__name__
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _real(value: Any) -> Any:
    """`value`, an argument of an operation, with states in place of lazy tensors."""
    if isinstance(value, LazyStates):
        return value._handle.states()[value._index]
    if type(value) in (tuple, list):
        return type(value)(_real(item) for item in value)
    if type(value) is dict:
        return {name: _real(item) for name, item in value.items()}
    return value


def placeholders(handle: Handle, nan: torch.Tensor) -> KeyValue:
    """Keys and values of a compiled step that only attention may read, by their handle: right shape, dtype and device,
    no memory, and NaN for whoever reads them all the same. `nan` is one NaN, `[1, 1, 1, 1]`."""
    return handle.attached((nan.expand(handle.shape(0)), nan.expand(handle.shape(1))))


def for_graphs(states: KeyValue) -> KeyValue:
    """States that an eager call returned, for a compiled caller to take in.

    A graph guards the shape that a lazy tensor has beneath its class. Other states come without their handle, whose
    attention would become part of the graph.
    """
    keys, values = states
    if isinstance(keys, LazyStates):
        handle = keys._handle
        keys, values = (states[i].as_subclass(torch.Tensor).expand(handle.shape(i)) for i in (0, 1))
        return handle.lazy((keys, values))
    return keys.detach(), values.detach()


def _attended(mask: torch.Tensor | None, length: int, tokens: int) -> torch.Tensor | None:
    """Which of the newest `tokens` of `length` the last query attends to, `[B or 1, tokens]` bool; `None` for all, and
    for a mask without a column for each."""
    if mask is None or mask.shape[-1] < length:
        return None
    row = mask[:, 0, -1, length - tokens : length]
    return row if row.dtype == torch.bool else row > torch.finfo(row.dtype).min / 2


def _show_hooks(module: torch.nn.Module, layer: Owner, states: KeyValue) -> None:
    """Let forward hooks of `module` read a first prompt as it came (kvpress prunes in one), and free it after them."""

    def free(*_: Any) -> None:
        layer.prompt = None
        hook.remove()

    layer.prompt = states
    hook = module.register_forward_hook(free)


def resolve(
    keys: torch.Tensor,
    values: torch.Tensor,
    module: torch.nn.Module,
    query: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> tuple[View | None, torch.Tensor, torch.Tensor]:
    """What the attention of `module` reads for these keys and values: the view behind them if both have one handle, and
    the tensors, which are the states where there is no view or the view is of a first call.

    Keys with other values than their own (DiffLlama) have no view, nor have states that were written to (kvpress).

    Args:
        keys: What `update` returned, or any keys.
        values: Likewise.
        module: Its config names the attention function that the model uses now.
        query: `[B, Hq, S, Dk]` of the call. A store that deferred the encoding of a prompt encodes it now: with these
            queries if they are of the same tokens, without any in cross-attention.
        mask: Of the call: it tells which tokens are padding.
    """
    handle: Handle | None = getattr(keys, "_handle", None)
    if handle is None:
        return None, _real(keys), _real(values)
    view = handle.view
    if query is not None and view.new is not None:
        store = handle.layer.store
        if store is not None and store.is_deferred:
            tokens = view.new[0].shape[2]
            own = query.shape[2] == tokens and attends_to_own_tokens(module)
            store.encode_deferred(query if own else None, _attended(mask, view.length, tokens))
    have_one_handle = getattr(values, "_handle", None) is handle
    if not have_one_handle or handle.written:
        return None, _real(keys), _real(values)
    layer = handle.layer
    if layer.reader is None and not torch.compiler.is_compiling():
        config = getattr(module, "config", None)
        layer.reader = None if config is None else weakref.ref(config)
    if handle.is_lazy:  # so nothing is compiled: see `turboquant_attention`
        layer.is_untouched = not handle.touched
    if view.counts is None:
        states = handle.layer.dense(view) if handle._states is None else handle._states
        if has_forward_hooks(module):
            _show_hooks(module, handle.layer, states)
        return (view, *states)
    return view, keys, values
