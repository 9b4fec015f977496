"""Writes `examples/results/families.md`: every family of transformers on a compressed cache.

python -m examples.measure.quality.families              # half an hour on two cores
python -m examples.measure.quality.families llama doge   # these anew, the rest from families.json
python -m examples.measure.quality.families sizes        # published sizes, two minutes; "page": neither, only the page
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from typing import Any

import torch
import transformers

from examples.measure.quality import published_sizes
from examples.measure.quality.family_check import NOT_TESTABLE, Finding, Outcome, examine
from examples.measure.quality.family_configs import WITH_IMAGES, model_types
from examples.provenance import RESULTS

VERDICTS = {
    "right": "right",
    "refused": "refused in a sentence",
    "not loaded": '"turboquant" refused by transformers',
    "alike": "right; preallocated, transformers' own cache fails alike",
    "differs": "**wrong**",
    "raises": "**raises**",
}


def main(only: list[str]) -> None:
    """Examine `only`, or all families, and write both files."""
    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kept = RESULTS / "families.json"
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    if not only or "sizes" in only:
        published_sizes.measure()
    for model_type in (
        model_types() | WITH_IMAGES if not only else [name for name in only if name not in ("page", "sizes")]
    ):
        if model_type in NOT_TESTABLE:
            found.pop(model_type, None)
            continue
        try:
            finding = examine(model_type)
        except Exception as error:
            finding = Finding(model_type, "", "", {"all": Outcome("raises", f"{type(error).__name__}: {error}"[:300])})
        found[model_type] = finding._asdict() | {"transformers": transformers.__version__}
        print(finding.verdict, model_type, {k: v for k, v in finding.outcomes.items() if v.kind != "right"}, flush=True)
        kept.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")
    (RESULTS / "families.md").write_text(table([value for _, value in sorted(found.items())]))


def _finding(value: dict[str, Any]) -> Finding:
    fields = {name: value[name] for name in Finding._fields}
    return Finding(**fields | {"outcomes": {mode: Outcome(*outcome) for mode, outcome in value["outcomes"].items()}})


def table(found: list[dict[str, Any]]) -> str:
    """The page, of findings as `families.json` has them."""
    findings = [_finding(value) for value in found]
    versions = sorted(Counter(value["transformers"] for value in found).items())
    counts = Counter(finding.verdict for finding in findings)
    lines = [
        "# Families",
        "",
        f"transformers {', '.join(f'{version} ({count} families)' for version, count in versions)}, "
        f"torch {torch.__version__.split('+')[0]} on a CPU, float32, tiny random models. "
        "Made by `python -m examples.measure.quality.families`; `test_every_family.py` holds it.",
        "",
        'Each is run with its default attention and with "turboquant", growing and preallocated, with everything in '
        "the dense residual and with whole prompts packed: logits of teacher-forced steps (one token, three tokens) "
        "and of a left-padded generation, against transformers' own cache; packed, against it read dequantized. "
        "Models with cross-attention are also run with default options and a compressed cache of 300 tokens of the "
        "encoder, or of an image.",
        "",
        "| | families |",
        "| --- | ---: |",
        *(f"| {VERDICTS[kind]} | {counts[kind]} |" for kind in reversed(list(VERDICTS)) if counts[kind]),
        f"| not testable here | {len(NOT_TESTABLE)} |",
        "",
        '"Read" is how "turboquant" reads the compressed layers: packed, or dequantized where keys do not reach '
        "attention as they were cached; where none is compressed, what layers there are.",
        "",
        "| family | layers compressed | read | | |",
        "| --- | ---: | --- | --- | --- |",
    ]
    for finding in findings:
        worst = next((o.detail for o in finding.outcomes.values() if o.kind == finding.verdict), "")
        detail = "" if finding.verdict == "right" else worst.split("\n")[0].replace("|", "\\|")[:140]
        lines.append(
            f"| {finding.model_type} | {finding.layers} | {finding.read} | {VERDICTS[finding.verdict]} | {detail} |"
        )
    lines += ["", "## Not testable here", "", "| family | why |", "| --- | --- |"]
    lines += [f"| {name} | {reason} |" for name, reason in sorted(NOT_TESTABLE.items())]
    return "\n".join(lines + published_sizes.section(published_sizes.read())) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", metavar="MODEL_TYPE", help="by default all; `page` and `sizes` alone")
    main(parser.parse_args().only)
