"""Quality of each preset, against other ways to store the cache at known bytes.

    python -m examples.measure.quality.evaluate --model smollm2           # real weights and text; minutes on a GPU
    python -m examples.measure.quality.evaluate --model DIR --text FILE   # any model of transformers
    python -m examples.measure.quality.evaluate                           # the shipped model, which reads bytes
    python -m examples.measure.quality.evaluate --model DIR --name needle-10m  # another that reads bytes
    python -m examples.measure.quality.evaluate --ablate                  # each part of the recipe switched by itself

Documents are read in chunks through the cache, so that what is measured was foretold from compressed blocks (one pass
without chunks would never read the cache), by the model in float32, so that nothing but the cache makes a difference;
`bf16 model` is the noise floor of running the model itself in bf16. `smollm2` and `gemma3` come from the package
registry, as does the text (`examples/real_model.py`); rows of models with a tokenizer go to real-NAME-TOKENS.json.

With `--inject`, a fixed vector is added to the keys before they are cached, so many times as long as a key: what a key
bias does to a format. `--rescale` and `--bias` are stresses that leave the model's function unchanged, too (see
`stress.py`); with them, rows go to stress-NAME.json:

    python -m examples.measure.quality.evaluate --rescale 4 10 --rescale 2 30 --rescale 0 10 8 --bias slow 40

With `--balance N` presets of 4 and 3 bits are read with and without balanced channels, nothing kept dense, under N
rotations each (KL moves by half with the rotation alone); rows go to balance-NAME.json. `--pad` puts padding before
every document, as the shorter prompts of a batch have it.

quanto and HQQ are among the others where they are installed (`pip install ".[peers]"`).

Other rows go to examples/results/quality-NAME.json. The file is written after each row: a run that is cut short keeps
what it measured.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import Cache
from transformers.utils import logging

from examples import real_model
from examples.measure.quality import peers, prose, stress
from examples.measure.quality.ablation import RECIPE, Switches, switched
from examples.measure.quality.quality import (
    Document,
    Outcome,
    Reference,
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
from tq_hf.tools.estimate import Estimator

EXACT = "float32 cache"
NOISE = "bf16 model"
NONE = str(stress.UNSTRESSED)
PACKED = {"residual_length": 0, "sink_tokens": 0}
SINKS = {"residual_length": 0}
VLLM = ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")
SMALL_MODELS_ONLY = re.compile("^paper|^bf16$|^fp8 cast$|packed only")
"""Rows that stand for the models that read bytes only."""
BYTES = 512
"""A model with a smaller vocabulary reads bytes: it was made by `train_needle.py`."""
GENERATED = 8
"""Most documents that are continued."""


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


def compressed(estimator: Estimator, name: str, options: TurboQuantConfig, tokens: int, **flags: Any) -> Method:
    """A `TurboQuantCache`; its bytes are those of one that holds `tokens` bf16 tokens. A mean that is switched off is
    not counted."""
    config = estimator.config
    kv_heads, dim = heads(config)
    held = estimator.footprint(options, tokens).total / (tokens * kv_heads * config.num_hidden_layers)
    layout = options.layout(dim)
    packed = layout.block_bytes / layout.tokens
    if not flags.get("switches", RECIPE).key_mean:
        mean = 2 * layout.key_dim_padded
        held -= mean * options.num_blocks(tokens) / tokens
        packed -= mean / layout.tokens
    return Method(name, lambda: TurboQuantCache(config, options), "turboquant", held, packed, **flags)


def our_methods(estimator: Estimator, tokens: int) -> list[Method]:
    """Every preset as it is; with exact sinks only; and for those vLLM has too, with nothing kept dense."""
    made = [
        compressed(estimator, name, options, tokens, generates=name in (*VLLM, "2.5bit_nc"))
        for name, options in PRESETS.items()
    ]
    for name, options in PRESETS.items():
        made.append(compressed(estimator, f"{name}, no residual", replace(options, **SINKS), tokens, stressed=False))
        if name in VLLM:
            made.append(compressed(estimator, f"{name}, packed only", replace(options, **PACKED), tokens))
    return made


def ablations(estimator: Estimator, tokens: int) -> list[Method]:
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
        made.append(compressed(estimator, f"{preset}, {what}", config_of, tokens, switches=Switches(**switches)))
    return made


def balances(estimator: Estimator, tokens: int, rotations: int) -> list[Method]:
    """Presets of 4 and 3 bits with nothing kept dense, balanced or not, under several rotations."""
    return [
        compressed(
            estimator,
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


@dataclass(frozen=True)
class Group:
    """Documents that are read at once, their ids `[N, T]`, and what the uncompressed model says of them."""

    read: Sequence[Document]
    ids: torch.Tensor
    known: Reference


class Evaluation:
    """One model, its documents, and the rows measured so far."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        self.model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).to(self.device).eval()
        self.config = self.model.config
        self.estimator = Estimator(self.config, torch.bfloat16)
        self.real = self.config.vocab_size > BYTES
        self.first = 0 if self.real else 512
        """First position that is scored."""
        self.origin: dict[str, Any] = {}
        self._fill_in_defaults()
        self.read = self._documents()
        most = arguments.batch or len(self.read)
        self.groups = [self._group(self.read[start : start + most]) for start in range(0, len(self.read), most)]
        self.exact = self._outcome(self.model)
        self.outcomes: dict[tuple[str, str], Outcome] = {(EXACT, NONE): self.exact}
        _, dim = heads(self.config)
        self.rows: list[dict[str, Any]] = []
        self.written: Path | None = None
        self._add(self._row(EXACT, 4.0 * 2 * dim, 4.0 * 2 * dim, stress.UNSTRESSED, self.exact))

    def _fill_in_defaults(self) -> None:
        """Set the options that depend on the kind of model."""
        arguments = self.arguments
        for name, of_bytes, of_tokens in (("chunk", 128, 256), ("generate", 512, 0)):
            if getattr(arguments, name) is None:
                setattr(arguments, name, of_tokens if self.real else of_bytes)
        if self.real and arguments.inject is None:
            arguments.inject = []

    def _documents(self) -> list[Document]:
        arguments = self.arguments
        if not self.real:
            return documents(arguments.tokens, arguments.seeds, arguments.recalls, arguments.depths)
        path = arguments.text or real_model.text_file()
        text, tokenizer = path.read_text(encoding="utf-8"), AutoTokenizer.from_pretrained(arguments.model)
        made = prose.documents(tokenizer, text, arguments.tokens, arguments.documents)
        arguments.seeds = arguments.documents
        digest = real_model.sha256(path)
        weights = sorted(Path(arguments.model).glob("*.safetensors"))
        self.origin = {
            "facts": prose.FACTS,
            "weights_sha256": real_model.sha256(*weights) if weights else None,
            "text": real_model.TEXT_PACKAGE if digest == real_model.TEXT_SHA256 else path.name,
            "text_sha256": digest,
        }
        return made

    def _group(self, read: Sequence[Document]) -> Group:
        ids = token_ids(read, self.device)
        return Group(read, ids, reference(self.model, ids, self.arguments.chunk))

    def _outcome(self, model: Any) -> Outcome:
        """The outcome of a model with a cache of its own dtype."""
        groups = self.groups
        return Outcome.joined([self._outcome_of(g, DynamicCache(config=model.config), "sdpa", model) for g in groups])

    def _outcome_of(self, group: Group, cache: Cache, attention: str, model: Any = None, padding: int = 0) -> Outcome:
        options = dict(chunk=self.arguments.chunk, first=self.first, padding=padding)
        return read_documents(model or self.model, group.read, group.ids, group.known, cache, attention, **options)

    def _row(self, name: str, all_in: float, packed: float, applied: Stress, outcome: Outcome) -> dict[str, Any]:
        figures = summary(outcome, self.exact, self.read)
        stressed = {"injection": applied.injection} | ({"stress": applied.name} if applied.name else {})
        return {"cache": name, "bytes_all_in": all_in, "bytes_packed": packed} | stressed | figures

    def measure(self, method: Method, applied: Stress) -> str | None:
        """Add the row of a method under a stress, or say why there is none."""
        with switched(method.switches):
            return self._measured(method, applied)

    def _measured(self, method: Method, applied: Stress) -> str | None:
        started = time.monotonic()
        parts, caches = zip(*(self._stressed(method, applied, group) for group in self.groups), strict=True)
        outcome = Outcome.joined(parts)
        finite = outcome.kl.isfinite().float().mean().item()
        if finite < 1:
            return f"{1 - finite:.0%} of its logits are not finite"
        row = self._row(method.name, method.bytes_all_in, method.bytes_packed, applied, outcome)
        if not (self.real or isinstance(caches[0], peers.QuantizedCache) or applied.name):
            row["worst_logit_correlation"] = worst_logit_correlation(self.groups[0].known, caches[0])
        row["seconds"] = round(time.monotonic() - started, 2)
        self.outcomes[method.name, str(applied)] = outcome
        self._add(row)
        return None

    def _stressed(self, method: Method, applied: Stress, group: Group) -> tuple[Outcome, Cache]:
        cache, model = method.make(), self.model
        if applied.padding:
            return self._outcome_of(group, cache, method.attention, padding=applied.padding), cache
        if applied.injection:
            cache = injected(cache, injection(group.known.keys, group.read, applied.injection))
        if applied.rescale:
            pairs, factor, values = applied.rescale
            model = stress.rescaled(self.model, int(pairs), factor, int(values))
        if not applied.bias:
            return self._outcome_of(group, cache, method.attention, model), cache
        spread, strength = applied.bias
        vectors = stress.key_bias(self.model, group.known.keys, strength, spread)
        with vectors.taken_off(method.attention):
            return self._outcome_of(group, vectors.added(cache), method.attention), cache

    def noise_floor(self) -> None:
        """Add the row of the model in bf16."""
        model = AutoModelForCausalLM.from_pretrained(self.arguments.model, dtype=torch.bfloat16).to(self.device).eval()
        outcome = self._outcome(model)
        _, dim = heads(self.config)
        self.outcomes[NOISE, NONE] = outcome
        self._add(self._row(NOISE, 4.0 * dim, 4.0 * dim, stress.UNSTRESSED, outcome))

    def generate(self, methods: list[Method], deadline: float) -> None:
        """Add to their rows where free generation first differs from the float32 cache's."""
        tokens = self.arguments.generate
        chosen = [i for i, document in enumerate(self.read) if not document.single][:GENERATED]
        prompts = token_ids(self.read, self.device)[chosen, : self.arguments.tokens - tokens]
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
            f"({row['kl_standard_error'] or 0:.6f})  p99 {row['kl_p99']:.5f}  PPL {row['delta_ppl']:+.4%}  "
            f"top-1 {row['top1']:.4f}  1-TVD {row['overlap']:.4f}  recall {recalls}  {row.get('seconds', 0):.1f} s",
            flush=True,
        )
        self.write({})

    def write(self, more: dict[str, Any]) -> None:
        """Write what there is."""
        arguments = self.arguments
        record = (
            provenance(self.device, arguments.model)
            | self.origin
            | {
                "model": arguments.name,
                "parameters": self.model.num_parameters(),
                "dtype": "float32",
                "documents": len(self.read),
                "seeds": arguments.seeds,
                "document_tokens": arguments.tokens,
                "chunk": arguments.chunk,
                "scored_from": self.first,
                "rows": self.rows,
            }
        )
        record["versions"] |= peers.versions()
        kind = "balance" if arguments.balance else "ablation" if arguments.ablate else "quality"
        if kind == "quality" and (arguments.rescale or arguments.bias or arguments.pad):
            kind = "stress"
        name = arguments.name
        if kind == "quality" and self.real:
            kind, name = "real", f"{name}-{arguments.tokens}"
        output = arguments.output or RESULTS / f"{kind}-{name}.json"
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(record | more, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        self.written = output


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default=SHIPPED_MODEL, help=f"a folder, or one of {', '.join(real_model.PACKAGES)}, made if need be"
    )
    parser.add_argument("--name", help="what to call it in the results; by default the folder's name")
    parser.add_argument("--ablate", action="store_true", help="measure switched parts of the recipe instead of peers")
    parser.add_argument("--balance", type=int, default=0, help="measure balance, with this number of rotations")
    parser.add_argument("--only", nargs="+", help="measure only the caches of these names")
    stress.add_arguments(parser)
    parser.add_argument("--tokens", type=int, default=4096, help="length of a document")
    parser.add_argument("--chunk", type=int, help="tokens read at a time; by default 256, of bytes 128")
    parser.add_argument("--batch", type=int, help="documents read at once; by default all")
    parser.add_argument("--text", type=Path, help="text of a model with a tokenizer; by default that of real_model.py")
    parser.add_argument("--documents", type=int, default=11, help="documents of a model with a tokenizer")
    parser.add_argument("--seeds", type=int, default=3, help="of documents for a model that reads bytes")
    parser.add_argument("--depths", type=int, default=9, help="documents with a pass key, for each seed")
    parser.add_argument("--recalls", type=int, default=3, help="documents with 16 facts, for each seed")
    parser.add_argument("--generate", type=int, help="tokens to generate freely; by default none, of bytes 512")
    parser.add_argument("--minutes", type=float, default=60.0, help="measure no further row after this long")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    arguments.name = arguments.name or Path(arguments.model).name
    try:
        arguments.model = real_model.model_folder(arguments.model)
    except real_model.NotAvailable as error:
        parser.error(str(error))
    return arguments


def main() -> None:
    arguments = parse_arguments()
    logging.disable_progress_bar()
    started = time.monotonic()
    evaluation = Evaluation(arguments)
    estimator = evaluation.estimator
    skipped: dict[str, str] = {}
    if arguments.balance:
        methods = balances(estimator, arguments.tokens, arguments.balance)
    elif arguments.ablate:
        methods = ablations(estimator, arguments.tokens)
    else:
        others, skipped = peer_methods(evaluation.config)
        methods = [*others, *our_methods(estimator, arguments.tokens)]
        if evaluation.real:
            methods = [method for method in methods if not SMALL_MODELS_ONLY.search(method.name)]
            methods.sort(key=lambda method: method.name in peers.QUANTIZED)  # the slowest come last
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
