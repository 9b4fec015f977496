"""Measure a step of requests whose answers follow a grammar over a step of the same requests without one.

Requests with and without a grammar take turns in one engine. All are in flight for the steps that count; times are of
the fastest round. The grammar is a JSON schema of objects with texts, numbers and choices, of which there are more than
an answer has room for. The vocabulary is random text, of a real one's size; by default its masks take longer.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import string
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedTokenizerFast

from examples.measure.speed.bench_serve import Request, decode_requests, loaded, step_of
from examples.provenance import provenance
from tq_hf import TurboQuantBatching

GATE = 1.10
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "price": {"type": "number"},
        "kind": {"enum": ["fruit", "vegetable", "bread"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "price", "kind", "tags"],
}
FORM = {"type": "json_schema", "schema": {"type": "array", "items": ITEM, "minItems": 1000}}


def tokenizer_of(vocabulary: int, letters: int = 1) -> PreTrainedTokenizerFast:
    """A tokenizer of all characters that can be printed and of random texts of up to 8 of them. A letter is `letters`
    times as likely as another character: 7% of tokens have quotes, with 10 1% (of SmolLM2 0.3%). A mask within a string
    takes 0.15 ms, with 10 0.01 ms (of SmolLM2 as well), and within a number 0.44 and 0.07 ms (0.02 ms)."""
    generator, texts = random.Random(0), ["<end>", *string.printable]
    texts += [" " * length for length in range(2, 20)]
    known, characters = set(texts), string.ascii_letters * letters + ' _.,:;-"{}[]0123456789'
    while len(texts) < vocabulary:
        part = "".join(generator.choices(characters, k=generator.randint(2, 8)))
        if part not in known:
            known.add(part)
            texts.append(part)
    backend = Tokenizer(models.WordLevel({text: i for i, text in enumerate(texts[:vocabulary])}, unk_token="<end>"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<end>", eos_token="<end>")


class Timed:
    """A method of an object, and the milliseconds of its calls."""

    def __init__(self, owner: Any, name: str) -> None:
        self.call, self.times = getattr(owner, name), list[float]()
        setattr(owner, name, self)

    def __call__(self, *arguments: Any) -> Any:
        begin = time.perf_counter()
        try:
            return self.call(*arguments)
        finally:
            self.times.append(1e3 * (time.perf_counter() - begin))


def timed(processor: Any) -> dict[str, Timed]:
    """Parts of a step on the host: masks, and what the device waits for if it takes longer than the step."""
    runner = processor.model_runner
    parts = [(runner.logit_processor, "write_masks"), (runner.logit_processor, "choose"), (runner, "compute_batch")]
    parts += [(processor, "update_batch"), (processor, "prepare_next_batch")]
    return {name: Timed(owner, name) for owner, name in parts}


def milliseconds(manager: Any, requests: list[Request], options: dict[str, Any]) -> float:
    """Time of a step while all requests are in flight."""
    names = [
        manager.add_request(each.prompt, max_new_tokens=each.new, record_timestamps=True, **options)
        for each in requests
    ]
    results = [manager.get_result(timeout=60) for _ in names]
    if failed := [each and each.error for each in results if each is None or each.error]:
        raise RuntimeError(f"{len(failed)} of {len(names)} requests failed: {failed[0]}")
    return step_of(results, sum(len(each.prompt) for each in requests))["ms_per_step"]


def measure(model: Any, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for greedy answers, and one for sampled ones."""
    vocabulary = model.config.vocab_size
    batching = TurboQuantBatching(
        model, "4bit_nc", balance=False, tokenizer=tokenizer_of(vocabulary, arguments.letters)
    )
    requests = decode_requests(arguments.requests, arguments.context, vocabulary, arguments)
    pages = 2 * len(requests) * -(-(arguments.context + requests[0].new) // 128)
    options = ContinuousBatchingConfig(num_blocks=pages + 64, max_requests_per_batch=len(requests))
    rows = []
    with batching.continuous_batching_context_manager(
        GenerationConfig(eos_token_id=0), continuous_batching_config=options
    ) as manager:
        milliseconds(manager, requests[:1], {"eos_token_id": -1})
        parts = timed(manager.batch_processor)
        for samples in (False, True):
            without, times = {"do_sample": samples, "eos_token_id": -1}, {"without": [], "with": []}
            with_form = without | {"response_format": FORM, "eos_token_id": 0}
            for _ in range(1 + arguments.rounds):
                times["without"].append(milliseconds(manager, requests, without))
                for each in parts.values():
                    each.times.clear()
                times["with"].append(milliseconds(manager, requests, with_form))
            row = {f"ms_{name}": min(found[1:]) for name, found in times.items()}
            host = {name: statistics.mean(each.times) for name, each in parts.items()}
            rows.append({"sampled": samples, **row, "over": row["ms_with"] / row["ms_without"], "host_ms": host})
            print(rows[-1], flush=True)
            print(f"host, ms a step of {len(requests)} rows: {host}, compute_batch with the wait for the last tokens")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32, help="layers of the model")
    parser.add_argument("--requests", type=int, default=32, help="requests at once")
    parser.add_argument("--context", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=96, help="steps that are measured")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of which the fastest counts, after one")
    parser.add_argument("--letters", type=int, default=1, help="how many times as likely letters are in tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file; by default none")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, name = loaded(None, arguments.layers, device)
    with torch.no_grad():
        rows = measure(model, arguments)
    record = provenance(device, name) | {"requests": arguments.requests, "rows": rows}
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    worst = max(row["over"] for row in rows)
    print(f"A step with grammars takes {worst:.3f} times as long as one without; the gate is {GATE}.")
    raise SystemExit(worst > GATE)


if __name__ == "__main__":
    main()
