"""Recall of the shipped model from a fully packed history: `examples/measure/quality/evaluate_passkey.py` in small.

Documents are a multiple of 128 tokens and nothing is kept dense, so that every fact is read from packed blocks. A wrong
sign in the rotation, mixed-up scales or a lost block mean bring recall to zero; smaller errors are for the tests of
the parts.
"""

from functools import partial

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import needle_data as needle
from examples.measure.quality.evaluate_passkey import Document, evaluate
from examples.provenance import BASELINE, SHIPPED_MODEL
from tq_hf import PRESETS, BlockLayout, TurboQuantCache, TurboQuantConfig

TOKENS = 1280
DOCUMENTS = 2
FACTS = 4
PACKED = {"residual_length": 0, "sink_tokens": 0}

# Right answers of DOCUMENTS pass keys and DOCUMENTS * FACTS facts.
LEAST_RIGHT = {
    BASELINE: 10,
    "k8v4": 10,
    "4bit_nc": 10,
    "3.5bit_nc": 10,
    "k3v4_nc": 10,
    "3bit_nc": 9,
    "2.5bit_nc": 9,
    "2bit_nc": 8,
}


def documents() -> list[Document]:
    """Documents of FACTS facts and a pass key each, at random depths."""
    made = []
    for seed in range(DOCUMENTS):
        key = needle.fact(needle.PASSKEY, answer := str(314_159 + 86_028 * seed))
        text, asked = needle.recall_prompt(TOKENS - len(key), FACTS, seed)
        cut = text.index("\n", seed * len(text) // DOCUMENTS)
        made.append(Document(text[:cut] + key + text[cut:], [*asked, (needle.question(needle.PASSKEY), answer)]))
    return made


def right_answers() -> dict[str, dict[str, int]]:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    model = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL, dtype="float32").eval()
    caches = {preset: partial(TurboQuantCache, model.config, preset, **PACKED) for preset in PRESETS}
    return evaluate(model, tokenizer, documents(), caches, batch=DOCUMENTS)


@pytest.mark.slow  # recall with less to read is in test_quality.py
def test_every_preset_recalls_what_its_blocks_hold() -> None:
    """One test for all presets: they share the model and the prefill."""
    results = right_answers()
    assert {result["asked"] for result in results.values()} == {DOCUMENTS * (FACTS + 1)}
    assert set(results) == set(LEAST_RIGHT)
    right = {name: result["right"] for name, result in results.items()}
    assert {name: count for name, count in right.items() if count < LEAST_RIGHT[name]} == {}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_document_fills_packed_blocks_to_the_last_token(preset: str) -> None:
    assert TurboQuantConfig.from_preset(preset, **PACKED).num_blocks(TOKENS) * BlockLayout.tokens == TOKENS
