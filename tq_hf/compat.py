"""Private API of torch and transformers, each with the versions it was read in. `tq_kernels.common.compat` has what the
kernels' host side uses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.import_utils import is_tracing

__all__ = [
    "as_plain_tensors",
    "asked_by_prefill",
    "attention_implementation",
    "attention_of_parts",
    "current_raw_stream",
    "give_attention_back",
    "has_attention_heads",
    "is_capturing",
    "is_tracing",
    "mark_static_address",
    "storage_id",
    "takes_attention_functions",
]


def current_raw_stream(device: int) -> int:
    """The current CUDA stream's handle, without a `torch.cuda.Stream` around it (torch 2.9 to 2.15)."""
    return torch._C._cuda_getCurrentRawStream(device)


def mark_static_address(tensor: torch.Tensor) -> None:
    """Promise `torch.compile` that `tensor` stays where it is, so that graphs do not copy it (torch 2.9 to 2.15)."""
    torch._dynamo.mark_static_address(tensor)


def as_plain_tensors() -> AbstractContextManager[None]:
    """Let operations on tensors of a subclass be those of `torch.Tensor` (torch 2.9 to 2.15)."""
    return torch._C.DisableTorchFunctionSubclass()


def asked_by_prefill() -> bool:
    """Whether `generate()` asks if it should compile the chunks of a prompt, by the names of its functions.

    `_prefill` asks `_valid_auto_compile_criteria`, as the loop over steps does (transformers 5.17 to 5.23).
    """
    if torch.compiler.is_compiling():
        return False
    names: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(names) < 2:
        if frame.f_code.co_name != "is_compileable":  # of an encoder-decoder's cache
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names == ["_valid_auto_compile_criteria", "_prefill"]


def storage_id(tensor: torch.Tensor) -> int:
    """The same for tensors that share their memory, whatever part of it they see (torch 2.9 to 2.15)."""
    return tensor.untyped_storage()._cdata


def attention_implementation(config: PreTrainedConfig | None) -> str | None:
    """`config._attn_implementation` (transformers 5.17 to 5.23).

    Configurations look up attributes in Python, which takes as long as a kernel launch and comes with every update of
    every layer. Outside of compilation this reads what is stored beneath the property.
    """
    if not torch.compiler.is_compiling() and config is not None:
        kept: dict[str, Any] = object.__getattribute__(config, "__dict__")
        if "_attn_implementation_internal" in kept:
            return kept["_attn_implementation_internal"]
    return getattr(config, "_attn_implementation", None)


def attention_of_parts(model: Any) -> list[tuple[PreTrainedConfig, str | None]]:
    """The config of every part of a model (text decoder, vision tower) and its attention, to give back after
    `set_attn_implementation` (transformers 5.17 to 5.23)."""
    configs = [model.config, *(part.config for part in model.modules() if isinstance(part, PreTrainedModel))]
    for config in configs:  # which grows: parts of parts
        parts = (getattr(config, name, None) for name in config.sub_configs)
        configs += (part for part in parts if isinstance(part, PreTrainedConfig))
    return [(config, config._attn_implementation_internal) for config in configs]


def give_attention_back(parts: list[tuple[PreTrainedConfig, str | None]]) -> None:
    """Let every part attend as `attention_of_parts` found it. Given to `set_attn_implementation`, the attention of the
    whole would be that of all parts, and a dict could not name parts of parts (transformers 5.17 to 5.23)."""
    for config, attention in parts:
        config._attn_implementation_internal = attention


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured: the host can read nothing then."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


_known: WeakKeyDictionary[type[PreTrainedConfig], bool] = WeakKeyDictionary()


@torch.compiler.assume_constant_result
def takes_attention_functions(kind: type[PreTrainedConfig]) -> bool:
    """Whether models with such a config leave attention to the function registered under a name, with sdpa's masks.

    transformers checks this for its own names only. Models that do not (Bloom, XGLM, TrOCR) accept any other name and
    go on with attention of their own, or with masks that only "eager" makes (BigBird-Pegasus, GIT).
    """
    known = _known.get(kind)
    if known is None:
        models = [model for model in _models() if model.config_class is kind]
        known = all(_takes(model) for model in models)
        if models:  # else its module is still to be imported
            _known[kind] = known
    return known


def has_attention_heads(config: PreTrainedConfig) -> bool:
    """Whether any layer of a decoder's config has attention heads. Where layers differ in their number (Dots 3), the
    config as a whole raises when it is asked for it."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    return any(getattr(layer, "num_attention_heads", None) for layer in layers)


def _takes(model: type[PreTrainedModel]) -> bool:
    if not model._can_set_attn_implementation():
        return False
    # Those whose attention cannot be sdpa's for its mathematics alone (softcap, sinks) say that other functions can.
    others = model._supports_attention_backend and (model._supports_flex_attn or model._supports_flash_attn)
    return model._supports_sdpa or others


def _models() -> Iterator[type[PreTrainedModel]]:
    """All model classes imported so far."""
    pending = [PreTrainedModel]
    while pending:
        for model in pending.pop().__subclasses__():
            pending.append(model)
            yield model
