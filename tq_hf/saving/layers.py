"""Layers of a saved cache: check them against a model, and restore them.

A run of the model on a few tokens, with a new cache, shows the heads, dims, dtypes and devices of each layer. Each
layer then lists the tensors that a file must have for it. All tensors are checked before any memory is allocated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import psutil
import torch
import transformers
from transformers.cache_utils import Cache

from ..compat import as_input, device_of_inputs
from ..config import TurboQuantConfig
from ..layers.base import Probe, State, like_held
from ..memory import measure
from ..stores.store import LayerStore
from ..tensors.sinks import SinkOrder
from .recorded import BATCH, ROOM, TOKENS, RecordedLayer, record
from .safetensors_file import check_fields


def describe(layer: Any, index: int) -> State:
    with _named(index):
        if hasattr(layer, "state") and not layer.is_initialized:
            raise ValueError(
                "holds no tokens although others do. If an exception ended the first call, make a new cache and "
                "run the model again. If this layer has no attention, or the model ends before it, make the cache from "
                "a config of the layers there are (`num_hidden_layers`)."
            )
        description, tensors = (layer if hasattr(layer, "state") else RecordedLayer(layer)).state()
    return {"class": type(layer).__name__} | description, tensors


@contextmanager
def _named(index: int) -> Iterator[None]:
    """Context that adds the subject, "Layer `index`", to the message of a `ValueError`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"Layer {index} {error}") from None


class Loader:
    """Checks the description `state` of a file against a model, which runs on a few tokens. Restores a cache of class
    `kind`, whose `max_cache_len` is `room`. Raises `ValueError` if the file is not of a cache of this model."""

    def __init__(
        self, kind: Callable[..., Cache], model: Any, config: TurboQuantConfig, state: dict[str, Any], room: int | None
    ) -> None:
        self.state, saved_room, tokens = state, state["max_cache_len"], max(state["tokens"], default=0)
        if saved_room is not None and saved_room < tokens:
            raise ValueError(f"It holds {tokens} tokens in room for {saved_room}: the file is damaged.")
        if room is not None and room < tokens:
            raise ValueError(f"It holds {tokens} tokens, and `max_cache_len` is {room}. Pass {tokens} or more.")
        self.cache: Any = kind(model.config, config, max_cache_len=room)
        first = kind(model.config, TurboQuantConfig(skip_layers=config.skip_layers), max_cache_len=saved_room and ROOM)
        names = [layer.get("class") if type(layer) is dict else None for layer in state["layers"]]
        if names != [type(layer).__name__ for layer in first.layers] or len(names) != len(state["tokens"]):
            raise ValueError(
                "Its layers are not those of a cache of this model (saved with transformers "
                f"{state['transformers'][:16]}, running {transformers.__version__}). Save it again with this version."
            )
        counted = zip(self.cache.layers, state["tokens"], strict=True)
        # Sliding layers agree in their lengths: no press evicts tokens there.
        if len({tokens for layer, tokens in counted if getattr(layer, "is_sliding", False)}) > 1:
            raise ValueError("Its sliding windows saw different numbers of tokens: the file is damaged.")
        ids = torch.zeros(BATCH, TOKENS, dtype=torch.long, device=device_of_inputs(model))
        with torch.no_grad(), record(first) as calls:
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True, **as_input(first))
        self.layers: list[tuple[Any, Probe]] = []
        """Each layer of the cache, with the results of this run."""
        layers: Any = zip(self.cache.layers, first.layers, calls, state["tokens"], strict=True)
        for index, (layer, probe, own, tokens) in enumerate(layers):
            states = None
            if hasattr(layer, "load_state"):
                if not own:
                    raise ValueError(f"This model did not fill layer {index} of its cache; call `model.eval()` first.")
                states = like_held(layer, *own[0].tensors(state["batch"], 0))
            elif type(layer) is type(probe) and (room == saved_room or not hasattr(layer, "max_cache_len")):
                layer = RecordedLayer(layer, own, state["batch"])
            else:
                raise ValueError(
                    f"Layer {index} is a {type(probe).__name__} of transformers, which cannot change its "
                    "`max_cache_len`: load the cache without `max_cache_len`."
                )
            self.layers.append((layer, Probe(probe, states, tokens)))

    def check(self, entries: dict[str, torch.Tensor]) -> None:
        """Raise `ValueError` unless a file with these tensors, on the meta device, has exactly those of this cache, and
        memory for them is free."""
        expected: dict[str, torch.Tensor] = {}
        need = Counter({torch.device("cpu"): sum(tensor.nbytes for tensor in entries.values())})
        for index, (layer, probe) in enumerate(self.layers):
            description = self.state["layers"][index]
            check_fields(description, {"class": str} | layer.state_fields, f"Layer {index}")
            try:
                with _named(index):
                    tensors = layer.check_state(description, probe)
                if probe.states is not None:
                    sized = copy(layer)  # what an empty layer allocates
                    sized.lazy_initialization(*(part.to("meta") for part in probe.states))
                    need[probe.states[0].device] += measure([sized], 0).total
                    need[probe.states[0].device] += sum(tensor.nbytes for tensor in tensors.values())
            except RuntimeError as error:  # a meta tensor is too large
                raise ValueError(
                    f"Layer {index} would be too large ({str(error)[:80]}): the file is damaged."
                ) from None
            expected |= {f"layers.{index}.{name}": tensor for name, tensor in tensors.items()}
        if missing := sorted(expected.keys() - entries.keys()):
            raise ValueError(f"{len(missing)} tensors are missing, e.g. {missing[0]!r}: the file is damaged.")
        if extra := sorted(entries.keys() - expected.keys()):
            raise ValueError(f"There are {len(extra)} unknown tensors, e.g. {extra[0][:64]!r}: the file is damaged.")
        for name, tensor in expected.items():
            entry = entries[name]
            if (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
                raise ValueError(
                    f"{name!r} is {entry.dtype} {str(list(entry.shape))[:64]} in the file, and must be {tensor.dtype} "
                    f"{list(tensor.shape)} in a cache of this model: the file is damaged or of another autocast."
                )
        for device, size in need.items():
            free = _free_memory(device)
            if free is not None and size > free:
                raise ValueError(
                    f"It needs {size / 2**30:.2f} GiB on {device}, and {free / 2**30:.2f} GiB are free. Make room, or "
                    "do not trust the file."
                )

    def fill(self, tensors: dict[str, torch.Tensor]) -> Any:
        """Fill the cache with tensors that `check` has accepted, and return it."""
        for index, (layer, probe) in enumerate(self.layers):
            prefix = f"layers.{index}."
            own = {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            with _named(index):
                layer.load_state(self.state["layers"][index], own, probe)
        stores = (getattr(layer, "store", None) for layer in self.cache.layers)
        _share_orders([store for store in stores if store is not None])
        return self.cache


def _share_orders(stores: list[LayerStore]) -> None:
    """Let layers with equal orders of padded rows share one, as when they were filled."""
    orders: list[SinkOrder] = []
    for store in stores:
        if (own := store.tensors.order) is not None:
            shared = next((each for each in orders if each.equals(own)), own)
            store.tensors = store.tensors.with_order(shared)
            if shared is own:
                orders.append(own)


def _free_memory(device: torch.device) -> int | None:
    """Number of free bytes on a device; `None` if unknown."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return psutil.virtual_memory().available if device.type == "cpu" else None
