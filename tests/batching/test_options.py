"""Options of a request: every field is applied as `generate()` applies it, neutral, or refused by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CompileConfig, GenerationConfig, LogitsProcessor

from tests.support.batching_cases import (
    Oracle,
    Session,
    Tokens,
    ask,
    greedy,
    model_of,
    options,
    outputs_of,
    prompts,
    serve,
)
from tests.support.tiny_models import VOCAB
from tq_hf import TurboQuantBatching
from tq_hf.batching.options import (
    APPLIED,
    MOST_STOPS,
    NEUTRAL,
    OF_SAMPLING,
    REQUEST_FIELDS,
    UNCHANGED,
    RequestOptions,
    options_of,
    prompt_ids,
    with_defaults,
)
from tq_hf.batching.processors import BatchOptions, Features, History
from tq_hf.batching.requests import Detokenizer

NEW = 12
OTHER: dict[str, Any] = {
    "num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "constraints": ["x"], "force_words_ids": [[1]],
    "guidance_scale": 1.5, "no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.5, "exponential_decay_length_penalty": (3, 1.5), "forced_bos_token_id": 1,
    "forced_eos_token_id": 7, "remove_invalid_values": True, "typical_p": 0.5, "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.01, "top_h": 0.5, "watermarking_config": {"bias": 2.0}, "penalty_alpha": 0.6, "dola_layers": "low",
    "token_healing": True, "max_time": 1.0, "output_attentions": True, "output_hidden_states": True,
    "output_scores": True, "output_logits": True, "continuous_batching_config": object(), "is_assistant": True,
    "assistant_ensemble_weight": 0.5,
}  # fmt: skip
"""A value of each refused field that would change an answer or an output."""
GIVEN: dict[str, Any] = {
    "max_new_tokens": 5, "max_length": 105, "min_new_tokens": 3, "min_length": 103, "eos_token_id": [3, 4],
    "stop_strings": "x", "do_sample": True, "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.1,
    "repetition_penalty": 1.5, "sequence_bias": [[[1, 2], 2.0]], "bad_words_ids": [[1], [2, 3]], "suppress_tokens": [9],
    "begin_suppress_tokens": [8], "num_return_sequences": 3, "seed": 5, "presence_penalty": 0.5,
    "frequency_penalty": 0.5, "logit_bias": {"7": 3}, "stop_token_ids": [2], "top_logprobs": 3,
    "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"},
}  # fmt: skip
"""A value of each applied field, for a prompt of 100 tokens."""


def of(config: GenerationConfig | None = None, extra: dict[str, Any] | None = None, **fields: Any) -> RequestOptions:
    config = config or GenerationConfig()
    for name, value in fields.items():
        setattr(config, name, value)
    return options_of(config, extra, prompt=100, vocabulary=VOCAB)


def test_every_field_of_a_generation_config_is_applied_neutral_or_refused() -> None:
    taken = APPLIED.keys() | REQUEST_FIELDS.keys() | NEUTRAL
    assert vars(GenerationConfig()).keys() <= taken | OTHER.keys() and not taken & OTHER.keys()
    assert GIVEN.keys() == APPLIED.keys() | REQUEST_FIELDS.keys()
    assert UNCHANGED.keys() <= OTHER.keys() and OF_SAMPLING <= OTHER.keys() | APPLIED.keys()


@pytest.mark.parametrize("name", OTHER)
def test_fields_that_are_not_applied_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=rf"`{name}` is .*generate\(\).* with a `TurboQuantCache`"):
        of(do_sample=True, **{name: OTHER[name]})
    for neutral in (None, UNCHANGED.get(name)):
        assert of(**{name: neutral}) == RequestOptions()
    if name in OF_SAMPLING:
        assert of(do_sample=False, **{name: OTHER[name]}) == RequestOptions()


@pytest.mark.parametrize("name", GIVEN)
def test_applied_fields_change_the_options(name: str) -> None:
    extra, field = ({name: GIVEN[name]}, {}) if name in REQUEST_FIELDS else ({}, {name: GIVEN[name]})
    base = dict(do_sample=True, eos_token_id=1)
    assert of(extra=extra, **(base | field)) != (of(**base) if name != "do_sample" else of(eos_token_id=1))


def test_a_field_of_a_newer_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = GenerationConfig.__init__

    def init(self: GenerationConfig, **kwargs: Any) -> None:
        real(self, **kwargs)
        self.thinking_budget = None

    monkeypatch.setattr(GenerationConfig, "__init__", init)
    of()
    with pytest.raises(ValueError, match="`thinking_budget` is 5, and requests of a batch do not apply it"):
        of(thinking_budget=5)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": 0.0}, "`temperature` is 0.0; it must be a number between 1e-06"),
        ({"top_k": -1}, "`top_k` is -1; it must be a whole number, 0 or more"),
        ({"top_p": 1.5}, "`top_p` is 1.5; it must be a number between 0 and 1"),
        ({"min_p": float("nan")}, "`min_p` is nan"),
        ({"repetition_penalty": 0}, "`repetition_penalty` is 0;"),
        ({"bad_words_ids": [[]]}, "`bad_words_ids` has .*list of 1 to 8 token ids"),
        ({"bad_words_ids": [list(range(9))]}, "`bad_words_ids` has .*list of 1 to 8 token ids"),
        ({"suppress_tokens": [VOCAB]}, f"`suppress_tokens` has {VOCAB}; the model's tokens are whole numbers below"),
        ({"suppress_tokens": list(range(VOCAB))}, "bans all .* tokens of the model"),
        ({"max_length": 100}, "`max_length` is 100, and the prompt has 100 tokens already"),
        ({"stop_strings": [""]}, "`stop_strings` is .*; it must be a text or a list of texts"),
        ({"sequence_bias": [[[1], float("inf")]]}, "`sequence_bias` is inf"),
        ({"num_return_sequences": 0}, "`num_return_sequences` is 0"),
        ({"do_sample": "false"}, "`do_sample` is 'false'; it must be true or false"),
        ({"stop_strings": {"a": 1}}, "`stop_strings` is .*; it must be a text or a list of texts"),
        ({"bad_words_ids": [5]}, "`bad_words_ids` has 5; it must be a list of 1 to 8 token ids"),
        ({"bad_words_ids": 5}, "`bad_words_ids` is 5; it must be a list of lists of token ids"),
        ({"eos_token_id": 1.5}, "`eos_token_id` has 1.5; the model's tokens are whole numbers below"),
        ({"eos_token_id": {5: 1}}, "`eos_token_id` has {5: 1}; the model's tokens are whole numbers below"),
        ({"sequence_bias": {5: 1.0}}, "`sequence_bias` has 5; it must be a list of 1 to 8 token ids"),
        ({"sequence_bias": [5]}, "`sequence_bias` is .5.; it must be a list of pairs"),
        ({"min_length": "x"}, "`min_length` is 'x'; it must be a whole number, 0 or more"),
        ({"extra": {"logit_bias": [5]}}, "`logit_bias` is .5.; it must be a dict of token ids and numbers"),
        ({"extra": {"logit_bias": 5}}, "`logit_bias` is 5; it must be a dict of token ids and numbers"),
        ({"extra": {"logit_bias": {"9" * 5000: 1}}}, "`logit_bias` has '999.*; the model's tokens are"),
        ({"extra": {"logit_bias": {5: 10**400}}}, "`logit_bias` is 1000.*; it must be a number between"),
        ({"temperature": 10**400}, "`temperature` is 1000.*; it must be a number between 1e-06"),
        ({"top_k": 10**5000}, "`top_k` is a value with thousands of digits; it must be a whole number"),
        ({"stop_strings": "\ud800"}, "`stop_strings` is .*; it must be up to 64 texts of up to 1,024 bytes in UTF-8"),
        ({"stop_strings": "x" * 1025}, "`stop_strings` is .*; it must be up to 64 texts of up to 1,024 bytes in UTF-8"),
        ({"stop_strings": ["x"] * (MOST_STOPS + 1)}, "`stop_strings` is .*; it must be up to 64 texts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_out_of_range_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        of(**({"do_sample": True} | fields))


@pytest.mark.parametrize(
    "prompt",
    [b"abc", bytearray(b"abc"), {5, 6}, {5: 6}, frozenset({5}), [True, True], [5, True], torch.ones(3).bool(),
     [torch.tensor(True)], torch.ones(2), torch.ones(1, 2).long(), torch.tensor(5), None, "abc", np.ones(2, bool)],
    ids=str,
)  # fmt: skip
def test_prompts_that_are_masks_or_have_no_order_are_refused(prompt: Any) -> None:
    with pytest.raises(ValueError, match="A prompt is .*; it must be a list of token ids"):
        prompt_ids(prompt, VOCAB)


def test_prompts_are_lists_tuples_tensors_and_arrays_of_whole_numbers() -> None:
    for prompt in ([5, 6], (5, 6), torch.tensor([5, 6]), np.array([5, 6]), [torch.tensor(5), np.int64(6)], range(5, 7)):
        assert prompt_ids(prompt, VOCAB) == [5, 6]


def test_unset_fields_are_those_of_the_models_own_config() -> None:
    own = GenerationConfig(repetition_penalty=1.05, temperature=0.7, do_sample=True, top_k=20)
    merged = with_defaults(GenerationConfig(temperature=0.5, max_new_tokens=4), own)
    assert (merged.repetition_penalty, merged.temperature, merged.top_k, merged.do_sample) == (1.05, 0.5, 20, True)
    assert merged.max_new_tokens == 4 and own.max_new_tokens is None
    assert of(GenerationConfig(seed=5, logit_bias={7: 1.0})) == of(extra={"seed": 5, "logit_bias": {7: 1.0}})


class Occurrences(LogitsProcessor):
    """OpenAI's presence and frequency penalties over the answer, from their definition."""

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self.prompt, self.presence, self.frequency = prompt, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.stack([torch.bincount(row[self.prompt :], minlength=scores.shape[1]) for row in input_ids])
        return scores - self.frequency * counts - self.presence * (counts > 0)


def alone(model: Any, prompt: Tokens, fields: dict[str, Any], oracle: Oracle | None = None) -> Tokens:
    """Tokens of `generate()` on a cache of the same recipe."""
    config = greedy(NEW)
    for name, value in fields.items():
        if name in APPLIED:
            setattr(config, name, value)
    if "logit_bias" in fields:
        config.sequence_bias = [[[token], float(value)] for token, value in fields["logit_bias"].items()]
    penalties = Occurrences(len(prompt), fields.get("presence_penalty", 0), fields.get("frequency_penalty", 0))
    return (oracle or Oracle(model)).generate(prompt, NEW, config, penalties)


def cases(answer: Tokens) -> list[dict[str, Any]]:
    """Options by request that would each change this greedy answer."""
    a, b, c, *_ = answer
    return [
        {},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.8, "presence_penalty": -0.3},
        {"logit_bias": {a: -100, 5: 0.4}},
        {"sequence_bias": [[[a, b], -50.0], [[c], 0.3]]},
        {"bad_words_ids": [[a, b], [c]]},
        {"suppress_tokens": [a, c]},
        {"begin_suppress_tokens": [a]},
        {"eos_token_id": answer[3], "min_new_tokens": 7},
        {"eos_token_id": answer[3], "min_length": 105},
        {"eos_token_id": answer[3]},
        {"max_new_tokens": 4},
        {"repetition_penalty": 1.3, "bad_words_ids": [[b]], "frequency_penalty": 0.5, "suppress_tokens": [1, 2]},
    ]


@pytest.fixture(scope="module")
def batching() -> TurboQuantBatching:
    return TurboQuantBatching(model_of(), balance=False)


WAYS = {"plain": {}, "chunks": {"max_batch_tokens": 64}, "lists": {"max_blocks_per_request": 0}}
WAYS["few slots"] = {"max_requests_per_batch": 4}


@pytest.fixture(scope="module")
def answered(batching: TurboQuantBatching) -> tuple[list[tuple[Tokens, dict[str, Any]]], list[Tokens]]:
    """Requests of two prompts with all options, and the answers of `generate()`."""
    model, (prompt, other) = batching.model, prompts([100, 90])
    asked = [(prompt, fields) for fields in cases(alone(model, prompt, {}))]
    asked += [(other, fields) for fields in cases(alone(model, other, {})) if "min_length" not in fields]
    expected = [alone(model, *each) for each in asked]
    assert sum(answer != expected[0] for answer in expected[:15]) > 11, "the options change answers"
    return asked, expected


@pytest.mark.parametrize("way", [*WAYS, "asynchronous", "padded"])
def test_requests_of_one_batch_have_the_answers_of_generate_with_their_options(
    way: str,
    batching: TurboQuantBatching,
    answered: tuple[list[tuple[Tokens, dict[str, Any]]], list[Tokens]],
    request: pytest.FixtureRequest,
) -> None:
    changes, (asked, expected) = WAYS[way] if way in WAYS else request.getfixturevalue(way) or {}, answered
    assert ask(batching, asked, NEW, **changes) == expected


def test_options_hold_behind_a_shared_prefix_and_at_realistic_lengths(batching: TurboQuantBatching) -> None:
    model, (prompt,) = batching.model, prompts([700])
    asked = [(prompt, fields) for fields in cases(alone(model, prompt, {})) if "min_length" not in fields]
    unchunked = dict(allow_block_sharing=False, max_batch_tokens=16_384)
    assert ask(batching, asked, NEW, **unchunked) == [alone(model, *each) for each in asked]
    plain = ask(batching, asked[:1] * 2, NEW)[0]
    shared = ask(batching, [asked[0], *asked], NEW)
    assert shared[0] == plain and len({tuple(answer) for answer in shared}) > 8


def test_preempted_requests_keep_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """A soft reset turns generated tokens into a prompt: penalties still tell them apart."""
    loads: list[tuple[int, int]] = []
    real = History.load

    def noted(self: History, slot: int, tokens: Tokens, prompt: int, *args: Any) -> None:
        loads.append((len(tokens), prompt))
        real(self, slot, tokens, prompt, *args)

    monkeypatch.setattr(History, "load", noted)
    model, inputs = model_of(), prompts([100] * 6, seed=3)
    fields = {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "min_new_tokens": 30, "top_logprobs": 2}
    with Session(model, num_blocks=88, max_batch_tokens=700, safety_margin=0.0, allow_block_sharing=False) as session:
        session.run(inputs[:1], greedy(1))
        resets = session.recorded_waiting()
        manager = session.manager
        manager.start()
        names = [manager.add_request(prompt, max_new_tokens=36, **fields) for prompt in inputs]
        found = outputs_of(manager, len(names))
        manager.stop(keep_for_next_session=True)
        assert len(resets) > len(names), "some were preempted"
        assert {prompt for _, prompt in loads} == {100} and max(loads) > (101, 0), "read again with their answers"
        calm = [resets.count(name) == 1 for name in names]
        for name, prompt, undisturbed in zip(names, inputs, calm, strict=True):
            output = found[name]
            assert len(output.generated_tokens) == 36 == len(output.top_logprobs)
            expected = alone(model, prompt, fields | {"max_new_tokens": 36}, session.oracle)
            assert output.generated_tokens == expected or not undisturbed
            # What is read again is exact rather than packed; with 136 tokens one block at most differs.
            assert output.generated_tokens[:20] == expected[:20]


def test_requests_whose_pages_waited_on_the_cpu_keep_their_options(
    offloaded: list[set[str]], ways: dict[str, Any]
) -> None:
    """An asynchronous engine drops the token that was computed meanwhile, and its slot has counted it."""
    model, inputs = model_of(), prompts([100] * 6, seed=3)
    changes = dict(num_blocks=88, max_batch_tokens=700, safety_margin=0.0, cpu_offload_space=0.01) | ways
    fields = {"repetition_penalty": 1.2, "frequency_penalty": 0.7}
    with Session(model, **changes) as session:
        session.run(inputs[:1], greedy(1))
        session.manager.start()
        names = [session.manager.add_request(prompt, max_new_tokens=36, **fields) for prompt in inputs]
        found = outputs_of(session.manager, len(names))
        session.manager.stop(keep_for_next_session=True)
        assert any(offloaded)
        processors = session.manager.batch_processor.logit_processor
        for _, slot, position in processors.slots.values():
            assert (processors.history.counts[slot] >> 1).sum() == position - 100, "each token is counted once"
        expected = [alone(model, prompt, fields | {"max_new_tokens": 36}, session.oracle) for prompt in inputs]
    assert [found[name].generated_tokens for name in names] == expected


@pytest.mark.parametrize("length", [60, 1])
def test_forks_have_the_options_of_their_request(batching: TurboQuantBatching, length: int) -> None:
    (prompt,) = prompts([length])
    fields = {"repetition_penalty": 1.7, "frequency_penalty": 0.5}
    with serve(batching, NEW) as manager:
        name = manager.add_request(prompt, num_return_sequences=3, **fields)
        single = manager.add_request(prompt)
        found = outputs_of(manager, 4)
    expected = alone(batching.model, prompt, fields)
    names = [name, f"{name}__child#0", f"{name}__child#1"]
    assert [found[each].generated_tokens for each in names] == [expected] * 3
    assert found[single].generated_tokens == alone(batching.model, prompt, {})


def test_a_stop_string_may_end_in_a_character_of_several_tokens() -> None:
    """Here a token is a byte; the beginning of a character decodes to a sign of its own."""
    tokenizer = SimpleNamespace(decode=lambda ids: bytes(ids).decode(errors="replace"))
    tokens = list("bc€de".encode())
    for stop, end in (("€", 5), ("c€", 5), ("€d", 6), ("c", 2)):
        ends = [n for n in range(1, len(tokens) + 1) if Detokenizer(tokenizer).completes(tokens[:n], (stop,))]
        assert ends == [end]


def test_a_cancelled_request_leaves_no_trace_in_its_slot(batching: TurboQuantBatching) -> None:
    first, second = prompts([60, 50])
    with serve(batching, NEW, max_requests_per_batch=1) as manager:
        name = manager.add_request(first, max_new_tokens=500, streaming=True, repetition_penalty=1.7)
        for i, _ in enumerate(manager.request_id_iter(name)):
            if i == 3:
                manager.cancel_request(name)
                break
        again = manager.add_request(second, "again", repetition_penalty=1.7, bad_words_ids=[[3]])
        while (result := manager.get_result()).request_id != again or not result.is_finished():
            pass
    expected = alone(batching.model, second, {"repetition_penalty": 1.7, "bad_words_ids": [[3]]})
    assert result.generated_tokens == expected


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"temperature": 1.4, "top_k": 20},
    {"top_p": 0.7},
    {"min_p": 0.05, "temperature": 1.3},
    {"top_k": 30, "top_p": 0.8, "min_p": 0.02, "temperature": 0.9, "repetition_penalty": 1.3},
]


@pytest.mark.parametrize("fields", SAMPLED, ids=str)
def test_a_sampled_answer_is_that_of_generate_with_the_same_seed(
    fields: dict[str, Any], batching: TurboQuantBatching
) -> None:
    """Of one request: `generate()` and a batch draw from one generator of torch."""
    model, (prompt,) = batching.model, prompts([80])
    fields = {"do_sample": True, "top_k": 0} | fields
    torch.manual_seed(5)
    expected = alone(model, prompt, fields)
    with serve(batching, NEW) as manager:
        torch.manual_seed(5)
        manager.add_request(prompt, **fields)
        found = outputs_of(manager, 1)
    assert [each.generated_tokens for each in found.values()] == [expected] != [alone(model, prompt, {})]


def test_log_probabilities_of_chosen_and_most_likely_tokens(ways: dict[str, Any], batching: TurboQuantBatching) -> None:
    model, (prompt, other) = batching.model, prompts([90, 40])
    with serve(batching, 6, **ways) as manager:
        names = [manager.add_request(prompt, top_logprobs=4, repetition_penalty=1.7), manager.add_request(other)]
        names.append(manager.add_request(prompt, top_logprobs=0))
        found = outputs_of(manager, len(names))
    output = found[names[0]]
    assert found[names[1]].top_logprobs is None
    assert all(each.top == {} for each in found[names[2]].top_logprobs)
    assert output.generated_tokens == alone(model, prompt, {"repetition_penalty": 1.7})[:6]
    text = torch.tensor([prompt + output.generated_tokens])
    with torch.no_grad():
        expected = model(text).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    for each, token, row in zip(output.top_logprobs, output.generated_tokens, expected, strict=True):
        assert each.logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert list(each.top) == row.topk(4).indices.tolist()
        assert list(each.top.values()) == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)


class Letters:
    """A tokenizer of one or two letters a token."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(97 + token % 26) * (1 + token % 2) for token in tokens)


def test_an_answer_ends_with_its_stop_string() -> None:
    batching, (prompt,) = TurboQuantBatching(model_of(), balance=False, tokenizer=Letters()), prompts([40])
    whole = alone(batching.model, prompt, {})
    text = [Letters().decode(whole[: i + 1]) for i in range(NEW)]
    for stop in (text[4][-3:], text[0][-1:], "9"):
        end = next((i for i, each in enumerate(text) if stop in each), NEW - 1)
        assert ask(batching, [(prompt, {"stop_strings": ["#", stop]})], NEW) == [whole[: end + 1]]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"typo": 1}, "A request has no option typo. Its options are bad_words_ids, begin_suppress"),
        ({"use_cache": True}, "A request has no option use_cache"),
        ({"num_beams": 4}, "`num_beams` is 4, and requests of a batch do not apply it. Set it to 1"),
        ({"max_new_tokens": True}, "`max_new_tokens` is True; it must be a whole number, 1 or more"),
        ({"stop_strings": "x"}, r"`stop_strings` is \('x',\), and there is no tokenizer"),
        ({"top_logprobs": 21}, "`top_logprobs` is 21; it must be a whole number, 0 to 20"),
        ({"generation_config": {"max_new_tokens": 3}}, "`generation_config` is .*; it must be a `GenerationConfig`"),
    ],
    ids=str,
)
def test_a_request_with_an_option_that_is_not_applied_is_refused_at_once(
    fields: dict[str, Any], words: str, batching: TurboQuantBatching
) -> None:
    with serve(batching, 3) as manager:
        with pytest.raises(ValueError, match=words):
            manager.add_request([1, 2, 3], **fields)
        name = manager.add_request([1, 2, 3])
        assert outputs_of(manager, 1)[name].error is None, "others are answered"


@pytest.fixture
def own_config(batching: TurboQuantBatching) -> Iterator[GenerationConfig]:
    before = batching.model.generation_config
    batching.model.generation_config = GenerationConfig(pad_token_id=0)
    yield batching.model.generation_config
    batching.model.generation_config = before


def test_penalties_of_the_models_own_generation_config_are_applied(
    batching: TurboQuantBatching, own_config: GenerationConfig
) -> None:
    """Qwen2.5 ships one."""
    inputs = prompts([60, 100])
    expected = [alone(batching.model, prompt, {"repetition_penalty": 1.5}) for prompt in inputs]
    own_config.repetition_penalty = 1.5
    for given in (None, GenerationConfig(max_new_tokens=NEW)):
        outputs = batching.generate_batch(inputs, given, options(), max_new_tokens=NEW)
        assert [output.generated_tokens for output in outputs.values()] == expected
    own_config.no_repeat_ngram_size = 2
    with pytest.raises(ValueError, match="`no_repeat_ngram_size` is 2, .*Set it to 0"):
        batching.generate_batch(inputs, None, options(), max_new_tokens=NEW)


def test_a_step_of_greedy_requests_without_options_runs_no_processor(
    batching: TurboQuantBatching, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[Features] = []
    real = BatchOptions.choose
    monkeypatch.setattr(BatchOptions, "choose", lambda *args: (chosen.append(args[3]), real(*args))[1])
    (prompt,) = prompts([40])
    ask(batching, [(prompt, {}), (prompt, {"top_k": 5, "temperature": 3.0})], NEW)
    assert chosen == []
    ask(batching, [(prompt, {"repetition_penalty": 1.2})], NEW)
    assert set(chosen) == {Features(history=True)}


def test_other_options_compile_no_step_again() -> None:
    model, inputs = model_of(), prompts([40, 60, 90])
    config = CompileConfig(backend="eager", mode=None, fullgraph=True, dynamic=True)
    fields = [{"repetition_penalty": 1.5}, {"do_sample": True, "top_k": 1}, {"frequency_penalty": 0.7}]
    torch._dynamo.reset()
    with Session(model, decode_compile_config=config) as session:
        session.run(inputs, greedy(6))
        torch._dynamo.utils.counters.clear()
        session.manager.start()
        names = [session.manager.add_request(p, max_new_tokens=6, **f) for p, f in zip(inputs, fields, strict=True)]
        found = outputs_of(session.manager, len(names))
        session.manager.stop(keep_for_next_session=True)
        assert not torch._dynamo.utils.counters["stats"] and not torch._dynamo.utils.counters["graph_break"]
        expected = [alone(model, p, f, session.oracle)[:6] for p, f in zip(inputs, fields, strict=True)]
    assert [found[name].generated_tokens for name in names] == expected


def test_steps_have_six_combinations_of_processors() -> None:
    kinds = [
        RequestOptions(), RequestOptions(repetition_penalty=1.1), RequestOptions(do_sample=True),
        RequestOptions(do_sample=True, top_k=4), RequestOptions(do_sample=True, seed=4), RequestOptions(top_logprobs=1),
    ]  # fmt: skip
    found = {Features.of(list(batch)) for n in range(4) for batch in itertools.combinations(kinds, n)}
    assert len(found) == 6
