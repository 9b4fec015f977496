"""Handles: how attention finds the compressed layer behind the keys and values that a model passes to it.

transformers passes only tensors to attention. So `TurboQuantLayer.update` puts a `Handle` on the keys and values that
it returns, and `turboquant_attention` calls `resolve` to read the packed store. A tensor that the model computes from
the keys (repeated heads, a copy on another device) has no handle; attention then reads the tensor itself.

Where attention will resolve the handle, dense states are not needed, and the tensors are *lazy*. A lazy tensor has the
shape, dtype and device of the states, and becomes the states at the first operation on it. A model may compute with
keys and values from `update` (Doge makes a mask from its values, DiffLlama rearranges them). The result is right, and
the layer remembers that the model does so. A compiler cannot trace lazy tensors; see `TurboQuantLayer`.

`Handle.lazy` assigns a class: `keys.__class__ = LazyStates`. An eager step makes two lazy tensors a layer, and this way
takes 0.6 us for each where `as_subclass` takes 1.2 us. The assignment is safe: `detach` returns a new Python object, so
the class of the original does not change, and `LazyStates` has the memory layout of `torch.Tensor`. Bases that require
gradients go through `as_subclass`, because `detach` would cut them off from the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tq_kernels.types import KeyValue, Mask

from ..compat import METADATA, as_plain_tensors, autocast_dtype, forward_hooks, is_self_attention
from ..ops import dispatch
from ..tensors.layer import View
from .base import replaced
from .expansion import ExpandedStates, Expansion, is_known, is_up_projection, real


class _NoBackward(torch.autograd.Function):
    """Identity of the first argument, a new tensor without history, with a backward pass that raises."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(states)
        return states

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "A TurboQuantCache is for inference: gradients of keys and values after the first call are lost, and this "
            "backward pass goes through a later call. Compute the loss in one call without a cache "
            "(`use_cache=False`), or use a `DynamicCache` to process a prompt once."
        )


def without_backward(states: torch.Tensor, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """Make `states`, a new tensor without gradients, a function of `sources` with a backward pass that raises."""
    return _NoBackward.apply(states, *sources)


class Handle:
    """Reference to a layer's tokens, for one call of the model.

    Args:
        layer: The `TurboQuantLayer`.
        view: View of the tokens that the queries of this call attend to.
        states: Dense keys and values, if they exist already.
    """

    touched = False
    """Whether the model computed with the states."""
    written = False
    """Whether the model wrote to the states. Attention then reads the states, not the store."""
    _expansion: Callable[[], Expansion | None] = staticmethod(lambda: None)
    """Recorded operations on the states: a weak reference, because these refer to the handle."""
    sources: tuple[torch.Tensor, ...] = ()
    """Tensors that the states depend on and that get no gradients: see `without_backward`."""

    def __init__(self, layer: Any, view: View, states: KeyValue | None = None) -> None:
        self.layer, self.view, self._states = layer, view, states

    def lazy(self, bases: KeyValue) -> KeyValue:
        """Lazy keys and values with the dtype and device of `bases`."""
        keys: Any
        values: Any
        if bases[0].requires_grad or bases[1].requires_grad:
            keys, values = (base.as_subclass(LazyStates) for base in bases)
        else:  # the module's docstring says why
            keys, values = bases[0].detach(), bases[1].detach()
            keys.__class__ = values.__class__ = LazyStates
        keys._handle = values._handle = self
        values._index = 1
        return keys, values

    def attached(self, states: KeyValue) -> KeyValue:
        """Put this handle on `states`, and return them."""
        for tensor in states:
            tensor._handle = self  # type: ignore[attr-defined]
        return states

    def shape(self, index: int) -> torch.Size:
        """Shape of the keys (0) or values (1)."""
        if self._states is not None:
            return self._states[index].shape
        room = self.layer.get_max_length() if self.layer.returns_empty_rows else 0
        return self.view.tensors.dense_shapes(max(self.view.length, room))[index]

    def recorder(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expansion | None:
        """`Expansion` that records an operation on lazy states, if any: a linear layer on latents begins one."""
        expansion, states = self._expansion(), args[0]
        if expansion is None:
            if func is not torch.nn.functional.linear or states._index or self.shape(0)[1] > 1 or self.touched:
                return None
            long = self.view.counts is not None and self.view.new is not None
            if long or torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling():
                return None
            with as_plain_tensors():
                like = states.as_subclass(torch.Tensor)
                if autocast_dtype(like) is not None:
                    return None
            expansion = Expansion(self, like, LazyStates)
            self._expansion = weakref.ref(expansion)
        return expansion if expansion.records(func, args, kwargs) else None

    def states(self) -> KeyValue:
        """Dense keys and values, computed at the first call. Records that the model computes with them."""
        self.touched = True
        self.layer.is_untouched = False
        if self._states is None:
            self._states = self.dense()
        return self._states

    def dense(self) -> KeyValue:
        """Dequantize keys and values, in new tensors."""
        if not self.sources:
            return self.layer.dense(self.view)
        with torch.no_grad():
            keys, values = self.layer.dense(self.view)
        return without_backward(keys, self.sources), without_backward(values, self.sources)


_SHAPE: Any = torch.Tensor.shape.__get__  # type: ignore[attr-defined]


class LazyStates(torch.Tensor):
    """Keys or values that are dequantized at the first operation on them; see the module."""

    _handle: Handle
    _index = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (_SHAPE, torch.Tensor.size):
            shape = args[0]._handle.shape(args[0]._index)
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            return shape if dim is None else shape[dim]
        if func not in METADATA and isinstance(args[0] if args else None, LazyStates):
            expansion = args[0]._handle.recorder(func, args, kwargs)
            if expansion is not None:
                if not _is_in_place(func):
                    return expansion.record(func, args, kwargs)
                expansion.result(0)  # operations before this one read states that it changes
        if func in METADATA:  # that of the base, for compilers too
            with as_plain_tensors():
                return func(*args, **kwargs)
        if args and isinstance(args[0], LazyStates) and _is_in_place(func):
            args[0]._handle.written = True
        return func(*_real(args), **_real(kwargs))  # other subclasses, as of quantized weights, have ways of their own


def _is_in_place(func: Any) -> bool:
    """Whether an operation changes its first argument: `x[i] = y`, or a name that ends in one underscore."""
    name = func.__name__
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _real(value: Any) -> Any:
    """Replace lazy and expanded tensors by what they stand for in an argument of an operation, nested or not."""
    return real(replaced(value, LazyStates, lambda lazy: lazy._handle.states()[lazy._index]))


def for_graphs(states: KeyValue) -> KeyValue:
    """Prepare states of an eager update for a compiled caller.

    A graph guards the shape of a lazy tensor's base, so the base gets the full shape. Other states lose their handle:
    with it, resolving would become part of the graph.
    """
    keys, values = states
    if isinstance(keys, LazyStates) and keys._handle.layer.expands:
        return keys._handle.states()
    if isinstance(keys, LazyStates):
        handle = keys._handle
        keys, values = (states[i].as_subclass(torch.Tensor).expand(handle.shape(i)) for i in (0, 1))
        return handle.lazy((keys, values))
    return keys.detach(), values.detach()


def _unpadded(mask: Mask, length: int, tokens: int) -> torch.Tensor | None:
    """Padding of the newest `tokens` of `length` tokens: those that the last query attends to, `[B or 1, tokens]` bool.
    `None` if all are, or if the mask has fewer columns than tokens."""
    if mask is None or mask.shape[-1] < length:
        return None
    row = mask[:, 0, -1, length - tokens : length]
    return row if row.dtype == torch.bool else row > torch.finfo(row.dtype).min / 2


def _keep_for_hooks(module: torch.nn.Module, layer: Any, states: KeyValue) -> None:
    """Keep a first prompt dense for forward hooks of `module` (kvpress prunes in one), and free it after them."""

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
    mask: Mask = None,
) -> tuple[View | None, torch.Tensor, torch.Tensor]:
    """Find the view behind keys and values, for the attention of `module`.

    There is no view without a handle, for keys and values with different handles (DiffLlama pairs keys with other
    values), or for states that were written to (kvpress).

    Args:
        keys, values: Keys and values that `update` returned, or any.
        module: The attention module. Its config names the attention function that the model uses now.
        query: `[B, Hq, S, Dk]` of the call. A store that deferred the encoding of a prompt encodes the prompt now,
            observing these queries if they are of the same tokens (not in cross-attention).
        mask: Attention mask of the call. It shows which tokens of a deferred prompt are padding.

    Returns:
        The view or `None`; keys and values. These are dense where there is no view, or the view is of a first call.
        They are `ExpandedStates` where there is a view of latents.
    """
    if isinstance(keys, ExpandedStates):
        return _resolve_expanded(keys, values, module)
    handle: Handle | None = getattr(keys, "_handle", None)
    if handle is None:
        return None, _real(keys), _real(values)
    view, layer = handle.view, handle.layer
    if query is not None and view.new is not None and layer.store is not None and layer.store.is_deferred:
        tokens = view.new[0].shape[2]
        own = query.shape[2] == tokens and is_self_attention(module)
        layer.store.encode_deferred(query if own else None, _unpadded(mask, view.length, tokens))
    have_one_handle = getattr(values, "_handle", None) is handle
    if not have_one_handle or handle.written:
        return None, _real(keys), _real(values)
    if layer.reader is None and not torch.compiler.is_dynamo_compiling():
        config = getattr(module, "config", None)
        layer.reader = None if config is None else weakref.ref(config)
    if isinstance(keys, LazyStates):  # so nothing is compiled: see `turboquant_attention`
        layer.is_untouched = not handle.touched
    if view.counts is None:
        states = layer.dense(view) if handle._states is None else handle._states
        if forward_hooks([module]):
            _keep_for_hooks(module, layer, states)
        return (view, *states)
    return view, keys, values


def _resolve_expanded(
    keys: ExpandedStates, values: torch.Tensor, module: torch.nn.Module
) -> tuple[View | None, torch.Tensor, torch.Tensor]:
    """`resolve` for keys that the model made of lazy latents."""
    handle: Any = keys._expansion.handle
    layer, is_first = handle.layer, handle.view.counts is None
    layer.is_untouched = False
    config = getattr(module, "config", None)
    known = config is not None and is_known(module, keys, values)
    own = is_up_projection(keys._expansion.weight, module)
    layer.expands = known and own and dispatch.supports_latents(keys._expansion.like, handle.view.tensors.layout)
    if known and layer.reader is None:
        layer.reader = weakref.ref(config)
    if is_first or not known:
        return None, _real(keys), _real(values)
    return handle.view, keys, values
