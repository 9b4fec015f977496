"""Decoder layers that are compiled one by one: layers that are alike once, for any number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from transformers import CompileConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

logger = logging.get_logger(__name__)

LAYER = "tq_hf_layer"
"""Attribute of modules with `layer_idx`: the index, and the module's place among `CompiledLayers.modules`, as a tensor
`[2]` int64 on the CPU. Layers that only differ in a number of Python would be compiled one by one."""


class CompiledLayers:
    """Decoder layers of a model, compiled by `torch.compile`. Layers whose `forward` something else has replaced stay
    as they are."""

    def __init__(self, model: Any, config: CompileConfig) -> None:
        layers = (each for each in model.get_decoder().modules() if isinstance(each, GradientCheckpointingLayer))
        self.layers = [each for each in layers if "forward" not in vars(each)]
        every = chain(*(each.modules() for each in self.layers))
        self.modules = [each for each in every if isinstance(getattr(each, "layer_idx", None), int)]
        for place, module in enumerate(self.modules):
            vars(module)[LAYER] = torch.tensor([module.layer_idx, place])
        if not self.layers:
            logger.warning_once(
                f"{type(model).__name__} has no layers that can be compiled one by one: steps stay as they are."
            )
        self.takes_prompts = config.dynamic is not False  # else each length would be compiled
        kinds: set[Any] = {type(each) for each in self.layers}
        self.forward = {kind: torch.compile(kind.forward, **config.to_dict()) for kind in kinds}

    @contextmanager
    def called(self, call: Callable[..., Any] | None = None) -> Iterator[None]:
        """Context in which the model calls the compiled layers, by `call(forward, layer, *arguments)` if given."""
        for layer in self.layers:
            forward = self.forward[type(layer)]
            vars(layer)["forward"] = partial(forward, layer) if call is None else partial(call, forward, layer)
        try:
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
