"""What tests of continuous batching need: models, prompts, and answers to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tiny_models import VOCAB, build
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from tq_hf import Balance, TurboQuantCache, TurboQuantConfig

Tokens = list[int]


def model_of(name: str = "llama", **changes: int) -> PreTrainedModel:
    """A random model of two layers."""
    return build(name, **(dict(num_hidden_layers=2) | changes))


def prompts(lengths: Sequence[int], seed: int = 1) -> list[Tokens]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]


def greedy(new: int, **options: Any) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, **options)


def options(**changes: Any) -> ContinuousBatchingConfig:
    """A pool of 200 pages of 128 tokens."""
    return ContinuousBatchingConfig(**(dict(page_size=128, num_blocks=200, max_batch_tokens=2048) | changes))


def answers(results: dict[str, Any]) -> list[Tokens]:
    """The generated tokens of what `generate_batch` returns."""
    for result in results.values():
        assert result.error is None, result.error
    return [result.generated_tokens for result in results.values()]


def paged(preset: str, **overrides: Any) -> TurboQuantConfig:
    """A preset as pages have it."""
    return TurboQuantConfig.from_preset(preset, sink_tokens=0, residual_length=0, **overrides)


class Oracle:
    """What `generate()` answers on a cache that encodes as pages do."""

    def __init__(self, model: PreTrainedModel, preset: str = "4bit_nc", balance: Balance | None = None) -> None:
        self.model, self.balance = model, balance
        self.config = paged(preset, balance=balance is not None)

    def cache(self) -> TurboQuantCache:
        return TurboQuantCache(self.model.config, self.config, balance=self.balance)

    def generate(self, prompt: Tokens, new: int) -> Tokens:
        """Greedy tokens of `generate()`."""
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation("turboquant")
        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=self.cache(),
            max_new_tokens=new,
            do_sample=False,
        )
        self.model.set_attn_implementation(before)
        return out[0, len(prompt) :].tolist()

    def chunked(self, prompt: Tokens, new: int, chunks: Sequence[int] = ()) -> Tokens:
        """Greedy tokens, the prompt read in pieces of these sizes and the rest."""
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation("turboquant")
        cache, out, at, logits = self.cache(), [], 0, torch.empty(0)
        with torch.no_grad():
            for size in (*chunks, len(prompt) - sum(chunks)):
                logits = self.model(torch.tensor([prompt[at : at + size]]), past_key_values=cache).logits[0, -1]
                at += size
            for _ in range(new):
                out.append(int(logits.argmax()))
                logits = self.model(torch.tensor([out[-1:]]), past_key_values=cache).logits[0, -1]
        self.model.set_attn_implementation(before)
        return out
