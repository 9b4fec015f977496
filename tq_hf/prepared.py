"""A model prepared for its steps: joined projections, and decoder layers that are compiled one by one.

A product of few rows takes as long as its weights take to be read, and a small one longer (8B on an H200, 8 rows: keys'
and values' 16 us of their own beside 11 for the queries'). So projections that read the same states are one product.
The weights of joined projections are views of one tensor; the parameters of the model stay what they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from itertools import chain
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.utils import logging

from .compat import forward_hooks

if TYPE_CHECKING:
    from transformers import CompileConfig

logger = logging.get_logger(__name__)

MOST_TOKENS, CALLS = 512, 4
"""Tokens of the largest prompts that are CUDA graphs: with longer ones the device is busy while the host launches. And
prompts of a size before its capture, which takes as long as it saves for six (8B, H200)."""
GROUPS = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
"""Names of projections of the same states, in the order in which modules call them."""


class Joined:
    """One product for linear modules that are called one after the other with the same states.

    A module that is called with other states, or out of turn, computes its own product.
    """

    def __init__(self, modules: list[Any]) -> None:
        self.sizes, self.last = [each.out_features for each in modules], None
        self.weight = _joined([each.weight for each in modules])
        self.bias = None if modules[0].bias is None else _joined([each.bias for each in modules])
        for i, module in enumerate(modules):
            # A method, and not a partial function: the compiler would take each for another function.
            vars(module).update(tq_hf_joined=self, tq_hf_index=i, forward=MethodType(project, module))


def project(module: Any, states: torch.Tensor) -> torch.Tensor:
    """Projection of `states` `[..., in_features]` by a joined module."""
    joined, index = module.tq_hf_joined, module.tq_hf_index
    last = joined.last  # once: a thread that compiles the layer may replace it
    if index == 0:
        parts = nn.functional.linear(states, joined.weight, joined.bias).split(joined.sizes, -1)
    elif last is None or last[0] is not states:
        return nn.functional.linear(states, module.weight, module.bias)
    else:
        parts = last[1]
    joined.last = None if index + 1 == len(joined.sizes) else (states, parts)
    return parts[index]


def _joined(parameters: list[Any]) -> torch.Tensor:
    """Join the rows of all parameters in one tensor. Each parameter becomes a view."""
    first, rows = parameters[0], sum(len(each) for each in parameters)
    end, storage = first.storage_offset(), first.untyped_storage().data_ptr()
    for each in parameters:
        if each.untyped_storage().data_ptr() != storage or each.storage_offset() != end:
            break
        end += each.numel()
    else:
        return first.detach().as_strided((rows, *first.shape[1:]), first.stride())
    joined, start = torch.cat([each.detach() for each in parameters]), 0
    for each in parameters:
        each.data = joined[start : start + len(each)]
        start += len(each)
    if joined.is_cuda:
        torch.cuda.empty_cache()  # the pieces that were joined are too short for the next ones
    return joined


def _are_alike(modules: list[Any], device: str | None) -> bool:
    """Whether modules can have one product: plain linear ones of one width, dtype and device, none replaced."""
    if not all(type(each) is nn.Linear and "forward" not in vars(each) for each in modules):
        return False
    kinds = {
        (each.in_features, each.bias is None, each.weight.dtype, each.weight.device, each.weight.requires_grad)
        for each in modules
    }
    plain = all(type(x := each.weight) is nn.Parameter and x.is_contiguous() and not x.is_meta for each in modules)
    return plain and len(kinds) == 1 and device in (None, modules[0].weight.device.type)


def join(model: nn.Module, device: str | None = None) -> None:
    """Join projections of a model in place, until `separate`; those on devices of one kind, by default on all."""
    found, modules = list[list[Any]](), [*model.modules()]
    for parent in modules:
        children = dict(parent.named_children())  # one that has two names is shared, and has the first only
        found += [each for names in GROUPS if _are_alike(each := [children.get(name) for name in names], device)]
    used = Counter(id(x) for each in modules if found for x in each.parameters(recurse=False))
    for group in found:
        if all(used[id(each.weight)] == 1 for each in group):
            Joined(group)


def separate(model: nn.Module) -> None:
    """Undo `join`. Weights stay views of one tensor."""
    for own in map(vars, model.modules()):
        if own.pop("tq_hf_joined", None) is not None:
            del own["forward"], own["tq_hf_index"]


@contextmanager
def joined(model: nn.Module) -> Iterator[None]:
    """Context in which projections of a model on a GPU are joined."""
    join(model, "cuda")
    try:
        yield
    finally:
        separate(model)


def needs_of_graphs(model: nn.Module) -> tuple[list[int], ...]:
    """Modules of a model, their forward hooks, and addresses of parameters and buffers, which graphs depend on."""
    modules, tensors = [*model.modules()], chain(model.parameters(), model.buffers())
    return [*map(id, modules)], forward_hooks(modules), [each.data_ptr() for each in tensors]


def guarding_hooks() -> AbstractContextManager[None]:
    """Context in which layers are compiled anew when hooks of their modules come or go. torch does not look."""
    from torch._dynamo import config  # imports the compiler

    return config.patch(skip_nnmodule_hook_guards=False)


LAYER = "tq_hf_layer"
"""Attribute of modules with `layer_idx`: the index, and the module's place among `CompiledLayers.modules`, as a tensor
`[2]` int64 on the CPU. Layers that only differ in a number of Python would be compiled one by one."""


class CompiledLayers:
    """Decoder layers of a model, compiled by `torch.compile` with a `config`. Layers whose `forward` something else has
    replaced stay as they are."""

    def __init__(self, model: Any, config: CompileConfig | None) -> None:
        # Not at the top: importing this package loads no models of transformers.
        from transformers.modeling_layers import GradientCheckpointingLayer

        layers = (each for each in model.get_decoder().modules() if isinstance(each, GradientCheckpointingLayer))
        self.layers = [each for each in layers if "forward" not in vars(each)]
        every = chain(*(each.modules() for each in self.layers))
        self.modules = [each for each in every if isinstance(getattr(each, "layer_idx", None), int)]
        for place, module in enumerate(self.modules):
            vars(module)[LAYER] = torch.tensor([module.layer_idx, place])
        self.config = config
        if config is not None and not self.layers:
            logger.warning_once(
                f"{type(model).__name__} has no layers that can be compiled one by one: steps stay as they are."
            )
        self.takes_prompts = config is None or config.dynamic is not False  # else each length would be compiled

    @cached_property
    def forward(self) -> dict[Any, Any]:
        """`forward` by class of layers. The compiler is imported here, which takes one to two seconds."""
        options = None if self.config is None else self.config.to_dict()
        calls = {type(each): type(each).forward for each in self.layers}
        return calls if options is None else {each: torch.compile(call, **options) for each, call in calls.items()}

    @contextmanager
    def called(self, call: Callable[..., Any] | None = None) -> Iterator[None]:
        """Context in which the model calls the compiled layers, by `call(forward, layer, *arguments)` if given."""
        for layer in self.layers:
            forward = self.forward[type(layer)]
            vars(layer)["forward"] = partial(forward, layer) if call is None else partial(call, forward, layer)
        try:
            with nullcontext() if self.config is None else guarding_hooks():
                yield
        finally:
            for layer in self.layers:
                del vars(layer)["forward"]

    def within(self, function: Callable) -> Callable:
        """`function`, in which the model calls the compiled layers."""

        def call(*arguments: Any) -> Any:
            with self.called():
                return function(*arguments)

        return call

    @contextmanager
    def recording(self, calls: list[Any]) -> Iterator[None]:
        """Add the layers that are called, and their arguments, to `calls`."""
        with ExitStack() as hooks:
            for layer in self.layers:
                hook = layer.register_forward_pre_hook(lambda *call: calls.append(call), with_kwargs=True)
                hooks.callback(hook.remove)
            yield
