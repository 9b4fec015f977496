"""The layers of a file, checked against a model, and made again.

A tiny forward pass of the model, on a cache of its own, tells what this model caches: the class of each layer, heads,
dims, dtypes and devices. What it handed each layer is given again, at another batch and length, to the layers of a
second cache: sizes that differ between the two are those that may differ in a file. Every tensor is held against that
before anything is allocated.
"""

from __future__ import annotations

from typing import Any

import psutil
import torch
import transformers

from ..config import TurboQuantConfig
from ..layers.base import FileSizes, TensorSize
from ..layers.dense import record
from .recorded import PROBE_BATCH, PROBE_ROOM, PROBE_TOKENS, RecordedLayer
from .safetensors_file import Header, check_fields


def answering(layer: Any) -> Any:
    """What answers for a layer: itself, or a `RecordedLayer` around one of transformers."""
    return layer if hasattr(layer, "load_state") else RecordedLayer(layer)


class Loader:
    """Checks a file's description against a model, and makes the cache it describes.

    Args:
        kind: `TurboQuantCache`.
        model: The model, which is run on a few tokens.
        config: What the file was compressed with.
        state: The file's description, its fields typed.
        room: Tokens to preallocate for, or `None`: of the cache that is made, not of the one that was saved.
    """

    def __init__(
        self,
        kind: Any,
        model: Any,
        config: TurboQuantConfig,
        state: dict[str, Any],
        room: int | None,
    ) -> None:
        self.kind, self.state = kind, state
        self.sizes = FileSizes(config, state["batch"], state["tokens"], state["max_cache_len"], room)
        tokens, saved_room = self.sizes.tokens, self.sizes.saved_room
        if saved_room is not None and saved_room < tokens:
            raise ValueError(f"It holds {tokens} tokens in room for {saved_room}: the file is damaged.")
        if room is not None and room < tokens:
            raise ValueError(f"It holds {tokens} tokens, and `max_cache_len` is {room}. Give room for them.")
        self.cache = kind(model.config, config, max_cache_len=room)
        self.saved_layers = kind(model.config, config, max_cache_len=saved_room).layers
        if [type(layer).__name__ for layer in self.saved_layers] != [
            layer.get("class") if isinstance(layer, dict) else None for layer in state["layers"]
        ]:
            raise ValueError(
                "Its layers are not those of a cache of this model (saved with transformers "
                f"{state['transformers'][:16]}, running {transformers.__version__}). Save it again with this version."
            )
        self.probes = self._probes(model)

    def _probes(self, model: Any) -> list[tuple[Any, Any]]:
        """Of each layer two that hold a few tokens of this model; of compressed ones only the first is filled."""
        config = TurboQuantConfig(skip_layers=self.sizes.config.skip_layers)
        first, second = (
            self.kind(model.config, config, max_cache_len=None if self.sizes.saved_room is None else room)
            for room in PROBE_ROOM
        )
        calls = record(first)
        # A model whose weights accelerate keeps elsewhere has no device, and moves its inputs itself.
        device = "cpu" if model.device.type == "meta" else model.device
        ids = torch.zeros(PROBE_BATCH[0], PROBE_TOKENS[0], dtype=torch.long, device=device)
        with torch.no_grad():
            model(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=first, use_cache=True)
        for index, (layer, other) in enumerate(zip(first.layers, second.layers, strict=True)):
            if answering(layer) is not layer:
                for call in calls[index]:
                    call.replay(other, PROBE_BATCH[1], PROBE_TOKENS[1])
            elif not layer.is_initialized:
                raise ValueError(f"This model did not fill layer {index} of its cache; call `model.eval()` first.")
        return list(zip(first.layers, second.layers, strict=True))

    def check(self, header: Header) -> None:
        """Raise a `ValueError` unless the file has just the tensors such a cache has, and there is memory for them."""
        expected: dict[str, TensorSize] = {}
        need: dict[torch.device, int] = {torch.device("cpu"): header.data_bytes}
        for index, (first, second) in enumerate(self.probes):
            described, layer = self.state["layers"][index], answering(first)
            check_fields(described, layer.state_fields, f"Layer {index}")
            # A sliding layer has room for its window.
            room = getattr(self.saved_layers[index], "max_cache_len", self.sizes.saved_room)
            tensors, used = layer.expected_state(described, index, self.sizes._replace(saved_room=room), second)
            expected |= {f"layers.{index}.{name}": value for name, value in tensors.items()}
            for device, size in used.items():
                need[device] = need.get(device, 0) + size
        if missing := sorted(expected.keys() - header.entries.keys()):
            raise ValueError(f"{len(missing)} tensors are missing, e.g. {missing[0]!r}: the file is damaged.")
        if extra := sorted(header.entries.keys() - expected.keys()):
            raise ValueError(f"There are {len(extra)} unknown tensors, e.g. {extra[0][:64]!r}: the file is damaged.")
        for name, size_of in expected.items():
            entry = header.entries[name]
            if not size_of.fits(entry.dtype, entry.shape):
                raise ValueError(
                    f"{name!r} is {entry.dtype} {str(list(entry.shape))[:64]} in the file, and would be "
                    f"{size_of.dtype} {size_of.least} in a cache of this model: the file is damaged."
                )
        for device, size in need.items():
            free = _free_memory(device)
            if free is not None and size > free:
                raise ValueError(
                    f"It needs {size / 2**30:.2f} GiB on {device}, and {free / 2**30:.2f} GiB are free. Make room, or "
                    "do not trust the file."
                )

    def fill(self, tensors: dict[str, torch.Tensor]) -> Any:
        """The cache, with these tensors, which `check` has passed."""
        for index, probes in enumerate(self.probes):
            prefix = f"layers.{index}."
            own = {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            layer = answering(self.cache.layers[index])
            self.cache.layers[index] = layer.load_state(self.state["layers"][index], own, self.sizes, probes)
        return self.cache


def _free_memory(device: torch.device) -> int | None:
    """Bytes that can be allocated on a device, if that can be told."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return psutil.virtual_memory().available if device.type == "cpu" else None
