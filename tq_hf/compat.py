"""The border to torch and transformers: their private names, each with the versions it was read in, the versions this
package was run with, inference mode and autocast. `tq_kernels.common.device` has what the kernels' host side uses."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import lru_cache, wraps
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from pkgutil import resolve_name
from types import FrameType
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
import transformers
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
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
"""The oldest and the newest of each that tests have run with. What `pyproject.toml` allows is wider: each torch asks
for a Triton of its own, and a newer one may well work."""


_GENERATION = "transformers:GenerationMixin."
_CACHE = "transformers.cache_utils:"
_ENGINE = "transformers.generation.continuous_batching."
_MANAGER = f"{_ENGINE}continuous_api:ContinuousBatchingManager."
_PROCESSOR = f"{_ENGINE}continuous_api:ContinuousBatchProcessor."
_RUNNER = f"{_ENGINE}model_runner:ModelRunner."
_SERVER = "transformers.cli."

GROUND: dict[str, dict[str, str]] = {
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
        f"{_GENERATION}_update_model_kwargs_for_generation": "outputs model_kwargs",
        f"{_GENERATION}_valid_auto_compile_criteria": "model_kwargs generation_config",
        f"{_GENERATION}_optimize_model_for_decode": "",
        f"{_GENERATION}prepare_inputs_for_generation": "input_ids next_sequence_length",
        "transformers:PreTrainedModel.get_compiled_call": "compile_config",
        "transformers.generation.stopping_criteria:EosTokenCriteria": "eos_token_id",
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
        f"{_ENGINE}scheduler:FIFOScheduler._get_waiting_candidates": "",
        f"{_ENGINE}requests:RequestState": "request_id initial_tokens",
        "transformers:ContinuousMixin.init_continuous_batching": "generation_config continuous_batching_config",
        "transformers:ContinuousMixin.generate_batch": "inputs generation_config",
    },
    "tq-hf serve": {
        f"{_SERVER}serve:Serve.__init__": "continuous_batching non_blocking cb_num_blocks",
        f"{_SERVER}serve:Serve.start_server": "",
        f"{_SERVER}serving.utils:CBGenerateManager.init_cb": "model gen_config",
        f"{_SERVER}serving.utils:Modality.LLM": "",
    },
}
"""Private or changing names of transformers, by the way that stands on them, with the parameters that are used."""


def moved(way: str) -> list[str]:
    """The names of `GROUND[way]` that the installed transformers does not have, or that lack a parameter."""
    gone = []
    for name, parameters in GROUND[way].items():
        try:
            found = signature(resolve_name(name)).parameters if parameters else resolve_name(name)
        except (ImportError, AttributeError):
            gone.append(name)
        else:
            gone += [f"{name}({parameter}=)" for parameter in parameters.split() if parameter not in found]
    return gone


@lru_cache
def check_ground(way: str, instead: str) -> None:
    """Raise an `ImportError` that names what `way` needs of transformers and the installed version does not have.

    Args:
        way: A key of `GROUND`.
        instead: What to use in its place: a sentence.
    """
    if gone := moved(way):
        oldest, newest = (".".join(map(str, bound)) for bound in TESTED["transformers"])
        raise ImportError(
            f"{way} was tested with transformers {oldest} to {newest}. Version {transformers.__version__} is installed "
            f"and lacks {', '.join(gone)}. {instead} Or install transformers {newest}: "
            f'`pip install "transformers=={newest}.*"`.'
        )


def untested(installed: dict[str, str]) -> list[str]:
    """A clause for each of these versions, by package, that lies outside of what was tested."""
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
            # An imported module says its own version: several installations may be on the path.
            installed[name] = getattr(sys.modules.get(name), "__version__", None) or version(name)
        except PackageNotFoundError:
            continue
    if clauses := untested(installed):
        logger.warning(
            f"tq_hf has not been run with {' and '.join(clauses)}. Compare an answer with that of transformers' own "
            "cache before you rely on it."
        )


def outside_inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Run `function` outside of inference mode and without gradients, whatever the caller is in.

    Under `torch.inference_mode` every new tensor is an inference tensor, which may never be written to in place outside
    of it. A cache that was filled there must still serve a plain `generate()`, so what it keeps is made outside.
    """
    # In this order: leaving inference mode turns gradients on.
    guarded = torch.inference_mode(False)(torch.no_grad()(function))

    @wraps(function)
    def outside(*args: P.args, **kwargs: P.kwargs) -> R:
        # Under `generate()` there is nothing to leave, and the two decorators take as long as two kernel launches.
        if torch.is_inference_mode_enabled() or torch.is_grad_enabled():
            return guarded(*args, **kwargs)
        return function(*args, **kwargs)

    return outside


def cached_table(make: Callable[P, R]) -> Callable[P, R]:
    """Make the table for these arguments, which must be hashable, once. To `torch.compile` it is a constant: Dynamo
    warns of `lru_cache` itself, looks through it and makes the table anew in each graph."""
    cached = lru_cache(outside_inference_mode(make))

    @torch.compiler.assume_constant_result
    @wraps(make)
    def table(*args: P.args, **kwargs: P.kwargs) -> R:
        return cached(*args, **kwargs)  # type: ignore[arg-type]

    return table


def autocast_dtype(states: torch.Tensor) -> torch.dtype | None:
    """The dtype that sdpa computes in and returns on the device of these states, or `None` outside of autocast.

    A float32 model computes its matrix products in 16 bits there. Keys leave the rotary embedding in float32 all the
    same, and values do not. `DynamicCache` holds both in float32, and so does a cache of this package; sdpa then reads
    them, and the queries, in 16 bits. What this package computes itself, it computes in the dtypes that it names.
    (`_is_any_autocast_enabled`: torch 2.9 to 2.15.)
    """
    # Asked first: the kind of a device takes torch longer than the rest.
    if not torch._C._is_any_autocast_enabled():
        return None
    device = states.device.type
    # torch raises for the meta device.
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None


def outside_autocast(states: torch.Tensor) -> AbstractContextManager[object]:
    """A context in which operations on these states' device have the dtypes of their arguments."""
    return nullcontext() if autocast_dtype(states) is None else torch.autocast(states.device.type, enabled=False)


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured: the host can read nothing then."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextmanager
def ending_failed_capture(device: torch.device, pool: Any) -> Iterator[None]:
    """Around the capture of a CUDA graph on `device` with memory of `pool`: if it fails, leave torch as it was.

    After an operation that no graph holds, `CUDAGraph::capture_end` raises before it has done its work (torch 2.9 to
    2.12; later ones do more of it). The current stream stays that of the capture, the allocator returns no cached
    memory any more, and random numbers raise until another capture succeeds.
    """
    with torch.cuda.stream(torch.cuda.current_stream(device)):
        try:
            yield
        except BaseException:
            # Raised where the capture had not begun, or torch has ended it (2.13 may then keep the pool's memory).
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(device.index, pool)
                torch._C._cuda_releasePool(device.index, pool)
                graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    torch.zeros(1, device=device)
            raise


def capture_failure(error: RuntimeError) -> str:
    """The first line of what went wrong in a capture: not that it could not be ended, which torch raises after it."""
    before = error.__context__ if "previous error during capture" in str(error) else None
    return str(before or error).partition("\n")[0]


def current_raw_stream(device: int) -> int:
    """The current CUDA stream's handle, without a `torch.cuda.Stream` around it (torch 2.9 to 2.15)."""
    return torch._C._cuda_getCurrentRawStream(device)


def mark_static_addresses(tensors: Iterable[torch.Tensor]) -> None:
    """Promise `torch.compile` that tensors stay where they are, so that graphs do not copy them (torch 2.9 to 2.15)."""
    mark = torch._dynamo.mark_static_address
    for tensor in tensors:
        mark(tensor)


def as_plain_tensors() -> AbstractContextManager[None]:
    """Let operations on tensors of a subclass be those of `torch.Tensor` (torch 2.9 to 2.15)."""
    return torch._C.DisableTorchFunctionSubclass()


def storage_id(tensor: torch.Tensor) -> int:
    """The same for tensors that share their memory, whatever part of it they see (torch 2.9 to 2.15)."""
    return tensor.untyped_storage()._cdata


def changes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Differs once a tensor made outside of inference mode, or a view that shares its count, was written to in place
    (`_version`: torch 2.9 to 2.15), or given other memory."""
    return tensor._version, tensor.untyped_storage()._cdata


def has_forward_hooks(module: Any) -> bool:
    """Whether a module calls hooks after `forward` (torch 2.9 to 2.15)."""
    return bool(getattr(module, "_forward_hooks", None))


_VIEWS = {"data", "T", "mT", "H", "mH", "real", "imag"}
"""Attributes of a tensor that are tensors of its elements."""
METADATA: set[Any] = {
    getattr(torch.Tensor, name)
    for name in (
        "dim",
        "is_floating_point",
        "is_conj",
        "is_neg",
        "stride",
        "storage_offset",
        "untyped_storage",
        "_is_view",
    )
} | {
    attribute.__get__
    for name, attribute in vars(torch._C.TensorBase).items()
    if hasattr(attribute, "__set__") and name not in _VIEWS
}
"""Methods and attributes of a tensor that need no elements (torch 2.9 to 2.15)."""


CACHE_NAME = (
    "cache" if "cache" in signature(GenerationMixin.prepare_inputs_for_generation).parameters else "past_key_values"
)
"""Name of the cache among a model's inputs and outputs: `past_key_values` in transformers 5.17 to 5.23, `cache` in
5.24. `generate()` and models of 5.24 also take the older name, with a warning."""


def as_input(cache: Cache) -> dict[str, Cache]:
    """The keyword argument by which the installed transformers hands `cache` to a model and to `generate()`."""
    return {CACHE_NAME: cache}


def device_of_inputs(model: Any) -> torch.device:
    """Where a model takes token ids. Of weights that accelerate has offloaded only the shapes are left (on the meta
    device), and its hooks move what a layer is given."""
    return torch.device("cpu") if model.device.type == "meta" else model.device


@lru_cache
def _states_taken(forward: Any) -> set[str]:
    """Parameters of a module's `forward` that are states of tokens."""
    return {name for name in signature(forward).parameters if name.endswith("_states")}


def takes_other_states(module: Any) -> bool:
    """Whether an attention module can be given states of other tokens than those whose queries it computes."""
    return bool(_states_taken(type(module).forward) - {"hidden_states"})


def attends_to_own_tokens(module: Any) -> bool:
    """Whether queries and keys of an attention module are of the same tokens: not in cross-attention (transformers 5.17
    to 5.24).

    Cross-attention is not causal, or has `is_cross_attention` (GPTBigCode marks it causal, too). Other modules that are
    not causal attend to their own tokens if these are all that their `forward` takes (PaliGemma).
    """
    if getattr(module, "is_causal", False):
        return not getattr(module, "is_cross_attention", False)
    return _states_taken(type(module).forward) == {"hidden_states"}


def attention_implementation(config: PreTrainedConfig | None) -> str | None:
    """`config._attn_implementation` (transformers 5.17 to 5.24).

    Configurations look up attributes in Python, which takes as long as a kernel launch and comes with every update of
    every layer. Outside of compilation this reads what is stored beneath the property.
    """
    if not torch.compiler.is_compiling() and config is not None:
        attributes: dict[str, Any] = object.__getattribute__(config, "__dict__")
        if "_attn_implementation_internal" in attributes:
            return attributes["_attn_implementation_internal"]
    return getattr(config, "_attn_implementation", None)


def attention_of_parts(model: Any) -> list[tuple[PreTrainedConfig, str | None]]:
    """The config of every part of a model (text decoder, vision tower) and its attention, to give back after
    `set_attn_implementation` (transformers 5.17 to 5.24)."""
    configs = [model.config, *(part.config for part in model.modules() if isinstance(part, PreTrainedModel))]
    for config in configs:  # which grows: parts of parts
        parts = (getattr(config, name, None) for name in config.sub_configs)
        configs += (part for part in parts if isinstance(part, PreTrainedConfig))
    return [(config, config._attn_implementation_internal) for config in configs]


def give_attention_back(parts: list[tuple[PreTrainedConfig, str | None]]) -> None:
    """Let every part attend as `attention_of_parts` found it. Given to `set_attn_implementation`, the attention of the
    whole would be that of all parts, and a dict could not name parts of parts (transformers 5.17 to 5.24)."""
    for config, attention in parts:
        config._attn_implementation_internal = attention


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
    """Whether any layer of a decoder's config has attention heads."""
    return any(getattr(layer, "num_attention_heads", None) for layer in layer_configs(config))


def layer_configs(config: PreTrainedConfig) -> Iterable[PreTrainedConfig]:
    """The configs of a decoder's layers where they differ (Gemma 4, Dots 3), else its own. One whose layers differ
    raises when it is asked for what they differ in."""
    return config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]


def layer_config(config: PreTrainedConfig, layer: int) -> PreTrainedConfig:
    """The config of a decoder's layer."""
    return config.per_layer_config[layer] if getattr(config, "is_heterogeneous", False) else config


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


def asked_by_prefill() -> bool:
    """Whether `generate()` asks if it should compile the chunks of a prompt, by the names of its functions.

    `_prefill` asks `_valid_auto_compile_criteria`, as the loop over steps does (transformers 5.17 to 5.24).
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


def arguments_of_generate() -> dict[str, Any]:
    """The local variables of `generate()`, for a loop that it calls: it does not pass on `streamer`, `assistant_model`
    and `synced_gpus`, and drops `tokenizer`, which the frame of its `torch.no_grad` still has (transformers 5.17 to
    5.24, torch 2.9 to 2.15)."""
    frame = sys._getframe(2)
    given = None if frame.f_back is None else frame.f_back.f_locals.get("kwargs")
    return {"tokenizer": given.get("tokenizer") if isinstance(given, dict) else None, **frame.f_locals}


def prefill(model: Any, ids: torch.Tensor, config: GenerationConfig, inputs: dict[str, Any]) -> tuple[Any, Any]:
    """Run the prompt as `generate()` does, in chunks if asked. Returns the model's outputs and the inputs of the first
    step (transformers 5.17 to 5.24)."""
    outputs = model._prefill(ids, config, inputs)
    return outputs, model._update_model_kwargs_for_generation(outputs, inputs)


def compiles_steps(model: Any, cache: Cache, config: GenerationConfig) -> bool:
    """Whether `generate()` would compile its steps over this cache (transformers 5.17 to 5.24)."""
    return model._valid_auto_compile_criteria(as_input(cache), config)


def optimized_for_decode(model: Any) -> AbstractContextManager[None]:
    """What `generate()` does to a model for the time of its steps (transformers 5.17 to 5.24)."""
    return model._optimize_model_for_decode()


def pad_token(config: Any) -> torch.Tensor:
    """The padding token as `generate()` has prepared it (transformers 5.17 to 5.24)."""
    return config._pad_token_tensor
