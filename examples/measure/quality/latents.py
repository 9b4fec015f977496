"""KL divergence by the bits of latents and of rotary keys, in a small model with latent attention (MLA).

    python -m examples.measure.quality.train_needle --model needle-latents --minutes 2.5 --output DIR --eval-seeds 0
    python -m examples.measure.quality.latents --model DIR

A cache holds the latents of such a model as keys, and its rotary keys as values. Documents and chunks are those of
`evaluate.py`; the model computes in float32, so that only the cache makes a difference. The shipped model, a Llama,
reads the same documents with keys and values of 4 bits.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from examples.measure.quality import quality
from examples.provenance import RESULTS, SHIPPED_MODEL, provenance
from tq_hf import TurboQuantCache, TurboQuantConfig

BITS = ((8, 8), (4, 8), (4, 4), (8, 4), (3, 8), (3, 3), (2, 8))
"""Bits of latents and of rotary keys."""


def rows(folder: str, bits: tuple[tuple[int, int], ...], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure caches of these bits in one model."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    read = quality.documents(arguments.tokens, arguments.seeds, recalls=2, depths=2)
    ids, chunk, found = quality.token_ids(read, device), arguments.chunk, []
    known = quality.reference(model, ids, chunk)
    options: dict[str, Any] = dict(chunk=chunk, first=chunk)
    exact = quality.read_documents(model, read, ids, known, DynamicCache(config=model.config), "sdpa", **options)
    for key_bits, value_bits in bits:
        recipe = TurboQuantConfig(key_bits=key_bits, value_bits=value_bits)  # without a name: as it stands
        cache = TurboQuantCache(model.config, recipe)
        outcome = quality.read_documents(model, read, ids, known, cache, "sdpa", **options)
        row = {"model": model.config.model_type, "key_bits": key_bits, "value_bits": value_bits}
        row["ratio"] = cache.layers[0].store.layout.compression_ratio
        found.append(row | quality.summary(outcome, exact, read))
        print({name: found[-1][name] for name in (*row, "kl", "kl_95", "top1", "recall")}, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a model with latent attention that reads bytes")
    parser.add_argument("--tokens", type=int, default=4096, help="bytes of a document")
    parser.add_argument("--seeds", type=int, default=4, help="groups of four documents")
    parser.add_argument("--chunk", type=int, default=256, help="tokens read at a time")
    parser.add_argument("--output", type=Path, default=RESULTS / "rotary-needle-latents.json")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record = provenance(device, f"documents of {arguments.tokens:,} bytes, read {arguments.chunk} at a time")
    record["rows"] = rows(arguments.model, BITS, arguments) + rows(SHIPPED_MODEL, ((4, 4),), arguments)
    arguments.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
