"""Options of a request: each field of a generation config is applied, changes no answer, or is refused."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from transformers import GenerationConfig

from ..config import FOLLOWING, number_of_positions, rotary_embeddings
from .grammars import Grammar, grammar_of

INSTEAD = "Use `generate()` with a `TurboQuantCache`."
MOST_LOGPROBS = 20
"""Most likely tokens per position that a request can ask for, as in OpenAI's API."""
MOST_BIASES = 1024
"""Tokens and sequences with a bias per request: banned and suppressed ones count, too."""
LARGEST_BIAS = 1e6
"""Largest bias or penalty that is added to a logit; larger ones overflow."""
MOST_STOPS, LONGEST_STOP = 64, 1024
"""Stop strings of a request, and bytes of the longest. As many of the last tokens are decoded at each step."""
MOST = 2**31 - 1
"""Largest whole number of an option without a limit of its own."""
MOST_PREFIX = 7
"""Tokens before the last one of a sequence with a bias."""


APPLIED = {
    "max_new_tokens": "most tokens of an answer; unset: until a stop, the model's last position",
    "max_length": "most tokens of prompt and answer, without `max_new_tokens`",
    "min_new_tokens": "no end-of-sequence token before",
    "min_length": "the same, with the prompt counted, without `min_new_tokens`",
    "eos_token_id": "one or several tokens that end an answer",
    "stop_strings": f"up to {MOST_STOPS} texts that end an answer; needs `tokenizer`",
    "do_sample": "greedy, or sampled with the fields below",
    "temperature": "if sampled",
    "top_k": "if sampled; unset: all tokens, where `generate()` takes 50",
    "top_p": "if sampled",
    "min_p": "if sampled",
    "repetition_penalty": "over prompt and answer",
    "sequence_bias": f"sequences of up to {MOST_PREFIX + 1} tokens",
    "bad_words_ids": f"sequences of up to {MOST_PREFIX + 1} tokens",
    "suppress_tokens": "never chosen",
    "begin_suppress_tokens": "at the first token",
    "num_return_sequences": "answers that share the pages of their prompt, which is read once",
}
"""Fields of `GenerationConfig` that are applied, and how."""
NEUTRAL = frozenset(
    "early_stopping length_penalty low_memory renormalize_logits return_dict_in_generate use_cache max_cache_len "
    "cache_implementation cache_config prefill_chunk_size compile_config disable_compile pad_token_id bos_token_id "
    "decoder_start_token_id use_mtp num_assistant_tokens num_assistant_tokens_schedule speculation_type "
    "assistant_confidence_threshold assistant_early_exit assistant_lookbehind target_lookbehind "
    "prompt_lookup_num_tokens max_matching_ngram_size _from_model_config transformers_version".split()
)
"""Fields of `GenerationConfig` that change no answer here. All others are refused."""
OF_SAMPLING = frozenset("temperature top_k top_p min_p typical_p epsilon_cutoff eta_cutoff top_h".split())
"""Fields that change sampled answers only."""
UNCHANGED = dict.fromkeys(
    "num_beams num_beam_groups guidance_scale encoder_repetition_penalty typical_p".split(), 1
) | dict.fromkeys(
    "diversity_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size penalty_alpha epsilon_cutoff eta_cutoff "
    "assistant_ensemble_weight remove_invalid_values token_healing is_assistant output_attentions "
    "output_hidden_states output_scores output_logits".split(),
    0,
)
"""Value of a refused field that changes no answer, besides `None`."""
LIMITS: dict[str, tuple[Any, Any]] = {
    "temperature": (1e-6, 1e6),
    **dict.fromkeys(("top_p", "min_p"), (0.0, 1.0)),
    "repetition_penalty": (0.01, 100.0),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (-LARGEST_BIAS, LARGEST_BIAS)),
    **dict.fromkeys(("top_k", "min_new_tokens", "min_length"), (0, MOST)),
    **dict.fromkeys(("max_new_tokens", "max_length", "num_return_sequences"), (1, MOST)),
    "seed": (-(2**63), 2**64 - 1),
    "top_logprobs": (0, MOST_LOGPROBS),
}
"""Smallest and largest value of an option that is a number: a whole number, if the limits are."""
REQUEST_FIELDS = {
    "seed": "no other request of the batch changes what is drawn; answer `i` of several has `seed + i`. A prompt that "
    "is read in parts, begins with a shared prefix or gets several answers has slightly other logits: part of it is "
    "read packed",
    "presence_penalty": "over the answer",
    "frequency_penalty": "over the answer",
    "logit_bias": "a dict of token ids and numbers",
    "stop_token_ids": "tokens that end an answer besides `eos_token_id`",
    "top_logprobs": f"0 to {MOST_LOGPROBS}: log-probabilities of the model, before other options, of the chosen token "
    "and the most likely ones, in `top_logprobs` of the output",
    "response_format": "as in OpenAI's API: `json_object`, or `json_schema`; needs `tokenizer` and `tq-hf[grammar]`",
    "structured_outputs": "as in vLLM: one of `json`, `regex`, `choice`, `grammar`, `json_object`; likewise",
}
"""Options of a request that no generation config has, and how they are applied."""


class Bias(NamedTuple):
    """A number that is added to the logit of the last of `tokens` after the tokens before."""

    tokens: tuple[int, ...]
    value: float
    until: int = MOST
    """Number of generated tokens from which the bias no longer applies."""


class Features(NamedTuple):
    """Processors that a step runs; each combination has captured graphs of its own."""

    history: bool = False
    """Penalties and biases."""
    sampled: bool = False
    truncated: bool = False
    """`top_k`, `top_p` or `min_p`."""
    details: bool = False
    """Seeds or log-probabilities."""
    grammar: bool = False
    """Masks, written while the device computes logits: the only feature of the graph then."""

    @classmethod
    def of(cls, options: list[RequestOptions]) -> Features:
        """Features of a batch. Rare ones turn others on, so that graphs are captured for six combinations only."""
        found = [cls(), *(each.features for each in options)]
        history, sampled, truncated, details, grammar = map(any, zip(*found, strict=True))
        if details:
            return cls(True, True, True, True, grammar)
        return cls(history, sampled, sampled and (history or truncated), False, grammar)


@dataclass(frozen=True)
class RequestOptions:
    """Options of a request that change its answer, with values that change nothing as defaults."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    """0 for all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    biases: tuple[Bias, ...] = ()
    stop_strings: tuple[str, ...] = ()
    top_logprobs: int | None = None
    num_return_sequences: int = 1
    max_new_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None

    def __deepcopy__(self, memo: Any) -> RequestOptions:
        return self  # forks and preempted requests copy their options

    @cached_property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @cached_property
    def has_history(self) -> bool:
        """Whether logits depend on earlier tokens, or on their number."""
        return self.has_penalties or bool(self.biases)

    @cached_property
    def features(self) -> Features:
        """Processors of the request alone."""
        truncated = self.do_sample and (self.top_k, self.top_p, self.min_p) != (0, 1, 0)
        details = self.top_logprobs is not None or (self.do_sample and self.seed is not None)
        return Features(self.has_history, self.do_sample, truncated, details, self.grammar is not None)

    @cached_property
    def numbers(self) -> tuple[float, ...]:
        """Options that are not whole numbers, in the order of `tq_hf.batching.processors.Rows`."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return self.temperature, self.top_p, self.min_p, *penalties


def with_defaults(config: GenerationConfig | None, defaults: GenerationConfig) -> GenerationConfig:
    """Copy a generation config, with unset fields from `defaults`, as `generate()` has them from the model. Raise
    `ValueError` for a config of another type."""
    if not isinstance(config, GenerationConfig | None):
        raise ValueError(f"`generation_config` is {shown(config)}; it must be a `GenerationConfig`.")
    merged = deepcopy(defaults if config is None else config)
    for name, value in vars(defaults).items():
        # transformers counts the answers that it waits for before they are merged.
        if name != "num_return_sequences" and getattr(merged, name, None) is None:
            setattr(merged, name, deepcopy(value))
    return merged


def check_refused(fields: Mapping[str, Any]) -> None:
    """Raise `ValueError` if fields of a generation config would change an answer and are not applied."""
    for name in sorted((vars(GenerationConfig()).keys() | UNCHANGED.keys()) - APPLIED.keys() - NEUTRAL):
        value, unchanged = fields.get(name), UNCHANGED.get(name)
        if value is None or (name in OF_SAMPLING and not fields.get("do_sample")):
            continue
        if unchanged is None or not isinstance(value, (int, float)) or value != unchanged:
            instead = "Leave it out" if unchanged is None else f"Set it to {unchanged}"
            raise ValueError(
                f"`{name}` is {shown(value)}, and requests of a batch do not apply it. {instead}, or use `generate()` "
                "with a `TurboQuantCache`."
            )


def shown(value: Any) -> str:
    """Text of a value in a message, shortened. Python has no text for whole numbers of thousands of digits."""
    try:
        text = repr(value)
    except ValueError:
        return "a value with thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def number(name: str, value: Any, least: Any, most: Any = MOST) -> Any:
    """Return an option. Raise `ValueError` unless it is a number within limits, a whole one if the limits are."""
    kinds = (int, float) if isinstance(least, float) else int
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        limits = f"{least} or more, and below 2**31" if most == MOST else f"{least} to {most}"
        limits = f"number between {least:g} and {most:g}" if isinstance(least, float) else f"whole number, {limits}"
        raise ValueError(f"`{name}` is {shown(value)}; it must be a {limits}.")
    return float(value) if isinstance(least, float) else value


def _bias(name: str, value: Any) -> float:
    """Return a bias. Minus infinity bans a token. Raise `ValueError` if it is not a number or too large."""
    return value if value == -math.inf else number(name, value, -LARGEST_BIAS, LARGEST_BIAS)


def token_ids(name: str, value: Any, vocabulary: int) -> tuple[int, ...]:
    """Token ids of an option: a number, or a list or tensor of numbers. Negative ones stand for no token. Raise
    `ValueError` if an id is not a whole number of the vocabulary."""
    if value is None:
        return ()
    value = value.tolist() if hasattr(value, "tolist") else value
    ids = list(value) if isinstance(value, (Sequence, Set)) else [value]
    for each in ids:
        if isinstance(each, bool) or not isinstance(each, int) or each >= vocabulary:
            raise ValueError(f"`{name}` has {shown(each)}; the model's tokens are whole numbers below {vocabulary:,}.")
    return tuple(each for each in ids if each >= 0)


def prompt_ids(input_ids: Any, vocabulary: int) -> list[int]:
    """Token ids of a prompt as a list. Raise `ValueError` unless they are whole numbers of the vocabulary."""
    try:
        if isinstance(input_ids, (str, bytes, bytearray, Set, Mapping)):
            raise TypeError("it has no tokens in an order")
        given = input_ids.tolist() if hasattr(input_ids, "tolist") else list(input_ids)
        if any(type(each) is not int and "bool" in str(getattr(each, "dtype", type(each))) for each in given):
            raise TypeError("it is a mask")
        ids = list(map(operator.index, given))
    except TypeError as error:
        raise ValueError(
            f"A prompt is {shown(input_ids)}; it must be a list of token ids (`tokenizer(text).input_ids`)."
        ) from error
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        wrong = shown(min(ids) if min(ids) < 0 else max(ids))
        raise ValueError(f"A prompt has the token {wrong}; the model's tokens are whole numbers below {vocabulary:,}.")
    return ids


def _biases(given: dict[str, Any], eos: tuple[int, ...], least: int, vocabulary: int) -> tuple[Bias, ...]:
    """All biases of a request; -inf bans a token. The fields of the request that are set are `given`, and its answer
    has `least` tokens before one of `eos`. Raises `ValueError` if a bias is not a number, a token does not exist, or
    limits are exceeded."""

    def listed(name: str, ids: Any) -> tuple[int, ...]:
        tokens = token_ids(name, ids, vocabulary)
        if isinstance(ids, int) or not 0 < len(tokens) == len(list(ids)) <= MOST_PREFIX + 1:
            raise ValueError(f"`{name}` has {shown(ids)}; it must be a list of 1 to {MOST_PREFIX + 1} token ids.")
        return tokens

    def banned(ids: Iterable[int], until: int) -> list[Bias]:
        return [Bias((token,), -math.inf, until) for token in dict.fromkeys(ids)]

    found = []
    sequences = given.get("sequence_bias") or {}
    pairs = list(sequences.items()) if isinstance(sequences, dict) else sequences
    if not isinstance(pairs, (list, tuple)) or not all(isinstance(x, (list, tuple)) and len(x) == 2 for x in pairs):
        raise ValueError(f"`sequence_bias` is {shown(sequences)}; it must be a list of pairs: token ids and a number.")
    for ids, value in pairs:
        found.append(Bias(listed("sequence_bias", ids), _bias("sequence_bias", value)))
    if not isinstance(biases := given.get("logit_bias") or {}, dict):
        raise ValueError(f"`logit_bias` is {shown(biases)}; it must be a dict of token ids and numbers.")
    for token, value in biases.items():
        digits = int(token) if isinstance(token, str) and token.isdecimal() and len(token) < 20 else token
        found.append(Bias(listed("logit_bias", [digits]), _bias("logit_bias", value)))
    if not isinstance(words := given.get("bad_words_ids") or (), (list, tuple)):
        raise ValueError(f"`bad_words_ids` is {shown(words)}; it must be a list of lists of token ids.")
    banned_words = [listed("bad_words_ids", ids) for ids in words]
    found += [Bias(ids, -math.inf) for ids in banned_words if ids not in {(token,) for token in eos}]
    for name, until in (("suppress_tokens", MOST), ("begin_suppress_tokens", 1)):
        found += banned(token_ids(name, given.get(name), vocabulary), until)
    found += banned(eos, least) if least > 0 else []
    if len(found) > MOST_BIASES:
        raise ValueError(
            f"The request has {len(found):,} tokens and sequences with a bias or a ban; at most {MOST_BIASES:,} fit. "
            "Shorten `sequence_bias`, `logit_bias`, `bad_words_ids` or `suppress_tokens`."
        )
    if len({bias.tokens for bias in found if len(bias.tokens) == 1 and bias.value == -math.inf}) >= vocabulary:
        raise ValueError(f"The request bans all {vocabulary:,} tokens of the model. Leave one for the answer.")
    return tuple(found)


def _stop_strings(value: Any) -> tuple[str, ...]:
    """Return stop strings. Raise `ValueError` if they are not texts, cannot be encoded, or are too many or too long."""
    stops = tuple(value) if isinstance(value, (list, tuple, set)) else (value,)
    if not all(isinstance(each, str) and each for each in stops):
        raise ValueError(f"`stop_strings` is {shown(stops)}; it must be a text or a list of texts.")
    encoded = [each.encode(errors="replace") for each in stops]  # a lone surrogate becomes a question mark
    fit = all(len(each) <= LONGEST_STOP and each.decode() == stop for each, stop in zip(encoded, stops, strict=True))
    if len(stops) > MOST_STOPS or not fit:
        raise ValueError(
            f"`stop_strings` is {shown(stops)}; it must be up to {MOST_STOPS} texts of up to {LONGEST_STOP:,} bytes in "
            "UTF-8."
        )
    return stops


def options_of(
    config: GenerationConfig, options: dict[str, Any] | None = None, *, prompt: int, vocabulary: int
) -> RequestOptions:
    """Return the options of a request with a prompt of `prompt` tokens: those of its generation config, replaced by
    `options`, which may also be of `REQUEST_FIELDS`. Raises `ValueError` if an option does not exist, would change the
    answer and is not applied, or is outside its range."""
    options = options or {}
    known = (vars(GenerationConfig()).keys() | UNCHANGED.keys()) - NEUTRAL | REQUEST_FIELDS.keys()
    if unknown := sorted(options.keys() - known):
        names = ", ".join(sorted(APPLIED.keys() | REQUEST_FIELDS.keys()))
        raise ValueError(f"A request has no option {', '.join(unknown)}. Its options are {names}.")
    check_refused(fields := vars(config) | options)
    given = {name: value for name, value in fields.items() if value is not None}
    if not isinstance(samples := given.get("do_sample", False), bool):
        raise ValueError(f"`do_sample` is {shown(samples)}; it must be true or false.")
    unused = ({"max_length"} if "max_new_tokens" in given else set()) | (set() if samples else OF_SAMPLING)
    numbers = {name: number(name, given[name], *LIMITS[name]) for name in LIMITS if name in given.keys() - unused}
    if (most := numbers.pop("max_length", None)) is not None:
        if most <= prompt:
            raise ValueError(
                f"`max_length` is {most}, and the prompt has {prompt} tokens already. Say `max_new_tokens`."
            )
        numbers["max_new_tokens"] = most - prompt
    least = max(0, numbers.pop("min_length", 0) - prompt)
    least = numbers.pop("min_new_tokens", least)
    eos = [token_ids(name, given.get(name), vocabulary) for name in ("eos_token_id", "stop_token_ids")]
    biases = _biases(given, ends := (*eos[0], *eos[1]), least, vocabulary)
    stops = _stop_strings(given.get("stop_strings", ()))
    grammar = grammar_of(given.get("response_format"), given.get("structured_outputs"))
    if grammar is not None and not ends:
        raise ValueError("An answer in a form needs a token that ends it. Set `eos_token_id`.")
    return RequestOptions(
        do_sample=samples, biases=biases, stop_strings=stops, eos_token_ids=ends, grammar=grammar, **numbers
    )


def new_tokens(prompt: int, most: int | None, config: Any) -> int | None:
    """Maximum number of new tokens after a prompt of `prompt` tokens: `most`, or fewer if the model's positions end
    before. Raise `ValueError` if the prompt is longer than the positions."""
    positions = number_of_positions(config)
    if positions is None:
        return most
    if prompt > positions:
        why = ". Shorten it; or raise `max_position_embeddings` of the config, if the model can read more."
        if any(rope.get("rope_type") in FOLLOWING for rope in rotary_embeddings(config)):
            why = f", beyond which its rotary embeddings follow the longest request of a step. Shorten it. {INSTEAD}"
        raise ValueError(f"A prompt of {prompt:,} tokens is longer than the {positions:,} positions of the model{why}")
    left = positions + 1 - prompt  # the last token of an answer needs no position
    return left if most is None else min(most, left)
