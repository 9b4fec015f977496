"""Which model a cache belongs to: what of its config shapes keys and values, a sample of its weights, and its adapters.

Keys and values mean nothing to another model, not even to a fine-tuned sister of the same shape. So the fingerprint
has a hash of 64 values of every parameter of the decoder, taken as float64: equal on every device and with every
attention implementation. Rounding weights to another dtype changes it, as it changes the keys and values.

Weights do not say which of several adapters is active, or how strong: PEFT's layers are asked for that.
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

from ..compat import layer_configs

CONFIG_FIELDS = (
    "model_type vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim layer_types "
    "sliding_window rope_parameters q_lora_rank kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim "
    "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim"
).split()
"""What of a config shapes keys and values; a field a config does not have is left out. A list of what counts, not of
what does not: configs gain fields with every version of transformers, and a saved prompt should survive that."""

SAMPLES = 64
"""Values of each parameter that are hashed."""


def identify(model: Any) -> dict[str, Any]:
    """The fingerprint of a model: JSON with `config`, `dtype`, `shard`, `weights` and `adapters`."""
    decoder_config = model.config.get_text_config(decoder=True)
    by_layer = getattr(decoder_config, "per_layer_attributes", None) or ()  # Gemma 4's heads, a list of each
    fields = {
        name: [getattr(layer, name) for layer in layer_configs(decoder_config)]
        if name in by_layer
        else getattr(decoder_config, name)
        for name in CONFIG_FIELDS
        if name in by_layer or hasattr(decoder_config, name)
    }
    # Through JSON, so that what comes out of a file compares equal.
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
    """Raise a `ValueError` that says what differs unless `model` has the fingerprint `saved`."""
    ours = identify(model)
    if saved.keys() != ours.keys() or not isinstance(saved["config"], dict):
        raise ValueError("The file's description of its model is damaged; save the cache again.")
    # Not fields that only one has: configs gain fields from version to version.
    common = [name for name in CONFIG_FIELDS if name in saved["config"] and name in ours["config"]]
    differing = [name for name in common if saved["config"][name] != ours["config"][name]]
    if differing:
        name = differing[0]
        raise ValueError(
            f"The cache belongs to another model: its `{name}` is {str(saved['config'][name])[:80]}, and this "
            f"model's is {str(ours['config'][name])[:80]}. Load it with the model it was made with."
        )
    if saved["dtype"] != ours["dtype"]:
        raise ValueError(
            f"The cache was made by this kind of model in {str(saved['dtype'])[:32]}, and this one is in "
            f"{ours['dtype']}. Load the model with `dtype={str(saved['dtype'])[:32]}`."
        )
    if saved["shard"] != ours["shard"]:
        came = saved["shard"] if isinstance(saved["shard"], str) else "a whole model"
        raise ValueError(
            f"The cache holds the KV heads of {came[:64]}, and this model is {ours['shard'] or 'whole'}. Under tensor "
            "parallelism every rank saves a file of its own heads; load it on the same rank of as many processes."
        )
    if saved["weights"] != ours["weights"]:
        raise ValueError(
            "The cache belongs to another model: of the same shape as this one, but with other weights (another "
            "checkpoint, a fine-tune, another adapter, other quantization). Load it with the model it was made with."
        )
    if saved["adapters"] != ours["adapters"]:
        raise ValueError(
            f"The cache was made with {_said(saved['adapters'])}, and this model has {_said(ours['adapters'])}. "
            "Activate, merge and scale its adapters as they were, or load the cache with the model it was made with."
        )


def _decoder(model: Any) -> torch.nn.Module:
    """The module that makes the keys and values: without the head, a vision tower or a wrapper around it."""
    return model.get_decoder() if hasattr(model, "get_decoder") else model


def adapters(model: Any) -> dict[str, Any] | None:
    """What PEFT does to this model: names of active and merged adapters, and a hash of what each layer does with them.
    `None` for a model without adapters.

    A layer of PEFT is known by its attributes, so that PEFT need not be installed.
    """
    decoder = _decoder(model)
    active: set[str] = set()
    merged: set[str] = set()
    state = hashlib.blake2b(digest_size=32)
    found = False
    for name, module in decoder.named_modules():
        adapters, disabled = getattr(module, "active_adapters", None), getattr(module, "disable_adapters", None)
        # transformers' own models have methods of these names.
        if not isinstance(adapters, (list, tuple)) or not isinstance(disabled, bool):
            continue
        found = True
        # Merged ones work whether or not they are active; what is disabled does not.
        working = [] if disabled else [adapter for adapter in adapters if _has(module, adapter)]
        ours = list(getattr(module, "merged_adapters", ()))
        active.update(working)
        merged.update(ours)
        scaling = getattr(module, "scaling", None)
        strengths = [scaling.get(adapter) for adapter in working] if isinstance(scaling, dict) else None
        state.update(json.dumps([name, working, ours, strengths], default=str).encode())
    # Prompts that PEFT puts before the user's: they are in the keys and values too.
    prompts = getattr(model, "prompt_encoder", None)
    if isinstance(prompts, torch.nn.Module):
        found = True
        active.add(str(getattr(model, "active_adapter", None)))
        state.update(_hash_weights(prompts).encode())
    return {"active": sorted(active), "merged": sorted(merged), "state": state.hexdigest()} if found else None


def _has(module: torch.nn.Module, adapter: str) -> bool:
    """Whether a layer has weights of an adapter: each has a name for all adapters, but not all have its weights."""
    return any(f".{adapter}." in f".{name}." for name, _ in module.named_parameters())


def _said(adapters: Any) -> str:
    """Adapters in words. Those of a file may be anything."""
    if adapters is None:
        return "no adapters"
    if not isinstance(adapters, dict):
        return "adapters that its description garbles"
    words = (f"{kind} {str(adapters.get(kind))[:64]}" for kind in ("active", "merged"))
    return f"adapters {' and '.join(words)}"


def _shard(decoder: torch.nn.Module) -> str | None:
    """Which part of a tensor-parallel model this process holds, or `None` for all of it."""
    for parameter in decoder.parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            return f"rank {mesh.get_local_rank()} of {mesh.size()}"
    return None


def _samples(decoder: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in decoder.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        # Weights that accelerate keeps elsewhere are brought in for the moment.
        offloaded = any(parameter.is_meta for parameter in parameters.values())
        with align_module_device(module) if offloaded else nullcontext():
            for name, parameter in module.named_parameters(recurse=False):
                if isinstance(parameter, DTensor):
                    parameter = parameter.to_local()
                count = min(SAMPLES, parameter.numel())
                flat = torch.arange(count, device=parameter.device) * max(1, parameter.numel() // SAMPLES)
                # Indexed by position: flattening could copy the whole parameter.
                values = parameter.detach()[torch.unravel_index(flat, parameter.shape)] if count else parameter
                yield f"{prefix}.{name}".replace("_orig_mod.", ""), values.cpu().to(torch.float64)


def _hash_weights(decoder: torch.nn.Module) -> str:
    state = hashlib.blake2b(digest_size=32)
    for name, values in sorted(_samples(decoder), key=lambda sample: sample[0]):
        state.update(f"{name} {tuple(values.shape)}\n".encode())
        state.update(values.detach().numpy().tobytes())
    return state.hexdigest()
