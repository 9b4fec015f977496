"""`tq-hf sweep`: what packing each layer costs by itself, and the presets by layer that fit a number of bytes.

Measured as in `examples/measure/quality`: a text is read in chunks through the cache, so that tokens are foretold from
packed blocks, and KL divergence from dense layers is the mean over tokens, in nats. One layer is packed at a time. All
others are dense and read by the same attention function, so nothing but this layer makes a difference.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import DynamicCache
from transformers.cache_utils import Cache

from ..cache import TurboQuantCache
from ..compat import as_input
from ..config import TurboQuantConfig
from ..layers.compressed import TurboQuantLayer
from .estimate import Estimator

CHUNK = 128
"""Tokens read at a time."""
FIRST = 512
"""The first position that is scored: before it little is packed."""
REPORTS = 20
"""Number of lines about progress where there is no terminal for a bar."""
DENSE = "dense"
"""Beside the names of presets, a layer that is not packed."""

Costs = Mapping[int, Mapping[str, float]]
"""A number for each layer at each preset."""
Reading = TypeVar("Reading")


class Reader:
    """A text, what a model foretells of it with all layers dense, and how far packed layers are from that.

    Args:
        model: A decoder in eval mode, with the attention "turboquant".
        ids: Token ids `[1, T]` of the text, on the model's device.

    Raises:
        ValueError: The text is too short, or no layer can be packed.
    """

    def __init__(self, model: Any, ids: torch.Tensor) -> None:
        if ids.shape[1] <= FIRST:
            raise ValueError(
                f"{ids.shape[1]} tokens of the text are read, and the first {FIRST} are not scored. Give a longer "
                "text, more `--tokens`, or a model with more positions."
            )
        self.model, self.ids = model, ids
        layers = enumerate(TurboQuantCache(model.config).layers)
        self.layers = [index for index, layer in layers if isinstance(layer, TurboQuantLayer)]
        """The layers that can be packed."""
        if not self.layers:
            raise ValueError(f"{type(model).__name__} has no layer that can be packed.")

    @cached_property
    def _exact(self) -> list[torch.Tensor]:
        """Log-probabilities with all layers dense."""
        return list(self._log_probs(DynamicCache(config=self.model.config)))

    @torch.no_grad()
    def _log_probs(self, cache: Cache) -> Iterator[torch.Tensor]:
        """Float32 log-probabilities `[<= CHUNK, V]` of the next tokens, chunk by chunk from `FIRST` on."""
        for start in range(0, self.ids.shape[1], CHUNK):
            logits = self.model(self.ids[:, start : start + CHUNK], **as_input(cache)).logits[0]
            if start >= FIRST:
                yield logits.float().log_softmax(-1)

    def kl(self, config: TurboQuantConfig) -> float:
        """KL divergence (dense || packed) of the next token's distribution, in nats, the mean over tokens."""
        packed = self._log_probs(TurboQuantCache(self.model.config, config))
        pairs = zip(self._exact, packed, strict=True)
        sums = [(exact.exp() * (exact - other)).sum(-1).clamp_min(0).sum().item() for exact, other in pairs]
        return sum(sums) / (self.ids.shape[1] - FIRST)

    def warm_up(self, config: TurboQuantConfig) -> None:
        """Read the text with all layers dense, and its beginning packed, so that the next reading takes as long as
        those after it: on a GPU the first one compiles kernels."""
        next(zip(self._exact, self._log_probs(TurboQuantCache(self.model.config, config)), strict=True))


@dataclass(frozen=True)
class Sweep:
    """What was measured: KL in nats, and bytes of the cache of one sequence of `context` tokens.

    Args:
        context: Tokens that bytes are counted for.
        whole_kl: With all layers at a preset.
        whole_bytes: With all layers at a preset.
        kl: With one layer at a preset, all others dense.
        more_bytes: With one layer at a preset, all others at the last one: what that is more than all at the last.
    """

    context: int
    whole_kl: Mapping[str, float]
    whole_bytes: Mapping[str, int]
    kl: Costs
    more_bytes: Costs


def sweep(reader: Reader, estimator: Estimator, presets: Sequence[str], context: int, most: int | None = None) -> Sweep:
    """Measure every layer at every preset. How far that is goes to the error stream (`with_progress`).

    Raises:
        ValueError: No choice of presets takes `most` bytes or less. Nothing was measured then.
    """
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
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"{reader.ids.shape[1]:,} tokens are read {len(readings)} times, after once with all layers dense.")
    reader.warm_up(TurboQuantConfig.from_preset(presets[0]))
    found: dict[tuple[int | None, str], float] = {}
    for alone, name in with_progress(readings, console):
        others = [] if alone is None else [layer for layer in reader.layers if layer != alone]
        found[alone, name] = reader.kl(TurboQuantConfig.from_preset(name, skip_layers=others))
    kl = {layer: {name: found[layer, name] for name in presets} | {DENSE: 0.0} for layer in reader.layers}
    return Sweep(context, {name: found[None, name] for name in presets}, sizes, kl, more)


def with_progress(readings: Sequence[Reading], console: Console) -> Iterator[Reading]:
    """Yield `readings`, and print on `console` how long all take, measured on the first, then how far they are: as a
    bar on a terminal, elsewhere in about `REPORTS` lines."""
    lines, every, start = not console.is_terminal, max(1, len(readings) // REPORTS), time.monotonic()
    for done, reading in enumerate(track(readings, "Reading", console=console, transient=True, disable=lines), 1):
        yield reading
        seconds = (time.monotonic() - start) / done
        if done == 1:
            whole = duration(seconds * len(readings))
            console.print(f"All readings take about {whole}: the first took {seconds:.1f} s.")
        elif lines and done % every == 0:
            left = duration(seconds * (len(readings) - done))
            console.print(f"{done} of {len(readings)} readings, about {left} left.")


def duration(seconds: float) -> str:
    """A time, in minutes if it is two or more."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def fit(kl: Costs, sizes: Costs, most: float) -> dict[int, str]:
    """The preset of each layer, so that all of them take `most` bytes at most; the smallest must fit.

    Greedy: every layer begins with what is smallest; of all changes of one layer that still fit, the one that takes
    most KL away for each byte is made, until none does. So the KL of single layers counts as if it added up.
    """
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
    """The configuration of these presets by layer, and the line that makes it: a preset, by default the commonest, and
    the layers that differ."""
    packed = Counter(name for name in chosen.values() if name != DENSE)
    base = preset or (packed.most_common(1)[0][0] if packed else "4bit_nc")
    others = {layer: None if name == DENSE else name for layer, name in chosen.items() if name != base}
    layers = f", layers={others}".replace("'", '"') if others else ""
    return TurboQuantConfig.from_preset(base, layers=others), f'TurboQuantConfig.from_preset("{base}"{layers})'


def print_sweep(result: Sweep, console: Console) -> None:
    """Print a row for each layer, and KL and bytes of all of them together."""
    presets = list(result.whole_kl)
    title = "KL from dense layers, in nats, of each layer packed alone and of all; MiB of a cache of"
    console.print(f"{title} {result.context:,} tokens", highlight=False, soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("layer", *presets):
        table.add_column(heading, justify="right", no_wrap=True)
    for layer, row in [*result.kl.items(), ("all", result.whole_kl)]:
        table.add_row(str(layer), *(f"{row[name]:.1e}" for name in presets), end_section=layer == max(result.kl))
    table.add_row("MiB", *(f"{result.whole_bytes[name] / 2**20:,.1f}" for name in presets))
    console.print(table)


def draw(result: Sweep, path: Path) -> None:
    """Draw KL over layers, a line for each preset. Needs matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure, layers = Figure(figsize=(8, 4.5), layout="constrained"), list(result.kl)
    axes = figure.add_subplot()
    for name in result.whole_kl:
        axes.plot(layers, [result.kl[layer][name] for layer in layers], marker="o", label=name)
    axes.set(xlabel="layer packed alone", ylabel="KL from dense layers (nats)", yscale="log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(ncols=2)
    figure.savefig(path, dpi=150)
