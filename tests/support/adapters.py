"""A model with adapters, without PEFT."""

from __future__ import annotations

import copy
from typing import Any

import torch


class Lora(torch.nn.Module):
    """What PEFT puts in a layer's place, as far as it is looked at."""

    def __init__(self, base_layer: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        generator = torch.Generator().manual_seed(1)
        self.lora_A = torch.nn.ParameterDict()
        for name in ("first", "second"):
            self.lora_A[name] = 0.1 * torch.randn(base_layer.weight.shape, generator=generator)
        self.scaling = {"first": 1.0, "second": 1.0}
        self.active_adapters = ["first"]
        self.merged_adapters: list[str] = []
        self.disable_adapters = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        active = [] if self.disable_adapters else self.active_adapters
        added = (self.scaling[name] * (x @ self.lora_A[name].T) for name in active)
        return self.base_layer(x) + sum(added)


def adapted(model: Any) -> Any:
    """A model, whose projections of keys have adapters now."""
    for layer in model.model.layers:
        layer.self_attn.k_proj = Lora(layer.self_attn.k_proj)
    return model


def change(model: Any, **attributes: Any) -> Any:
    """A copy of a model whose layers with adapters have other attributes."""
    model = copy.deepcopy(model)
    set_adapters(model, **attributes)
    return model


def set_adapters(model: Any, **attributes: Any) -> None:
    """Give a model's layers with adapters other attributes."""
    for module in model.modules():
        if isinstance(module, Lora):
            vars(module).update(copy.deepcopy(attributes))
