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

from .grammars import Grammar, grammar_of

MOST_LOGPROBS = 20
"""Most likely tokens per position that a request can ask for, as in OpenAI's API."""
MOST_BIASES = 1024
"""Tokens and sequences with a bias per request: banned and suppressed ones count, too."""
LARGEST_BIAS = 1e6
"""Largest bias or penalty that is added to a logit; larger ones overflow."""
MOST_STOPS, LONGEST_STOP = 64, 1024
"""Stop strings of a request, and bytes of the longest. As many of the last tokens are decoded at each step."""
MOST_PREFIX = 7
"""Tokens before the last one of a sequence with a bias."""
ALWAYS = 2**31 - 1
"""`Bias.until` of a bias for the whole answer."""


class Rule(NamedTuple):
    """How a field is treated."""

    kind: str
    """"applied", "neutral" (changes no answer) or "refused"."""
    note: str
    """Effect of the field, or the reason why it has none or is refused."""
    neutral: tuple[Any, ...] = ()
    """Values of a refused field that change no answer, besides `None`."""


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
NEUTRAL = {
    "there are no beams": "early_stopping length_penalty",
    "changes how fast `generate()` is, never an answer": "low_memory",
    "moves all logits by one number": "renormalize_logits",
    "outputs are objects": "return_dict_in_generate",
    "pages are the cache": "use_cache cache_implementation cache_config max_cache_len",
    "`max_batch_tokens` of the engine says it": "prefill_chunk_size",
    "the engine's options say it": "compile_config disable_compile",
    "nothing is padded": "pad_token_id",
    "prompts are read as they are": "bos_token_id",
    "of encoder-decoders only": "decoder_start_token_id",
    "no drafts of tokens are made": "use_mtp num_assistant_tokens num_assistant_tokens_schedule speculation_type "
    "assistant_confidence_threshold assistant_early_exit assistant_lookbehind target_lookbehind "
    "prompt_lookup_num_tokens max_matching_ngram_size",
    "not an option": "_from_model_config transformers_version",
}
FIELDS = {name: Rule("applied", note) for name, note in APPLIED.items()}
FIELDS |= {name: Rule("neutral", note) for note, names in NEUTRAL.items() for name in names.split()}
"""Fields of `GenerationConfig` that are applied or change no answer. All others are refused."""
OF_SAMPLING = ("typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")
"""Refused fields that change sampled answers only."""
UNCHANGED = dict.fromkeys(
    "num_beams num_beam_groups guidance_scale encoder_repetition_penalty typical_p".split(), 1
) | dict.fromkeys(
    "diversity_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size penalty_alpha epsilon_cutoff eta_cutoff "
    "assistant_ensemble_weight remove_invalid_values token_healing is_assistant output_attentions "
    "output_hidden_states output_scores output_logits".split(),
    0,
)
"""Value of a refused field that changes no answer, besides `None`."""
OF_REQUESTS = {
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
REQUEST_FIELDS = {name: Rule("applied", note) for name, note in OF_REQUESTS.items()}
"""Options of a request that no generation config has."""


class Bias(NamedTuple):
    """A number that is added to the logit of the last of `tokens` after the tokens before."""

    tokens: tuple[int, ...]
    value: float
    until: int = ALWAYS
    """Number of generated tokens from which the bias no longer applies."""


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
    def needs(self) -> frozenset[str]:
        """Processors of the request: "history", "sampled", "truncated" (`top_k`, `top_p`, `min_p`), "details" (a seed
        or log-probabilities), "grammar"."""
        found = {
            "history": self.has_history,
            "sampled": self.do_sample,
            "truncated": self.do_sample and (self.top_k, self.top_p, self.min_p) != (0, 1, 0),
            "details": self.top_logprobs is not None or (self.do_sample and self.seed is not None),
            "grammar": self.grammar is not None,
        }
        return frozenset(name for name, needed in found.items() if needed)

    @cached_property
    def numbers(self) -> tuple[float, ...]:
        """Options that are not whole numbers, in the order of `tq_hf.batching.processors.Rows`."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return self.temperature, self.top_p, self.min_p, *penalties


def with_defaults(config: GenerationConfig, defaults: GenerationConfig) -> GenerationConfig:
    """Copy a generation config, with unset fields from `defaults`, as `generate()` has them from the model. Raise
    `ValueError` for a config of another type."""
    if not isinstance(config, GenerationConfig):
        raise ValueError(f"`generation_config` is {shown(config)}; it must be a `GenerationConfig`.")
    merged = deepcopy(config)
    for name, value in vars(defaults).items():
        # transformers counts the answers that it waits for before they are merged.
        if name != "num_return_sequences" and getattr(merged, name, None) is None:
            setattr(merged, name, deepcopy(value))
    return merged


def with_options(config: GenerationConfig, options: dict[str, Any]) -> tuple[GenerationConfig, dict[str, Any]]:
    """Split options of a request into a copy of `config` with the options that it has, and the others. Raise
    `ValueError` for an option that has no effect here, or does not exist."""
    neutral = {name for name, rule in FIELDS.items() if rule.kind == "neutral"}
    known = (vars(GenerationConfig()).keys() | FIELDS.keys() | UNCHANGED.keys()) - neutral
    if unknown := sorted(options.keys() - known - REQUEST_FIELDS.keys()):
        names = sorted((FIELDS.keys() - neutral) | REQUEST_FIELDS.keys())
        raise ValueError(f"A request has no option {', '.join(unknown)}. Its options are {', '.join(names)}.")
    if options.keys() & known:
        config = deepcopy(config)
        for name in options.keys() & known:
            setattr(config, name, options[name])
    return config, {name: value for name, value in options.items() if name in REQUEST_FIELDS}


def check_refused(config: GenerationConfig) -> None:
    """Raise `ValueError` if a generation config has a field that would change an answer and is not applied."""
    for name in sorted((vars(GenerationConfig()).keys() | UNCHANGED.keys()) - FIELDS.keys()):
        value, unchanged = getattr(config, name, None), UNCHANGED.get(name)
        if value is None or (name in OF_SAMPLING and not config.do_sample):
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


def _number(name: str, value: Any, least: float, most: float) -> float:
    """Return an option as a float. Raise `ValueError` unless it is a number within limits."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ValueError(f"`{name}` is {shown(value)}; it must be a number between {least:g} and {most:g}.")
    return float(value)


def _bias(name: str, value: Any) -> float:
    """Return a bias. Minus infinity bans a token. Raise `ValueError` if it is not a number or too large."""
    return value if value == -math.inf else _number(name, value, -LARGEST_BIAS, LARGEST_BIAS)


def whole_number(name: str, value: Any, least: int, most: int = 2**31 - 1) -> int:
    """Return an option. Raise `ValueError` unless it is a whole number within limits."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        limits = f"{least} or more" if most == 2**31 - 1 else f"{least} to {most}"
        raise ValueError(f"`{name}` is {shown(value)}; it must be a whole number, {limits}.")
    return value


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


def _biases(
    config: GenerationConfig, extra: dict[str, Any], eos: tuple[int, ...], least: int, vocabulary: int
) -> tuple[Bias, ...]:
    """All biases of a request; -inf bans a token.

    Args:
        config: Generation config of the request.
        extra: Options of `REQUEST_FIELDS`.
        eos: Tokens that end the answer.
        least: Number of tokens that the answer has at least.
        vocabulary: Number of tokens of the model.

    Raises:
        ValueError: A bias is not a number, a token does not exist, or limits are exceeded.
    """

    def listed(name: str, ids: Any) -> tuple[int, ...]:
        tokens = token_ids(name, ids, vocabulary)
        if isinstance(ids, int) or not 0 < len(tokens) == len(list(ids)) <= MOST_PREFIX + 1:
            raise ValueError(f"`{name}` has {shown(ids)}; it must be a list of 1 to {MOST_PREFIX + 1} token ids.")
        return tokens

    def banned(ids: Iterable[int], until: int = ALWAYS) -> list[Bias]:
        return [Bias((token,), -math.inf, until) for token in dict.fromkeys(ids)]

    found = []
    sequences = getattr(config, "sequence_bias", None) or {}
    pairs = list(sequences.items()) if isinstance(sequences, dict) else sequences
    if not isinstance(pairs, (list, tuple)) or not all(isinstance(x, (list, tuple)) and len(x) == 2 for x in pairs):
        raise ValueError(f"`sequence_bias` is {shown(sequences)}; it must be a list of pairs: token ids and a number.")
    for ids, value in pairs:
        found.append(Bias(listed("sequence_bias", ids), _bias("sequence_bias", value)))
    if not isinstance(biases := extra.get("logit_bias") or {}, dict):
        raise ValueError(f"`logit_bias` is {shown(biases)}; it must be a dict of token ids and numbers.")
    for token, value in biases.items():
        digits = int(token) if isinstance(token, str) and token.isdecimal() and len(token) < 20 else token
        found.append(Bias(listed("logit_bias", [digits]), _bias("logit_bias", value)))
    if not isinstance(words := getattr(config, "bad_words_ids", None) or (), (list, tuple)):
        raise ValueError(f"`bad_words_ids` is {shown(words)}; it must be a list of lists of token ids.")
    banned_words = [listed("bad_words_ids", ids) for ids in words]
    found += [Bias(ids, -math.inf) for ids in banned_words if ids not in {(token,) for token in eos}]
    found += banned(token_ids("suppress_tokens", getattr(config, "suppress_tokens", None), vocabulary))
    found += banned(token_ids("begin_suppress_tokens", getattr(config, "begin_suppress_tokens", None), vocabulary), 1)
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
    config: GenerationConfig, extra: dict[str, Any] | None = None, *, prompt: int, vocabulary: int
) -> RequestOptions:
    """Return the options of a request.

    Args:
        config: Generation config of the request.
        extra: Options of `REQUEST_FIELDS`.
        prompt: Number of tokens of the prompt.
        vocabulary: Number of tokens of the model.

    Raises:
        ValueError: An option would change the answer and is not applied, or is outside its range.
    """
    check_refused(config)
    extra = extra or {}

    def given(name: str, default: Any) -> Any:
        value = extra.get(name) if name in REQUEST_FIELDS else getattr(config, name, None)
        return default if value is None else value

    eos = token_ids("eos_token_id", given("eos_token_id", None), vocabulary)
    eos += token_ids("stop_token_ids", given("stop_token_ids", None), vocabulary)
    least = given("min_new_tokens", max(0, whole_number("min_length", given("min_length", 0), 0) - prompt))
    most = given("max_new_tokens", None)
    if most is None and (length := given("max_length", None)) is not None:
        if (most := whole_number("max_length", length, 1) - prompt) < 1:
            raise ValueError(
                f"`max_length` is {length}, and the prompt has {prompt} tokens already. Say `max_new_tokens`."
            )
    stops = _stop_strings(given("stop_strings", ()))
    samples, seed, logprobs = given("do_sample", False), given("seed", None), given("top_logprobs", None)
    if not isinstance(samples, bool):
        raise ValueError(f"`do_sample` is {shown(samples)}; it must be true or false.")
    grammar = grammar_of(given("response_format", None), given("structured_outputs", None))
    if grammar is not None and not eos:
        raise ValueError("An answer in a form needs a token that ends it. Set `eos_token_id`.")
    return RequestOptions(
        do_sample=samples,
        temperature=_number("temperature", given("temperature", 1.0), 1e-6, 1e6) if samples else 1.0,
        top_k=whole_number("top_k", given("top_k", 0), 0) if samples else 0,
        top_p=_number("top_p", given("top_p", 1.0), 0, 1) if samples else 1.0,
        min_p=_number("min_p", given("min_p", 0.0), 0, 1) if samples else 0.0,
        seed=None if seed is None else whole_number("seed", seed, -(2**63), 2**64 - 1),
        repetition_penalty=_number("repetition_penalty", given("repetition_penalty", 1.0), 0.01, 100),
        presence_penalty=_number("presence_penalty", given("presence_penalty", 0.0), -LARGEST_BIAS, LARGEST_BIAS),
        frequency_penalty=_number("frequency_penalty", given("frequency_penalty", 0.0), -LARGEST_BIAS, LARGEST_BIAS),
        biases=_biases(config, extra, eos, whole_number("min_new_tokens", least, 0), vocabulary),
        stop_strings=stops,
        top_logprobs=None if logprobs is None else whole_number("top_logprobs", logprobs, 0, MOST_LOGPROBS),
        num_return_sequences=whole_number("num_return_sequences", given("num_return_sequences", 1), 1),
        max_new_tokens=None if most is None else whole_number("max_new_tokens", most, 1),
        eos_token_ids=eos,
        grammar=grammar,
    )
