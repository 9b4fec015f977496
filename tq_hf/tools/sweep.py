"""`tq-hf sweep`: the loss from packing each layer alone, and the presets by layer that fit into a number of bytes.

The measurement is that of `examples/measure/quality`: a text is read in chunks through the cache, so that tokens are
predicted from packed blocks. All layers use the same attention function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from rich.console import Console
from transformers import DynamicCache
from transformers.cache_utils import Cache

from ..cache import TurboQuantCache
from ..compat import as_input
from ..config import TurboQuantConfig
from ..layers.compressed import compressed
from .display import ERRORS, print_rows, with_progress
from .estimate import Estimator

CHUNK = 128
"""Number of tokens per chunk."""
FIRST = 512
"""First scored position. Few tokens are packed before it."""
DENSE = "dense"
"""Name of a dense layer in place of a preset."""

Costs = Mapping[int, Mapping[str, float]]
"""A number for each layer and preset."""


class Reader:
    """A text, a model's predictions of it with dense layers, and the divergence of packed layers from these.

    Args:
        model: A decoder in eval mode, with the attention "turboquant".
        ids: Token ids `[1, T]` of the text, on the model's device.

    Raises `ValueError` if the text is too short, or no layer can be packed.
    """

    def __init__(self, model: Any, ids: torch.Tensor) -> None:
        if ids.shape[1] <= FIRST:
            raise ValueError(
                f"{ids.shape[1]} tokens of the text are read, and the first {FIRST} are not scored. Pass a longer "
                "text, more `--tokens`, or a model with more positions."
            )
        self.model, self.ids = model, ids
        self.layers = list(compressed(TurboQuantCache(model.config).layers))
        """Indices of the layers that can be packed."""
        if not self.layers:
            raise ValueError(f"{type(model).__name__} has no layer that can be packed.")

    @cached_property
    def _exact(self) -> list[torch.Tensor]:
        """Log-probabilities with all layers dense, by chunk."""
        return list(self._log_probs(DynamicCache(config=self.model.config)))

    @torch.no_grad()
    def _log_probs(self, cache: Cache) -> Iterator[torch.Tensor]:
        """Yield log-probabilities `[<= CHUNK, V]` float32 of the next tokens, chunk by chunk from `FIRST` on."""
        for start in range(0, self.ids.shape[1], CHUNK):
            logits = self.model(self.ids[:, start : start + CHUNK], **as_input(cache)).logits[0]
            if start >= FIRST:
                yield logits.float().log_softmax(-1)

    def kl(self, config: TurboQuantConfig) -> float:
        """KL divergence (dense || packed) of next-token distributions: the mean over tokens, in nats."""
        packed = self._log_probs(TurboQuantCache(self.model.config, config))
        pairs = zip(self._exact, packed, strict=True)
        sums = [(exact.exp() * (exact - other)).sum(-1).clamp_min(0).sum().item() for exact, other in pairs]
        return sum(sums) / (self.ids.shape[1] - FIRST)

    def warm_up(self, config: TurboQuantConfig) -> None:
        """Read the text with dense layers, and its beginning with packed layers. On a GPU this compiles kernels, so
        that all later readings take the same time."""
        next(zip(self._exact, self._log_probs(TurboQuantCache(self.model.config, config)), strict=True))


@dataclass(frozen=True)
class Sweep:
    """Results of a sweep: KL in nats, and bytes of a cache with one sequence of `context` tokens.

    Args:
        context: Number of tokens for which bytes are counted.
        whole_kl: KL with all layers at a preset.
        whole_bytes: Bytes with all layers at a preset.
        kl: KL with one layer at a preset and all others dense.
        more_bytes: Bytes with one layer at a preset and all others at the last preset, minus the bytes with all layers
            at the last preset.
    """

    context: int
    whole_kl: Mapping[str, float]
    whole_bytes: Mapping[str, int]
    kl: Costs
    more_bytes: Costs


def sweep(reader: Reader, estimator: Estimator, presets: Sequence[str], context: int, most: int | None = None) -> Sweep:
    """Measure every layer at every preset, with bytes for `context` tokens. Progress is printed to the error stream.
    Raises `ValueError`, before the first measurement, if no choice of presets takes `most` bytes or less."""
    sizes = {name: estimator.footprint(name, context).total for name in presets}
    more: dict[int, dict[str, float]] = {layer: {} for layer in reader.layers}
    cells = [(layer, name) for layer in reader.layers for name in (*presets, DENSE)]
    for layer, name in cells:
        config, _ = spelled({layer: name}, presets[-1])
        more[layer][name] = estimator.footprint(config, context).total - sizes[presets[-1]]
    least = sizes[presets[-1]] + sum(min(row.values()) for row in more.values())
    if most is not None and most < least:
        raise ValueError(
            f"The smallest presets in all layers take {least:,} bytes with {context:,} tokens, and {most:,} are "
            "allowed. Allow more."
        )
    readings: list[tuple[int | None, str]] = [(layer, name) for layer, name in cells if name != DENSE]
    readings += [(None, name) for name in presets]
    ERRORS.print(f"{reader.ids.shape[1]:,} tokens are read {len(readings)} times, after once with all layers dense.")
    reader.warm_up(TurboQuantConfig.from_preset(presets[0]))
    losses: dict[tuple[int | None, str], float] = {}
    for alone, name in with_progress(readings, "readings", ERRORS):
        others = [] if alone is None else [layer for layer in reader.layers if layer != alone]
        losses[alone, name] = reader.kl(TurboQuantConfig.from_preset(name, skip_layers=others))
    kl = {layer: {name: losses[layer, name] for name in presets} | {DENSE: 0.0} for layer in reader.layers}
    return Sweep(context, {name: losses[None, name] for name in presets}, sizes, kl, more)


def fit(kl: Costs, sizes: Costs, most: float) -> dict[int, str]:
    """Choose the preset of each layer so that all layers take at most `most` bytes. The smallest presets must fit. The
    greedy search (see `tq-hf sweep --help`) assumes that the KL of single layers adds up."""
    chosen = {layer: min(row, key=lambda name: (row[name], kl[layer][name])) for layer, row in sizes.items()}  # noqa: B023
    left = most - sum(sizes[layer][name] for layer, name in chosen.items())
    while True:
        steps = []
        for layer, now in chosen.items():
            for name, size in sizes[layer].items():
                more, gain = size - sizes[layer][now], kl[layer][now] - kl[layer][name]
                if 0 < more <= left and gain > 0:
                    steps.append((gain / more, -layer, more, name))
        if not steps:
            return chosen
        _, layer, more, name = max(steps)
        chosen[-layer], left = name, left - more


def spelled(chosen: Mapping[int, str], preset: str | None = None) -> tuple[TurboQuantConfig, str]:
    """Return the configuration of presets by layer, and the line of code that creates it. The line names a preset, by
    default the most common one, and the layers that differ."""
    packed = Counter(name for name in chosen.values() if name != DENSE)
    base = preset or (packed.most_common(1)[0][0] if packed else "4bit_nc")
    others = {layer: None if name == DENSE else name for layer, name in chosen.items() if name != base}
    layers = f", layers={others}".replace("'", '"') if others else ""
    return TurboQuantConfig.from_preset(base, layers=others), f'TurboQuantConfig.from_preset("{base}"{layers})'


def print_sweep(result: Sweep, console: Console) -> None:
    presets = list(result.whole_kl)
    title = "KL from dense layers, in nats, of each layer packed alone and of all; MiB of a cache of"
    console.print(f"{title} {result.context:,} tokens", soft_wrap=True)
    rows = [[str(layer), *(f"{row[name]:.1e}" for name in presets)] for layer, row in result.kl.items()]
    rows.append(["all", *(f"{result.whole_kl[name]:.1e}" for name in presets)])
    rows.append(["MiB", *(f"{result.whole_bytes[name] / 2**20:,.1f}" for name in presets)])
    print_rows(["layer", *presets], rows, console)
