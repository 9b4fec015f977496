"""The shipped model of `examples/needle`: what its card claims, and that it recalls what it read, also from a fully
packed history (`examples/measure/quality/evaluate_passkey.py` in small).

Documents of the latter are a multiple of 128 tokens and nothing is kept dense, so that every fact is read from packed
blocks. A wrong sign in the rotation, mixed-up scales or a lost block mean bring recall to zero; smaller errors are for
the tests of the parts."""

import hashlib
from functools import lru_cache, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from examples import needle_data as needle
from examples.measure.quality.evaluate_passkey import Document, evaluate
from examples.provenance import BASELINE, ROOT, SHIPPED_MODEL
from tq_hf import PRESETS, BlockLayout, TurboQuantCache, TurboQuantConfig
from tq_hf.compat import as_input


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading must not ask the hub for anything."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@lru_cache
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL, dtype=torch.float32).eval()


@lru_cache
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(SHIPPED_MODEL)


def generated(prompts: list[str]) -> list[str]:
    """What the model says after each prompt, greedily by its own default, with transformers' own cache."""
    inputs = tokenizer()(prompts, return_tensors="pt", padding=True)
    cache = DynamicCache(config=model().config)
    output = model().generate(**inputs, **as_input(cache), max_new_tokens=needle.ANSWER_TOKENS)
    return tokenizer().batch_decode(output[:, inputs["input_ids"].shape[1] :])


def test_the_checkpoint_is_what_the_card_says() -> None:
    config = model().config
    assert config.model_type == "llama"
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 128)
    assert config.max_position_embeddings == 8192
    assert not config.tie_word_embeddings
    assert model().num_parameters() == 3_870_464
    assert AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL).dtype == torch.bfloat16
    assert (ROOT / "examples" / "needle" / "model.safetensors").stat().st_size < 8_000_000


def test_generation_is_greedy_and_knows_the_special_tokens() -> None:
    options, tokens = model().generation_config, tokenizer()
    assert not options.do_sample
    assert (options.bos_token_id, options.eos_token_id, options.pad_token_id) == (256, 257, 258)
    assert (tokens.bos_token_id, tokens.eos_token_id, tokens.pad_token_id) == (256, 257, 258)
    assert tokens.padding_side == "left"
    assert len(tokens) == model().config.vocab_size == 259


@given(st.one_of(st.text(max_size=200), st.sampled_from(["<|bos|> is plain text", " a  b .\r\n\t", "é🙂\x00"])))
@settings(max_examples=200)
def test_a_token_is_a_byte_and_any_text_survives(text: str) -> None:
    ids = tokenizer()(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer().decode(ids) == text
    assert tokenizer().decode(ids, skip_special_tokens=True) == text


@given(tokens=st.integers(100, 6000), depth=st.floats(0, 1), seed=st.integers(0, 10**6))
@settings(max_examples=100)
def test_a_passkey_prompt_holds_its_answer_once(tokens: int, depth: float, seed: int) -> None:
    prompt, answer = needle.passkey_prompt(tokens, depth, seed)
    assert (prompt, answer) == needle.passkey_prompt(tokens, depth, seed)
    assert len(prompt.encode()) == tokens
    assert len(answer) == needle.ANSWER_DIGITS and prompt.count(answer) == 1
    assert prompt.count(needle.fact(needle.PASSKEY, answer)) == 1
    assert prompt.endswith(needle.question(needle.PASSKEY))


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_a_passkey_lies_at_its_depth(depth: float) -> None:
    prompt, answer = needle.passkey_prompt(4000, depth, seed=3)
    # The fact goes to the start of a line, and a line is shorter than 120 bytes.
    assert prompt.index(needle.fact(needle.PASSKEY, answer)) == pytest.approx(depth * 4000, abs=120)


@given(n_facts=st.integers(1, 32), extra=st.integers(0, 4000), seed=st.integers(0, 10**6))
@settings(max_examples=100)
def test_a_recall_prompt_holds_every_answer_once(n_facts: int, extra: int, seed: int) -> None:
    tokens = 40 * n_facts + extra
    prompt, asked = needle.recall_prompt(tokens, n_facts, seed)
    assert (prompt, asked) == needle.recall_prompt(tokens, n_facts, seed)
    assert len(prompt.encode()) == tokens
    assert len(asked) == n_facts and len({question for question, _ in asked}) == n_facts
    for question, answer in asked:
        assert prompt.count(answer) == 1
        assert prompt.count(question + answer + needle.TERMINATOR) == 1


def test_prompts_that_cannot_be_made_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold a fact"):
        needle.passkey_prompt(20, 0.5, seed=0)
    with pytest.raises(ValueError, match="cannot hold 8 facts"):
        needle.recall_prompt(100, 8, seed=0)
    with pytest.raises(ValueError, match="depth"):
        needle.passkey_prompt(1000, 1.5, seed=0)


def test_prompts_are_the_same_everywhere() -> None:
    """Measured numbers are compared between machines, so no Python version may change a prompt."""
    made = [needle.passkey_prompt(2000, seed / 9, seed) for seed in range(10)]
    made += [needle.recall_prompt(2000, 8, seed) for seed in range(10)]
    digest = hashlib.sha256(repr(made).encode()).hexdigest()
    assert digest == "d5a9e5b095bbd34e272ac28b60b4a81c31a05b2b43bc8cde61446ab2898efe38"


@pytest.mark.parametrize(("tokens", "depth"), [(1000, 0.9), (2000, 0.4), (3000, 0.0)])
def test_a_passkey_is_recalled(tokens: int, depth: float) -> None:
    prompt, answer = needle.passkey_prompt(tokens, depth, seed=tokens)
    (text,) = generated([prompt])
    assert needle.is_recalled(text, answer)


def test_each_of_many_facts_is_recalled() -> None:
    prompt, asked = needle.recall_prompt(1500, n_facts=4, seed=1)
    texts = generated([prompt + question for question, _ in asked])
    assert all(needle.is_recalled(text, answer) for text, (_, answer) in zip(texts, asked, strict=True))


def test_a_fact_that_was_not_read_is_not_known() -> None:
    prompt, answer = needle.passkey_prompt(1000, 0.5, seed=4)
    (text,) = generated([prompt.replace(needle.fact(needle.PASSKEY, answer), "")])
    assert not needle.is_recalled(text, answer)


TOKENS = 1280
DOCUMENTS = 2
FACTS = 4
PACKED = {"residual_length": 0, "sink_tokens": 0}

# Right answers of DOCUMENTS pass keys and DOCUMENTS * FACTS facts.
LEAST_RIGHT = dict.fromkeys([BASELINE, *PRESETS], 10) | {"3bit_nc": 9, "2.5bit_nc": 9, "2bit_nc": 8}


def documents() -> list[Document]:
    """Documents of FACTS facts and a pass key each, at random depths."""
    made = []
    for seed in range(DOCUMENTS):
        key = needle.fact(needle.PASSKEY, answer := str(314_159 + 86_028 * seed))
        text, asked = needle.recall_prompt(TOKENS - len(key), FACTS, seed)
        cut = text.index("\n", seed * len(text) // DOCUMENTS)
        made.append(Document(text[:cut] + key + text[cut:], [*asked, (needle.question(needle.PASSKEY), answer)]))
    return made


@pytest.mark.slow  # recall with less to read is in test_quality.py
def test_every_preset_recalls_what_its_blocks_hold() -> None:
    """One test for all presets: they share the model and the prefill."""
    caches = {preset: partial(TurboQuantCache, model().config, preset, **PACKED) for preset in PRESETS}
    results = evaluate(model(), tokenizer(), documents(), caches, batch=DOCUMENTS)
    assert {result["asked"] for result in results.values()} == {DOCUMENTS * (FACTS + 1)}
    assert set(results) == set(LEAST_RIGHT)
    right = {name: result["right"] for name, result in results.items()}
    assert {name: count for name, count in right.items() if count < LEAST_RIGHT[name]} == {}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_document_fills_packed_blocks_to_the_last_token(preset: str) -> None:
    assert TurboQuantConfig.from_preset(preset, **PACKED).num_blocks(TOKENS) * BlockLayout.tokens == TOKENS
