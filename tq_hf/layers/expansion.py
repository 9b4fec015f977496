"""Latents that a model expands to the keys and values of its heads, and attention that does without.

A model with multi-head latent attention expands the lazy latents and rotary keys of `update`: a linear layer, and
operations that arrange its result. They are recorded, not run. Their results are meta tensors, `ExpandedStates`. Where
attention knows the module, its queries absorb the linear layer, and the history is never expanded
(`tq_hf.ops.dispatch.attend_absorbed`). Everywhere else the recorded operations run on dequantized states.

A module is known if the weight of the linear layer explains the keys and values of its first prompt. Numbers are
compared once; in every later call the operations have to be the same.

A compiled step cannot record. Its update returns dense states and calls `leave`; in the same graph, attention calls
`take` and reads packed latents with the `up_projection` of the module. The compiler then removes the dense states and
the operations on them, which nothing reads. If the graph breaks in between, attention reads the dense states.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ..compat import METADATA, as_plain_tensors, compiled_frame, is_traceable_wrapper_subclass
from .base import replaced

RECORDED = {"linear", "view", "transpose", "split", "expand", "new_empty", "__getitem__", "copy_"}
"""Names of the operations of `expand_kv` in transformers' modules."""
OF_DEVICE = {getattr(torch.Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu", "is_meta")}
"""Attributes in which a meta tensor differs from the tensor it stands for."""
COMPARED_TOKENS = 8
"""Number of tokens of a first prompt that are compared, the newest."""

known: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, ...]] = weakref.WeakKeyDictionary()
"""Signature of a module's expansion; `()` if the weight does not explain it."""

_left: Any = None
"""`Handle` that `leave` stored in a graph, until `take`."""
_frame: Any = "none"
"""`compiled_frame` of the last `leave`. Only one thread compiles at a time."""


class Result(NamedTuple):
    """Argument of a recorded operation: the result of another one."""

    place: int


class Expansion:
    """Recorded operations on the states of a handle. Results 0 and 1 are its keys (latents) and values (rotary keys).
    `like` is a tensor of their dtype and device, and `lazy` the class of the handle's lazy states."""

    def __init__(self, handle: Any, like: torch.Tensor, lazy: Any) -> None:
        self.handle, self.like, self.lazy = handle, like, lazy
        self.operations: list[tuple[Any, Any, Any]] = []
        self.size = 2
        self._results: list[Any] = []

    def records(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether to record an operation: none has run, and no argument is of another handle, a tensor in a list, or a
        quantized weight, a subclass of tensors that may compute nothing else."""
        if self._results or func.__name__ not in RECORDED:
            return False
        nested = (kwargs.values(), *(x for x in args if isinstance(x, (tuple, list))))
        if any(isinstance(x, torch.Tensor) for several in nested for x in several) or any(map(_is_quantized, args)):
            return False
        return all(getattr(x, "_handle", self.handle) is self.handle for x in args if isinstance(x, torch.Tensor))

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an operation. Returns its results, meta tensors."""
        own = (ExpandedStates, self.lazy)
        self.operations.append((func, [Result(x._index) if isinstance(x, own) else x for x in args], kwargs))
        with as_plain_tensors():
            out = func(*[self._on_meta(x) if isinstance(x, torch.Tensor) else x for x in args], **kwargs)
            several = isinstance(out, (tuple, list))
            return type(out)(map(self._numbered, out)) if several else self._numbered(out)

    def _on_meta(self, states: Any) -> torch.Tensor:
        if isinstance(states, self.lazy):
            return self.like.new_empty(self.handle.shape(states._index), device="meta")
        return states if states.is_meta else states.to("meta")  # weights are real

    def _numbered(self, states: torch.Tensor) -> torch.Tensor:
        result = states.as_subclass(ExpandedStates)
        result._expansion, result._handle, result._index = self, self.handle, self.size
        self.size += 1
        return result

    def result(self, index: int) -> torch.Tensor:
        """A result. All operations run at the first call."""
        if not self._results:
            results = self._results = list(self.handle.states())
            for func, args, kwargs in self.operations:
                out = func(*[results[x.place] if isinstance(x, Result) else x for x in args], **kwargs)
                results.extend(out if isinstance(out, (tuple, list)) else (out,))
        result: torch.Tensor = self._results[index]
        return result

    def signature(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[Any, ...]:
        """Operations, and numbers of the results that are keys and values; `()` if these are of another expansion."""
        if not all(isinstance(states, ExpandedStates) and states._expansion is self for states in (keys, values)):
            return ()
        return (*(func for func, *_ in self.operations), keys._index, values._index)  # type: ignore[attr-defined]

    @property
    def weight(self) -> torch.Tensor | None:
        """Weight `[Hq * (Dk - Dr + Dv), R]` of the first operation, a linear layer; `None` if that has a bias."""
        _, args, kwargs = self.operations[0]
        _, weight, bias = (*args, kwargs.get("bias"))[:3]
        plain = bias is None and isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.is_floating_point()
        return weight if plain else None


class ExpandedStates(torch.Tensor):
    """Result of a recorded operation; see the module."""

    _expansion: Expansion
    _handle: Any
    _index: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in OF_DEVICE:
            return func(args[0]._expansion.like)
        if func in METADATA or func is torch.Tensor.size:
            with as_plain_tensors():
                return func(*args, **kwargs)
        expansion = getattr(args[0] if args else None, "_expansion", None)
        if expansion is not None and expansion.records(func, args, kwargs):
            return expansion.record(func, args, kwargs)
        return func(*real(args), **real(kwargs))


@torch.compiler.assume_constant_result
def _mark_frame() -> None:
    global _frame
    _frame = compiled_frame()


@torch.compiler.assume_constant_result
def _is_marked() -> bool:
    return _frame is compiled_frame()


def leave(handle: Any) -> None:
    """Leave a `Handle` for `take` in the graph that is being compiled."""
    global _left
    _left = handle
    _mark_frame()


def take() -> Any:
    """Take the `Handle` that an update left in the graph that is being compiled; `None` if the graph broke since."""
    global _left
    if not _is_marked():
        return None
    handle, _left = _left, None
    return handle


def real(value: Any) -> Any:
    """Replace expanded states by the tensors they stand for in an argument of an operation, nested or not."""
    return replaced(value, ExpandedStates, lambda states: states._expansion.result(states._index))


def _is_quantized(weight: Any) -> bool:
    """Whether a tensor is made of others, with operations of its own (torchao)."""
    return is_traceable_wrapper_subclass(weight) and not isinstance(weight, DTensor)


def up_projection(module: torch.nn.Module) -> torch.Tensor | None:
    """Weight of `module.kv_b_proj`, in tensor parallelism the rows of this process's heads; `None` if there is none, or
    a quantized one."""
    weight = getattr(getattr(module, "kv_b_proj", None), "weight", None)
    if isinstance(weight, DTensor):
        return weight.to_local()
    return weight if isinstance(weight, torch.Tensor) and not _is_quantized(weight) else None


def is_up_projection(weight: torch.Tensor | None, module: torch.nn.Module) -> bool:
    """Whether `weight` is the `up_projection` of `module`. A shard is a new view of the same memory at each call."""
    own = up_projection(module)
    if weight is None or own is None:
        return False
    return own is weight or (own.data_ptr() == weight.data_ptr() != 0 and own.shape == weight.shape)


def is_known(module: torch.nn.Module, keys: ExpandedStates, values: torch.Tensor) -> bool:
    """Whether `Expansion.weight` explains these keys and values. Numbers of a module's first prompt are compared;
    the operations then run."""
    expansion, view = keys._expansion, keys._expansion.handle.view
    signature = expansion.signature(keys, values)
    if module not in known and (view.counts is None or view.past_length == 0):
        prompt = slice(None if view.counts is None else 1)  # a step of a preallocated layer has empty rows
        parts = (x[:, :, prompt] for x in (*expansion.handle.states(), real(keys), real(values)))
        known[module] = signature if signature and agrees(expansion.weight, *parts) else ()
    return bool(signature) and known.get(module) == signature


def agrees(weight: torch.Tensor | None, *parts: torch.Tensor) -> bool:
    """Whether `weight` times latents `[B, 1, T, R]`, beside rotary keys `[B, 1, T, Dr]`, is keys `[B, Hq, T, Dk]` and
    values `[B, Hq, T, Dv]`: the four `parts`."""
    latents, rotary, keys, values = (part[:, :, -COMPARED_TOKENS:] for part in parts)
    heads, content = keys.shape[1], keys.shape[3] - rotary.shape[3]
    kind = (heads * (content + values.shape[3]), latents.shape[3]), latents.dtype
    if weight is None or content < 1 or values.shape[1] != heads or (weight.shape, weight.dtype) != kind:
        return False
    made = latents.float() @ weight.float().unflatten(0, (heads, -1)).mT  # [B, Hq, T, Dk - Dr + Dv]
    apart = (torch.cat([keys[..., :content], values], -1).float() - made).norm()
    near = (apart <= 64 * torch.finfo(latents.dtype).eps * made.norm()) & (made.norm() > 0)
    return bool(near & (keys[..., content:] == rotary).all())
