"""A tiny random model of any family of transformers, from nothing but its name.

The config class's defaults are shrunk by the names of their fields (`SIZES`); what that does not get right is said
family by family (`OVERRIDES`). Nothing is taken from transformers' own testers, which are not installed.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

VOCAB = 160
LARGEST = 100_000_000
"""Parameters of the largest model that is still called tiny."""

TINY_HEAD = 16
"""Channels of a tiny model's heads."""

SIZES: list[tuple[str, Any]] = [
    (r"(src_|tgt_|decoder_|t2u_|text_|unpadded_)?vocab_size", VOCAB),
    (r"(swa_|decoder_|encoder_)?num_(key_value|kv)_heads|kv_heads|multi_query_group_num|swa_num_key_value_heads", 2),
    (r"linear_num_(key|value)_heads|linear_num_heads|mamba_num_heads", 4),
    (r"(\w+_)?(num_)?(attention_)?heads?|n_heads?|swa_num_attention_heads|\w+_heads|mamba_n_heads", 4),
    (r"(\w+_)?num_hidden_layers|(\w+_)?(n|num)_layers?|depth|(encoder|decoder)_layers|layers|num_blocks", 2),
    (r"num_(encoder|decoder)_layers|conf_num_hidden_layers|\w+_(encoder|decoder)_layers", 2),
    (r"num_experts_per_tok(en)?|moe_k|moe_topk|top_k_experts", 2),
    (r"(moe_)?num_(local_|routed_)?experts|n_routed_experts|zero_expert_num", 4),
    (r"n_group|topk_group", 1),
    (r"index_topk", 32),
    (r"index_topk_blocks", 2),
    (r"index_block_size|num_codebooks", 16),
    (r"qk_rope_head_dim|qk_nope_head_dim|v_head_dim|index_head_dim|linear_\w*head_dim|mamba_d_head|mamba_head_dim", 16),
    (r"qk_head_dim", 32),
    (r"(swa_|global_)?head_dim|d_kv|kv_channels|attention_head_size|dim_head", TINY_HEAD),
    (r"(kv|q|o)_lora_rank", 32),
    (r"\w*(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|dim_ff|mlp_dim|dff)(_mlp)?|share_expert_dim|d_inner", 64),
    (r"(text_|encoder_|decoder_|out_|vision_|audio_|projector_)?hidden_size|d_model|n_embd|hidden_dim|embed_dim", 64),
    (r"embedding_size|word_embed_proj_dim|output_dim|projection_dim|lru_width|backbone_hidden_size|emb_dim", 64),
    (r"max_position_embeddings|n_positions|max_seq_len|n_ctx|context_length|max_(source|target)_positions", 512),
    (r"codebook_size|t2u_\w*_dim|\w*embed_dim|lang_embed_dim|spkr_embed_dim", 64),
    (r"sliding_window(_size)?|attention_window_size|attention_chunk_size|local_attention", 48),
]
"""Sizes by what a field's name matches as a whole; the first match counts. Fields that are None stay so."""


def _mrope(*sections: int, **more: Any) -> dict[str, Any]:
    return dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=list(sections), **more))


OVERRIDES: dict[str, dict[str, Any]] = {
    "apertus1p5": dict(image_token_offset=32, audio_token_offset=96),
    "apertus1p5_vision_tokenizer": dict(base_channels=32, channel_multiplier=[1, 1], num_res_blocks=1),
    "bamba": dict(attn_layer_indices=[1]),
    "blenderbot": dict(max_position_embeddings=512),
    "blt": dict(encoder_hash_byte_group_vocab=512),
    "chameleon": dict(vocabulary_map={"<image>": 150}),
    "codegen": dict(rotary_dim=8),
    "cohere_compass_text": dict(
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            kind: dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 2, 2])
            for kind in ("sliding_attention", "full_attention")
        },
    ),
    "cosmos3_edge_text": _mrope(4, 2, 2),
    "dbrx": dict(
        attn_config=dict(rope_theta=1e4, kv_n_heads=2, clip_qkv=8),
        ffn_config=dict(ffn_hidden_size=64, moe_num_experts=4, moe_top_k=2),
    ),
    "deepseek_ocr2_text": dict(mlp_layer_types=["dense", "sparse"], num_experts_per_tok=2),
    "deepseek_v2": dict(num_experts_per_tok=2),
    "dots1": dict(n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1),
    "dory": dict(
        num_hidden_layers=4,
        n_input_layers=1,
        n_output_layers=1,
        layer_types=["sliding_attention", "full_attention"] * 2,
        n_recurrent_loops=2,
    ),
    "ernie4_5_vl_moe_text": dict(moe_intermediate_size=[64, 64]) | _mrope(3, 3, 2),
    "gemma3n_text": dict(
        num_hidden_layers=4,
        num_kv_shared_layers=1,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
    ),
    "gemma4_text": dict(vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=16),
    "glm4v_moe_text": _mrope(2, 1, 1, partial_rotary_factor=0.5),
    "glm4v_text": _mrope(2, 3, 3),
    "glm_ocr_text": _mrope(2, 3, 3),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "gptj": dict(rotary_dim=8),
    "granite4_vision": dict(deepstack_layer_map=[]),
    "granitemoehybrid": dict(layer_types=["mamba", "attention"]),
    "hunyuan_v1_dense": dict(head_dim=16),
    "hunyuan_v1_moe": dict(head_dim=16),
    "hunyuan_vl_text": dict(head_dim=16) | _mrope(2, 2, 2, 2),
    "hy_v4_vl_text": _mrope(4, 2, 2),
    "inkling2_loop_text": dict(
        num_hidden_layers=4,
        n_layers_per_attn_res_block=1,
        loop_layer_index_start=1,
        loop_layer_index_end=3,
        layer_types=["hybrid_sliding", "hybrid"] * 2,
    ),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"]),
    "mamba2": dict(hidden_size=64, num_heads=8, head_dim=16),
    "minimax_m3_vl_text": dict(
        layer_types=["full_attention", "minimax_m3_sparse"],
        mlp_layer_types=["dense", "sparse"],
        index_block_size=4,
        index_topk_blocks=8,
    ),
    "ministral": dict(head_dim=16),
    "mllama": dict(  # of the model as a whole: the second layer attends to an image of 104 tokens
        text_config=dict(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            cross_attention_layers=[1],
            max_position_embeddings=512,
            rope_parameters=dict(rope_type="default", rope_theta=1e4),
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        vision_config=dict(
            hidden_size=64,
            intermediate_size=64,
            attention_heads=4,
            num_hidden_layers=2,
            num_global_layers=1,
            intermediate_layers_indices=[0],
            vision_output_dim=128,
            image_size=70,
            patch_size=14,
            max_num_tiles=4,
            supported_aspect_ratios=[[1, 1], [2, 2]],
        ),
    ),
    "mpt": dict(max_seq_len=1024),
    "musicgen_decoder": dict(num_codebooks=1),
    "musicgen_melody_decoder": dict(num_codebooks=1),
    "nemotron": dict(num_key_value_heads=2),
    "nemotron_h": dict(n_groups=1, mamba_n_groups=1),
    "paddleocr_vl_text": _mrope(2, 3, 3),
    "qwen2_5_omni_text": _mrope(2, 3, 3),
    "qwen2_5_vl_text": _mrope(2, 3, 3),
    "qwen2_vl_text": _mrope(2, 3, 3),
    "qwen4_exp_text": dict(
        indexer_n_heads=2, indexer_kv_heads=2, indexer_head_dim=16, indexer_budget=32, indexer_compress_ratio=4
    ),
    "recurrent_gemma": dict(block_types=["recurrent", "attention"]),
    "step3p5": dict(sliding_window=48),
    "switch_transformers": dict(
        num_layers=2, num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1
    ),
    "wavtokenizer_encoder": dict(codebook_dim=64),
    "xmod": dict(default_language="en_XX"),
    "zamba": dict(num_hidden_layers=5, layers_block_type=["mamba", "mamba", "hybrid", "mamba", "hybrid"]),
}
"""Fields of a config by its `model_type`, after shrinking."""

PER_LAYER = {"layer_types", "layers_block_type", "mlp_layer_types", "indexer_types"}
"""Fields that name a kind for each layer."""


def model_types() -> dict[str, str]:
    """Model types with a cache to test, each with the name of its class. Of a type that is a decoder and an
    encoder-decoder, "type/seq2seq" is the latter."""
    names: dict[str, str] = {}
    for mapping in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    ):
        for model_type, name in mapping.items():
            names.setdefault(model_type, name if isinstance(name, str) else name[0])
    for model_type, name in modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.items():
        first = name if isinstance(name, str) else name[0]
        if names.setdefault(model_type, first) != first:
            names[f"{model_type}/seq2seq"] = first
    return names


def model_class(model_type: str) -> type[PreTrainedModel]:
    """The class of a model type."""
    return getattr(transformers, (model_types() | WITH_IMAGES)[model_type])


WITH_IMAGES = {"mllama/images": "MllamaForConditionalGeneration"}
"""Models as a whole with the images that layers of their decoders attend to, beside the decoders of `model_types`."""


Kept = Callable[[type[PreTrainedConfig], dict[str, Any]], dict[str, Any]]
"""Fields of a config of a class that have these values and are not shrunk, from the values that replace its defaults.
Asked of a model's config and of its text decoder's."""


def tiny_config(model_type: str, kept: Kept = lambda kind, given: {}) -> PreTrainedConfig:
    """The shrunk config of a model type: its text decoder's alone where the class takes that."""
    own, kind = CONFIG_MAPPING[model_type.partition("/")[0]], model_class(model_type).config_class
    if kind not in own.sub_configs.values():  # InternLM3 has sizes of its own for Llama's models
        kind = own
    return _tiny(kind, kept)


def _tiny(config_class: type[PreTrainedConfig], kept: Kept, **given: Any) -> PreTrainedConfig:
    changes: dict[str, Any] = {}
    overrides = OVERRIDES.get(config_class.model_type, {})
    specs = getattr(config_class, "sub_configs_defaults", {})
    for field in dataclasses.fields(config_class):
        default = given.get(field.name, field.default)
        if field.name in specs:
            spec = specs[field.name]
            of_part = kept if field.name == "text_config" else lambda kind, given: {}
            changes[field.name] = _tiny(spec.get_config_class(spec.model_type), of_part, **spec.init_kwargs)
        elif field.name in given or (isinstance(default, int) and not isinstance(default, bool)):
            changes[field.name] = _shrunk(field.name, default)
    fields = {field.name for field in dataclasses.fields(config_class)}
    changes.update(
        {name: i for i, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")) if name in fields}
    )
    if not overrides.keys() & PER_LAYER and "num_hidden_layers" in fields:
        changes.update(_layers(config_class, fields))
    if _whole(config_class, "num_key_value_heads") == _whole(config_class, "num_attention_heads") != None:  # noqa: E711
        changes["num_key_value_heads"] = changes["num_attention_heads"]
    if "is_decoder" in fields and not getattr(config_class, "is_encoder_decoder", False):
        changes["is_decoder"] = True
    changes.update(overrides)
    changes.update(kept(config_class, given))
    return config_class(**changes)


def _whole(config_class: type[PreTrainedConfig], name: str) -> int | None:
    """The default of a field, if that is a number."""
    default = getattr(config_class, name, None)
    return default if isinstance(default, int) else None


def _layers(config_class: type[PreTrainedConfig], fields: set[str]) -> dict[str, Any]:
    """One layer of each kind that the defaults have, at least two."""
    default = config_class()
    lists = {name: list(value) for name in PER_LAYER & fields if (value := getattr(default, name, None))}
    if not lists:
        return {}
    kinds = list(dict.fromkeys(zip(*lists.values(), strict=False)))[:4]
    kinds *= 2 if len(kinds) == 1 else 1
    return {"num_hidden_layers": len(kinds)} | {name: [kind[i] for kind in kinds] for i, name in enumerate(lists)}


def _shrunk(name: str, default: Any) -> Any:
    if not isinstance(default, int) or isinstance(default, bool):
        return default
    for pattern, size in SIZES:
        if re.fullmatch(pattern, name):
            return min(size, default)
    if re.search(r"token_(id|index)$|^(sep|cls|mask)_", name) and default >= VOCAB:
        return VOCAB - 1 - sum(map(ord, name)) % 32
    return default


def tiny_model(model_type: str, attention: str | None = None, seed: int = 0) -> PreTrainedModel:
    """A random model of a type, float32, in eval mode, whose attention is peaked enough to notice a wrong token.

    `attention` is its attention implementation, by default the one that transformers chooses.

    Raises:
        Exception: Whatever the family raises when its config or model does not allow such sizes.
    """
    return random_model(model_class(model_type), tiny_config(model_type), LARGEST, attention, seed)


def random_model(
    kind: type[PreTrainedModel], config: PreTrainedConfig, largest: int, attention: str | None = None, seed: int = 0
) -> PreTrainedModel:
    """A model as `tiny_model` makes them, of any config. Raises `ValueError` for more than `largest` parameters."""
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(copy.deepcopy(config)).parameters())
    if size > largest:
        raise ValueError(f"{kind.__name__} has {size:,} parameters, more than {largest:,}.")
    torch.manual_seed(seed)
    model = kind._from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(0, 1.5 * parameter.shape[-1] ** -0.5, generator=generator)
        if "sinks" in name:
            parameter.data.normal_(0, 1, generator=generator)
        if re.search(r"cross_attn_\w+_gate$", name):  # else images change nothing (Mllama)
            parameter.data.fill_(1.0)
    return model
