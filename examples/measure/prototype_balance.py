"""Balanced channels in torch, in several variants, on the two trained models: which to build.

    python examples/measure/train_needle.py --model qwen3 --minutes 2.8 --contexts 512 1024 4096 --enough 0.97 \\
        --eval-seeds 0 --output build/qwen3                                # and qwen2
    python examples/measure/prototype_balance.py --models build/qwen3 build/qwen2 --minutes 2

A cache of dense states whose blocks are replaced by what the codec reads back of them, with factors from the first
chunk. Rows are means over rotation seeds: one seed differs from another by more than what is compared.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import stress
import torch
from quality import documents, read_documents, reference, token_ids
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from tq_hf import PRESETS, TurboQuantConfig
from tq_hf.codec import reference as codec
from tq_hf.codec.balance import Statistics, statistics
from tq_hf.tensors.blocks import PackedBlocks
from tq_hf.tensors.factors import Factors

NAME = "prototype of balance"


@dataclass(frozen=True)
class Variant:
    keys: Callable[[Statistics], torch.Tensor] | None
    values: Callable[[Statistics], torch.Tensor] | None
    tokens: int = 128


def by_channel(near: float, far: float, tokens: int = 128) -> Variant:
    """Each channel by how far it is from the median."""

    def away(logarithm: torch.Tensor) -> torch.Tensor:
        r = logarithm - logarithm.median(-1, keepdim=True).values
        weight = (r.abs() - math.log(near)) / (math.log(far) - math.log(near))
        return (weight.clamp(0, 1) * r).exp()

    def keys(found: Statistics) -> torch.Tensor:
        return away((found.rms("keys") / found.rms("queries")).log() / 2)

    return Variant(keys, lambda found: away(found.rms("values").log()), tokens)


CHOSEN = by_channel(1.6, 2.5)
VARIANTS = {
    "none": Variant(None, None),
    "channel 1.6-2.5": CHOSEN,
    "always": by_channel(0.5, 1.0),
    "channel 1.3-1.8": by_channel(1.3, 1.8),
    "channel 2-3": by_channel(2, 3),
    "channel 1.6-2.5, 512": replace(CHOSEN, tokens=512),
    "keys 1.6-2.5": replace(CHOSEN, values=None),
    "values 1.6-2.5": replace(CHOSEN, keys=None),
}
STRESSES = {
    "none": {},
    "4 pairs x10": {"rescale": (4, 10, 0)},
    "2 pairs x30": {"rescale": (2, 30, 0)},
    "8 values x10": {"rescale": (0, 10, 8)},
    "4 pairs x3": {"rescale": (4, 3, 0)},
    "slow bias x40": {"bias": ("slow", 40.0)},
}


class Layer(DynamicLayer):
    def __init__(self, config: TurboQuantConfig, variant: Variant) -> None:
        super().__init__()
        self.config, self.variant, self.encoded, self.factors = config, variant, 0, None
        self.queries: list[torch.Tensor] = []

    def seen(self) -> int:
        return sum(part.shape[2] for part in self.queries)

    def _decide(self) -> Factors:
        queries = torch.cat(self.queries, dim=2)[:, :, : self.variant.tokens]
        keys, values = (x[:, :, : queries.shape[2]] for x in (self.keys, self.values))
        found = statistics(queries, keys, values, first=self.config.sink_tokens)
        s = self.variant.keys(found) if self.variant.keys else torch.ones_like(keys[:, :, 0])
        t = self.variant.values(found) if self.variant.values else torch.ones_like(values[:, :, 0])
        self.queries = []
        return Factors(1 / s, 1 / t).map(lambda factor: factor.bfloat16().half())

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Encode what is due, then append."""
        due = self.config.num_blocks(self.keys.shape[2]) if self.is_initialized else 0
        if due > self.encoded:
            self.factors = self.factors or self._decide()
            start, stop = (self.config.sink_tokens + 128 * n for n in (self.encoded, due))
            rows = self.keys[:, :, start:stop], self.values[:, :, start:stop]
            layout = self.config.layout(rows[0].shape[-1], rows[1].shape[-1])
            blocks = PackedBlocks.allocate(layout, *rows[0].shape[:2], due - self.encoded, keys.device)
            blocks = replace(blocks, factors=self.factors)
            codec.encode(self.config, *rows, blocks, 0)
            codec.dequantise(self.config, blocks, *rows)
            self.encoded = due
        new, all_values = super().update(keys, values)
        new = new.view_as(new)
        new.layer = self
        return new, all_values


def attention(module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    layer = getattr(key, "layer", None)
    if layer is not None and layer.factors is None and layer.seen() < layer.variant.tokens:
        layer.queries.append(query)
    return sdpa_attention_forward(module, query, key, *args, **kwargs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=2.0, help="for each model")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--seeds", type=int, default=3, help="of the rotation")
    parser.add_argument("--presets", nargs="+", default=["3bit_nc", "4bit_nc"])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    rows = []
    for folder in given.models:
        started = time.monotonic()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(given.device).eval()
        read = documents(given.tokens, 1, 6, 4)
        ids = token_ids(read, model.device)
        known = reference(model, ids, 128)
        first: dict[tuple[str, str], float] = {}
        windows = {"defaults": {}, "packed": {"residual_length": 0, "sink_tokens": 0}}
        cases = [
            (kind, window, preset, variant)
            for kind in STRESSES
            for window in windows
            for preset in given.presets
            for variant in given.variants
        ]
        for kind, window, preset, variant in cases:
            if time.monotonic() - started > 60 * given.minutes:
                print("no time left")
                break
            options, kls, right = STRESSES[kind], [], []
            subject = stress.rescaled(model, *options["rescale"]) if "rescale" in options else model
            for seed in range(given.seeds):
                config = replace(PRESETS[preset], seed=seed, **windows[window])
                cache = Cache(layers=[Layer(config, VARIANTS[variant]) for _ in range(model.config.num_hidden_layers)])
                if "bias" in options:
                    spread, strength = options["bias"]
                    bias = stress.key_bias(model, known.keys, strength, spread)
                    with bias.taken_off(NAME):
                        cache = bias.added(cache)
                        outcome = read_documents(model, read, ids, known, cache, NAME, chunk=128, first=512)
                else:
                    outcome = read_documents(subject, read, ids, known, cache, NAME, chunk=128, first=512)
                kls.append(outcome.kl.mean().item())
                right += [answer for answers in outcome.recalled for answer in answers]
            kl = sum(kls) / len(kls)
            base = first.setdefault((window, preset), kl)
            rows.append(
                dict(model=folder.name, stress=kind, window=window, preset=preset, variant=variant, kls=kls)
                | {"ratio": kl / base, "recall": sum(right) / len(right)}
            )
            print(
                f"{folder.name:8} {kind:14} {window:9} {preset:8} {variant:20} KL {kl:.6f}  {kl / base:.3f} of plain, "
                f"unstressed  recall {rows[-1]['recall']:.3f}",
                flush=True,
            )
            if given.output:
                given.output.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
