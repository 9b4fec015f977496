"""What depends on versions and modes of torch and transformers: private API, each with the versions it was read in,
inference mode, autocast, versions that were tested. `tq_kernels.common.device` has what the kernels' host side uses.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, wraps
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging
from transformers.utils.import_utils import is_tracing

__all__ = [
    "TESTED",
    "as_plain_tensors",
    "asked_by_prefill",
    "attention_implementation",
    "attention_of_parts",
    "autocast_dtype",
    "cached_table",
    "current_raw_stream",
    "give_attention_back",
    "has_attention_heads",
    "is_capturing",
    "is_tracing",
    "mark_static_address",
    "outside_autocast",
    "outside_inference_mode",
    "report_untested",
    "storage_id",
    "takes_attention_functions",
    "untested",
]

logger = logging.get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
Number = tuple[int, int]


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


def outside_inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Run `function` outside of inference mode and without gradients, whatever the caller is in.

    Tensors made in inference mode may never be written to in place outside of it, and a cache that was filled there
    must still serve a plain `generate()`.
    """
    # In this order: leaving inference mode turns gradients on.
    return torch.inference_mode(False)(torch.no_grad()(function))


def cached_table(make: Callable[P, R]) -> Callable[P, R]:
    """Keep the table that `make` returns for these arguments, which must be hashable. To `torch.compile` it is a
    constant: Dynamo warns of `lru_cache` itself, looks through it and makes the table anew in each graph."""
    kept = lru_cache(outside_inference_mode(make))

    @torch.compiler.assume_constant_result
    @wraps(make)
    def table(*args: P.args, **kwargs: P.kwargs) -> R:
        return kept(*args, **kwargs)  # type: ignore[arg-type]

    return table


def autocast_dtype(states: torch.Tensor) -> torch.dtype | None:
    """What sdpa computes in and returns where these states are, or `None` outside of `torch.autocast`.

    A float32 model computes its matrix products in 16 bits there. Keys leave the rotary embedding in float32 all the
    same, and values do not. `DynamicCache` holds both in float32, as a cache of this package does; sdpa then reads
    them, and the queries, in 16 bits. What this package computes itself, it computes in the dtypes that it names.
    """
    device = states.device.type
    # torch answers for devices that compute.
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None


def outside_autocast(states: torch.Tensor) -> AbstractContextManager[object]:
    """A context in which operations on these states' device have the dtypes of their arguments."""
    return nullcontext() if autocast_dtype(states) is None else torch.autocast(states.device.type, enabled=False)


TESTED: dict[str, tuple[Number, Number]] = {
    "torch": ((2, 9), (2, 15)),
    "transformers": ((5, 17), (5, 23)),
    "triton": ((3, 5), (3, 9)),
}
"""The oldest and the newest of each that tests have run with. What `pyproject.toml` allows is wider: each torch asks
for a Triton of its own, and a newer one may well work."""


def untested(installed: dict[str, str]) -> list[str]:
    """Of these versions by package, a clause for each that lies outside of what was tested."""
    clauses = []
    for name, (oldest, newest) in TESTED.items():
        number = re.match(r"(\d+)\.(\d+)", installed.get(name, ""))
        if number is not None and not oldest <= (int(number[1]), int(number[2])) <= newest:
            tested = " to ".join(".".join(map(str, bound)) for bound in (oldest, newest))
            clauses.append(f"{name} {installed[name]} (tested: {tested})")
    return clauses


def report_untested() -> None:
    """Log one sentence if a package is older or newer than what was tested."""
    installed = {}
    for name in TESTED:
        try:
            # Of a module that is there already, what it says itself: several installations may be on the path.
            installed[name] = getattr(sys.modules.get(name), "__version__", None) or version(name)
        except PackageNotFoundError:
            continue
    if clauses := untested(installed):
        logger.warning(
            f"tq_hf has not been run with {' and '.join(clauses)}. Compare an answer with that of transformers' own "
            "cache before you rely on it."
        )
