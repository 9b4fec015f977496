"""What a model caches and weighs, from its config alone: built on torch's `meta` device, and run without memory."""

from __future__ import annotations

import copy
import textwrap
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedConfig,
    PreTrainedModel,
)

from ..cache import TurboQuantCache
from ..layers.dense import Call, record

META = torch.device("meta")
TOKENS = 2
WHOLE = (AutoModelForImageTextToText, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq)
"""Of the models of a config that has a decoder in it, the one with everything around the decoder."""


@dataclass(frozen=True)
class Trace:
    """What a run without memory showed.

    Args:
        config: Of the decoder.
        model: The whole model, on the meta device; its decoder alone if what is around it cannot be built here.
        whole: Whether it is the whole model.
        calls: What each layer of the cache was given.
        cross_bytes: Bytes of keys and values that an encoder-decoder caches for each token of its encoder.
    """

    config: PreTrainedConfig
    model: PreTrainedModel
    whole: bool
    calls: list[list[Call]]
    cross_bytes: int


def trace(model_config: PreTrainedConfig, dtype: torch.dtype) -> Trace:
    """Build the model and run its decoder on a few tokens.

    Raises:
        ValueError: It has no cache of keys and values, or does not run without memory. The message says which.
    """
    name = type(model_config).__name__
    if not getattr(model_config.get_text_config(decoder=True), "num_attention_heads", None):
        TurboQuantCache(model_config)  # says what is wrong with a config that has no keys and values
    if not model_config.is_encoder_decoder and getattr(model_config, "is_decoder", None) is False:
        raise ValueError(f"{name} is that of an encoder (`is_decoder` is False), so there is no cache to estimate.")
    # Whatever goes wrong inside of transformers with this config, it is this config that cannot be estimated.
    try:
        found = _run(_traceable(model_config), dtype)
    except Exception as error:
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
        raise ValueError(
            f"The cache of a {name} cannot be estimated from its config: the model does not run "
            f"without its weights ({reason}). Load it, and ask `cache.memory_footprint()`."
        ) from error
    if not any(found.calls):
        raise ValueError(
            f"A {type(found.model).__name__} keeps no keys and values from one token to the next, so there is no cache "
            "to estimate."
        )
    return found


def _run(config: PreTrainedConfig, dtype: torch.dtype) -> Trace:
    decoder_config = config.get_text_config(decoder=True)
    # Of an encoder-decoder, sdpa's masks are made by looking at values.
    options = {"dtype": dtype} | ({"attn_implementation": "eager"} if config.is_encoder_decoder else {})
    built = config
    with META:
        try:
            model = _kind(config).from_config(config, **options).eval()
        except ImportError:  # a tower of another package
            built = decoder_config
            model = _kind(built).from_config(built, **options).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # the others refuse some dtypes and sizes
    cache = DynamicCache(config=decoder_config)
    calls, cross = record(cache), DynamicCache()
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device=META)
    with torch.no_grad():
        if config.is_encoder_decoder:
            encoded = torch.zeros(1, TOKENS, config.hidden_size, dtype=dtype, device=META)
            both = EncoderDecoderCache(cache, cross)
            model(encoder_outputs=(encoded,), decoder_input_ids=ids, past_key_values=both, use_cache=True)
        else:
            # Without the towers around it: they look at the values of their inputs.
            decoder = model if decoder_config is built else model.get_decoder()
            decoder(input_ids=ids, past_key_values=cache, use_cache=True)
    layers: list[Any] = list(cross.layers)
    cross_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers) // TOKENS
    return Trace(decoder_config, model, built is config, calls, cross_bytes)


def _kind(config: PreTrainedConfig) -> Any:
    """The class of transformers that makes the whole model of a config."""
    inner = config.is_encoder_decoder or config.get_text_config(decoder=True) is not config
    for kind in (*(WHOLE if inner else ()), AutoModelForCausalLM, AutoModel):
        if type(config) in kind._model_mapping:
            return kind
    raise ValueError(f"transformers has no model of a {type(config).__name__}")


def _traceable(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of a config without what makes a model look at the values of its inputs, and unquantized; no size of a
    cache depends on it."""
    config = copy.deepcopy(config)
    for part in {id(one): one for one in (config, config.get_text_config(decoder=True))}.values():
        part.pad_token_id = None
        vars(part).pop("quantization_config", None)
        rope = getattr(part, "rope_parameters", None) or {}
        for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
            if parameters.get("rope_type") in ("dynamic", "longrope"):
                parameters["rope_type"] = "default"
    return config
