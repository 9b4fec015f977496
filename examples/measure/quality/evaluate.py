"""Quality of each preset, against other ways to store the cache at known bytes.

    python -m examples.measure.quality.evaluate                           # the shipped model; minutes on a GPU
    python -m examples.measure.quality.evaluate --model DIR --name needle-10m  # a byte-level model
    python -m examples.measure.quality.evaluate --ablate                  # each part of the recipe switched by itself

Documents are read in chunks through the cache, so that what is measured was foretold from compressed blocks (one pass
without chunks would never read the cache), by the model in float32, so that nothing but the cache makes a difference;
`bf16 model` is the noise floor of running the model itself in bf16. With `--inject`, a fixed vector is added to the
keys before they are cached, so many times as long as a key: what a key bias does to a format. `--rescale` and `--bias`
are stresses that leave the model's function unchanged, too (see `stress.py`); with them, rows go to stress-NAME.json:

    python -m examples.measure.quality.evaluate --rescale 4 10 --rescale 2 30 --rescale 0 10 8 --bias slow 40

With `--balance N` presets of 4 and 3 bits are read with and without balanced channels, nothing kept dense, under N
rotations each (KL moves by half with the rotation alone); rows go to balance-NAME.json. `--pad` puts padding before
every document, as the shorter prompts of a batch have it.

quanto and HQQ are among the others where they are installed (`pip install ".[peers]"`).

Writes examples/results/quality-NAME.json after each row: a run that is cut short keeps what it measured.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import Cache
from transformers.utils import logging

from examples.measure.quality import peers, stress
from examples.measure.quality.ablation import RECIPE, Switches, switched
from examples.measure.quality.quality import (
    Outcome,
    continued,
    documents,
    injected,
    injection,
    ratio_interval,
    read_documents,
    reference,
    summary,
    token_ids,
    worst_logit_correlation,
)
from examples.measure.quality.stress import Stress
from examples.provenance import RESULTS, SHIPPED_MODEL, provenance
from tq_hf import PRESETS, TurboQuantCache, TurboQuantConfig
from tq_hf.ops.triton import blocks as triton_blocks

EXACT = "float32 cache"
NOISE = "bf16 model"
NONE = str(stress.UNSTRESSED)
PACKED = {"residual_length": 0, "sink_tokens": 0}
SINKS = {"residual_length": 0}
VLLM = ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")


@dataclass(frozen=True)
class Method:
    """A cache under test.

    Args:
        name: Its name in the results.
        make: Makes an empty one.
        attention: The attention implementation that reads it.
        bytes_all_in: Bytes per token and KV head of a bf16 model's cache of one document, everything counted.
        bytes_packed: Bytes per token and KV head in packed blocks, their means included; what a long history tends to.
        stressed: Whether it is also measured with injected vectors.
        generates: Whether it also generates freely.
        switches: What of the recipe is switched while it is filled and read.
    """

    name: str
    make: Callable[[], Cache]
    attention: str
    bytes_all_in: float
    bytes_packed: float
    stressed: bool = True
    generates: bool = False
    switches: Switches = RECIPE


def heads(config: Any) -> tuple[int, int]:
    """KV heads and head_dim."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_key_value_heads, dim


def compressed(config: Any, name: str, options: TurboQuantConfig, tokens: int, **flags: Any) -> Method:
    """A `TurboQuantCache`; its bytes are those of one that holds `tokens` bf16 tokens. A mean that is switched off is
    not counted."""
    kv_heads, dim = heads(config)
    sample = TurboQuantCache(config, options)
    states = torch.zeros(1, kv_heads, tokens, dim, dtype=torch.bfloat16)
    for index in range(len(sample.layers)):
        sample.update(states, states, index)
    held = sample.memory_footprint().total / (tokens * kv_heads * len(sample.layers))
    layout = options.layout(dim)
    packed = layout.block_bytes / layout.tokens
    if not flags.get("switches", RECIPE).key_mean:
        held -= layout.mean_bytes * options.num_blocks(tokens) / tokens
        packed -= layout.mean_bytes / layout.tokens
    return Method(name, lambda: TurboQuantCache(config, options), "turboquant", held, packed, **flags)


def our_methods(config: Any, tokens: int) -> list[Method]:
    """Every preset as it is; without a window; and for those vLLM has too, with nothing kept dense."""
    made = [
        compressed(config, name, options, tokens, generates=name in (*VLLM, "2.5bit_nc"))
        for name, options in PRESETS.items()
    ]
    for name, options in PRESETS.items():
        made.append(compressed(config, f"{name}, no residual", replace(options, **SINKS), tokens, stressed=False))
        if name in VLLM:
            made.append(compressed(config, f"{name}, packed only", replace(options, **PACKED), tokens))
    return made


def ablations(config: Any, tokens: int) -> list[Method]:
    """One part of the recipe switched at a time, for presets of 4 and 3 bits."""
    changed: dict[str, dict[str, Any]] = {
        "defaults": {},
        "packed only": PACKED,
        "no residual": SINKS,
        "no sinks": {"sink_tokens": 0},
        "no key mean": {"key_mean": False},
        "no random signs": {"random_signs": False},
        "no signs, no key mean": {"random_signs": False, "key_mean": False},
        "values not rotated": {"rotate_values": False},
        "keys: none": {"key_correction": "none"},
        "keys: norm": {"key_correction": "norm"},
        "keys: projection": {"key_correction": "projection"},
        "values: none": {"value_correction": "none"},
        "values: norm": {"value_correction": "norm"},
        "values: projection": {"value_correction": "projection"},
        "residual of 256": {"residual_length": 256},
        "first and last layer dense": {"skip_layers": (0, -1)},
        "another seed": {"seed": 1},
        "no balance": {"balance": False},
        "packed only, no balance": PACKED | {"balance": False},
        "another seed, no balance": {"seed": 1, "balance": False},
    }
    chosen = [(preset, what) for preset in ("4bit_nc", "3bit_nc") for what in changed]
    chosen += [
        (preset, what)
        for preset in ("3.5bit_nc", "2.5bit_nc", "2bit_nc")
        for what in ("defaults", "packed only", "no residual")
    ]
    made = []
    for preset, what in chosen:
        switches = {name: value for name, value in changed[what].items() if name in Switches._fields}
        options = {name: value for name, value in changed[what].items() if name not in switches}
        config_of = TurboQuantConfig.from_preset(preset, **options)
        made.append(compressed(config, f"{preset}, {what}", config_of, tokens, switches=Switches(**switches)))
    return made


def balances(config: Any, tokens: int, rotations: int) -> list[Method]:
    """Presets of 4 and 3 bits with nothing kept dense, balanced or not, under several rotations."""
    return [
        compressed(
            config,
            f"{preset}, {'balanced' if balance else 'not balanced'}, seed {seed}",
            TurboQuantConfig.from_preset(preset, balance=balance, seed=seed, **PACKED),
            tokens,
        )
        for preset in ("4bit_nc", "3bit_nc")
        for balance in (True, False)
        for seed in range(rotations)
    ]


def peer_methods(config: Any) -> tuple[list[Method], dict[str, str]]:
    """Baselines of presets, and baselines that cannot run here with the reason."""
    _, dim = heads(config)
    made = []
    for name, codec in peers.CODECS.items():
        size = codec.bytes_per_token(dim)
        make = lambda name=name: peers.coded_cache(config, name)  # noqa: E731
        made.append(Method(name, make, "sdpa", size, size, generates=name.startswith(("bf16", "fp8 s", "vLLM"))))
    skipped = {}
    for name in peers.QUANTIZED:
        if reason := peers.missing(name):
            skipped[name] = reason
            continue
        make = lambda name=name: peers.quantized_cache(config, name)  # noqa: E731
        # fp8 has one scale a tensor; the others a scale and a zero point, 16 bits each, for 64 channels.
        size = 2.0 * dim if name.endswith("fp8") else 2 * dim * (4 + 32 / 64) / 8
        made.append(Method(name, make, "sdpa", size, size))
    return made, skipped


class Evaluation:
    """One model, its documents, and the rows measured so far."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        self.model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).to(self.device).eval()
        self.config = self.model.config
        self.read = documents(arguments.tokens, arguments.seeds, arguments.recalls, arguments.depths)
        self.ids = token_ids(self.read, self.device)
        self.known = reference(self.model, self.ids, arguments.chunk)
        self.exact = self._outcome(DynamicCache(config=self.config), "sdpa")
        self.outcomes: dict[tuple[str, str], Outcome] = {(EXACT, NONE): self.exact}
        _, dim = heads(self.config)
        self.rows: list[dict[str, Any]] = [
            self._row(EXACT, 4.0 * 2 * dim, 4.0 * 2 * dim, stress.UNSTRESSED, self.exact)
        ]
        self.written: Path | None = None

    def _outcome(self, cache: Cache, attention: str, model: Any = None, padding: int = 0) -> Outcome:
        options = dict(chunk=self.arguments.chunk, first=self.arguments.first, padding=padding)
        return read_documents(model or self.model, self.read, self.ids, self.known, cache, attention, **options)

    def _row(self, name: str, all_in: float, packed: float, applied: Stress, outcome: Outcome) -> dict[str, Any]:
        figures = summary(outcome, self.exact, self.read)
        stressed = {"injection": applied.injection} | ({"stress": applied.name} if applied.name else {})
        return {"cache": name, "bytes_all_in": all_in, "bytes_packed": packed} | stressed | figures

    def measure(self, method: Method, applied: Stress) -> str | None:
        """Add the row of a method under a stress, or say why there is none."""
        with switched(method.switches):
            return self._measured(method, applied)

    def _measured(self, method: Method, applied: Stress) -> str | None:
        outcome, cache = self._stressed(method, applied)
        finite = outcome.kl.isfinite().float().mean().item()
        if finite < 1:
            return f"{1 - finite:.0%} of its logits are not finite"
        row = self._row(method.name, method.bytes_all_in, method.bytes_packed, applied, outcome)
        if not isinstance(cache, peers.QuantizedCache) and not applied.name:
            row["worst_logit_correlation"] = worst_logit_correlation(self.known, cache)
        self.outcomes[method.name, str(applied)] = outcome
        self._add(row)
        return None

    def _stressed(self, method: Method, applied: Stress) -> tuple[Outcome, Cache]:
        cache, model = method.make(), self.model
        if applied.padding:
            return self._outcome(cache, method.attention, padding=applied.padding), cache
        if applied.injection:
            cache = injected(cache, injection(self.known.keys, self.read, applied.injection))
        if applied.rescale:
            pairs, factor, values = applied.rescale
            model = stress.rescaled(self.model, int(pairs), factor, int(values))
        if not applied.bias:
            return self._outcome(cache, method.attention, model), cache
        spread, strength = applied.bias
        vectors = stress.key_bias(self.model, self.known.keys, strength, spread)
        with vectors.taken_off(method.attention):
            return self._outcome(vectors.added(cache), method.attention), cache

    def noise_floor(self) -> None:
        """Add the row of the model in bf16."""
        model = AutoModelForCausalLM.from_pretrained(self.arguments.model, dtype=torch.bfloat16).to(self.device).eval()
        outcome = self._outcome(DynamicCache(config=model.config), "sdpa", model)
        _, dim = heads(self.config)
        self.outcomes[NOISE, NONE] = outcome
        self._add(self._row(NOISE, 4.0 * dim, 4.0 * dim, stress.UNSTRESSED, outcome))

    def generate(self, methods: list[Method], deadline: float) -> None:
        """Add to their rows where free generation first differs from the float32 cache's."""
        tokens = self.arguments.generate
        chosen = [i for i, document in enumerate(self.read) if not document.single][: self.arguments.generated]
        prompts = self.ids[chosen, : self.arguments.tokens - tokens]
        exact = continued(self.model, prompts, DynamicCache(config=self.config), "sdpa", tokens)
        for method in methods:
            if time.monotonic() > deadline:
                break
            came = continued(self.model, prompts, method.make(), method.attention, tokens)
            differs = torch.cat([came != exact, torch.ones_like(came[:, :1], dtype=torch.bool)], dim=1)
            (row,) = (row for row in self.rows if row["cache"] == method.name and row["injection"] == 0)
            row["generated_before_divergence"] = differs.int().argmax(1).float().mean().item()
            row["generated_alike"] = (came == exact).all(1).float().mean().item()
            print(f"{method.name:28} {row['generated_before_divergence']:6.0f} of {tokens} tokens as the full cache")

    def comparisons(self) -> list[dict[str, Any]]:
        """KL of our presets over that of vLLM's recipe, with paired bootstrap intervals over documents."""
        sizes = {row["cache"]: row["bytes_all_in"] for row in self.rows}
        packed = {row["cache"]: row["bytes_packed"] for row in self.rows}
        pairs = [(f"{name}{kind}", f"vLLM {name}") for name in VLLM for kind in ("", ", no residual", ", packed only")]
        pairs += [("3bit_nc", "vLLM 4bit_nc")]
        made = []
        for ours, theirs in pairs:
            if (ours, NONE) not in self.outcomes or (theirs, NONE) not in self.outcomes:
                continue
            kl, other = (self.outcomes[name, NONE].kl.mean(1) for name in (ours, theirs))
            made.append(
                {
                    "ours": ours,
                    "theirs": theirs,
                    "kl_ratio": (kl.mean() / other.mean()).item(),
                    "kl_ratio_95": ratio_interval(kl, other),
                    "bytes_all_in": [sizes[ours], sizes[theirs]],
                    "bytes_packed": [packed[ours], packed[theirs]],
                }
            )
        return made

    def _add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        stressed = row.get("stress") or f"x{row['injection']:g}"
        recalls = "/".join("-" if row[key] is None else f"{row[key]:.3f}" for key in ("passkey_recall", "recall"))
        print(
            f"{row['cache']:28} {stressed:16} {row['bytes_all_in']:6.1f} B  KL {row['kl']:.6f} "
            f"p99 {row['kl_p99']:.5f}  PPL {row['delta_ppl']:+.4%}  top-1 {row['top1']:.4f}  recall {recalls}  "
            f"logits {row.get('worst_logit_correlation', float('nan')):.5f}",
            flush=True,
        )
        self.write({})

    def write(self, more: dict[str, Any]) -> None:
        """Write what there is."""
        arguments = self.arguments
        record = provenance(self.device, arguments.model) | {
            "model": arguments.name,
            "parameters": self.model.num_parameters(),
            "dtype": "float32",
            "documents": len(self.read),
            "seeds": arguments.seeds,
            "document_tokens": arguments.tokens,
            "chunk": arguments.chunk,
            "scored_from": arguments.first,
            "rows": self.rows,
        }
        record["versions"] |= peers.versions()
        kind = "balance" if arguments.balance else "ablation" if arguments.ablate else "quality"
        if kind == "quality" and (arguments.rescale or arguments.bias or arguments.pad):
            kind = "stress"
        output = arguments.output or RESULTS / f"{kind}-{arguments.name}.json"
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(record | more, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        self.written = output


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SHIPPED_MODEL, help="folder of a byte-level model of full-attention layers")
    parser.add_argument("--name", default="needle", help="what to call it in the results")
    parser.add_argument("--ablate", action="store_true", help="measure switched parts of the recipe instead of peers")
    parser.add_argument("--balance", type=int, default=0, help="measure balance, with this number of rotations")
    parser.add_argument("--only", nargs="+", help="measure only the caches of these names")
    stress.add_arguments(parser)
    parser.add_argument("--tokens", type=int, default=4096, help="length of a document")
    parser.add_argument("--chunk", type=int, default=128, help="tokens read at a time")
    parser.add_argument("--first", type=int, default=512, help="first position that is scored")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--depths", type=int, default=9, help="documents with a pass key, for each seed")
    parser.add_argument("--recalls", type=int, default=3, help="documents with 16 facts, for each seed")
    parser.add_argument("--generate", type=int, default=512, help="tokens to generate freely; 0 leaves it out")
    parser.add_argument("--generated", type=int, default=8, help="maximum number of documents to continue")
    parser.add_argument("--torch", action="store_true", help="read blocks in torch even where kernels could")
    parser.add_argument("--minutes", type=float, default=60.0, help="measure no further row after this long")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    logging.disable_progress_bar()
    if arguments.torch:
        triton_blocks.HAS_TRITON = False
    started = time.monotonic()
    evaluation = Evaluation(arguments)
    config = evaluation.config
    skipped: dict[str, str] = {}
    if arguments.balance:
        methods = balances(config, arguments.tokens, arguments.balance)
    elif arguments.ablate:
        methods = ablations(config, arguments.tokens)
    else:
        others, skipped = peer_methods(config)
        methods = [*others, *our_methods(config, arguments.tokens)]
        evaluation.noise_floor()
    if arguments.only:
        methods = [method for method in methods if method.name in arguments.only]
    for applied in stress.chosen(arguments):
        for method in methods:
            if time.monotonic() - started > 60 * arguments.minutes:
                skipped[f"{method.name} {applied}"] = f"no time left after {arguments.minutes} minutes"
            elif (applied == stress.UNSTRESSED or method.stressed) and (reason := evaluation.measure(method, applied)):
                skipped[f"{method.name} {applied}"] = reason
    if arguments.generate and not arguments.balance and not arguments.ablate and not applied.name:
        evaluation.generate([method for method in methods if method.generates], started + 60 * arguments.minutes)
    comparisons = evaluation.comparisons()
    evaluation.write({"comparisons": comparisons, "skipped": skipped, "seconds": round(time.monotonic() - started)})
    for pair in comparisons:
        low, high = pair["kl_ratio_95"]
        print(f"KL of {pair['ours']:22} / {pair['theirs']:12} {pair['kl_ratio']:.3f} ({low:.3f} to {high:.3f})")
    for name, reason in skipped.items():
        print(f"left out: {name}: {reason}")
    print(evaluation.written)


if __name__ == "__main__":
    main()
