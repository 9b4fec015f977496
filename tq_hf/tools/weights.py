"""Number of bytes of a model's weights, quantized as the checkpoint's `quantization_config` says.

mxfp4           4 bits per weight, 1 byte per 32 weights (experts of gpt-oss)
fp8             1 byte per weight, 4 bytes per block of 128 x 128 weights
awq, gptq       `bits` per weight, a 16-bit scale and a zero point of `bits` per group of `group_size` weights
bitsandbytes    4 bits per weight, 4 bytes per 64 weights (double quantization: 1 byte, and 4 bytes per 256 groups);
                or 1 byte per weight, 4 bytes per row
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

Size = Callable[[torch.Tensor], float]
"""Function from a weight, `[rows, columns]` or `[experts, ...]`, to its number of quantized bytes."""

ALWAYS_PLAIN = r"(^|\.)(lm_head|embed_out|router|gate)(\.|$)"
"""Names of modules that checkpoints do not quantize, even if `modules_to_not_convert` does not list them."""


def _mxfp4(options: dict[str, Any]) -> Size:
    return lambda weight: weight.numel() * (1 / 2 + 1 / 32)


def _fp8(options: dict[str, Any]) -> Size:
    rows, columns = options.get("weight_block_size") or (128, 128)

    def size(weight: torch.Tensor) -> float:
        *experts, height, width = weight.shape
        blocks = -(-height // rows) * -(-width // columns)
        return weight.numel() + 4 * blocks * (experts[0] if experts else 1)

    return size


def _grouped(options: dict[str, Any]) -> Size:
    bits = options.get("bits") or options.get("w_bit") or 4
    group = options.get("group_size") or options.get("q_group_size") or 128

    def size(weight: torch.Tensor) -> float:
        groups = weight.numel() / (group if group > 0 else weight.shape[-1])
        return weight.numel() * bits / 8 + groups * (2 + bits / 8)

    return size


def _bitsandbytes(options: dict[str, Any]) -> Size:
    if options.get("load_in_8bit") or options.get("_load_in_8bit"):
        return lambda weight: weight.numel() + 4 * weight.numel() / weight.shape[-1]
    scale = (1 + 4 / 256) / 64 if options.get("bnb_4bit_use_double_quant") else 4 / 64
    return lambda weight: weight.numel() * (1 / 2 + scale)


METHODS = {"mxfp4": _mxfp4, "fp8": _fp8, "awq": _grouped, "gptq": _grouped, "bitsandbytes": _bitsandbytes}


def quantization_of(config: Any) -> dict[str, Any] | None:
    """Return `quantization_config` of a model's config or of its decoder's config, as a dictionary."""
    for part in (config, config.get_text_config(decoder=True)):
        options = getattr(part, "quantization_config", None)
        if options is not None:
            return dict(options if isinstance(options, dict) else options.to_dict())
    return None


def method_of(options: dict[str, Any] | None) -> str | None:
    """Return the method of a `quantization_config`, e.g. "fp8"."""
    if options is None:
        return None
    method = options.get("quant_method") or ("bitsandbytes" if options.get("load_in_4bit") else "unknown")
    return str(getattr(method, "value", method))


def weight_bytes(model: torch.nn.Module, options: dict[str, Any] | None) -> tuple[int, str | None]:
    """Count the bytes of all weights of a model on the meta device. Weights count as unquantized if the method is
    unknown, and a sentence for the user says so."""
    method = method_of(options)
    if options is None or method not in METHODS:
        note = method and (
            f"The checkpoint is quantized with {method}, an unknown method: its weights are counted as unquantized. "
            "Pass their size with `--weights 13GB`."
        )
        return sum(parameter.nbytes for parameter in model.parameters()), note
    size = METHODS[method](options)
    # Names may have `*` for layers, or lack a prefix.
    names = (".*".join(map(re.escape, str(name).split("*"))) for name in options.get("modules_to_not_convert") or [])
    skipped = "|".join([ALWAYS_PLAIN, *(rf"(^|\.){name}(\.|$)" for name in names)])
    sizes: dict[torch.nn.Parameter, float] = {}
    for prefix, module in model.named_modules():
        plain = re.search(skipped, prefix) is not None
        for parameter in module.parameters(recurse=False):
            linear = isinstance(module, torch.nn.Linear) and parameter.dim() == 2 and method != "mxfp4"
            quantized = not plain and (linear or (parameter.dim() == 3 and prefix.endswith("experts")))
            sizes.setdefault(parameter, size(parameter) if quantized else parameter.nbytes)
    return round(sum(sizes.values())), None
