"""Which model a cache belongs to: what of its config shapes keys and values, and a sample of its weights.

Keys and values mean nothing to another model, not even to a fine-tuned sister of the same shape. So the fingerprint
has a hash of 64 values of every parameter of the decoder, taken as float64: equal on every device and with every
attention implementation. Rounding weights to another dtype changes it, as it changes the keys and values.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

CONFIG_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "layer_types",
    "sliding_window",
    "rope_parameters",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
"""What of a config shapes keys and values; a field a config does not have is left out. A list of what counts, not of
what does not: configs gain fields with every version of transformers, and a saved prompt should survive that."""

SAMPLES = 64
"""Values of each parameter that are hashed."""


def identify(model: Any) -> dict[str, Any]:
    """The fingerprint of a model: JSON with `config`, `dtype`, `shard` and `weights`."""
    decoder_config = model.config.get_text_config(decoder=True)
    fields = {name: getattr(decoder_config, name) for name in CONFIG_FIELDS if hasattr(decoder_config, name)}
    # Through JSON, so that what comes out of a file compares equal.
    config = json.loads(json.dumps(fields, sort_keys=True, default=str))
    decoder = _decoder(model)
    return {"config": config, "dtype": str(model.dtype), "shard": _shard(decoder), "weights": _hash_weights(decoder)}


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
            "checkpoint, a fine-tune, another adapter, other quantisation). Load it with the model it was made with."
        )


def owner(decoder_config: PreTrainedConfig | None) -> PreTrainedModel:
    """The living model whose decoder has this very config object.

    A cache is given a config and never sees its model, so this looks through the objects of the process.

    Raises:
        ValueError: There is none, or more than one.
    """
    found: dict[int, PreTrainedModel] = {}
    for candidate in gc.get_objects() if decoder_config is not None else ():
        # Not isinstance: that would ask proxies of all kinds for their `__class__`.
        if issubclass(type(candidate), PreTrainedModel) and "_modules" in vars(candidate):
            if candidate.config.get_text_config(decoder=True) is decoder_config:
                found[id(_decoder(candidate))] = candidate
    if len(found) != 1:
        number = "no model" if not found else f"{len(found)} models"
        raise ValueError(
            f"There is {number} with the config this cache was made from, so it cannot be told whose keys and values "
            "it holds. Pass the model: `cache.save(path, model)`."
        )
    return next(iter(found.values()))


def _decoder(model: Any) -> torch.nn.Module:
    """The module that makes the keys and values: without the head, a vision tower or a wrapper around it."""
    return model.get_decoder() if hasattr(model, "get_decoder") else model


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
