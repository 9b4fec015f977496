"""Metrics of an engine in the text format of Prometheus, for `tq-hf serve` and for users of a manager."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from typing import Any

from transformers.generation.continuous_batching.requests import RequestStatus

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
"""Upper limits of the buckets of a histogram."""


class Histogram:
    """Counts of times by bucket."""

    def __init__(self) -> None:
        self.counts, self.sum = [0] * (len(SECONDS) + 1), 0.0

    def observe(self, seconds: float) -> None:
        """Count a time."""
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds

    def lines(self, name: str) -> Iterator[str]:
        """Lines of the text format."""
        total = 0
        for limit, count in zip((*SECONDS, "+Inf"), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{limit}"}} {total}'
        yield f"{name}_sum {self.sum}"
        yield f"{name}_count {total}"


class Metrics:
    """Counts of requests, tokens and times since an engine was created. The engine's thread counts, others read."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.first_token, self.next_token = Histogram(), Histogram()

    def observe(self, output: Any) -> None:
        """Count the last output of a request."""
        self.requests["finished" if output.status == RequestStatus.FINISHED else "failed"] += 1
        number, first = len(output.generated_tokens), getattr(output, "first_token_time", None)
        self.tokens["prompt"] += len(output.prompt_ids)
        self.tokens["generated"] += number
        if first is not None:
            self.first_token.observe(first - output.created_time)
            if number > 1:
                self.next_token.observe((output.lifespan[1] - first) / (number - 1))

    def text(self, manager: Any) -> str:
        """Metrics of a manager in the text format of Prometheus, version 0.0.4."""
        processor = manager.batch_processor
        states, pages, cancelled, shared = {"running": 0, "waiting": manager.input_queue.qsize()}, {}, 0, 0
        prefixes: tuple[Any, ...] = ()
        if processor is not None:
            scheduler, cache = processor.scheduler, processor.cache
            states["running"] = len(scheduler.active_requests)
            states["waiting"] += len(scheduler.waiting_requests)
            pages, cancelled, shared = cache.count_pages(), scheduler.number_cancelled, cache.number_shared
            prefixes = () if cache.prefixes is None else cache.prefixes.metrics()
        ended = {name: self.requests[name] for name in ("finished", "failed")} | {"cancelled": cancelled}
        tokens = {name: self.tokens[name] for name in ("prompt", "generated")} | {"shared": shared}
        values = (
            ("requests", "gauge", "state", "Requests that are not answered yet.", states),
            ("requests_total", "counter", "status", "Requests that have ended.", ended),
            ("tokens_total", "counter", "kind", "Tokens of ended requests, and of prompts in pages of others.", tokens),
            ("pages", "gauge", "state", "Pages of the pool; cached ones are free, and hold prefixes.", pages),
            *prefixes,
        )
        lines = []
        for name, kind, label, what, entries in values:
            lines += [f"# HELP tq_hf_{name} {what}", f"# TYPE tq_hf_{name} {kind}"]
            lines += [f'tq_hf_{name}{{{label}="{value}"}} {number}' for value, number in entries.items()]
        for name, what, histogram in (
            ("time_to_first_token_seconds", "Time from arrival to the first token.", self.first_token),
            ("time_per_token_seconds", "Mean time of the other tokens of a request.", self.next_token),
        ):
            lines += [f"# HELP tq_hf_{name} {what}", f"# TYPE tq_hf_{name} histogram"]
            lines += histogram.lines(f"tq_hf_{name}")
        return "\n".join(lines) + "\n"
