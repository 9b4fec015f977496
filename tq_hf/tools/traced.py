"""Run of a model on torch's `meta` device, without memory: it shows the tensors that the layers cache, and the weights,
whose bytes are counted as the checkpoint's `quantization_config` says."""

from __future__ import annotations

import copy
import re
import textwrap
from typing import Any, NamedTuple

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
from ..compat import as_input, has_attention_heads
from ..config import FOLLOWING, rotary_embeddings
from ..saving.recorded import TOKENS, Call, record, replay, shapes

META = torch.device("meta")
WHOLE = (AutoModelForImageTextToText, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq)
"""Auto classes that build a whole multimodal or encoder-decoder model."""


class Trace(NamedTuple):
    """A model on the meta device, config of its decoder, and the calls of its layers to the cache that the run
    filled."""

    config: PreTrainedConfig
    model: PreTrainedModel
    whole: bool
    """Whether `model` is the whole model: its decoder, if another part needs a package that is not installed."""
    cache: DynamicCache
    calls: list[list[Call]]
    cross_bytes: int
    """Bytes of keys and values that an encoder-decoder caches per token of its encoder."""


def trace(model_config: PreTrainedConfig, dtype: torch.dtype) -> Trace:
    """Build the model and run its decoder on a few tokens. Raise `ValueError` if the model has no cache of keys and
    values, or does not run without memory."""
    name = type(model_config).__name__
    if not has_attention_heads(model_config.get_text_config(decoder=True)):
        TurboQuantCache(model_config)  # raises: the config has no keys and values
    if not model_config.is_encoder_decoder and getattr(model_config, "is_decoder", None) is False:
        raise ValueError(f"{name} is the config of an encoder (`is_decoder` is False): there is no cache to estimate.")
    try:
        result = _run_in_either_way(model_config, dtype)
    except Exception as error:  # transformers raises any exception for a config that it cannot build or run
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
        raise ValueError(
            f"The cache of a {name} cannot be estimated from its config: the model does not run "
            f"without its weights ({reason}). Load the model, and call `cache.memory_footprint()`."
        ) from error
    if not any(result.calls):
        raise ValueError(
            f"A {type(result.model).__name__} keeps no keys and values from one token to the next, so there is no "
            "cache to estimate."
        )
    again = DynamicCache(config=result.config)
    for layer, other, calls in zip(result.cache.layers, again.layers, result.calls, strict=True):
        replay(calls, other, 1, TOKENS)
        if shapes(layer) != shapes(other):
            raise ValueError(
                f"The cache of a {name} cannot be estimated from its config: the model fills a {type(layer).__name__} "
                "in an unknown way. Load the model, and call `cache.memory_footprint()`."
            )
    return result


def _run_in_either_way(config: PreTrainedConfig, dtype: torch.dtype) -> Trace:
    """Run a model without a padding token, then with one if that fails. Some models search their inputs for the token,
    which needs values. Others need the token to count positions (RoBERTa, NLLB), or build masks for sdpa from values
    (BioGPT). The second run uses "eager" attention."""
    try:
        return _run(_traceable(config, pads=False), dtype, config.is_encoder_decoder)
    except Exception:
        return _run(_traceable(config, pads=True), dtype, eager=True)


def _run(config: PreTrainedConfig, dtype: torch.dtype, eager: bool) -> Trace:
    decoder_config = config.get_text_config(decoder=True)
    # The masks for sdpa in an encoder-decoder depend on values, and meta tensors have none.
    options = {"dtype": dtype} | ({"attn_implementation": "eager"} if eager else {})
    built = config
    with META:
        try:
            model = _kind(config).from_config(config, **options).eval()
        except ImportError:  # a part of the model needs another package
            built = decoder_config
            model = _kind(built).from_config(built, **options).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # the others refuse some dtypes and sizes
    cache = DynamicCache(config=decoder_config)
    cross = DynamicCache()
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device=META)
    with torch.no_grad(), record(cache) as calls:
        if config.is_encoder_decoder:
            encoded = torch.zeros(1, TOKENS, config.hidden_size, dtype=dtype, device=META)
            both = EncoderDecoderCache(cache, cross)
            model(encoder_outputs=(encoded,), decoder_input_ids=ids, use_cache=True, **as_input(both))
        else:
            # Run the decoder alone: other parts read values of their inputs.
            decoder = model if decoder_config is built else model.get_decoder()
            decoder(input_ids=ids, use_cache=True, **as_input(cache))
    layers: list[Any] = list(cross.layers)
    cross_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers) // TOKENS
    return Trace(decoder_config, model, built is config, cache, calls, cross_bytes)


def _kind(config: PreTrainedConfig) -> Any:
    """Return the auto class that builds the whole model of a config."""
    inner = config.is_encoder_decoder or config.get_text_config(decoder=True) is not config
    for kind in (*(WHOLE if inner else ()), AutoModelForCausalLM, AutoModel):
        if type(config) in kind._model_mapping:
            return kind
    raise ValueError(f"transformers has no model of a {type(config).__name__}")


def _traceable(config: PreTrainedConfig, pads: bool) -> PreTrainedConfig:
    """Copy a config without quantization and without options that make the model read values of its inputs: sizes of
    the cache do not change. With `pads` the padding token is kept."""
    config = copy.deepcopy(config)
    for part in {id(one): one for one in (config, config.get_text_config(decoder=True))}.values():
        if not pads:
            part.pad_token_id = None
        vars(part).pop("quantization_config", None)
        for parameters in rotary_embeddings(part):
            if parameters.get("rope_type") in FOLLOWING:
                parameters["rope_type"] = "default"
    return config


ALWAYS_PLAIN = r"(^|\.)(lm_head|embed_out|router|gate)(\.|$)"
"""Names of modules that checkpoints do not quantize, even if `modules_to_not_convert` does not list them."""


def _mxfp4(options: dict[str, Any], weight: torch.Tensor) -> float:
    return weight.numel() * (1 / 2 + 1 / 32)


def _fp8(options: dict[str, Any], weight: torch.Tensor) -> float:
    rows, columns = options.get("weight_block_size") or (128, 128)
    *experts, height, width = weight.shape
    blocks = -(-height // rows) * -(-width // columns)
    return weight.numel() + 4 * blocks * (experts[0] if experts else 1)


def _grouped(options: dict[str, Any], weight: torch.Tensor) -> float:
    bits = options.get("bits") or options.get("w_bit") or 4
    group = options.get("group_size") or options.get("q_group_size") or 128
    groups = weight.numel() / (group if group > 0 else weight.shape[-1])
    return weight.numel() * bits / 8 + groups * (2 + bits / 8)


def _bitsandbytes(options: dict[str, Any], weight: torch.Tensor) -> float:
    if options.get("load_in_8bit") or options.get("_load_in_8bit"):
        return weight.numel() + 4 * weight.numel() / weight.shape[-1]
    scale = (1 + 4 / 256) / 64 if options.get("bnb_4bit_use_double_quant") else 4 / 64
    return weight.numel() * (1 / 2 + scale)


METHODS = {"mxfp4": _mxfp4, "fp8": _fp8, "awq": _grouped, "gptq": _grouped, "bitsandbytes": _bitsandbytes}
"""Functions of a `quantization_config` and a weight, `[rows, columns]` or `[experts, ...]`: its number of bytes.

mxfp4           4 bits per weight, 1 byte per 32 weights (experts of gpt-oss)
fp8             1 byte per weight, 4 bytes per block of 128 x 128 weights
awq, gptq       `bits` per weight, a 16-bit scale and a zero point of `bits` per group of `group_size` weights
bitsandbytes    4 bits per weight, 4 bytes per 64 weights (double quantization: 1 byte, and 4 bytes per 256 groups);
                or 1 byte per weight, 4 bytes per row
"""


def quantization_of(config: Any) -> tuple[str | None, dict[str, Any]]:
    """Method, e.g. "fp8", and options in the `quantization_config` of a model's config or of its decoder's config."""
    for part in (config, config.get_text_config(decoder=True)):
        found = getattr(part, "quantization_config", None)
        if found is not None:
            options = dict(found if isinstance(found, dict) else found.to_dict())
            method = options.get("quant_method") or ("bitsandbytes" if options.get("load_in_4bit") else "unknown")
            return str(getattr(method, "value", method)), options
    return None, {}


def bytes_of_weights(model: torch.nn.Module, method: str | None, options: dict[str, Any]) -> tuple[int, str | None]:
    """Count the bytes of all weights of a model on the meta device. Weights count as unquantized if the method is
    unknown, and a sentence for the user says so."""
    if method not in METHODS:
        note = method and (
            f"The checkpoint is quantized with {method}, an unknown method: its weights are counted as unquantized. "
            "Pass their size with `--weights 13GB`."
        )
        return sum(parameter.nbytes for parameter in model.parameters()), note
    # Names may have `*` for layers, or lack a prefix.
    names = (".*".join(map(re.escape, str(name).split("*"))) for name in options.get("modules_to_not_convert") or [])
    skipped = "|".join([ALWAYS_PLAIN, *(rf"(^|\.){name}(\.|$)" for name in names)])
    sizes: dict[torch.nn.Parameter, float] = {}
    for prefix, module in model.named_modules():
        plain = re.search(skipped, prefix) is not None
        for parameter in module.parameters(recurse=False):
            linear = isinstance(module, torch.nn.Linear) and parameter.dim() == 2 and method != "mxfp4"
            quantized = not plain and (linear or (parameter.dim() == 3 and prefix.endswith("experts")))
            sizes.setdefault(parameter, METHODS[method](options, parameter) if quantized else parameter.nbytes)
    return round(sum(sizes.values())), None
