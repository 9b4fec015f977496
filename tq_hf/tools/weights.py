"""Bytes of a model's weights, as a checkpoint's `quantization_config` says they are stored.

mxfp4           4 bits, and a byte for each 32 weights: the experts of gpt-oss
fp8             a byte, and 4 for each block of 128 x 128
awq, gptq       `bits`, and for each group of `group_size` weights a 16-bit scale and a zero point of `bits`
bitsandbytes    4 bits and 4 bytes for each 64 weights (double quantization: 1 byte, and 4 for each 256 of these),
                or a byte and 4 for each row
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

Size = Callable[[torch.Tensor], float]
"""Bytes of one quantized weight, `[rows, columns]` or of all experts `[experts, ...]`."""

ALWAYS_PLAIN = r"(^|\.)(lm_head|embed_out|router|gate)(\.|$)"
"""Modules that checkpoints leave as they are, whether or not they say so."""


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
    """`quantization_config` of a model's config or of its decoder's, as a dictionary."""
    for part in (config, config.get_text_config(decoder=True)):
        found = getattr(part, "quantization_config", None)
        if found is not None:
            return dict(found if isinstance(found, dict) else found.to_dict())
    return None


def method_of(options: dict[str, Any] | None) -> str | None:
    """The name of a way of quantizing, e.g. "fp8"; `None` for none."""
    if options is None:
        return None
    method = options.get("quant_method") or ("bitsandbytes" if options.get("load_in_4bit") else "unknown")
    return str(getattr(method, "value", method))


def weight_bytes(model: torch.nn.Module, options: dict[str, Any] | None) -> tuple[int, str | None]:
    """Bytes of all weights of a model on the meta device, and a sentence if they were quantized in another way than
    this counts (which are then taken as unquantized)."""
    method = method_of(options)
    if options is None or method not in METHODS:
        note = None
        if method is not None:
            note = (
                f"The checkpoint is quantized with {method}, which is not known here: its weights are counted "
                "unquantized. Say what they take with `--weights 13GB`."
            )
        return sum(parameter.nbytes for parameter in model.parameters()), note
    size = METHODS[method](options)
    skipped = [str(name) for name in options.get("modules_to_not_convert") or []]
    total = 0.0
    seen = set()
    for prefix, module in model.named_modules():
        plain = bool(re.search(ALWAYS_PLAIN, prefix)) or any(_matches(name, prefix) for name in skipped)
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                linear = isinstance(module, torch.nn.Linear) and parameter.dim() == 2 and method != "mxfp4"
                quantized = not plain and (linear or (parameter.dim() == 3 and prefix.endswith("experts")))
                total += size(parameter) if quantized else parameter.nbytes
    return round(total), None


def _matches(name: str, prefix: str) -> bool:
    """Whether a name in `modules_to_not_convert`, perhaps with layers left open as `*` or a prefix missing, means this
    module."""
    pattern = ".*".join(map(re.escape, name.split("*")))
    return re.search(rf"(^|\.){pattern}(\.|$)", prefix) is not None
