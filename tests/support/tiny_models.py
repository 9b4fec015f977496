"""Tiny random decoders of the families the cache must serve, made without downloads.

Weights are drawn wide and embeddings untied: small random models otherwise repeat one token whatever the cache holds,
and a test on them cannot fail.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)

VOCAB = 128


def token_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random tokens `[batch, length]`, none of them special."""
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


_OF_TEXT = dict(vocab_size=VOCAB, tie_word_embeddings=False, bos_token_id=1, eos_token_id=None, pad_token_id=0)
_SIZES = _OF_TEXT | dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, max_position_embeddings=2048)
_SIZES |= dict(num_attention_heads=4, num_key_value_heads=2)
_SLIDING = dict(sliding_window=96, layer_types=["sliding_attention", "full_attention"])


def _gpt_oss() -> PreTrainedConfig:
    return GptOssConfig(**_SIZES, **_SLIDING, head_dim=32, num_local_experts=4, num_experts_per_tok=2)


def _qwen3_next() -> PreTrainedConfig:
    heads = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
    kinds = ["linear_attention", "full_attention"]
    return Qwen3NextConfig(**_SIZES, **heads, **experts, head_dim=32, layer_types=kinds)


def _gemma3n() -> PreTrainedConfig:
    """The last two layers read the keys of the two before them."""
    layers = dict(num_hidden_layers=4, num_kv_shared_layers=2, layer_types=_SLIDING["layer_types"] * 2)
    beside = dict(vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=16, laurel_rank=8, altup_num_inputs=2)
    beside |= dict(activation_sparsity_pattern=[0.0] * 4)
    return Gemma3nTextConfig(**(_SIZES | _SLIDING | layers), **beside, head_dim=32)


def gemma4_config(**changes: Any) -> PreTrainedConfig:
    """Heads of full attention are wider and fewer than those of sliding windows, and read keys for values; heads by
    layer are made from `changes`, too."""
    heads = dict(head_dim=32, global_head_dim=64, num_global_key_value_heads=1, attention_k_eq_v=True)
    beside = dict(vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=16)
    return Gemma4TextConfig(**(_SIZES | _SLIDING | heads | beside | changes))


def _deepseek_v3() -> PreTrainedConfig:
    experts = dict(moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1)
    experts |= dict(n_shared_experts=1, first_k_dense_replace=1)
    latents = dict(kv_lora_rank=32, q_lora_rank=48, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32)
    return DeepseekV3Config(**{**_SIZES, "num_key_value_heads": 4}, **experts, **latents)


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SIZES, head_dim=32),
    "qwen2": lambda: Qwen2Config(**_SIZES),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=32),
    "mistral": lambda: MistralConfig(**_SIZES, sliding_window=None),
    "gemma2": lambda: Gemma2Config(**_SIZES, head_dim=32, query_pre_attn_scalar=32, sliding_window=96),
    "gemma3": lambda: Gemma3TextConfig(**_SIZES, **_SLIDING, head_dim=32, query_pre_attn_scalar=32),
    "gemma3n": _gemma3n,
    "gemma4": gemma4_config,
    "gpt_oss": _gpt_oss,
    "phi3": lambda: Phi3Config(**_SIZES),
    "deepseek_v3": _deepseek_v3,
    "qwen3_next": _qwen3_next,
    "gpt2": lambda: GPT2Config(**_OF_TEXT, n_positions=2048, n_embd=64, n_layer=2, n_head=4),
}

DENSE_ATTENTION = {"gemma2": "eager", "gpt_oss": "eager"}
"""What to compare with: sdpa refuses softcap and ignores sinks."""


def dense_attention(name: str) -> str:
    """The attention implementation that is the reference for this family."""
    return DENSE_ATTENTION.get(name, "sdpa")


def build(name: str, seed: int = 1, attention: str | None = None, **changes: Any) -> PreTrainedModel:
    """A random model of a family, float32, in eval mode, with this `attention`; `changes` replace sizes of its config.
    More layers repeat the kinds of the two."""
    config = CONFIGS[name]()
    if kinds := getattr(config, "layer_types", None):
        layers = changes.get("num_hidden_layers", len(kinds))
        changes = {"layer_types": (kinds * layers)[:layers]} | changes
    config.update(changes)
    model = random_weights(config, seed)
    if attention is not None:
        model.set_attn_implementation(attention)
    return model


def random_weights(config: PreTrainedConfig, seed: int = 1) -> PreTrainedModel:
    """A random model of a config, float32, in eval mode."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            # Gain 2 keeps attention peaked, so that a wrong token attended to changes the logits.
            parameter.data.normal_(0, 2 * parameter.shape[-1] ** -0.5, generator=generator)
        if "sinks" in key:
            parameter.data.normal_(0, 2, generator=generator)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def letters(**options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of a token a character, by its code."""
    backend = Tokenizer(models.WordLevel({chr(code): code for code in range(VOCAB)}, unk_token="?"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?", **options)


def noisy(model: PreTrainedModel, noise: float = 0.05) -> PreTrainedModel:
    """A copy of a model with a little noise: as an assistant, some of its drafts are accepted."""
    assistant = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    for parameter in assistant.parameters():
        change = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        parameter.data.add_(change, alpha=noise * parameter.data.std(correction=0).item())
    return assistant


def multimodal() -> tuple[PreTrainedModel, Callable[[], list[str]]]:
    """A random decoder with a vision tower, each of another attention, and what names those of whole, text, tower."""
    torch.manual_seed(1)
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    vision = CLIPVisionConfig(**sizes, image_size=32, patch_size=16)
    text = LlamaConfig(**_SIZES)
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=VOCAB - 1)
    attention = {"text_config": "turboquant", "vision_config": "eager"}
    model = LlavaForConditionalGeneration._from_config(config, attn_implementation=attention).eval()
    parts = (model.config, model.config.text_config, model.config.vision_config)
    return model, lambda: [part._attn_implementation for part in parts]
