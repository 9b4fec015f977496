"""Many requests of random lengths with shared prefixes, forks, cancellations and preemptions.

How a request was read (its chunks, what it shared, whether it was preempted and read again) follows from its company
and from time, and decides which tokens it read packed. So every step of a request is noted, and each of its tokens is
compared with what a cache of its own says after the same steps. In a model of one layer that is all: what is cached of
a token follows from the token alone, whoever cached it. So it does where the layer before has a sliding window, which
is exact.
"""

from __future__ import annotations

import gc
import random
from typing import Any

import psutil
import pytest
import torch
from transformers import PreTrainedModel

from tests.support.batching_cases import Log, Oracle, Session, Tokens, greedy, hybrid, mixed, model_of, take_scratch
from tq_hf.compat import as_input

NEAR = 0.05
"""So far may a token's logit be below the largest: rounding differs between batches, and now and then moves a code."""


def replay(oracle: Oracle, prompt: Tokens, answer: Tokens, lives: list[list[tuple[int, int, int]]]) -> int:
    """Compare an answer with a cache of its own after the same steps. Returns how many tokens are not exactly those."""
    text, checked, others = prompt + answer, 0, 0
    for steps in lives:
        cache = oracle.begun(text, steps[0][2])
        if steps[0][0] > cache.get_seq_length():  # forked from
            oracle.model(torch.tensor([text[cache.get_seq_length() : steps[0][0]]]), **as_input(cache))
        for past, new, _ in steps:
            if not new:  # all but its last token was there when it was forked
                continue
            logits = oracle.model(torch.tensor([text[past : past + new]]), **as_input(cache)).logits[0, -1]
            if past + new == len(prompt) + checked and checked < len(answer):
                token = answer[checked]
                assert logits[token] >= logits.max() - NEAR, (len(prompt), checked, steps)
                others += int(logits.argmax()) != token
                checked += 1
    assert checked == len(answer)
    return others


def soak(count: int, model: PreTrainedModel, blocks: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Serve so many requests in so many blocks and check all of them. Returns what happened, in numbers."""
    take_scratch(monkeypatch, 300 << 10)
    log, chance = Log(monkeypatch), random.Random(7)
    prefixes = [[chance.randrange(128) for _ in range(n)] for n in (128, 200, 300)]
    asked: dict[str, Tokens] = {}
    open_: dict[str, bool] = {}  # whether it is a parent or a fork
    found: dict[str, Any] = {}
    cancelled: set[str] = set()
    resident: list[int] = []
    pool = dict(num_blocks=blocks, max_batch_tokens=300, max_requests_per_batch=24, safety_margin=0.0)
    with Session(model, **pool) as session:
        session.run([[1, 2, 3]], greedy(1))
        log.steps.clear()
        manager = session.manager
        manager.start()
        processor = manager.batch_processor

        def receive(timeout: float) -> None:
            result = manager.get_result(timeout=timeout)
            if result is not None and result.is_finished():
                assert result.error is None and result.request_id not in found
                found[result.request_id] = result
                open_.pop(result.request_id, None)
                if len(found) % max(1, count // 20) == 0:
                    gc.collect()
                    resident.append(psutil.Process().memory_info().rss)

        while len(asked) < count:
            while len(open_) > 60:
                receive(1)
            # Now and then many come that complete a block each at the same time, and have no room for all.
            burst = len(asked) % 100 < 25
            length = chance.randrange(100, 126) if burst else int(2 ** chance.uniform(0, 8.5))
            prompt = [chance.randrange(128) for _ in range(length)]
            if not burst and chance.random() < 0.4:
                prompt = chance.choice(prefixes) + prompt
            forks = 1 if burst else chance.choice([1] * 7 + [3])
            new = chance.randrange(30, 60) if burst else chance.randrange(1, 40)
            name = manager.add_request(prompt, max_new_tokens=new, num_return_sequences=forks)
            for each in [name, *(f"{name}__child#{i}" for i in range(forks - 1))]:
                asked[each], open_[each] = prompt, forks > 1
            alone = [each for each, related in open_.items() if not related]
            if alone and chance.random() < 0.1:
                victim = chance.choice(alone)
                manager.cancel_request(victim)
                cancelled.add(victim)
                del open_[victim]
        while open_ or processor.has_pending_requests() or not manager.input_queue.empty():
            receive(0.1)
        manager.stop(keep_for_next_session=True)
        while manager.output_router.output_queue.qsize():
            receive(0.1)
        assert session.pages_in_use() == 0
        assert session.cache.scratch.nbytes == 300 << 10, "scratch is what it was at the start"
        scheduler, allocator = processor.scheduler, session.cache.allocator
        assert not (scheduler.active_requests or scheduler.waiting_requests or scheduler._requests_to_fork)
        assert not (allocator.block_table or allocator.ledger.shared_ref_counts)
        assert found.keys() | cancelled == asked.keys()
        model.set_attn_implementation("turboquant")
        with torch.no_grad():
            others = sum(
                replay(session.oracle, asked[name], result.generated_tokens, log.lives(name))
                for name, result in found.items()
            )
    late = resident[len(resident) // 4 :]
    lives = {name: log.lives(name) for name in found}
    return {
        "requests": len(asked),
        "answered": len(found),
        "cancelled": len(asked.keys() - found.keys()),
        "tokens": sum(len(result.generated_tokens) for result in found.values()),
        "not the very first choice": others,
        "forks": sum("child" in name for name in found),
        "preempted": sum(len(lives[name]) > 1 for name in found),
        "shared a prefix": sum(steps[0][0] > 0 and "child" not in name for name in found for steps in lives[name]),
        "read in chunks": sum(steps[0][1] > 1 < steps[1][1] for ls in lives.values() for steps in ls if len(steps) > 1),
        "bytes grown": max(late) - late[0],
    }


LINEAR = ["linear_attention", "full_attention"]
KINDS = {
    "packed": (2000, lambda: model_of(num_hidden_layers=1, head_dim=16, hidden_size=32), 88),
    "windows": (500, lambda: mixed("gemma3", head_dim=16, hidden_size=32), 26),
    "linear": (1000, lambda: hybrid(num_hidden_layers=2, layer_types=LINEAR, head_dim=16, hidden_size=32), 86),
}
"""Number of requests, a model, and pages. What a linear layer makes of a text is exact, however the text was read."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_hundreds_of_requests(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count, make, blocks = KINDS[kind]
    happened = soak(count, make(), blocks, monkeypatch)
    print(happened)
    assert all(happened[what] > 0 for what in ("cancelled", "forks", "preempted", "read in chunks")), happened
    assert (happened["shared a prefix"] > 0) == (kind == "packed"), happened
    assert happened["not the very first choice"] <= happened["tokens"] // 1000, happened
    assert kind == "windows" or happened["bytes grown"] < 32 << 20, happened
