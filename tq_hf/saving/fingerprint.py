"""Fingerprint of the model of a cache: fields of its config, a sample of its weights, and its adapters.

Keys and values are useless to another model, even to a fine-tune of the same shape. The fingerprint therefore contains
a hash: 64 values of every parameter of the decoder in float64. The hash is equal on every device and for every
attention implementation. Casting the weights to another dtype changes the hash, as it changes keys and values.

The weights do not show which adapters are active, or their scaling. That is read from PEFT's layers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch.distributed.tensor import DTensor

from ..compat import is_traceable_wrapper_subclass, layer_configs

CONFIG_FIELDS = (
    "model_type vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim layer_types "
    "sliding_window rope_parameters q_lora_rank kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim "
    "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim"
).split()
"""Fields of a config that determine keys and values. Fields that a config lacks are left out. New fields in later
versions of transformers do not change the fingerprint, because only the listed fields count."""

SAMPLES = 64
"""Number of hashed values per parameter."""


def identify(model: Any) -> dict[str, Any]:
    """Compute the fingerprint of a model: JSON with `config`, `dtype`, `shard`, `weights` and `adapters`."""
    decoder_config = model.config.get_text_config(decoder=True)
    by_layer = getattr(decoder_config, "per_layer_attributes", None) or ()  # heads of Gemma 4: one value per layer
    fields = {
        name: [getattr(layer, name) for layer in layer_configs(decoder_config)]
        if name in by_layer
        else getattr(decoder_config, name)
        for name in CONFIG_FIELDS
        if name in by_layer or hasattr(decoder_config, name)
    }
    # Convert through JSON, so that the config compares equal to the config in a file.
    config = json.loads(json.dumps(fields, sort_keys=True, default=str))
    decoder = _decoder(model)
    return {
        "config": config,
        "dtype": str(model.dtype),
        "shard": _shard(decoder),
        "weights": _hash_weights(decoder),
        "adapters": adapters(model),
    }


def check(saved: dict[str, Any], model: Any) -> None:
    """Raise `ValueError` unless `model` has the fingerprint `saved`. The message names the difference."""
    ours = identify(model)
    if saved.keys() != ours.keys() or not isinstance(saved["config"], dict):
        raise ValueError("The file's description of its model is damaged; save the cache again.")
    # Compare common fields only: configs gain fields from version to version.
    common = [name for name in CONFIG_FIELDS if name in saved["config"] and name in ours["config"]]
    differing = [name for name in common if saved["config"][name] != ours["config"][name]]
    if differing:
        name = differing[0]
        raise ValueError(
            f"The cache belongs to another model: its `{name}` is {str(saved['config'][name])[:80]}, and this "
            f"model's is {str(ours['config'][name])[:80]}. Load the cache with the model that made it."
        )
    dtype, shard = str(saved["dtype"])[:32], saved["shard"] if isinstance(saved["shard"], str) else "a whole model"
    reasons = {
        "dtype": f"The cache was made by a model in {dtype}, and this model is in {ours['dtype']}. Load the model with "
        f"`dtype={dtype}`.",
        "shard": f"The cache holds the KV heads of {shard[:64]}, and this model is {ours['shard'] or 'whole'}. Under "
        "tensor parallelism every rank saves a file of its own heads. Load each file on the same rank of the same "
        "number of processes.",
        "weights": "The cache belongs to another model of the same shape with other weights (another checkpoint, a "
        "fine-tune, another adapter, other quantization). Load the cache with the model that made it.",
        "adapters": f"The cache was made with {_in_words(saved['adapters'])}, and this model has "
        f"{_in_words(ours['adapters'])}. Activate, merge and scale the adapters as they were, or load the cache with "
        "the model that made it.",
    }
    for part, reason in reasons.items():
        if saved[part] != ours[part]:
            raise ValueError(reason)


def _decoder(model: Any) -> torch.nn.Module:
    """Module that computes keys and values, without head, vision tower or wrappers."""
    return model.get_decoder() if hasattr(model, "get_decoder") else model


def adapters(model: Any) -> dict[str, Any] | None:
    """Names of active and merged PEFT adapters, and a hash of the adapters and scalings of each layer. `None` for a
    model without adapters. Layers are recognized by their attributes, so PEFT need not be installed."""
    decoder = _decoder(model)
    active: set[str] = set()
    merged: set[str] = set()
    state = hashlib.blake2b(digest_size=32)
    has_adapters = False
    for name, module in decoder.named_modules():
        # `getattr` of what modules lack takes 1.2 ms for 32 layers; with this, .4.
        if "active_adapters" not in vars(module) and not hasattr(type(module), "active_adapters"):
            continue
        adapters, disabled = getattr(module, "active_adapters", None), getattr(module, "disable_adapters", None)
        # transformers' own models have methods of these names.
        if not isinstance(adapters, (list, tuple)) or not isinstance(disabled, bool):
            continue
        has_adapters = True
        # Every layer lists all adapters, even those without weights in it.
        own = [f".{parameter}." for parameter, _ in module.named_parameters()]
        # Merged adapters work even if they are not active. Disabled adapters do not work.
        working = [each for each in adapters if not disabled and any(f".{each}." in parameter for parameter in own)]
        ours = list(getattr(module, "merged_adapters", ()))
        active.update(working)
        merged.update(ours)
        scaling = getattr(module, "scaling", None)
        strengths = [scaling.get(adapter) for adapter in working] if isinstance(scaling, dict) else None
        state.update(json.dumps([name, working, ours, strengths], default=str).encode())
    # PEFT's prompts come before the user's and are part of keys and values.
    prompts = getattr(model, "prompt_encoder", None)
    if isinstance(prompts, torch.nn.Module):
        has_adapters = True
        active.add(str(getattr(model, "active_adapter", None)))
        state.update(_hash_weights(prompts).encode())
    return {"active": sorted(active), "merged": sorted(merged), "state": state.hexdigest()} if has_adapters else None


def _in_words(adapters: Any) -> str:
    """Describe adapters for a message. The value may come from a damaged file."""
    if adapters is None:
        return "no adapters"
    if not isinstance(adapters, dict):
        return "adapters whose description is damaged"
    words = (f"{kind} {str(adapters.get(kind))[:64]}" for kind in ("active", "merged"))
    return f"adapters {' and '.join(words)}"


def _shard(decoder: torch.nn.Module) -> str | None:
    """Name the part of a tensor-parallel model in this process; `None` for a whole model."""
    mesh = next((each.device_mesh for each in decoder.parameters() if isinstance(each, DTensor)), None)
    return None if mesh is None else f"rank {mesh.get_local_rank()} of {mesh.size()}"


def _samples(decoder: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in decoder.named_modules():
        # Load weights that accelerate has offloaded, for the time of this read.
        offloaded = any(parameter.is_meta for parameter in module.parameters(recurse=False))
        with align_module_device(module) if offloaded else nullcontext():
            for name, parameter in module.named_parameters(recurse=False):
                for part, tensor in _parts(parameter.to_local() if isinstance(parameter, DTensor) else parameter):
                    count, step = min(SAMPLES, tensor.numel()), max(1, tensor.numel() // SAMPLES)
                    if tensor.is_contiguous() and not offloaded:
                        values = tensor.detach().as_strided((count,), (step,))
                    else:  # by position: flattening could copy the whole parameter
                        flat = torch.arange(count, device=tensor.device) * step
                        values = tensor.detach()[torch.unravel_index(flat, tensor.shape)] if count else tensor
                    yield f"{prefix}.{name}{part}".replace("_orig_mod.", ""), values


def _parts(parameter: torch.Tensor, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a parameter is made of, by name: one, or those of a quantized one (torchao), which has no
    elements of its own."""
    if not is_traceable_wrapper_subclass(parameter):
        yield name, parameter
        return
    for part in parameter.__tensor_flatten__()[0]:
        yield from _parts(getattr(parameter, part), f"{name}.{part}")


def _hash_weights(decoder: torch.nn.Module) -> str:
    state, found = hashlib.blake2b(digest_size=32), sorted(_samples(decoder), key=lambda sample: sample[0])
    alike: dict[Any, list[torch.Tensor]] = {}
    for _, values in found:
        alike.setdefault((values.dtype, values.device), []).append(values.flatten())
    # One copy from a device for all values of a dtype.
    copies = {
        kind: iter(torch.cat(each).cpu().to(torch.float64).split([*map(len, each)])) for kind, each in alike.items()
    }
    for name, values in found:
        state.update(f"{name} {tuple(values.shape)}\n".encode())
        state.update(next(copies[values.dtype, values.device]).numpy().tobytes())
    return state.hexdigest()
