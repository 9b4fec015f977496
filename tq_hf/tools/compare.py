"""`tq-hf compare`: one prompt on a `DynamicCache` and on packed caches, with memory, times and both answers.

KL and agreement are measured on the answer of the `DynamicCache`, so that one early difference does not count twice.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import DynamicCache
from transformers.cache_utils import Cache

from ..cache import TurboQuantCache
from ..compat import as_input
from ..memory import measure
from .display import print_rows

BASELINE = "DynamicCache"
QUESTION = "Summarize the text above in three sentences."


@dataclass(frozen=True)
class Answer:
    """Answer of one cache to the prompt, with its costs.

    Args:
        cache: A preset, or `BASELINE`.
        ids: Tokens of the greedy answer.
        bytes_held: Number of bytes of the cache after the answer.
        first_token: Seconds to the first token.
        ms_a_token: Median milliseconds of the later tokens, `None` if there is none.
        kl: KL divergence from the baseline over the tokens of its answer, the mean in nats.
        top1: Share of these tokens with the same most likely token.
    """

    cache: str
    ids: list[int]
    bytes_held: int
    first_token: float
    ms_a_token: float | None
    kl: float = 0.0
    top1: float = 1.0

    def parts_at(self, other: Answer) -> int | None:
        """Return the index of the first token that differs from `other`, `None` if there is none."""
        return next((index for index, (a, b) in enumerate(zip_longest(self.ids, other.ids)) if a != b), None)


def prompt_ids(tokenizer: Any, text: str, question: str, tokens: int) -> torch.Tensor:
    """Return the ids `[1, T]` of the first `tokens` tokens of a text, with a question where there is a chat template.
    Without a template the model continues the text."""
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :tokens]
    if not tokenizer.chat_template:
        return ids
    shown = tokenizer.decode(ids[0], skip_special_tokens=True)
    chat = [{"role": "user", "content": f"{shown}\n\n{question}"}]
    options = {"add_generation_prompt": True, "enable_thinking": False, "return_tensors": "pt", "return_dict": True}
    return tokenizer.apply_chat_template(chat, **options)["input_ids"]


class Comparison:
    """A decoder in eval mode, whose attention is changed, the ids `[1, T]` of a prompt on its device, and the answer of
    a `DynamicCache` with up to `new_tokens` tokens, which the others are compared with."""

    def __init__(self, model: Any, ids: torch.Tensor, new_tokens: int) -> None:
        self.model, self.ids, self.new_tokens = model, ids, new_tokens
        ends = model.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])

    @cached_property
    def baseline(self) -> Answer:
        attention = "sdpa" if getattr(self.model, "_supports_sdpa", False) else "eager"
        return self._answer(BASELINE, attention, DynamicCache(config=self.model.config))

    def answer(self, name: str) -> Answer:
        """Answer on a cache of a preset, or the baseline's. The baseline answers first."""
        baseline = self.baseline
        if name == BASELINE:
            return baseline
        return self._answer(name, "turboquant", TurboQuantCache(self.model.config, name))

    @torch.no_grad()
    def _answer(self, name: str, attention: str, cache: Cache) -> Answer:
        self.model.set_attn_implementation(attention)
        if self.ids.device.type == "cuda":  # kernels are compiled on first use
            warm = copy.deepcopy(cache)
            for part in (self.ids, self.ids[:, :1]):
                self._logits(part, warm)
        start = time.perf_counter()
        first = self._logits(self.ids, cache)
        ids = [int(first.argmax())]  # waits for the device
        waited = time.perf_counter() - start
        after_prompt, times = copy.deepcopy(cache), []
        while len(ids) < self.new_tokens and ids[-1] not in self._ends:
            start = time.perf_counter()
            ids.append(int(self._logits(self.ids.new_tensor([ids[-1:]]), cache).argmax()))
            times.append(time.perf_counter() - start)
        if name == BASELINE:
            self._answered = ids
        parts = [first]  # the baseline's answer, read in one call
        if rest := self._answered[:-1]:
            parts.append(self._logits(self.ids.new_tensor([rest]), after_prompt, len(rest)))
        log_probs = torch.cat(parts).float().log_softmax(-1)
        if name == BASELINE:
            self._exact = log_probs
        kl = (self._exact.exp() * (self._exact - log_probs)).sum(-1).clamp_min(0).mean().item()
        top1 = (self._exact.argmax(-1) == log_probs.argmax(-1)).float().mean().item()
        step = 1e3 * statistics.median(times) if times else None
        return Answer(name, ids, measure(cache.layers).total, waited, step, kl, top1)

    def _logits(self, ids: torch.Tensor, cache: Cache, keep: int = 1) -> torch.Tensor:
        """Logits `[keep, V]` of the last `keep` positions."""
        return self.model(ids, **as_input(cache), logits_to_keep=keep).logits[0, -keep:]


def print_numbers(answers: Sequence[Answer], console: Console) -> None:
    """Print a row for each cache; the first answer is the baseline."""
    base, rows = answers[0], []
    for one in answers:
        parts = one.parts_at(base)
        loss = ["-"] * 3
        if one is not base:
            loss = [f"{one.kl:.1e}", f"{one.top1:.1%}", "never" if parts is None else f"token {parts + 1}"]
        size = [f"{one.bytes_held / 2**20:,.1f}", f"{base.bytes_held / one.bytes_held:.2f}x"]
        times = [f"{one.first_token:.2f} s", "-" if one.ms_a_token is None else f"{one.ms_a_token:.1f}"]
        rows.append([one.cache, *size, *times, *loss])
    headings = ("cache", "MiB held", "smaller", "first token", "ms a token", "KL, nats", "top-1", "answers part at")
    print_rows(headings, rows, console)


def print_answers(answers: Sequence[Answer], tokenizer: Any, console: Console) -> None:
    """Print the answer of each cache beside that of the baseline, in bold from where they part."""
    base, *others = answers

    def text(one: Answer, parts: int) -> str:
        same, rest = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (one.ids[:parts], one.ids[parts:]))
        return f"{escape(same)}[bold]{escape(rest)}[/]"

    alike = [one.cache for one in others if one.ids == base.ids]
    if alike:
        console.print(f"The answer of {base.cache}, {', '.join(alike)}:")
        console.print(tokenizer.decode(base.ids, skip_special_tokens=True), markup=False)
    for one in others:
        if (parts := one.parts_at(base)) is not None:
            table = Table(box=SIMPLE_HEAD, pad_edge=False, expand=True)
            for name in (base.cache, one.cache):
                table.add_column(name, ratio=1)
            table.add_row(text(base, parts), text(one, parts))
            console.print(table)
