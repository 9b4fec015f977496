"""`graph_decoding`: checks of a call of `generate()`, its prompt, and its loop.

On a GPU decoder layers run compiled in a first prompt. A compiled layer gets no cache: its attention is the operator
`tq_hf::attend_prompt`, which fills the cache.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import CompileConfig, GenerationConfig, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.utils import logging

from ..attention import NAME, PROMPT, NotCompiled, prompt
from ..cache import TurboQuantCache
from ..compat import (
    CACHE_NAME,
    arguments_of_generate,
    attention_implementation,
    autocast_dtype,
    check_required_names,
    compiles_steps,
    has_forward_hooks,
    prefill,
    switches_rope,
)
from ..config import holds_latents
from ..layers.compressed import TurboQuantLayer
from ..prepared import CompiledLayers
from .assisted import AssistedLoop, check_room_for_drafts, drafts_of, expect_drafts
from .loop import Loop, check_layers, without_graphs

logger = logging.get_logger(__name__)

MANY_TOKENS = 4_000_000
"""Tokens of prompts after which layers are compiled unasked."""
tokens_read: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Tokens of prompts by model."""
compiled_layers: WeakKeyDictionary[Any, tuple[str, CompiledLayers | None]] = WeakKeyDictionary()
"""Compile options and compiled layers, by model; `None` where a layer attends in a way that is not compiled."""


def graph_decoding(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    stop_strings: str | list[str] | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Decode greedily or by sampling on a preallocated cache. `generate()` calls this function.

    ```python
    cache = TurboQuantCache(model.config, max_cache_len=4096)
    model.generate(**inputs, cache=cache, custom_generate=tq_hf.graph_decoding)
    ```

    One sequence can be decoded with drafts: `prompt_lookup_num_tokens=k`, or `assistant_model=`, a smaller model of the
    same vocabulary (load it with `attn_implementation="turboquant"`, too). The assistant gets a preallocated cache of
    its own, which is freed with this one. A step checks up to 15 drafts. It has 5 of an assistant where
    `num_assistant_tokens` is transformers' default of 20, which only transformers' own loop ends at unlikely drafts.

    Args:
        model: A decoder with `attn_implementation="turboquant"`. Other implementations work, but read dense states.
        input_ids: `[B, T]` int64.
        logits_processor: Processors of logits, as for any loop of transformers.
        stopping_criteria: Stopping criteria, as for any loop of transformers.
        generation_config: Generation config. `disable_compile` and `compile_config` apply, except for CUDA graphs of
            the compiler, which cannot be captured again. With a `compile_config`, and unasked after four million tokens
            of prompts, a GPU reads first prompts by layers that are compiled once for all lengths (16 s; a prompt of 2k
            tokens then takes 54 ms and not 63; 8B, H200), if all are compressed and nothing is padded. For one sequence
            `CompileConfig(options={"coordinate_descent_tuning": True})` shortens a step by 11 to 15% and lengthens the
            first call by half a minute (8B, H200): the compiler then writes products with one row itself and tunes
            them.
        stop_strings: `stop_strings` of `generate()`, with `tokenizer`. transformers refuses `stop_strings` in a
            generation config, because it has dropped the tokenizer by then.
        **model_kwargs: Inputs of the model, the cache among them.

    Returns:
        Tokens `[B, T + n]` int64, or a `GenerateDecoderOnlyOutput` with `return_dict_in_generate`.

    Raises:
        ValueError: The cache is not a preallocated `TurboQuantCache` of full-attention, sliding and linear layers, with
            room for the drafts of the last step. The call asks for other decoding (beams, contrastive search, drafts of
            other kinds), for `synced_gpus`, attentions or hidden states. A step would be captured over several devices.
            `stop_strings` come without a tokenizer.
        ImportError: The installed transformers lacks a name that this loop needs.
    """
    check_required_names("graph_decoding", "Leave out `custom_generate`: `generate()` decodes with the same cache.")
    arguments = arguments_of_generate()
    mode = generation_config.get_generation_mode(arguments.get("assistant_model"))
    cache, drafts = _check(model, generation_config, mode, model_kwargs, arguments), None
    if mode == GenerationMode.ASSISTED_GENERATION:
        drafts = drafts_of(model, cache, input_ids, generation_config, arguments)
        if input_ids.shape[1] and not int(cache.get_seq_length()) and stopping_criteria.max_length is not None:
            check_room_for_drafts(stopping_criteria.max_length, drafts, cache)
        expect_drafts(cache)
    if stop_strings is not None:
        if (tokenizer := arguments["tokenizer"]) is None:
            raise ValueError(
                f"`stop_strings` {stop_strings!r} came without a tokenizer. Pass `tokenizer=` to `generate()` beside "
                "them, or `stopping_criteria=[StopStringCriteria(tokenizer, strings)]`."
            )
        stop = StopStringCriteria(tokenizer, stop_strings)
        stopping_criteria = StoppingCriteriaList([*stopping_criteria, stop])
    most, switch = stopping_criteria.max_length, switches_rope(model)
    if switch is not None and most is not None and input_ids.shape[1] <= switch < most:
        raise ValueError(
            f"The rotary embedding of {type(model).__name__} changes at {switch:,} tokens, and `generate()` computes "
            f"all tokens again there, which `graph_decoding` does not: this text may have {most:,} tokens. Leave out "
            "`custom_generate`, pass fewer `max_new_tokens`, or keep the states that there are: set "
            "`model.config.original_max_position_embeddings = 10**9`."
        )
    compiles = input_ids.is_cuda and compiles_steps(model, cache, generation_config)
    worth_it = _is_worth_compiling(model, generation_config, input_ids.numel())
    how = without_graphs(generation_config.compile_config) if compiles and worth_it else None
    outputs, model_kwargs = read_prompt(model, cache, input_ids, generation_config, how, model_kwargs)
    if model_kwargs[CACHE_NAME] is not cache:
        raise ValueError(
            f"{type(model).__name__} filled a {type(model_kwargs[CACHE_NAME]).__name__} of its own, not the cache that "
            "was passed. Leave out `custom_generate`."
        )
    logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=input_ids.device)
    del outputs
    call = (model, cache, input_ids, logits_processor, stopping_criteria, generation_config, arguments.get("streamer"))
    loop = Loop(*call) if drafts is None else AssistedLoop(drafts, *call)
    return loop.run(logits, model_kwargs)


def _check(
    model: Any, config: GenerationConfig, mode: GenerationMode, inputs: dict[str, Any], arguments: dict[str, Any]
) -> TurboQuantCache:
    cache = inputs.get(CACHE_NAME)
    advice = "Leave out `custom_generate`, or "
    if model.config.is_encoder_decoder:
        raise ValueError("`graph_decoding` does not take encoder-decoder models. Leave out `custom_generate`.")
    if not isinstance(cache, TurboQuantCache) or not cache.is_compileable:
        came = "none" if cache is None else type(cache).__name__
        came += " without `max_cache_len`" if isinstance(cache, TurboQuantCache) else ""
        raise ValueError(
            f"`graph_decoding` needs a preallocated cache, but got {came}. Pass "
            f"`{CACHE_NAME}=TurboQuantCache(model.config, max_cache_len=...)`."
        )
    check_layers(model, cache, mode == GenerationMode.ASSISTED_GENERATION)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION):
        raise ValueError(
            f"The options of this call ask for {mode.value.replace('_', ' ')}, and `graph_decoding` searches greedily "
            f"or samples. {advice}those options."
        )
    if not config.use_cache:
        raise ValueError(f"`graph_decoding` decodes with a cache, but `use_cache` is False. {advice}`use_cache`.")
    if arguments.get("synced_gpus"):
        raise ValueError(f"`graph_decoding` does not wait for other ranks (`synced_gpus`). {advice}`synced_gpus`.")
    devices = sorted(map(str, set((getattr(model, "hf_device_map", None) or {}).values())))
    if len(devices) > 1 and compiles_steps(model, cache, config):
        raise ValueError(
            f"The model is spread over the devices {', '.join(devices)}, and a CUDA graph is captured on one. {advice}"
            'load the model on one device (`device_map="cuda"`), or by tensor parallelism, with one graph per process.'
        )
    for name in ("output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, name):
            raise ValueError(f"`graph_decoding` does not return `{name}`. {advice}set it to False.")
    return cache


def _is_worth_compiling(model: Any, config: GenerationConfig, tokens: int) -> bool:
    """Whether prompts are compiled: where the caller says how, or once compiling would have taken less time than it
    would have saved. Counts `tokens` more of a prompt."""
    tokens_read[model] = tokens_read.get(model, 0) + tokens
    return config.compile_config is not None or tokens_read[model] > MANY_TOKENS


def read_prompt(
    model: Any,
    cache: TurboQuantCache,
    ids: torch.Tensor,
    config: GenerationConfig,
    compile_config: CompileConfig | None,
    inputs: dict[str, Any],
) -> tuple[Any, Any]:
    """`tq_hf.compat.prefill`. With a `compile_config`, compiled layers read a first prompt without padding, for caches
    of compressed layers."""
    layers = None if compile_config is None else _layers(model, compile_config)
    if layers is None or not _takes(model, cache, ids, config, inputs, layers):
        return prefill(model, ids, config, inputs)
    prompt.cache, prompt.modules = cache, layers.modules
    try:
        with layers.called(partial(_call, cache)):
            found = prefill(model, ids, config, dict(inputs))
        stores = [getattr(layer, "store", None) for layer in cache.layers]
        if all(store is not None and store.num_tokens == ids.shape[1] for store in stores):
            return found
        reason = "some layers stored no tokens."
    except NotCompiled as error:
        reason = str(error)
    finally:
        prompt.cache, prompt.modules = None, ()
    logger.warning_once(f"Prompts of {type(model).__name__} are not compiled: {reason}")
    compiled_layers[model] = compiled_layers[model][0], None
    cache.reset()
    return prefill(model, ids, config, inputs)


def _layers(model: Any, config: CompileConfig) -> CompiledLayers | None:
    """Compiled layers of a model, made once."""
    config = CompileConfig(**config.to_dict() | {"dynamic": True})
    if (held := compiled_layers.get(model)) is None or held[0] != repr(config):
        held = compiled_layers[model] = repr(config), CompiledLayers(model, config)
    return held[1]


def _takes(
    model: Any, cache: TurboQuantCache, ids: torch.Tensor, config: GenerationConfig, inputs: Any, layers: CompiledLayers
) -> bool:
    """Whether compiled layers read this prompt."""
    mask, tokens = inputs.get("attention_mask"), ids.shape[1]
    plain = all(type(layer) is TurboQuantLayer for layer in cache.layers) and not holds_latents(model.config)
    return (
        plain
        and len(layers.layers) == len(cache.layers)
        and attention_implementation(model.config) == NAME
        and tokens > 1
        and not (model.training or torch.is_grad_enabled() or int(cache.get_seq_length()))
        and config.prefill_chunk_size is None
        and inputs.get("inputs_embeds") is None
        and autocast_dtype(ids) is None
        and not any(map(has_forward_hooks, layers.modules))
        and (mask is None or (mask.dim() == 2 and mask.shape[1] == tokens and bool(mask.all())))
    )


def _call(held: TurboQuantCache, forward: Any, layer: Any, /, *arguments: Any, **options: Any) -> Any:
    """Call a compiled layer without its cache; one without this cache, or with a mask, as it is. (Models that pass more
    than states by position pass a mask.)"""
    if arguments[1:] or options.get(CACHE_NAME) is not held or options.get("attention_mask") is not None:
        return type(layer).forward(layer, *arguments, **options)
    return forward(layer, *arguments, **options | {CACHE_NAME: None, PROMPT: True})
