"""Compatibility with torch and transformers: their private names, each with the versions where the name was found, the
tested versions, inference mode and autocast. `tq_kernels.common.device` does the same for the host side of kernels."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import lru_cache, wraps
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from pkgutil import resolve_name
from threading import get_ident
from types import FrameType, SimpleNamespace
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
import transformers
from torch.fx._symbolic_trace import _Patcher
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import candidate_generator
from transformers.utils import logging
from transformers.utils.import_utils import is_tracing as is_tracing

logger = logging.get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

Number = tuple[int, int]

TESTED: dict[str, tuple[Number, Number]] = {
    "torch": ((2, 9), (2, 15)),
    "transformers": ((5, 17), (5, 24)),
    "triton": ((3, 5), (3, 9)),
}
"""Oldest and newest version of each package that tests have run with. `pyproject.toml` allows a wider range: each torch
requires its own Triton, and newer versions may work."""


_GENERATION = "transformers:GenerationMixin."
_CACHE = "transformers.cache_utils:"
_ENGINE = "transformers.generation.continuous_batching."
_MANAGER = f"{_ENGINE}continuous_api:ContinuousBatchingManager."
_PROCESSOR = f"{_ENGINE}continuous_api:ContinuousBatchProcessor."
_RUNNER = f"{_ENGINE}model_runner:ModelRunner."
_SERVER = "transformers.cli."

REQUIRED_NAMES: dict[str, dict[str, str]] = {
    "TurboQuantCache": {
        f"{_CACHE}DynamicLayer.lazy_initialization": "key_states value_states",
        f"{_CACHE}DynamicSlidingWindowLayer.update": "key_states value_states",
        f"{_CACHE}StaticLayer.lazy_initialization": "key_states value_states",
        f"{_CACHE}StaticSlidingWindowLayer.get_mask_sizes": "query_length",
        f"{_CACHE}Cache.update": "key_states value_states layer_idx",
        f"{_CACHE}Cache.get_mask_sizes": "query_length layer_idx",
        f"{_CACHE}LinearAttentionCacheLayerMixin.update_conv_state": "",
        "transformers:PreTrainedConfig.get_text_config": "decoder",
        "transformers:PreTrainedModel._can_set_attn_implementation": "",
        "transformers.integrations.sdpa_attention:sdpa_attention_forward": "module query key value scaling",
        "transformers.masking_utils:sdpa_mask": "batch_size q_length kv_length q_offset kv_offset mask_function",
        "transformers.utils.import_utils:is_tracing": "",
        f"{_GENERATION}_valid_auto_compile_criteria": "model_kwargs generation_config",
        f"{_GENERATION}_prefill": "input_ids generation_config model_kwargs",
    },
    "graph_decoding": {
        f"{_GENERATION}_prefill": "input_ids generation_config model_kwargs",
        f"{_GENERATION}_prepare_position_ids_for_generation": "inputs_tensor model_kwargs",
        f"{_GENERATION}_update_model_kwargs_for_generation": "outputs model_kwargs is_encoder_decoder",
        f"{_GENERATION}_valid_auto_compile_criteria": "model_kwargs generation_config",
        f"{_GENERATION}_optimize_model_for_decode": "",
        f"{_GENERATION}prepare_inputs_for_generation": "input_ids next_sequence_length",
        "transformers:PreTrainedModel.get_compiled_call": "compile_config",
        "transformers.generation.stopping_criteria:EosTokenCriteria": "eos_token_id",
        "transformers.generation.candidate_generator:_prepare_attention_mask": "model_kwargs new_length",
        "transformers.generation.candidate_generator:_prepare_position_ids": "model_kwargs new_length",
        "transformers.generation.candidate_generator:_prepare_token_type_ids": "model_kwargs new_length",
    },
    "continuous batching": {
        f"{_ENGINE}cache:PagedAttentionCache.search_prefix_match": "request_id prompt_ids",
        f"{_ENGINE}cache:PagedAttentionCache.count_new_complete_blocks": "state request_len",
        f"{_ENGINE}cache:PagedAttentionMemoryHandler.infer_max_batch_tokens_and_num_sectors": "",
        f"{_ENGINE}cache:group_layers_by_attn_type": "config",
        f"{_ENGINE}cache_allocators:FullAttentionCacheAllocator.register_cache_tensor": "",
        f"{_ENGINE}cache_allocators:SlidingAttentionCacheAllocator.register_cache_tensor": "",
        f"{_ENGINE}cache_allocators:CachePool.allocate_sector": "",
        f"{_MANAGER}_create_batch_processor": "",
        f"{_MANAGER}_generation_loop_body": "batch_processor bootstrapping",
        f"{_MANAGER}_generation_step": "",
        f"{_MANAGER}_handle_critical_error": "error batch_processor",
        f"{_MANAGER}switch_to_cb_friendly_attn": "model",
        f"{_PROCESSOR}__init__": "cache config generation_config logit_processor scheduler distributed_helper",
        f"{_PROCESSOR}_handle_request_error": "error state",
        f"{_PROCESSOR}_generation_step": "model",
        f"{_PROCESSOR}prepare_next_batch": "",
        f"{_RUNNER}compute_batch": "model batch_data",
        f"{_RUNNER}run_one_warmup": "model",
        f"{_RUNNER}_capture_graph": "forward_fn compute_stream",
        f"{_ENGINE}offloading_manager:OffloadingManager._offload_to_cpu": "",
        f"{_ENGINE}scheduler:FIFOScheduler._get_waiting_candidates": "",
        f"{_ENGINE}scheduler:FIFOScheduler._process_candidates": "candidates token_budget",
        f"{_ENGINE}requests:RequestState": "request_id initial_tokens",
        "transformers:ContinuousMixin.init_continuous_batching": "generation_config continuous_batching_config",
        "transformers:ContinuousMixin.generate_batch": "inputs generation_config",
    },
    "tq-hf serve": {
        f"{_SERVER}serving.utils:get_response_template": "processor model",
        f"{_SERVER}serving.utils:response_events_to_chunks": "events",
        "transformers.utils.chat_parsing:ResponseParser": "response_template prefix",
    },
}
"""Private or changing names of transformers that each feature needs, with the parameters that are used."""


def missing_names(feature: str) -> list[str]:
    """List the names of `REQUIRED_NAMES[feature]` that the installed transformers lacks, or that lack a parameter."""
    missing = []
    for name, parameters in REQUIRED_NAMES[feature].items():
        try:
            installed = signature(resolve_name(name)).parameters if parameters else resolve_name(name)
        except (ImportError, AttributeError):
            missing.append(name)
        else:
            missing += [f"{name}({parameter}=)" for parameter in parameters.split() if parameter not in installed]
    return missing


@lru_cache
def check_required_names(feature: str, instead: str) -> None:
    """Raise `ImportError` if the installed transformers lacks names that `feature` needs. The message lists them.

    Args:
        feature: A key of `REQUIRED_NAMES`.
        instead: A sentence about an alternative, for the message.
    """
    if missing := missing_names(feature):
        oldest, newest = (".".join(map(str, bound)) for bound in TESTED["transformers"])
        raise ImportError(
            f"{feature} was tested with transformers {oldest} to {newest}. Version {transformers.__version__} is "
            f"installed and lacks {', '.join(missing)}. {instead} Or install transformers {newest}: "
            f'`pip install "transformers=={newest}.*"`.'
        )


def untested(installed: dict[str, str]) -> list[str]:
    """List the packages outside of the tested versions, one clause each, from the installed version of each package."""
    clauses = []
    for name, (oldest, newest) in TESTED.items():
        number = re.match(r"(\d+)\.(\d+)", installed.get(name, ""))
        if number is not None and not oldest <= (int(number[1]), int(number[2])) <= newest:
            tested = " to ".join(".".join(map(str, bound)) for bound in (oldest, newest))
            clauses.append(f"{name} {installed[name]} (tested: {tested})")
    return clauses


def report_untested() -> None:
    """Log one line if a package is older or newer than the tested versions."""
    installed = {}
    for name in TESTED:
        try:
            # Prefer the version of the imported module: several installations may be on the path.
            installed[name] = getattr(sys.modules.get(name), "__version__", None) or version(name)
        except PackageNotFoundError:
            continue
    if clauses := untested(installed):
        logger.warning(
            f"tq_hf has not been run with {' and '.join(clauses)}. Compare an answer with that of transformers' own "
            "cache before you rely on the results."
        )


def outside_inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Run `function` outside of inference mode and without gradients, independent of the mode of the caller.

    Under `torch.inference_mode` every new tensor is an inference tensor. Inference tensors cannot be written in place
    outside of inference mode. A cache that was filled there must still serve a plain `generate()`, so its tensors are
    allocated outside of inference mode.
    """
    # The order matters: leaving inference mode turns gradients on.
    guarded = torch.inference_mode(False)(torch.no_grad()(function))

    @wraps(function)
    def outside(*args: P.args, **kwargs: P.kwargs) -> R:
        # `generate()` needs neither, and the two decorators take as long as two kernel launches.
        if torch.is_inference_mode_enabled() or torch.is_grad_enabled():
            return guarded(*args, **kwargs)
        return function(*args, **kwargs)

    return outside


def cached_table(make: Callable[P, R]) -> Callable[P, R]:
    """Cache the results of `make`, one per set of hashable arguments. `torch.compile` takes them as constants.

    Dynamo warns about a plain `lru_cache`, ignores it and computes the table again in each graph.
    """
    cached = lru_cache(outside_inference_mode(make))

    @torch.compiler.assume_constant_result
    @wraps(make)
    def table(*args: P.args, **kwargs: P.kwargs) -> R:
        return cached(*args, **kwargs)  # type: ignore[arg-type]

    return table


def autocast_dtype(states: torch.Tensor) -> torch.dtype | None:
    """Return the dtype in which sdpa computes on the device of `states`, or `None` outside of autocast.

    Under autocast a float32 model computes its matrix products in 16 bits. The rotary embedding still returns keys in
    float32; values are in 16 bits. `DynamicCache` and the caches of this package store both in float32. sdpa then casts
    queries, keys and values to 16 bits. This package names the dtypes of its own computations.
    (`_is_any_autocast_enabled`: torch 2.9 to 2.15.)
    """
    # Check this first: reading the type of a device takes torch longer than the rest.
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
    later versions clean up more). Without this context the current stream would stay that of the capture, the allocator
    would return no cached memory, and random numbers would raise until another capture succeeds.

    Meanwhile no garbage is collected: that might free the memory pool of an older engine, and torch aborts the process
    if a pool is freed while another is allocated to.
    """
    collects = gc.isenabled()
    gc.disable()
    with torch.cuda.stream(torch.cuda.current_stream(device)):
        try:
            yield
        except BaseException:
            # Suppress errors if the capture had not begun, or if torch has ended it (2.13 may then keep the memory of
            # the pool).
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


def capture_failure(model: Any, error: RuntimeError) -> str:
    """Describe a decode step that no CUDA graph holds, by the first line of the error that ended the capture. torch
    raises a second error when the capture cannot be ended; that one is skipped. Grouped products of experts read their
    sizes on the host, except in bfloat16 on compute capability 9.0 and 10.0 (torch 2.11)."""
    before = error.__context__ if "previous error during capture" in str(error) else None
    reason = str(before or error).partition("\n")[0].rstrip(".")
    if "grouped_mm" in model.get_experts_implementation().values():
        reason += '; of grouped experts, call `model.set_experts_implementation("batched_mm")` first'
    return f"A decode step of {type(model).__name__} cannot be captured as a CUDA graph ({reason})."


@lru_cache
def trace_apart() -> None:
    """Let torch.fx trace without effect on other threads, from now on.

    While `Tracer.trace` runs, torch 2.9 to 2.13 replaces `torch.nn.Module.__call__` by a function that reports each
    call to the tracer, and a model that another thread calls raises "module is not installed as a submodule".
    """
    patch_method = _Patcher.patch_method

    def patch_in_thread(self: Any, cls: type, name: str, new_fn: Callable, deduplicate: bool = True) -> None:
        tracing, original = get_ident(), getattr(cls, name)

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (new_fn if get_ident() == tracing else original)(*args, **kwargs)

        patch_method(self, cls, name, call, deduplicate)

    _Patcher.patch_method = patch_in_thread  # type: ignore[method-assign]


def current_raw_stream(device: int) -> int:
    """Handle of the current CUDA stream, without a `torch.cuda.Stream` around it (torch 2.9 to 2.15)."""
    return torch._C._cuda_getCurrentRawStream(device)


def mark_static_addresses(tensors: Iterable[torch.Tensor]) -> None:
    """Tell `torch.compile` that the addresses of tensors do not change, so that graphs need no copies (torch 2.9 to
    2.15)."""
    mark = torch._dynamo.mark_static_address
    for tensor in tensors:
        mark(tensor)


def as_plain_tensors() -> AbstractContextManager[None]:
    """Context in which operations on subclasses of tensors are those of `torch.Tensor` (torch 2.9 to 2.15)."""
    return torch._C.DisableTorchFunctionSubclass()


def storage_id(tensor: torch.Tensor) -> int:
    """Id of the storage of a tensor, equal for all views of one storage (torch 2.9 to 2.15)."""
    return tensor.untyped_storage()._cdata


def changes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Differs once a tensor made outside of inference mode, or a view that shares its count, was written to in place
    (`_version`: torch 2.9 to 2.15), or given other memory."""
    return tensor._version, tensor.untyped_storage()._cdata


def has_forward_hooks(module: Any) -> bool:
    """Whether a module calls hooks after `forward` (torch 2.9 to 2.15)."""
    return bool(getattr(module, "_forward_hooks", None))


_VIEWS = {"data", "T", "mT", "H", "mH", "real", "imag"}
"""Attributes of a tensor that are views of its elements."""
METADATA: set[Any] = {
    getattr(torch.Tensor, name)
    for name in "dim is_floating_point is_conj is_neg stride storage_offset untyped_storage _is_view".split()
} | {
    attribute.__get__
    for name, attribute in vars(torch._C.TensorBase).items()
    if hasattr(attribute, "__set__") and name not in _VIEWS
}
"""Methods and attributes of a tensor that do not read its elements (torch 2.9 to 2.15)."""


CACHE_NAME = (
    "cache" if "cache" in signature(GenerationMixin.prepare_inputs_for_generation).parameters else "past_key_values"
)
"""Name of the cache among a model's inputs and outputs: `past_key_values` in transformers 5.17 to 5.23, `cache` in
5.24. `generate()` and models of 5.24 also take the older name, with a warning."""


def as_input(cache: Cache) -> dict[str, Cache]:
    """Return `cache` as a keyword argument, under the name that the installed transformers uses."""
    return {CACHE_NAME: cache}


def device_of_inputs(model: Any) -> torch.device:
    """Device on which a model takes token ids. Weights that accelerate has offloaded are on the meta device, and the
    hooks of accelerate move the inputs of each layer."""
    return torch.device("cpu") if model.device.type == "meta" else model.device


@lru_cache
def _states_taken(forward: Any) -> set[str]:
    """Names of the parameters of `forward` that are states of tokens."""
    return {name for name in signature(forward).parameters if name.endswith("_states")}


def takes_other_states(module: Any) -> bool:
    """Whether an attention module can take states of other tokens than the tokens of its queries."""
    return bool(_states_taken(type(module).forward) - {"hidden_states"})


def attends_to_own_tokens(module: Any) -> bool:
    """Whether queries and keys of an attention module belong to the same tokens, unlike in cross-attention
    (transformers 5.17 to 5.24).

    Cross-attention is not causal, or has `is_cross_attention` (GPTBigCode marks cross-attention as causal, too). Other
    modules that are not causal attend to their own tokens if `forward` takes no other states (PaliGemma).
    """
    if getattr(module, "is_causal", False):
        return not getattr(module, "is_cross_attention", False)
    return _states_taken(type(module).forward) == {"hidden_states"}


def attention_implementation(config: PreTrainedConfig | None) -> str | None:
    """`config._attn_implementation` (transformers 5.17 to 5.24).

    Configs look up attributes in Python. That takes as long as a kernel launch, in every update of every layer. Outside
    of compilation this function reads the attribute beneath the property.
    """
    if not torch.compiler.is_dynamo_compiling() and config is not None:
        attributes: dict[str, Any] = object.__getattribute__(config, "__dict__")
        if "_attn_implementation_internal" in attributes:
            return attributes["_attn_implementation_internal"]
    return getattr(config, "_attn_implementation", None)


def attention_of_parts(model: Any) -> list[tuple[PreTrainedConfig, str | None]]:
    """List the config of every part of a model (text decoder, vision tower) with its attention, for
    `restore_attention` (transformers 5.17 to 5.24)."""
    configs = [model.config, *(part.config for part in model.modules() if isinstance(part, PreTrainedModel))]
    for config in configs:  # the list grows by the parts of parts
        parts = (getattr(config, name, None) for name in config.sub_configs)
        configs += (part for part in parts if isinstance(part, PreTrainedConfig))
    return [(config, config._attn_implementation_internal) for config in configs]


def restore_attention(parts: list[tuple[PreTrainedConfig, str | None]]) -> None:
    """Set the attention of every part to the value in `parts` (transformers 5.17 to 5.24).

    `set_attn_implementation` cannot do this: one name applies to all parts, and a dict cannot name parts of parts.
    """
    for config, attention in parts:
        config._attn_implementation_internal = attention


@contextmanager
def layer_types_known(kinds: Iterable[str]) -> Iterator[None]:
    """Context in which transformers' continuous batching takes configs with layers of other kinds.

    Its manager refuses them when it looks for kinds without block tables (`ATTN_TYPE_TO_ALLOCATOR`: transformers 5.18
    to 5.24). Our kinds have block tables.
    """
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

    transformers checks this for its own names only. Models with attention of their own (Bloom, XGLM, TrOCR) accept any
    other name and ignore it. Others need masks that only "eager" makes (BigBird-Pegasus, GIT).
    """
    known = _known.get(kind)
    if known is None:
        models = [model for model in _models() if model.config_class is kind]
        known = all(_takes(model) for model in models)
        if models:  # otherwise the module of the model is not imported yet
            _known[kind] = known
    return known


def has_attention_heads(config: PreTrainedConfig) -> bool:
    """Whether any layer of a decoder's config has attention heads."""
    return any(getattr(layer, "num_attention_heads", None) for layer in layer_configs(config))


def layer_configs(config: PreTrainedConfig) -> Iterable[PreTrainedConfig]:
    """Configs of the layers of a decoder, or only its own config if all layers are equal.

    The config of a decoder with different layers (Gemma 4, Dots 3) raises for attributes that differ between layers.
    """
    return config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]


def layer_config(config: PreTrainedConfig, layer: int) -> PreTrainedConfig:
    """Config of one layer of a decoder."""
    return config.per_layer_config[layer] if getattr(config, "is_heterogeneous", False) else config


def memory_per_gpu(handler: Any, gpus: int) -> dict[str, Any]:
    """Argument by which the paged cache's memory `handler` counts the activations of a step per GPU (from 5.24 on).

    Older versions count those of all `gpus`, so the pool gets fewer pages than would fit.
    """
    return {"kv_tp_size": gpus} if "kv_tp_size" in signature(handler.__init__).parameters else {}


def _takes(model: type[PreTrainedModel]) -> bool:
    if not model._can_set_attn_implementation():
        return False
    # Models that sdpa cannot compute (softcap, sinks) still declare flex or flash attention.
    others = model._supports_attention_backend and (model._supports_flex_attn or model._supports_flash_attn)
    return model._supports_sdpa or others


def _models() -> Iterator[type[PreTrainedModel]]:
    """Yield all model classes imported so far."""
    pending = [PreTrainedModel]
    while pending:
        for model in pending.pop().__subclasses__():
            pending.append(model)
            yield model


def asked_by_prefill() -> bool:
    """Whether the caller is `_prefill` of `generate()`, which asks if chunks of a prompt should be compiled.

    The names of the calling functions decide. `_prefill` and the loop over steps both call
    `_valid_auto_compile_criteria` (transformers 5.17 to 5.24).
    """
    if torch.compiler.is_dynamo_compiling():
        return False
    names: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(names) < 2:
        if frame.f_code.co_name != "is_compileable":  # the property of an encoder-decoder's cache
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names == ["_valid_auto_compile_criteria", "_prefill"]


def padding_mask_of_caller() -> torch.Tensor | None:
    """Padding mask `[B, T]` bool for which the sizes of masks are asked; `None` without one.

    A function that makes masks calls `get_mask_sizes` of a cache, and passes no mask. Its local variable
    `attention_mask` is the mask (transformers 5.17 to 5.24).
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name == "get_mask_sizes":  # of an encoder-decoder's cache, too
        frame = frame.f_back
    mask = None if frame is None else frame.f_locals.get("attention_mask")
    return mask.bool() if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None


def arguments_of_generate() -> dict[str, Any]:
    """Return the local variables of `generate()`, for a `custom_generate` loop.

    `generate()` does not pass on `streamer`, `assistant_model` and `synced_gpus`. It drops `tokenizer`, but the frame
    of its `torch.no_grad` still has it (transformers 5.17 to 5.24, torch 2.9 to 2.15).
    """
    frame = sys._getframe(2)
    kwargs = None if frame.f_back is None else frame.f_back.f_locals.get("kwargs")
    return {"tokenizer": kwargs.get("tokenizer") if isinstance(kwargs, dict) else None, **frame.f_locals}


def takes_positions(model: Any) -> bool:
    """Whether a model takes `position_ids`."""
    return "position_ids" in signature(model.forward).parameters


def prefill(model: Any, ids: torch.Tensor, config: GenerationConfig, inputs: dict[str, Any]) -> tuple[Any, Any]:
    """Run the prompt as `generate()` does, in chunks if the config says so (transformers 5.17 to 5.24).

    Returns:
        Outputs of the model, and inputs of the first step, with positions if the model takes them.
    """
    if inputs.get("position_ids") is None and takes_positions(model):
        inputs = {**inputs, "position_ids": model._prepare_position_ids_for_generation(ids, inputs)}
    outputs = model._prefill(ids, config, inputs)
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
    """Inputs of a model extended by `tokens` tokens, as assisted decoding does (transformers 5.17 to 5.24)."""
    inputs = dict(inputs)
    for name, extend in (
        ("attention_mask", lambda length: candidate_generator._prepare_attention_mask(inputs, length, False)),
        ("token_type_ids", lambda length: candidate_generator._prepare_token_type_ids(inputs, length)),
        ("position_ids", lambda length: candidate_generator._prepare_position_ids(inputs, length, False)),
    ):
        if (held := inputs.get(name)) is not None:
            extend(held.shape[-1] + tokens)
    return inputs


def mark_static_shape(tensor: torch.Tensor) -> None:
    """Let the compiler compile for this shape, also after others (torch 2.9 to 2.15)."""
    torch._dynamo.mark_static(tensor)


foreach = SimpleNamespace(
    add_=torch._foreach_add_,
    sub=torch._foreach_sub,
    clamp_max=torch._foreach_clamp_max,
    clamp_min_=torch._foreach_clamp_min_,
    minimum_=torch._foreach_minimum_,
)
"""Operations on many small tensors in one launch (torch 2.9 to 2.15)."""
