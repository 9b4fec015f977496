"""Recall from a compressed history: pass keys, and several facts of one document, for each preset.

    python -m examples.measure.quality.evaluate_passkey
    python -m examples.measure.quality.evaluate_passkey --device cuda --passkeys 200 --tokens 7936

The document goes into the cache first; the question follows in a second call, so that what answers it is read from
packed blocks. Greedy decoding, free running: an answer counts if all its digits and the closing mark are right.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import Cache, DynamicLayer
from transformers.utils import logging

from examples import needle_data as needle
from examples.provenance import BASELINE, RESULTS, SHIPPED_MODEL, bytes_held, provenance, slug
from tq_hf import PRESETS, TurboQuantCache
from tq_hf.compat import as_input

GREATEST_DEPTH = 0.9
"""Pass keys are not hidden in the last tenth of a document: part of that is still in the dense residual."""
FACTS = 16
"""Facts in each document of several."""


@dataclass(frozen=True)
class Document:
    """A text with facts, and `(question, answer)` for each of them."""

    text: str
    asked: list[tuple[str, str]]


def passkey_documents(count: int, tokens: int) -> list[Document]:
    """Documents of one fact each, at depths evenly spread from 0 to `GREATEST_DEPTH`."""
    question = needle.question(needle.PASSKEY)
    documents = []
    for seed in range(count):
        depth = GREATEST_DEPTH * seed / max(1, count - 1)
        prompt, answer = needle.passkey_prompt(tokens + len(question), depth, seed)
        documents.append(Document(prompt.removesuffix(question), [(question, answer)]))
    return documents


def recall_documents(count: int, tokens: int) -> list[Document]:
    """Documents of `FACTS` facts each, at random depths."""
    return [Document(*needle.recall_prompt(tokens, FACTS, seed)) for seed in range(count)]


@torch.no_grad()
def prefill(model: Any, tokenizer: Any, documents: list[Document]) -> tuple[torch.Tensor, DynamicCache]:
    """Ids `[B, T]` of documents of equal length, and the plain cache of their keys and values."""
    ids = tokenizer([document.text for document in documents], return_tensors="pt")["input_ids"].to(model.device)
    cache = DynamicCache(config=model.config)
    model.set_attn_implementation("sdpa")
    model(ids, **as_input(cache), logits_to_keep=1)
    return ids, cache


def compress(dense: DynamicCache, cache: TurboQuantCache) -> TurboQuantCache:
    """`cache`, filled as by a prefill of its own.

    A prefill without a past attends to exact states, so the keys and values it stores do not depend on the cache that
    stores them; computing them once serves every preset.
    """
    for index, layer in enumerate(dense.layers):
        assert isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
        cache.update(layer.keys[:], layer.values[:], index)
    return cache


@torch.no_grad()
def right_answers(
    model: Any, tokenizer: Any, documents: list[Document], ids: torch.Tensor, cache: Cache, attention: str
) -> int:
    """Ask all questions of `documents` (equally many each) whose tokens are in `cache`, and count right answers."""
    per_document = len(documents[0].asked)
    questions, answers = zip(*(pair for document in documents for pair in document.asked), strict=True)
    cache.batch_repeat_interleave(per_document)
    asked = tokenizer(list(questions), padding=True, padding_side="left", return_tensors="pt").to(model.device)
    ids = ids.repeat_interleave(per_document, dim=0)
    model.set_attn_implementation(attention)
    output = model.generate(
        torch.cat([ids, asked["input_ids"]], dim=1),
        attention_mask=torch.cat([torch.ones_like(ids), asked["attention_mask"]], dim=1),
        **as_input(cache),
        max_new_tokens=needle.ANSWER_TOKENS,
        do_sample=False,
    )
    texts = tokenizer.batch_decode(output[:, -needle.ANSWER_TOKENS :])
    return sum(needle.is_recalled(text, answer) for text, answer in zip(texts, answers, strict=True))


def evaluate(
    model: Any,
    tokenizer: Any,
    documents: list[Document],
    caches: Mapping[str, Callable[[], TurboQuantCache]],
    batch: int,
    advance: Callable[[], object] = lambda: None,
) -> dict[str, dict[str, int]]:
    """For each of `caches`, and for the plain cache as `BASELINE`: questions `asked`, `right` answers, and `bytes` held
    by the first document's batch once its documents are in the cache, a document."""
    results: dict[str, Counter[str]] = {name: Counter() for name in (BASELINE, *caches)}
    for first in range(0, len(documents), batch):
        chunk = documents[first : first + batch]
        ids, dense = prefill(model, tokenizer, chunk)
        for name in (*caches, BASELINE):
            # The plain cache comes last: asking fills it further.
            cache = dense if name == BASELINE else compress(dense, caches[name]())
            attention = "sdpa" if name == BASELINE else "turboquant"
            result = results[name]
            if not result["bytes"]:
                result["bytes"] = bytes_held(cache) // len(chunk)
            result["right"] += right_answers(model, tokenizer, chunk, ids, cache, attention)
            result["asked"] += sum(len(document.asked) for document in chunk)
            advance()
    return {name: dict(result) for name, result in results.items()}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=3968, help="length of a document")
    parser.add_argument("--passkeys", type=int, default=60, help="documents that hide a pass key")
    parser.add_argument("--recalls", type=int, default=10, help=f"documents of {FACTS} facts")
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS), metavar="PRESET")
    parser.add_argument("--residual-length", type=int, help="instead of the presets' own")
    parser.add_argument("--sink-tokens", type=int, help="instead of the presets' own")
    parser.add_argument("--batch", type=int, default=10, help="documents at a time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument(
        "--output", type=Path, help="results file, by default examples/results/passkey-DEVICE-TOKENS.json"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    logging.disable_progress_bar()
    device = torch.device(arguments.device)
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    model = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL, dtype=dtype, device_map=device).eval()
    overrides = {
        name: getattr(arguments, name)
        for name in ("residual_length", "sink_tokens")
        if getattr(arguments, name) is not None
    }
    caches = {preset: partial(TurboQuantCache, model.config, preset, **overrides) for preset in arguments.presets}
    passkeys = passkey_documents(arguments.passkeys, arguments.tokens)
    recalls = recall_documents(arguments.recalls, arguments.tokens)
    recall_batch = max(1, arguments.batch // FACTS)
    with Progress() as progress:
        steps = -(-len(passkeys) // arguments.batch) + -(-len(recalls) // recall_batch)
        task = progress.add_task("documents", total=steps * (len(caches) + 1))

        def advance() -> None:
            progress.advance(task)

        passkey = evaluate(model, tokenizer, passkeys, caches, arguments.batch, advance)
        recall = evaluate(model, tokenizer, recalls, caches, recall_batch, advance)
    rows = [
        {
            "cache": name,
            "passkeys_right": passkey[name]["right"],
            "passkeys_asked": passkey[name]["asked"],
            "facts_right": recall[name]["right"],
            "facts_asked": recall[name]["asked"],
            "bytes_held": passkey[name]["bytes"],
            "times_smaller": round(passkey[BASELINE]["bytes"] / passkey[name]["bytes"], 3),
        }
        for name in passkey
    ]
    record = provenance(device, SHIPPED_MODEL) | {
        "dtype": arguments.dtype,
        "document_tokens": arguments.tokens,
        "cache_options": overrides,
        "rows": rows,
    }
    output = arguments.output or RESULTS / f"passkey-{slug(device)}-{arguments.tokens}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for row in rows:
        passkeys_line = f"pass keys {row['passkeys_right']}/{row['passkeys_asked']}"
        facts_line = f"facts {row['facts_right']}/{row['facts_asked']}"
        print(f"{row['cache']:13} {passkeys_line:18} {facts_line:15} {row['times_smaller']:.2f} times smaller")
    print(output)


if __name__ == "__main__":
    main()
