"""Serve bursts of requests for a while, and print whether memory stays flat, pages come back and answers are right.

    python -m examples.measure.speed.soak --seconds 90

Each burst asks some of a fixed set of prompts, which were answered one by one before, beside random ones, several
answers to one prompt, aborted requests and requests that are refused. The pool is too small for all of them, so some
are preempted. After every tenth burst the engine sleeps and wakes. An answer is wrong if its first tokens are those of
another prompt of the set and not its own. Where a step ends a chunk of a long prompt decides which tokens are packed
before the next are read. So only answers to short prompts, which are not packed yet, have to be the same: of
24 long ones of a random model of 8B shape 18 were, and 12 in steps of 300 tokens (in float32, on a CPU).
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, LlamaConfig, PreTrainedModel

from examples.measure.speed.bench_generate import LLAMA_8B
from examples.provenance import provenance
from tq_hf import TurboQuantBatching

FIRST = 6
"""Tokens of an answer that are compared."""
SHORT = 96
"""Tokens of a short prompt, at most: with an answer's first tokens it fills no block."""
Tokens = list[int]


def small_model(device: torch.device) -> PreTrainedModel:
    """A random Llama of two layers in float32, on a GPU with the heads of an 8B shape."""
    shape = LLAMA_8B | dict(num_hidden_layers=2, vocab_size=4096, hidden_size=1024, intermediate_size=2048)
    if device.type == "cpu":
        shape |= dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=torch.float32).eval()


class Soak:
    """An engine under bursts of requests.

    Args:
        model: The model.
        requests: Number of requests of a burst.
        longest: Number of tokens of the longest prompts.
        answer: Number of tokens of the longest answers.
    """

    def __init__(self, model: PreTrainedModel, requests: int, longest: int, answer: int = 64) -> None:
        self.model, self.requests, self.longest, self.answer = model, requests, longest, answer
        self.chance, self.counts = random.Random(0), Counter[str]()
        self.batching = TurboQuantBatching(model, "4bit_nc")
        # Room for a quarter of a burst.
        blocks = 3 * longest // 128 + requests * (longest // 2 // 128 + 12) // 4
        options = ContinuousBatchingConfig(
            page_size=128, num_blocks=blocks, max_batch_tokens=1024, max_requests_per_batch=requests
        )
        self.manager = self.batching.init_continuous_batching(self.config(answer), options)
        self.manager.start()
        lengths = [self.chance.randrange(8, most) for most in (SHORT, longest) for _ in range(6)]
        self.prompts = [self.random_prompt(n) for n in lengths]
        self.expected = [self.ask_all([(prompt, {})])[0][:FIRST] for prompt in self.prompts]

    @staticmethod
    def config(new: int) -> GenerationConfig:
        return GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)

    def random_prompt(self, length: int) -> Tokens:
        return self.chance.choices(range(3, self.model.config.vocab_size), k=length)

    def ask_all(self, asked: list[tuple[Tokens, dict[str, Any]]], aborts: int = 0) -> list[Tokens | None]:
        """Answers of the first of `num_return_sequences`; `None` for the last `aborts` requests, which are aborted."""
        names = [self.manager.add_request(prompt, **options) for prompt, options in asked]
        kept = len(names) - aborts
        for name in names[kept:]:
            self.manager.cancel_request(name)
        awaited = sum(options.get("num_return_sequences", 1) for _, options in asked[:kept])
        found: dict[str, Tokens] = {}
        while len(found) < awaited:
            result = self.manager.get_result(timeout=60)
            if result is None or result.error is not None:
                raise RuntimeError(f"A request failed: {result and result.error}")
            if result.request_id not in names[kept:]:
                found[result.request_id] = result.generated_tokens
        self.counts["tokens"] += sum(map(len, found.values()))
        return [found.get(name) for name in names]

    def burst(self) -> None:
        """Ask a burst of requests, wait for the answers, and compare those to known prompts."""
        known = [self.chance.randrange(len(self.prompts)) for _ in range(self.requests // 2)]
        asked: list[tuple[Tokens, dict[str, Any]]] = [
            (self.prompts[i], {"max_new_tokens": self.chance.randrange(FIRST, self.answer)}) for i in known
        ]
        for i in range(self.requests - len(asked)):
            options = ({}, {"num_return_sequences": 3}, {"repetition_penalty": 1.2}, {"do_sample": True, "top_p": 0.9})
            asked.append((self.random_prompt(self.chance.randrange(1, self.longest)), dict(options[i % 4])))
        for refused in ({"num_beams": 4}, {"typo": 1}):
            try:
                self.manager.add_request([1], **refused)
            except ValueError:
                self.counts["refused"] += 1
        aborts = self.requests // 8
        found = self.ask_all(asked, aborts)
        for i, answer in zip(known, found, strict=False):
            assert answer is not None
            same = [answer[:FIRST] == other for other in self.expected]
            kind = "" if len(self.prompts[i]) < SHORT else "long and "
            self.counts[f"{kind}compared"] += 1
            self.counts[f"{kind}equal"] += same[i]
            self.counts["of another"] += any(same) and not same[i]
        self.counts["requests"] += len(asked) + 2
        self.counts["aborted"] += aborts

    def settle(self) -> tuple[int, int]:
        """Wait until nothing is pending. Returns the number of used pages, and of bytes in use."""
        processor = self.manager.batch_processor
        while processor.has_pending_requests() or not self.manager.input_queue.empty():
            time.sleep(0.001)
        with self.manager.pause():
            used = processor.cache.count_pages()["used"]
        gc.collect()
        device = self.model.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            return used, torch.cuda.memory_allocated(device)
        return used, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def sleep_and_wake(self) -> None:
        self.manager.stop(block=True, keep_for_next_session=True)
        self.batching.sleep()
        self.batching.wake()
        self.manager.start()

    def run(self, seconds: float, bursts: int | None = None) -> dict[str, Any]:
        """Burst after burst, for a number of seconds, or of bursts."""
        start, memory, pages, number = time.perf_counter(), [], [], 0
        while number < bursts if bursts is not None else time.perf_counter() - start < seconds:
            self.burst()
            number += 1
            used, held = self.settle()
            pages.append(used)
            memory.append(held)
            if number % 10 == 0:
                self.sleep_and_wake()
                self.counts["sleeps"] += 1
        self.manager.stop(block=True)
        later = memory[len(memory) // 4 :]
        return {
            "seconds": time.perf_counter() - start,
            "bursts": number,
            **self.counts,
            "pages_after_bursts": max(pages),
            "mib_grown": (max(later) - later[0]) / 2**20,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--requests", type=int, default=64, help="requests of a burst")
    parser.add_argument("--longest", type=int, default=2000, help="tokens of the longest prompts")
    parser.add_argument("--output", type=Path, help="JSON file")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record = provenance(device, "random Llama of 2 layers in float32")
    found = Soak(small_model(device), arguments.requests, arguments.longest).run(arguments.seconds)
    print(found)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps({**record, "rows": [found]}, indent=2) + "\n", encoding="utf-8")
    flat = found["mib_grown"] < 1 and found["pages_after_bursts"] == 0
    right = not found["of another"] and found["equal"] >= 0.98 * found["compared"]
    print(f"memory {'flat' if flat else 'NOT FLAT'}, answers {'right' if right else 'WRONG'}")


if __name__ == "__main__":
    main()
