"""Fields of requests in OpenAI's format: each is applied, changes no answer, or is refused."""

from __future__ import annotations

import json
from typing import Any

from transformers import GenerationConfig

from ..batching.options import MOST_LOGPROBS, REQUEST_FIELDS, Rule, whole_number

LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
MOST_ANSWERS = 128
"""Answers that a request can ask for, as in OpenAI's API."""


def _applied(note: str = "") -> Rule:
    return Rule("applied", note)


def _neutral(note: str) -> Rule:
    return Rule("neutral", note)


def _refused(note: str, *neutral: Any) -> Rule:
    return Rule("refused", note, neutral)


_CALLER = "about the caller, not the answer"
_HOSTED = "this server keeps no requests"
_TEXT = {"type": "text"}
_SHARED = {
    "model": _applied("the served model only"),
    "stream": _applied(),
    "temperature": _applied("0 is greedy"),
    "top_p": _applied(),
    "seed": _applied("the answer is the same in any batch"),
    "generation_config": _applied("JSON of a generation config; its fields are applied or refused as above"),
    "user": _neutral(_CALLER),
    "stream_options": _neutral("usage is always in the last part"),
}
_GENERATES = {
    "max_tokens": _applied(),
    "stop": _applied("the text ends before it"),
    "frequency_penalty": _applied("over the answer"),
    "presence_penalty": _applied("over the answer"),
    "logit_bias": _applied(),
    "n": _applied(f"up to {MOST_ANSWERS}; the seed of answer `i` is `seed + i`"),
}
_CHATS = {
    "tools": _applied("if the chat template has them"),
    "tool_choice": _refused("the model chooses", "auto"),
    "parallel_tool_calls": _refused("the model may call several tools", True),
    "metadata": _neutral(_CALLER),
    "safety_identifier": _neutral(_CALLER),
    "service_tier": _neutral(_CALLER),
    "store": _neutral("requests are never stored"),
    "prompt_cache_key": _neutral("prompts share pages by themselves"),
    "prompt_cache_options": _neutral("prompts share pages by themselves"),
    "prompt_cache_retention": _neutral("prompts share pages by themselves"),
    "moderation": _refused("answers are not moderated"),
}
ENDPOINTS: dict[str, dict[str, Rule]] = {
    "chat/completions": {
        "messages": _applied("text only"),
        **_SHARED,
        **_GENERATES,
        "max_completion_tokens": _applied(),
        "logprobs": _applied("of the model, before other options"),
        "top_logprobs": _applied(f"0 to {MOST_LOGPROBS}, with `logprobs`"),
        "chat_template_kwargs": _applied("arguments of the chat template"),
        **_CHATS,
        "response_format": _refused("this server answers with free text only", _TEXT),
        "functions": _refused("`tools` has taken their place", []),
        "function_call": _refused("`tools` has taken their place"),
        "audio": _refused("the model writes text only"),
        "modalities": _refused("the model writes text only", ["text"]),
        "prediction": _neutral("changes how fast an answer is, never the answer"),
        "reasoning_effort": _refused("say it to the template, in `chat_template_kwargs`"),
        "verbosity": _refused("the model has no levels of it"),
        "web_search_options": _refused("this server searches nothing"),
    },
    "completions": {
        "prompt": _applied("one text"),
        **_SHARED,
        **_GENERATES,
        "logprobs": _applied(f"0 to {MOST_LOGPROBS}; of the model, before other options"),
        "suffix": _applied("added to the text"),
        "best_of": _refused("answers are not ranked", 1),
        "echo": _refused("the prompt is not repeated", False),
    },
    "responses": {
        "input": _applied("text only"),
        "instructions": _applied(),
        **_SHARED,
        "max_output_tokens": _applied(),
        **_CHATS,
        "text": _refused("this server answers with free text only", {}, {"format": _TEXT}),
        "top_logprobs": _refused("outputs of this endpoint have no log-probabilities", 0),
        "include": _refused("outputs hold text only", []),
        "reasoning": _refused("say it to the template, in `chat_template_kwargs` of chat/completions"),
        "previous_response_id": _refused(_HOSTED),
        "conversation": _refused(_HOSTED),
        "prompt": _refused(_HOSTED),
        "background": _refused(_HOSTED, False),
        "background_options": _refused(_HOSTED),
        "context_management": _refused(_HOSTED),
        "truncation": _refused("prompts are read whole", "disabled"),
        "max_tool_calls": _refused("tools are not called by this server"),
        "access_programs": _refused("tools are not called by this server"),
        "image": _refused("the model writes text only"),
    },
}
"""Each field of OpenAI's requests and of transformers' server, by endpoint."""


def _is_neutral(value: Any, rule: Rule) -> bool:
    """Whether a value of a refused field has no effect."""
    return value is None or any(type(value) is type(each) and value == each for each in rule.neutral)


def check_fields(body: dict[str, Any], endpoint: str, has_tools: bool) -> None:
    """Raise `ValueError` if a request has a field that would change the answer and is not applied.

    Args:
        body: The request.
        endpoint: Key of `ENDPOINTS`.
        has_tools: Whether the chat template of the model renders tools.
    """
    for name, rule in ENDPOINTS[endpoint].items():
        value = body.get(name)
        if rule.kind == "refused" and not _is_neutral(value, rule):
            verb = "asks for" if name in ("response_format", "text") else "is"
            raise ValueError(f"`{name}` {verb} {value!r}, and {rule.note}. Leave it out.")
    for name in LIMITS:
        number = body.get(name)
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ValueError(
                f"`{name}` is {number!r}; it must be a whole number, 1 or more. Leave it out for a default."
            )
    if body.get("tools") and not has_tools:
        raise ValueError("The request has `tools`, and the chat template of this model has no place for them.")
    if (number := body.get("n")) is not None:
        whole_number("n", number, 1, MOST_ANSWERS)
    for name in ("stream", "logprobs") if endpoint == "chat/completions" else ("stream",):
        if not isinstance(body.get(name), (bool, type(None))):
            raise ValueError(f"`{name}` is {body[name]!r}; it must be true or false.")
    for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty"):
        if isinstance(body.get(name), bool) or not isinstance(body.get(name), (int, float, type(None))):
            raise ValueError(f"`{name}` is {body[name]!r}; it must be a number.")
    stops = body.get("stop") or []
    if not all(isinstance(each, str) for each in (stops if isinstance(stops, (list, str)) else [stops])):
        raise ValueError(f"`stop` is {stops!r}; it must be a text or a list of texts.")
    if body.get("top_logprobs") and not body.get("logprobs"):
        raise ValueError(f"`top_logprobs` is {body['top_logprobs']!r} without `logprobs`. Set `logprobs` to true.")
    if not isinstance(body.get("logit_bias"), (dict, type(None))):
        raise ValueError(f"`logit_bias` is {body['logit_bias']!r}; it must be an object of token ids and numbers.")


def fields_of_config(body: dict[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Split the fields of a request's `generation_config` into those of a generation config, `None` without one, and
    options that only a request has.

    Raises:
        ValueError: It is not an object in JSON, or has a field that does not exist.
    """
    text = body.get("generation_config")
    if text is None:
        return None, {}
    fields = json.loads(text) if isinstance(text, str) else text
    if not isinstance(fields, dict):
        raise ValueError(f"`generation_config` is {text!r}; it must be an object in JSON.")
    if unknown := sorted(fields.keys() - vars(GenerationConfig()).keys() - REQUEST_FIELDS.keys()):
        raise ValueError(f"`generation_config` has {', '.join(unknown)}, which does not exist.")
    if (number := fields.get("num_return_sequences")) is not None:
        whole_number("num_return_sequences", number, 1, MOST_ANSWERS)
    extra = {name: value for name, value in fields.items() if name in REQUEST_FIELDS and value is not None}
    return {name: value for name, value in fields.items() if name not in REQUEST_FIELDS}, extra


def options_of_body(body: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return the options of a request that no generation config has, and set those that `config` has.

    Args:
        body: The request in OpenAI's format. A temperature of 0 is greedy. A temperature above 0, top_p or a seed turn
            sampling on, even if the model's generation config is greedy.
        config: Generation config that the server has made of the request.

    Raises:
        ValueError: An option is not a number, or is outside its range.
    """
    temperature, top_p, seed = (body.get(name) for name in ("temperature", "top_p", "seed"))
    if temperature is not None and not 0 <= float(temperature) <= 100:
        raise ValueError(f"`temperature` is {temperature}; it must be between 0 and 100.")
    if top_p is not None and not 0 < float(top_p) <= 1:
        raise ValueError(f"`top_p` is {top_p}; it must be above 0 and at most 1.")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ValueError(f"`seed` is {seed!r}; it must be a whole number.")
    for name in ("presence_penalty", "frequency_penalty"):
        if (penalty := body.get(name)) is not None and not -2 <= float(penalty) <= 2:
            raise ValueError(f"`{name}` is {penalty}; it must be between -2 and 2.")
    if temperature is not None and float(temperature) == 0:
        config.do_sample, config.temperature = False, 1.0
    elif any(value is not None for value in (temperature, top_p, seed)):
        config.do_sample = True
    options = {name: body[name] for name in ("seed", "logit_bias") if body.get(name) is not None}
    for name in ("presence_penalty", "frequency_penalty"):
        if body.get(name) is not None:
            options[name] = float(body[name])
    logprobs = body.get("logprobs")
    if logprobs is not None and logprobs is not False:
        options["top_logprobs"] = (body.get("top_logprobs") or 0) if logprobs is True else logprobs
    return options


OF_BODY = ("seed", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs")
"""Fields that `options_of_body` reads in the place of transformers' server, which takes `frequency_penalty` for another
penalty, and a seed for all requests."""
