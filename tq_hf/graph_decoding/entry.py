"""`graph_decoding`: checks of a call of `generate()`, its prompt, and its loop."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CompileConfig, GenerationConfig, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode
from transformers.generation.stopping_criteria import StopStringCriteria

from ..cache import TurboQuantCache
from ..compat import CACHE_NAME, arguments_of_generate, check_required_names, compiles_steps, prefill, switches_rope
from .assisted import AssistedLoop, check_room_for_drafts, drafts_of, expect_drafts
from .loop import Loop, check_layers, without_graphs
from .prompts import PromptReader


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
            the compiler, which cannot be captured again. On a GPU first prompts without padding of up to 512 tokens are
            graphs, too, from the fourth of a size on, if all layers are compressed: one of 128 tokens then takes 12.8
            ms and not 25. With a `compile_config`, and unasked after four million tokens of prompts, the others are
            read by layers that are compiled once for all lengths (16 s): 2k tokens then take 54 ms and not 63 (8B,
            H200). For one sequence `CompileConfig(options={"coordinate_descent_tuning": True})` shortens a step by 11
            to 15% and lengthens the first call by half a minute (8B, H200): the compiler then writes products with one
            row itself and tunes them.
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
    (cache, compiles), drafts = _check(model, generation_config, mode, model_kwargs, arguments), None
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
    captures = compiles is not None and input_ids.is_cuda
    read = PromptReader.of(model, generation_config, input_ids.numel()).read if captures else prefill
    outputs, model_kwargs = read(model, input_ids, generation_config, model_kwargs)
    if model_kwargs[CACHE_NAME] is not cache:
        raise ValueError(
            f"{type(model).__name__} filled a {type(model_kwargs[CACHE_NAME]).__name__} of its own, not the cache that "
            "was passed. Leave out `custom_generate`."
        )
    logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=input_ids.device)
    del outputs
    streamer = arguments.get("streamer")
    call = (model, cache, input_ids, logits_processor, stopping_criteria, generation_config, compiles, streamer)
    loop = Loop(*call) if drafts is None else AssistedLoop(drafts, *call)
    return loop.run(logits, model_kwargs)


def _check(
    model: Any, config: GenerationConfig, mode: GenerationMode, inputs: dict[str, Any], arguments: dict[str, Any]
) -> tuple[TurboQuantCache, CompileConfig | None]:
    """Return the cache, and how steps are compiled, if they are."""
    cache = inputs.get(CACHE_NAME)
    advice = "Leave out `custom_generate`, or "
    if model.config.is_encoder_decoder:
        raise ValueError("`graph_decoding` does not take encoder-decoder models. Leave out `custom_generate`.")
    if not isinstance(cache, TurboQuantCache) or cache.preallocated_for is None:
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
    compiles = without_graphs(config.compile_config) if compiles_steps(model, cache, config) else None
    if len(devices) > 1 and compiles is not None:
        raise ValueError(
            f"The model is spread over the devices {', '.join(devices)}, and a CUDA graph is captured on one. {advice}"
            'load the model on one device (`device_map="cuda"`), or by tensor parallelism, with one graph per process.'
        )
    for name in ("output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, name):
            raise ValueError(f"`graph_decoding` does not return `{name}`. {advice}set it to False.")
    return cache, compiles
