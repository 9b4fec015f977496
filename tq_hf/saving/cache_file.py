"""Save a cache to a safetensors file and load it back, so that a processed prompt can be reused after a restart.

A file holds the state of each layer (`tq_hf.layers.base`): tensors, and one JSON text with the rest (lengths,
configuration, fingerprint of the model). The text has a checksum of its own, and contains a checksum of all tensors.

Loading checks everything: `tq_hf.saving.safetensors_file` the file, `tq_hf.saving.fingerprint` the model and
`tq_hf.saving.layers` the layers.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import transformers
from transformers import PreTrainedConfig

from ..compat import outside_inference_mode
from ..config import PRESETS, TurboQuantConfig
from ..layers.rollback import check_complete, held_lengths, tokens_ahead
from . import fingerprint, safetensors_file
from .layers import Loader, describe

FORMAT = "tq_hf.cache"
VERSION = 8
"""Version of the format. Increase it when a reader of the old version would misread a new file."""

STATE_FIELDS = {
    "config": dict,
    "max_cache_len": (int, type(None)),
    "model": dict,
    "batch": int,
    "tokens": list,
    "layers": list,
    "tensors": str,
    "notes": dict,
    "transformers": str,
}


def save_cache(cache: Any, path: str | os.PathLike[str], model: Any, notes: Mapping[str, str] | None = None) -> None:
    """Write `cache` to `path` (see `TurboQuantCache.save`). `load_cache` returns `notes`, e.g. the prompt."""
    lengths = held_lengths(cache.layers)
    if not any(lengths.values()):
        raise ValueError("The cache holds no tokens, so there is nothing to save. Run the model with it first.")
    _check_model(model, "cache.save(path, model)")
    crossing = getattr(model.config.get_text_config(decoder=True), "cross_attention_layers", None) or ()
    if model.config.is_encoder_decoder or any(lengths.get(layer) for layer in crossing):
        raise ValueError(
            f"{type(model).__name__} has read the states of an encoder or an image by cross-attention, and its keys "
            "and values depend on that input, which this cache does not hold. Only caches of texts can be saved."
        )
    check_complete(cache.layers, cache.last_update)
    least, most, first = min(lengths.values()), max(lengths.values()), next(iter(lengths.values()))
    if least and (ahead := tokens_ahead(cache.layers, lengths, cache.last_update)):
        raise ValueError(
            f"The layers hold different numbers of tokens, {least} to {most}: an exception (Ctrl-C, no memory left) "
            f"ended a forward pass half way. `cache.crop({-max(ahead.values())})` makes the lengths equal again."
        )
    if cache.offloading:
        # Layers are copied to the CPU on side streams, possibly of several GPUs.
        for device in {getattr(layer, "device", None) for layer in cache.layers}:
            if device is not None and device.type == "cuda":
                torch.cuda.synchronize(device)
    tensors: dict[str, torch.Tensor] = {}
    layers = []
    for index, layer in enumerate(cache.layers):
        description, parts = describe(layer, index)
        layers.append(description)
        for name, tensor in parts.items():
            # Copy: safetensors refuses two tensors that share a storage.
            tensor = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            tensors[f"layers.{index}.{name}"] = tensor
    state = {
        "config": dataclasses.asdict(cache.config),
        "max_cache_len": cache.preallocated_for,
        "model": fingerprint.identify(model),
        "batch": next(tensor.shape[0] for name, tensor in tensors.items() if name.endswith("keys")),
        "tokens": [lengths.get(index, first) for index in range(len(layers))],
        "layers": layers,
        "tensors": safetensors_file.digest(tensors),
        "notes": dict(notes or {}),
        "transformers": transformers.__version__,
    }
    text = json.dumps(state, sort_keys=True)
    metadata = {"format": FORMAT, "version": str(VERSION), "state": text}
    safetensors_file.write(path, tensors, metadata | {"checksum": safetensors_file.text_digest(text)})


@outside_inference_mode
def load_cache(
    kind: Callable[..., Any],
    path: str | os.PathLike[str],
    model: Any,
    preset: str | TurboQuantConfig | None = None,
    max_cache_len: int | None | Literal["saved"] = "saved",
) -> tuple[Any, dict[str, str]]:
    """Load the cache and the notes saved at `path` (see `TurboQuantCache.load`). `kind` is the class of the cache."""
    _check_model(model, "TurboQuantCache.load(path, model)")
    with safetensors_file.opened(path) as file:
        try:
            metadata, entries = safetensors_file.read_header(file)
            state = _read_state(metadata)
            config = _config(state["config"], preset)
            fingerprint.check(state["model"], model)
            room = state["max_cache_len"] if max_cache_len == "saved" else max_cache_len
            loader = Loader(kind, model, config, state, room)
            loader.check(entries)
            tensors = safetensors_file.read_tensors(file)
            if safetensors_file.digest(tensors) != state["tensors"]:
                raise ValueError("The tensors do not have the checksum they were saved with: the file is damaged.")
            return loader.fill(tensors), state["notes"]
        except ValueError as error:
            raise ValueError(f"Cannot load the cache in {os.fspath(path)!r}. {error}") from error


def _check_model(model: Any, call: str) -> None:
    if not isinstance(model, torch.nn.Module) or not isinstance(getattr(model, "config", None), PreTrainedConfig):
        came = "None" if model is None else f"a {type(model).__name__}"
        raise ValueError(
            f"Got {came} in place of the model. The model is needed to check that the keys and values are its own: "
            f"`{call}`."
        )


def _read_state(metadata: dict[str, str]) -> dict[str, Any]:
    """Parse the JSON text of a file. Checks its checksum and the types of its fields."""
    if metadata.get("format") != FORMAT or "version" not in metadata:
        raise ValueError(
            "It is a safetensors file, but not of a cache (model weights, perhaps). Pass a file of `cache.save`."
        )
    version = metadata["version"]
    if not version.isascii() or not version.isdigit() or len(version) > 9:
        raise ValueError(f"Its format version is {version[:32]!r}, not a number: the file is damaged.")
    if int(version) != VERSION:
        what = "a newer tq_hf: upgrade it" if int(version) > VERSION else "no released tq_hf: save the cache again"
        raise ValueError(f"Its format version is {version}, and this tq_hf reads {VERSION}. It was written by {what}.")
    if metadata.keys() != {"format", "version", "state", "checksum"}:
        raise ValueError("Its metadata are not those of a cache: the file is damaged.")
    if safetensors_file.text_digest(metadata["state"]) != metadata["checksum"]:
        raise ValueError("Its description does not have the checksum it was saved with: the file is damaged.")
    state = safetensors_file.parse_json(metadata["state"])
    safetensors_file.check_fields(state, STATE_FIELDS, "The description")
    if not all(isinstance(note, str) for note in state["notes"].values()):
        raise ValueError("Its notes are not all strings: the file is damaged.")
    if not all(type(tokens) is int and 0 <= tokens <= safetensors_file.MAX_DIMENSION for tokens in state["tokens"]):
        raise ValueError("Its `tokens` are not numbers of tokens, one for each layer: the file is damaged.")
    for name in ("batch", "max_cache_len"):
        if state[name] is not None and not 1 <= state[name] <= safetensors_file.MAX_DIMENSION:
            raise ValueError(f"Its `{name}` is {state[name]}; it must be 1 or more.")
    return state


def _config(saved: dict[str, Any], preset: str | TurboQuantConfig | None) -> TurboQuantConfig:
    """Return the configuration of a file. Raises `ValueError` if `preset` is another configuration."""
    defaults = dataclasses.asdict(TurboQuantConfig())
    types = {name: (str, type(None)) if name == "preset" else type(value) for name, value in defaults.items()}
    safetensors_file.check_fields(saved, types | {"skip_layers": list, "layers": list}, "The configuration")
    if saved["preset"] is not None and saved["preset"] not in PRESETS:
        raise ValueError(f"Its preset is {saved['preset'][:32]!r}, unknown here. Known presets: {', '.join(PRESETS)}.")
    config = TurboQuantConfig(**saved)
    if preset is not None:
        asked = TurboQuantConfig.from_preset(preset) if isinstance(preset, str) else preset
        if asked != config:
            differing = [name for name in defaults if getattr(asked, name) != getattr(config, name)]
            options = ", ".join(f"{name}={getattr(config, name)!r}" for name in differing)
            raise ValueError(
                f"It was saved with {options}, which differs from `preset`. Leave out `preset`, or save the cache "
                "again."
            )
    return config
