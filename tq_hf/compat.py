"""Compatibility with torch and transformers: their private names, each with the versions where the name was found, the
tested versions, inference mode and autocast. `tq_kernels.common.device` does the same for the host side of kernels."""

from __future__ import annotations

import dis
import gc
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import lru_cache, wraps
from importlib.metadata import PackageNotFoundError, version
from inspect import Parameter, signature, unwrap
from itertools import islice
from pathlib import Path
from pkgutil import resolve_name
from threading import get_ident
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
import transformers
from packaging.version import Version
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import logging

logger = logging.get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

TESTED: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "torch": ((2, 9), (2, 15)),
    "transformers": ((5, 17), (5, 24)),
    "triton": ((3, 5), (3, 9)),
}
"""Oldest and newest version of each package that tests have run with. `pyproject.toml` allows newer ones."""

REQUIRED_NAMES: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("required_names.json").read_text())
"""Names of transformers and torch that each way needs, by the class or module that has them: what our classes override,
set or read, as `tests/support/fence.py` derives it. An item is a name, a name with the parameters that are used
(`update(key_states)`) or the attributes that its code reads (`_prefill(.is_compileable)`), or an attribute that methods
of the class set (`.keys`). Versions before the newest tested one may lack an item that begins with `+`."""


def attributes_of(owner: Any) -> set[str]:
    """Names of the attributes that the methods of a class set, or that it annotates."""
    kinds = getattr(owner, "__mro__", ())
    codes = [code for each in kinds for method in vars(each).values() for code in codes_of(method)]
    return set().union(*map(inspect.get_annotations, kinds), *map(_stored, codes))


def _stored(code: CodeType) -> set[str]:
    """Names of the attributes that a function sets. (`dis.get_instructions` takes 20 times as long.)"""
    names, high = set(), 0
    for operation, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        if operation == dis.opmap["STORE_ATTR"]:
            names.add(code.co_names[high | low])
        high = (high | low) << 8 if operation == dis.EXTENDED_ARG else 0
    return names


def codes_of(method: Any) -> list[CodeType]:
    """Codes of a function, method or property, beneath its decorators. None if it is not in Python."""
    if isinstance(method, property):
        return [*codes_of(method.fget), *codes_of(method.fset)]
    function = getattr(method, "__func__", method)
    code = getattr(unwrap(function), "__code__", None) if callable(function) else None
    return [] if code is None else [code]


def missing_names(feature: str) -> list[str]:
    """List the names of `REQUIRED_NAMES[feature]` that the installed transformers lacks, or that lack a parameter."""
    missing, newest = [], Version(transformers.__version__).release >= TESTED["transformers"][1]
    for place, items in REQUIRED_NAMES[feature].items():
        try:
            owner = resolve_name(place)
        except (ImportError, AttributeError):
            missing.append(place)
            continue
        wanted = [item.removeprefix("+") for item in items.split() if newest or item[0] != "+"]
        attributes = attributes_of(owner) if any(item[0] == "." for item in wanted) else set()
        for item in wanted:
            name, _, parts = item.rstrip(")").partition("(")
            lacks = {name[1:]} - attributes if name[0] == "." else _lacks(owner, name, parts)
            missing += [f"{place}.{each}" for each in sorted(lacks)]
    return missing


def _lacks(owner: Any, name: str, parts: str) -> set[str]:
    """Return what a class or a module lacks of a name and its parameters."""
    if not hasattr(owner, name) or not parts:
        return set() if hasattr(owner, name) else {name}
    parameters = {each: of.kind for each, of in signature(getattr(owner, name)).parameters.items() if each != "self"}
    if {*parameters.values()} == {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}:
        return set()  # a wrapper, which passes on what it is given
    read = {f".{each}" for code in codes_of(inspect.getattr_static(owner, name)) for each in code.co_names}
    return {f"{name}({part})" for part in set(parts.split(",")) - read.union(parameters)}


@lru_cache
def check_required_names(feature: str, instead: str) -> None:
    """Raise an `ImportError` with the names that `feature` needs and transformers lacks, and the sentence `instead`."""
    if missing := missing_names(feature):
        raise ImportError(f"{feature} {_lacking(', '.join(missing))} {instead}")


@contextmanager
def naming_versions() -> Iterator[None]:
    """Context of imports. An error about a name that transformers or torch lacks also names the versions."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        of = error.name if isinstance(error, ImportError) else getattr(error.obj, "__module__", None) or str(error.obj)
        if not str(of).removeprefix("<module '").startswith(("torch", "transformers")):
            raise
        raise ImportError(f"tq_hf {_lacking(f'a name: {error}')}") from error


def _lacking(names: str) -> str:
    return (
        f"was tested with transformers {tested('transformers')}. Version {transformers.__version__} is installed and "
        f"lacks {names} (torch is {torch.__version__}). Install another: `pip install "
        f'"transformers=={".".join(map(str, TESTED["transformers"][1]))}.*"`.'
    )


with naming_versions():
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch.fx._symbolic_trace import _Patcher
    from torch.utils._python_dispatch import _disable_current_modes
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
    from transformers.generation import candidate_generator
    from transformers.utils.import_utils import is_tracing as is_tracing


def tested(name: str) -> str:
    """Tested versions of a package, as "5.17 to 5.24"."""
    return " to ".join(".".join(map(str, bound)) for bound in TESTED[name])


def untested(installed: dict[str, str]) -> list[str]:
    """List the packages outside of the tested versions, one clause each, from the installed version of each package."""
    numbers = {name: re.match(r"(\d+)\.(\d+)", installed.get(name, "")) for name in TESTED}
    releases = {name: (int(number[1]), int(number[2])) for name, number in numbers.items() if number}
    outside = [name for name, release in releases.items() if not TESTED[name][0] <= release <= TESTED[name][1]]
    return [f"{name} {installed[name]} (tested: {tested(name)})" for name in outside]


def report_untested() -> None:
    """Log one line if a package is older or newer than the tested versions."""
    installed = {}
    for name in TESTED:
        with suppress(PackageNotFoundError):
            # Prefer the version of the imported module: several installations may be on the path.
            installed[name] = getattr(sys.modules.get(name), "__version__", None) or version(name)
    if clauses := untested(installed):
        logger.warning(
            f"tq_hf has not been run with {' and '.join(clauses)}. Compare an answer with that of transformers' own "
            "cache before you rely on the results."
        )


def outside_inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Run `function` outside of inference mode and without gradients: inference tensors cannot be written in place
    outside of inference mode, where a cache may be used later."""
    # The order matters: leaving inference mode turns gradients on.
    guarded = torch.inference_mode(False)(torch.no_grad()(function))

    @wraps(function)
    def outside(*args: P.args, **kwargs: P.kwargs) -> R:
        # `generate()` needs neither, and the two decorators take as long as two kernel launches.
        if torch.is_inference_mode_enabled() or torch.is_grad_enabled():
            return guarded(*args, **kwargs)
        return function(*args, **kwargs)

    return outside


def outside_modes(make: Callable[P, R]) -> Callable[P, R]:
    """Run `make` outside of modes (a default device, fake tensors), which what it makes outlives. `make` names every
    dtype and device (`_disable_current_modes`: torch 2.9 to 2.15)."""

    @outside_inference_mode
    @wraps(make)
    def outside(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return make(*args, **kwargs)

    return outside


def cached_table(make: Callable[P, R]) -> Callable[P, R]:
    """Cache the results of `make`, one per set of hashable arguments. `torch.compile` takes them as constants: it would
    ignore a plain `lru_cache`, with a warning."""
    cached = lru_cache(outside_modes(make))

    @torch.compiler.assume_constant_result
    @wraps(make)
    def table(*args: P.args, **kwargs: P.kwargs) -> R:
        return cached(*args, **kwargs)  # type: ignore[arg-type]

    return table


def autocast_dtype(states: torch.Tensor) -> torch.dtype | None:
    """Return the dtype in which sdpa computes on the device of `states`, or `None` outside of autocast. Caches store
    keys and values in float32 there, and sdpa casts them (`_is_any_autocast_enabled`: torch 2.9 to 2.15)."""
    # Reading the type of a device takes torch longer than the rest.
    if not torch._C._is_any_autocast_enabled():
        return None
    device = states.device.type
    # torch raises for the meta device.
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None


def outside_autocast(states: torch.Tensor) -> AbstractContextManager[object]:
    """Context without autocast on the device of `states`: operations keep the dtypes of their arguments."""
    return nullcontext() if autocast_dtype(states) is None else torch.autocast(states.device.type, enabled=False)


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured. The host cannot read tensors during a capture."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextmanager
def ending_failed_capture(device: torch.device, pool: Any) -> Iterator[None]:
    """Context around the capture of a CUDA graph on `device` with memory of `pool`. Cleans up after a failed capture.

    After an operation that no graph can hold, `CUDAGraph::capture_end` raises before its cleanup (torch 2.9 to 2.12;
    later versions clean up more): the stream would stay that of the capture, and random numbers would raise. Meanwhile
    no garbage is collected: torch aborts the process if a pool of memory is freed while another is allocated to.
    """
    collects = gc.isenabled()
    gc.disable()
    with torch.cuda.stream(torch.cuda.current_stream(device)):
        try:
            yield
        except BaseException:
            # The capture may not have begun, or torch has ended it (2.13 may then keep the memory of the pool).
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(device.index, pool)
                torch._C._cuda_releasePool(device.index, pool)
                graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    torch.zeros(1, device=device)
            raise
        finally:
            if collects:
                gc.enable()


def capture_failure(model: Any, error: Exception, what: str = "A decode step") -> str:
    """Describe a step that no CUDA graph holds, by the first line of the error that ended the capture. torch
    raises a second error when the capture cannot be ended; that one is skipped. Grouped products of experts read their
    sizes on the host, except in bfloat16 on compute capability 9.0 and 10.0 (torch 2.11)."""
    before = error.__context__ if "previous error during capture" in str(error) else None
    reason = str(before or error).partition("\n")[0].rstrip(".")
    if "grouped_mm" in model.get_experts_implementation().values():
        reason += '; of grouped experts, call `model.set_experts_implementation("batched_mm")` first'
    return f"{what} of {type(model).__name__} cannot be captured as a CUDA graph ({reason})."


@lru_cache
def trace_apart() -> None:
    """Let torch.fx trace without effect on other threads, from now on. While `Tracer.trace` runs, torch 2.9 to 2.13
    reports each call of a module to the tracer: another thread's raises "module is not installed as a submodule"."""
    patch_method = _Patcher.patch_method

    def patch_in_thread(self: Any, cls: type, name: str, new_fn: Callable, deduplicate: bool = True) -> None:
        tracing, original = get_ident(), getattr(cls, name)

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (new_fn if get_ident() == tracing else original)(*args, **kwargs)

        patch_method(self, cls, name, call, deduplicate)

    _Patcher.patch_method = patch_in_thread  # type: ignore[method-assign]


def flash_varlen(new: Any, ends: torch.Tensor, most: int, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal FlashAttention `[T, Hq, D]` of queries, keys and values of sequences with these `ends`, up to `most`
    tokens each, and base-e logarithms `[Hq, T]`. (`torch.nn.attention.varlen` has other arguments in each release.)"""
    return torch.ops.aten._flash_attention_forward(*new, ends, ends, most, most, 0.0, True, False, scale=scaling)[:2]


def cudnn_attention(states: Sequence[Any], causal: bool, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cuDNN's attention `[1, Hq, S, D]` of queries, keys and values, and base-e logarithms `[1, Hq, S, 1]`."""
    return torch.ops.aten._scaled_dot_product_cudnn_attention(*states, None, True, 0.0, causal, scale=scaling)[:2]


def current_raw_stream(device: int) -> int:
    """Handle of the current CUDA stream, without a `torch.cuda.Stream` around it (torch 2.9 to 2.15)."""
    return torch._C._cuda_getCurrentRawStream(device)


def mark_static_addresses(tensors: Iterable[torch.Tensor]) -> None:
    """Tell `torch.compile` that addresses do not change, so that graphs need no copies (torch 2.9 to 2.15)."""
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor)


def mark_static_shape(tensor: torch.Tensor) -> None:
    """Let the compiler compile for this shape, also after others (torch 2.9 to 2.15)."""
    torch._dynamo.mark_static(tensor)


def as_plain_tensors() -> AbstractContextManager[None]:
    """Context in which operations on subclasses of tensors are those of `torch.Tensor` (torch 2.9 to 2.15)."""
    return torch._C.DisableTorchFunctionSubclass()


def storage_id(tensor: torch.Tensor) -> int:
    """Id of the storage of a tensor, equal for all views of one storage (torch 2.9 to 2.15)."""
    return tensor.untyped_storage()._cdata


def changes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Differs once a tensor made outside of inference mode, or a view that shares its count, was written to in place
    (`_version`: torch 2.9 to 2.15), or given other memory."""
    return tensor._version, storage_id(tensor)


def compiled_frame() -> Any:
    """Context of the graph that is being compiled (torch 2.9 to 2.15). Ids of graphs come again after a reset."""
    return torch._guards.CompileContext.try_get()


def forward_hooks(modules: Iterable[Any]) -> list[int]:
    """Numbers of the hooks of modules, before and after `forward` (torch 2.9 to 2.15). No two hooks have one number."""
    return [number for module in modules for number in (*module._forward_pre_hooks, *module._forward_hooks)]


METADATA: set[Any] = {
    getattr(torch.Tensor, name)
    for name in "dim is_floating_point is_conj is_neg stride storage_offset untyped_storage _is_view".split()
} | {
    attribute.__get__
    for name, attribute in vars(torch._C.TensorBase).items()
    if hasattr(attribute, "__set__") and name not in {"data", "T", "mT", "H", "mH", "real", "imag"}  # views of elements
}
"""Methods and attributes of a tensor that do not read its elements (torch 2.9 to 2.15)."""


CACHE_NAME = (
    "cache" if "cache" in signature(GenerationMixin.prepare_inputs_for_generation).parameters else "past_key_values"
)
"""Name of the cache among a model's inputs and outputs: `past_key_values` before transformers 5.24, which takes this
name with a warning."""


def as_input(cache: Cache) -> dict[str, Cache]:
    """Return `cache` as a keyword argument, under the name that the installed transformers uses."""
    return {CACHE_NAME: cache}


def device_of_inputs(model: Any) -> torch.device:
    """Device on which a model takes token ids. Weights that accelerate has offloaded are on the meta device, and the
    hooks of accelerate move the inputs of each layer."""
    return torch.device("cpu") if model.device.type == "meta" else model.device


@lru_cache
def _states_taken(forward: Any) -> set[str]:
    """Names of the parameters of `forward` that are token states."""
    return {name for name in signature(forward).parameters if name.endswith("_states")}


def takes_other_states(module: Any) -> bool:
    """Whether an attention module can take states of other tokens than the tokens of its queries."""
    return bool(_states_taken(type(module).forward) - {"hidden_states"})


def is_self_attention(module: Any) -> bool:
    """Whether queries and keys of an attention module belong to the same tokens, unlike in cross-attention
    (transformers 5.17 to 5.24).

    Cross-attention is not causal, or has `is_cross_attention` (GPTBigCode). Other modules that are not causal attend to
    their own tokens if `forward` takes no other states (PaliGemma).
    """
    if getattr(module, "is_causal", False):
        return not getattr(module, "is_cross_attention", False)
    return _states_taken(type(module).forward) == {"hidden_states"}


def attention_implementation(config: PreTrainedConfig | None) -> str | None:
    """`config._attn_implementation` (transformers 5.17 to 5.24), read beneath the property: configs look up attributes
    in Python, which takes as long as a kernel launch."""
    if not torch.compiler.is_dynamo_compiling() and config is not None:
        attributes: dict[str, Any] = object.__getattribute__(config, "__dict__")
        if "_attn_implementation_internal" in attributes:
            return attributes["_attn_implementation_internal"]
    return getattr(config, "_attn_implementation", None)


def attention_of_parts(model: Any) -> list[tuple[PreTrainedConfig, str | None]]:
    """List the config of every part of a model with its attention, for `restore_attention`."""
    configs = [model.config, *(part.config for part in model.modules() if isinstance(part, PreTrainedModel))]
    for config in configs:  # the list grows by the parts of parts
        parts = (getattr(config, name, None) for name in config.sub_configs)
        configs += (part for part in parts if isinstance(part, PreTrainedConfig))
    return [(config, config._attn_implementation_internal) for config in configs]


def restore_attention(parts: list[tuple[PreTrainedConfig, str | None]]) -> None:
    """Set the attention of every part (transformers 5.17 to 5.24), parts of parts as well, which
    `set_attn_implementation` cannot name."""
    for config, attention in parts:
        config._attn_implementation_internal = attention


@contextmanager
def layer_types_known(kinds: Iterable[str]) -> Iterator[None]:
    """Context in which transformers' continuous batching takes configs with layers of other kinds, which have block
    tables (`ATTN_TYPE_TO_ALLOCATOR`: transformers 5.18 to 5.24)."""
    from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR, FULL_ATTENTION

    added: Any = dict.fromkeys(set(kinds) - ATTN_TYPE_TO_ALLOCATOR.keys(), ATTN_TYPE_TO_ALLOCATOR[FULL_ATTENTION])
    ATTN_TYPE_TO_ALLOCATOR.update(added)
    try:
        yield
    finally:
        for kind in added:
            del ATTN_TYPE_TO_ALLOCATOR[kind]


_known: WeakKeyDictionary[type[PreTrainedConfig], bool] = WeakKeyDictionary()


@torch.compiler.assume_constant_result
def takes_attention_functions(kind: type[PreTrainedConfig]) -> bool:
    """Whether models with a config of class `kind` call registered attention functions, with the masks of sdpa.

    Others have attention of their own (Bloom, XGLM), or need masks that only "eager" makes (BigBird-Pegasus, GIT).
    """
    if kind not in _known:
        models = [model for model in _models() if model.config_class is kind]
        if not models:  # the module of the model is not imported yet
            return True
        _known[kind] = all(map(_takes, models))
    return _known[kind]


def has_attention_heads(config: PreTrainedConfig) -> bool:
    """Whether any layer of a decoder's config has attention heads."""
    return any(getattr(layer, "num_attention_heads", None) for layer in layer_configs(config))


def layer_configs(config: PreTrainedConfig) -> Iterable[PreTrainedConfig]:
    """Configs of the layers of a decoder, or only its own config if all layers are equal. That of a decoder with
    different layers (Gemma 4, Dots 3) raises for attributes that differ."""
    return config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]


def layer_config(config: PreTrainedConfig, layer: int) -> PreTrainedConfig:
    """Config of one layer of a decoder."""
    return config.per_layer_config[layer] if getattr(config, "is_heterogeneous", False) else config


def memory_per_gpu(handler: Any, gpus: int) -> dict[str, Any]:
    """Argument by which the paged cache's memory `handler` counts the activations of a step per GPU (from 5.24 on)."""
    return {"kv_tp_size": gpus} if "kv_tp_size" in signature(handler.__init__).parameters else {}


def _takes(model: type[PreTrainedModel]) -> bool:
    # Models that sdpa cannot compute (softcap, sinks) still declare flex or flash attention.
    others = model._supports_attention_backend and (model._supports_flex_attn or model._supports_flash_attn)
    return model._can_set_attn_implementation() and (model._supports_sdpa or others)


def _models(kind: type[PreTrainedModel] = PreTrainedModel) -> Iterator[type[PreTrainedModel]]:
    """Yield all model classes imported so far."""
    for model in kind.__subclasses__():
        yield model
        yield from _models(model)


def _callers(frame: FrameType | None, but: str = "") -> Iterator[FrameType]:
    """`frame` and those that called it, without functions called `but`, as an encoder-decoder's cache has."""
    while frame is not None:
        if frame.f_code.co_name != but:
            yield frame
        frame = frame.f_back


def asked_by() -> str:
    """Return who asks if a cache is compileable: "mask", to leave out that of one token, or "prefill" of `generate()`,
    for chunks of a prompt (transformers 5.17 to 5.24); "" for others. The loop over steps is one of these."""
    if torch.compiler.is_dynamo_compiling():
        return "mask"
    names = [frame.f_code.co_name for frame in islice(_callers(sys._getframe(2), but="is_compileable"), 2)]
    is_prefill = names == ["_valid_auto_compile_criteria", "_prefill"]
    return "mask" if names[0].startswith("create_") else "prefill" if is_prefill else ""


_SWITCH = "original_max_position_embeddings"


def switches_rope(model: Any) -> int | None:
    """Return the number of tokens after which `generate()` computes all again in a cache of its own, because rotary
    embeddings change; `None` without one. Phi-3, Phi-4 and PhiMoE compare it (transformers 5.17 to 5.24)."""
    code = unwrap(type(model).prepare_inputs_for_generation).__code__
    return getattr(model.config, _SWITCH, None) if _SWITCH in code.co_names else None


def model_about_to_switch() -> Any:
    """Return the model that asks for the number of tokens to compare it with `switches_rope`; `None` for others."""
    frame = sys._getframe(2)
    asks = frame.f_code.co_name == "prepare_inputs_for_generation" and _SWITCH in frame.f_code.co_names
    return frame.f_locals["self"] if asks else None


def length_of_generation() -> tuple[int, int] | None:
    """Largest number of tokens that the calling `generate()` lets a cache hold, and its `max_new_tokens`; `None`
    outside of `generate()`, or without that option (transformers 5.17 to 5.24). The last token is never cached."""
    names = "_prefill", "_assisted_decoding"
    loops = (frame.f_locals for frame in _callers(sys._getframe(2)) if frame.f_code.co_name in names)
    config = next(loops, {}).get("generation_config")
    new = getattr(config, "max_new_tokens", None)
    return None if config is None or new is None else (config.max_length - 1, new)


def padding_mask_of_caller() -> torch.Tensor | None:
    """Padding mask `[B, T]` bool for which the sizes of masks are asked; `None` without one. It is a local variable of
    the function that makes masks and calls `get_mask_sizes` of a cache (transformers 5.17 to 5.24)."""
    mask = next(_callers(sys._getframe(2), but="get_mask_sizes")).f_locals.get("attention_mask")
    return mask.bool() if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None


def cache_of_caller() -> Cache | None:
    """Cache for which a mask is made: the local variable of the caller, a function that makes masks (transformers 5.17
    to 5.24). The self-attention cache of an encoder-decoder."""
    cache = sys._getframe(2).f_locals.get(CACHE_NAME)
    return getattr(cache, "self_attention_cache", cache)


def arguments_of_generate() -> dict[str, Any]:
    """Return the local variables of `generate()`, for a `custom_generate` loop, and its `tokenizer`, which is in the
    frame of its `torch.no_grad` (transformers 5.17 to 5.24, torch 2.9 to 2.15)."""
    frame = sys._getframe(2)
    kwargs = None if frame.f_back is None else frame.f_back.f_locals.get("kwargs")
    return {"tokenizer": kwargs.get("tokenizer") if isinstance(kwargs, dict) else None, **frame.f_locals}


def takes_positions(model: Any) -> bool:
    """Whether a model takes `position_ids`."""
    return "position_ids" in signature(model.forward).parameters


def prefill(model: Any, ids: torch.Tensor, config: Any, inputs: dict[str, Any], read: Any = None) -> tuple[Any, Any]:
    """Run the prompt as `generate()` does, in chunks if the config says so, or by `read` (transformers 5.17 to 5.24).

    Returns:
        Outputs of the model, and inputs of the first step, with positions if the model takes them.
    """
    if inputs.get("position_ids") is None and takes_positions(model):
        inputs = {**inputs, "position_ids": model._prepare_position_ids_for_generation(ids, inputs)}
    outputs = model._prefill(ids, config, inputs) if read is None else read()
    return outputs, model._update_model_kwargs_for_generation(outputs, inputs, model.config.is_encoder_decoder)


def compiles_steps(model: Any, cache: Cache, config: GenerationConfig) -> bool:
    """Whether `generate()` would compile its steps with this cache (transformers 5.17 to 5.24)."""
    return model._valid_auto_compile_criteria(as_input(cache), config)


def optimized_for_decode(model: Any) -> AbstractContextManager[None]:
    """Context in which a model is prepared for steps, as by `generate()` (transformers 5.17 to 5.24)."""
    return model._optimize_model_for_decode()


def pad_token(config: Any) -> torch.Tensor:
    """Padding token as prepared by `generate()` (transformers 5.17 to 5.24)."""
    return config._pad_token_tensor


def longer_inputs(inputs: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Inputs of a model for `tokens` tokens more, as in assisted decoding (transformers 5.17 to 5.24)."""
    inputs = dict(inputs)
    for name, extend in (
        ("attention_mask", lambda length: candidate_generator._prepare_attention_mask(inputs, length, False)),
        ("token_type_ids", lambda length: candidate_generator._prepare_token_type_ids(inputs, length)),
        ("position_ids", lambda length: candidate_generator._prepare_position_ids(inputs, length, False)),
    ):
        if (held := inputs.get(name)) is not None:
            extend(held.shape[-1] + tokens)
    return inputs


_NAMES = ("add_", "sub", "clamp_max", "clamp_min_", "minimum_")
foreach = SimpleNamespace(**{name: getattr(torch, f"_foreach_{name}") for name in _NAMES})
"""Operations on many small tensors in one launch (torch 2.9 to 2.15)."""
