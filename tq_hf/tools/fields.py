"""Bodies of requests in OpenAI's format: each field is applied, changes no answer, or is refused in a sentence.

The models below have the fields that are applied, with their types and limits. `OTHERS` lists all other fields of
OpenAI's requests. A field in neither is refused, as OpenAI does.
"""

from __future__ import annotations

from inspect import signature
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import from_json
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..batching.options import FIELDS, MOST_BIASES, MOST_LOGPROBS, REQUEST_FIELDS, Rule

MOST_ANSWERS = 128
"""Answers that a request can ask for, as in OpenAI's API."""
MOST_STOPS, LONGEST_STOP = 4, 256
"""Number of stop strings, as in OpenAI's API, and characters of one. Each token is searched for them."""
MOST_MESSAGES = 4096
MOST_MARKS = 250_000
"""Colons, commas and opening brackets of a body: each makes an object that Python allocates."""
DEFAULT_TOKENS = 1024
"""New tokens of a request that names no limit."""

_ARGUMENTS = {"messages", *signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"kwargs"}
"""Names that a request cannot give to its chat template: arguments of the call, a template among them."""
_WITHOUT_EFFECT = {name for name, rule in FIELDS.items() if rule.kind == "neutral"}
_CALLER = "about the caller, not the answer"
_HOSTED = "this server keeps no requests"
_SHARES = "prompts share pages by themselves"
_TEXT = {"type": "text"}


def _neutral(note: str) -> Rule:
    return Rule("neutral", note)


def _refused(note: str, *neutral: Any) -> Rule:
    return Rule("refused", note, neutral)


_OF_CALLERS = {
    "metadata": _neutral(_CALLER),
    "safety_identifier": _neutral(_CALLER),
    "service_tier": _neutral(_CALLER),
    "store": _neutral("requests are never stored"),
    "prompt_cache_key": _neutral(_SHARES),
    "prompt_cache_options": _neutral(_SHARES),
    "prompt_cache_retention": _neutral(_SHARES),
    "moderation": _refused("answers are not moderated"),
}
OTHERS: dict[str, dict[str, Rule]] = {
    "chat/completions": {
        "user": _neutral(_CALLER),
        **_OF_CALLERS,
        "response_format": _refused("this server answers with free text only", _TEXT),
        "functions": _refused("`tools` has taken their place", []),
        "function_call": _refused("`tools` has taken their place", "none"),
        "audio": _refused("the model writes text only"),
        "modalities": _refused("the model writes text only", ["text"]),
        "prediction": _neutral("changes how fast an answer is, never the answer"),
        "reasoning_effort": _refused("say it to the template, in `chat_template_kwargs`"),
        "verbosity": _refused("the model has no levels of it"),
        "web_search_options": _refused("this server searches nothing"),
    },
    "completions": {
        "user": _neutral(_CALLER),
        "suffix": _refused("the model continues a text and fills no gap", ""),
        "best_of": _refused("answers are not ranked", 1),
        "echo": _refused("the prompt is not repeated", False),
    },
    "responses": {
        "user": _neutral(_CALLER),
        **_OF_CALLERS,
        "stream_options": _neutral("usage is always in the last event"),
        "text": _refused("this server answers with free text only", {}, {"format": _TEXT}),
        "top_logprobs": _refused("outputs of this endpoint have no log-probabilities", 0),
        "include": _refused("outputs hold text only", []),
        "reasoning": _refused("say it to the template, in `chat_template_kwargs` of chat/completions", {}),
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
"""Fields of OpenAI's requests that no model below has, by endpoint."""


def _shown(value: Any) -> str:
    return f"{value!r:.60}"


def _text(content: Any) -> Any:
    """Text of a message: a text, nothing, or parts that are joined."""
    parts = content if isinstance(content, list) else []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise ValueError(
                f"A message has a part of the type {kind!r}, and the model reads `text` only. Leave it out."
            )
        if not isinstance(part.get("text" if kind != "refusal" else kind), str):
            raise ValueError(f"A message has a part of the type {kind!r} without its text.")
    if isinstance(content, list):
        return "".join(part.get("text") or part.get("refusal") or "" for part in parts)
    return "" if content is None else content


def _calls(calls: Any) -> Any:
    """Tool calls of a message, with arguments as objects: templates read their items."""
    read = []
    for call in calls if isinstance(calls, list) else [calls] if calls else []:
        function = (call.get("function") or call) if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        try:
            arguments = from_json(arguments) if isinstance(arguments, str) and arguments else arguments
        except ValueError as error:
            raise ValueError(f"`tool_calls` has arguments that are no object in JSON: {error}.") from None
        if not isinstance(function, dict) or not isinstance(arguments, (str, dict)):
            raise ValueError(
                f"`tool_calls` has {_shown(call)}; it must be a list of objects, each with a `function` that has "
                "`arguments`."
            )
        function = function | {"arguments": arguments or {}}
        read.append(call | {"function": function} if call.get("function") else function)
    return read or None


Text = Annotated[str, BeforeValidator(_text)]


class Message(BaseModel):
    """A message of a chat. Fields that no template reads are dropped."""

    model_config = ConfigDict(strict=True)
    role: str = Field(min_length=1, max_length=64)
    content: Text = ""
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[dict[str, Any]] | None, BeforeValidator(_calls)] = None
    reasoning_content: str | None = None


_MESSAGES = TypeAdapter(Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)])


def _prompts(given: Any) -> list[Any]:
    """Prompts of a request: a text, token ids, or a list of them."""
    prompts = given if isinstance(given, list) and given and type(given[0]) is not int else [given]
    for each in prompts:
        if not isinstance(each, str) and not (isinstance(each, list) and all(type(token) is int for token in each)):
            raise ValueError(
                f"`prompt` has {_shown(each)}; it must be a text or a list of token ids, or a list of them."
            )
    return prompts


def _items(given: Any) -> Any:
    """Items of `input`: a text or the parts of a text are one message."""
    if isinstance(given, list) and given and all(isinstance(each, dict) for each in given):
        is_message = "role" in given[0] or not str(given[0].get("type")).endswith("_text")
        return given if is_message else [{"role": "user", "content": given}]
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    raise ValueError(f"`input` is {_shown(given)}; it must be a text or a list of messages.")


def _biases(given: Any) -> Any:
    """Biases by token id. Their number is checked first."""
    if not isinstance(given, dict):
        return given
    if len(given) > MOST_BIASES:
        raise ValueError(f"`logit_bias` has {len(given):,} tokens; at most {MOST_BIASES:,} fit.")
    if wrong := [token for token in given if not (token.isdecimal() and len(token) < 10)]:
        raise ValueError(f"`logit_bias` has {_shown(wrong[0])}; its names must be token ids.")
    return {int(token): bias for token, bias in given.items()}


def _field(note: str = "", **limits: Any) -> Any:
    return Field(None, description=note, **limits)


_TOKENS = dict(ge=1, lt=2**31)
Tools = Annotated[list[dict[str, Any]], Field(max_length=128, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]


class Body(BaseModel):
    """Fields that all endpoints apply. A field that is `null` is as good as none."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    endpoint: ClassVar[str]
    limits: ClassVar[tuple[str, ...]] = ("max_tokens",)
    """Names of the maximum number of new tokens. The first one that is set counts."""

    model: str | None = _field("the served model only")
    stream: bool | None = _field()
    temperature: float | None = _field("0 is greedy", ge=0, le=100)
    top_p: float | None = _field(gt=0, le=1)
    seed: int | None = _field("the answer is the same in any batch", ge=-(2**63), lt=2**64 - MOST_ANSWERS)
    generation_config: Any = _field("JSON of a generation config; its fields are applied or refused as above")

    @model_validator(mode="after")
    def _check_others(self) -> Body:
        for name, value in (self.model_extra or {}).items():
            rule = OTHERS[self.endpoint].get(name)
            if rule is None:
                raise ValueError(f"`{name:.60}` is no field of {self.endpoint}. Leave it out.")
            neutral = value is None or any(type(value) is type(each) and value == each for each in rule.neutral)
            if rule.kind == "refused" and not neutral:
                verb = "asks for" if name in ("response_format", "text") else "is"
                raise ValueError(f"`{name}` {verb} {_shown(value)}, and {rule.note}. Leave it out.")
        return self

    def options(self) -> dict[str, Any]:
        """Options of the engine: those of `generation_config`, replaced by those of the fields.

        A temperature above 0, top_p or a seed turn sampling on, even if the model's generation config is greedy.

        Raises:
            ValueError: `generation_config` is no object in JSON, or has a field that does not exist.
        """
        given = self.generation_config or {}
        config = from_json(given) if isinstance(given, str) else given
        if not isinstance(config, dict):
            raise ValueError(f"`generation_config` is {_shown(given)}; it must be an object in JSON.")
        if unknown := sorted(config.keys() - vars(GenerationConfig()).keys() - REQUEST_FIELDS.keys()):
            raise ValueError(f"`generation_config` has {', '.join(unknown):.200}, which does not exist.")
        options = {name: value for name, value in config.items() if value is not None and name not in _WITHOUT_EFFECT}
        for name in ("temperature", "top_p", *(REQUEST_FIELDS.keys() - {"top_logprobs"})):
            if (value := getattr(self, name, None)) is not None:
                options[name] = value
        if self.temperature == 0:
            options |= {"do_sample": False, "temperature": 1.0}
        elif any(value is not None for value in (self.temperature, self.top_p, self.seed)):
            options["do_sample"] = True
        limits = [getattr(self, name) for name in self.limits if getattr(self, name) is not None]
        return options | ({"max_new_tokens": limits[0]} if limits else {})


class GeneratingBody(Body):
    """Fields that both endpoints of completions apply."""

    max_tokens: int | None = _field(
        f"default: {DEFAULT_TOKENS:,}, or the model's `max_new_tokens` if larger", **_TOKENS
    )
    stop: Annotated[list[Stop] | None, BeforeValidator(lambda given: [given] if isinstance(given, str) else given)] = (
        _field(f"the text ends before it; up to {MOST_STOPS} of {LONGEST_STOP} characters", max_length=MOST_STOPS)
    )
    frequency_penalty: float | None = _field("over the answer", ge=-2, le=2)
    presence_penalty: float | None = _field("over the answer", ge=-2, le=2)
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_biases)] = _field()
    n: int | None = _field(
        f"up to {MOST_ANSWERS}; the prompt is read once; the seed of answer `i` is `seed + i`", ge=1, le=MOST_ANSWERS
    )
    stream_options: dict[str, Any] | None = _field("`include_usage`: a last part with the usage")

    def options(self) -> dict[str, Any]:
        own = {"stop_strings": self.stop or None, "num_return_sequences": self.n}
        return super().options() | {name: value for name, value in own.items() if value is not None}


class CompletionBody(GeneratingBody):
    """A request to continue texts."""

    endpoint = "completions"
    prompt: Annotated[list[Any], BeforeValidator(_prompts)] = Field(description="text or token ids, or a list of them")
    logprobs: int | None = _field(f"0 to {MOST_LOGPROBS}; of the model, before other options", ge=0, le=MOST_LOGPROBS)

    def options(self) -> dict[str, Any]:
        return super().options() | ({} if self.logprobs is None else {"top_logprobs": self.logprobs})


class ToolBody(Body):
    """Fields that both endpoints of chats apply."""

    tools: Tools | None = _field("if the chat template has them")
    tool_choice: Literal["auto", "none"] | None = _field("`auto`, or `none`: the template gets no tools")
    parallel_tool_calls: bool | None = _field("false: an answer has one call")

    def chat(self) -> list[Message]:
        """The messages for the chat template."""
        raise NotImplementedError

    def template_options(self) -> dict[str, Any]:
        """Arguments of the chat template besides the messages."""
        tools = self.tools if self.tools and self.tool_choice != "none" else None
        nested = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools or ()]
        return {"tools": nested or None, "add_generation_prompt": True}


class ChatBody(GeneratingBody, ToolBody):
    """A request for the next message of a chat."""

    endpoint = "chat/completions"
    limits = ("max_completion_tokens", "max_tokens")
    messages: list[Message] = Field(description="text only", min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = _field(**_TOKENS)
    logprobs: bool | None = _field("of the model, before other options")
    top_logprobs: int | None = _field(f"0 to {MOST_LOGPROBS}, with `logprobs`", ge=0, le=MOST_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = _field("variables of the chat template")
    add_generation_prompt: bool | None = _field("false: no new message begins")
    continue_final_message: bool | None = _field("continue the last message; with `add_generation_prompt: false`")

    def chat(self) -> list[Message]:
        return self.messages

    def template_options(self) -> dict[str, Any]:
        begins, continues = self.add_generation_prompt is not False, bool(self.continue_final_message)
        if begins and continues:
            raise ValueError(
                "`continue_final_message` is true, and a new message begins. Set `add_generation_prompt` to false."
            )
        variables = self.chat_template_kwargs or {}
        if refused := sorted(variables.keys() & _ARGUMENTS):
            raise ValueError(
                f"`chat_template_kwargs` has {', '.join(refused)}, and only variables of the chat template can be set. "
                "Leave it out."
            )
        own = {"add_generation_prompt": begins, "continue_final_message": continues}
        return variables | super().template_options() | own

    def options(self) -> dict[str, Any]:
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"`top_logprobs` is {self.top_logprobs} without `logprobs`. Set `logprobs` to true.")
        return super().options() | ({"top_logprobs": self.top_logprobs or 0} if self.logprobs else {})


class ResponseBody(ToolBody):
    """A request for a response."""

    endpoint = "responses"
    limits = ("max_output_tokens",)
    input: Annotated[list[dict[str, Any]], BeforeValidator(_items)] = Field(description="text only")
    instructions: str | None = _field("before a system message of `input`")
    max_output_tokens: int | None = _field("default: as `max_tokens`", **_TOKENS)

    def options(self) -> dict[str, Any]:
        options = super().options()
        if options.get("num_return_sequences", 1) != 1 or "top_logprobs" in options:
            raise ValueError(
                "`generation_config` asks for several answers or log-probabilities, and this endpoint gives one answer "
                "as text. Leave out `num_return_sequences` and `top_logprobs`, or use chat/completions."
            )
        return options

    def chat(self) -> list[Message]:
        """The messages for the chat template: calls and reasoning belong to the assistant's message beside them."""
        messages: list[dict[str, Any]] = []
        reasoning: dict[str, Any] = {}
        for item in self.input:
            kind = item.get("type")
            if "role" in item:
                own = reasoning if item["role"] == "assistant" else {}
                messages.append({"role": item["role"], "content": item.get("content"), **own})
            elif kind == "reasoning":
                texts = item.get("content") or []
                if not isinstance(texts, list) or not all(
                    isinstance(part, dict) and isinstance(part.get("text"), str) for part in texts
                ):
                    raise ValueError("The `content` of an item of the type 'reasoning' must be parts with a `text`.")
                reasoning = {"reasoning_content": "".join(part["text"] for part in texts)}
                continue
            elif kind == "function_call":
                call = {name: _of_item(item, name) for name in ("call_id", "name", "arguments")}
                function = {"name": call["name"], "arguments": call["arguments"]}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", **reasoning})
                messages[-1].setdefault("tool_calls", []).append(
                    {"id": call["call_id"], "type": "function", "function": function}
                )
            elif kind == "function_call_output":
                output = {"role": "tool", "tool_call_id": _of_item(item, "call_id"), "content": item.get("output")}
                messages.append(output)
            else:
                raise ValueError(
                    f"`input` has an item of the type {_shown(kind)}; without a `role` it must be function_call, "
                    "function_call_output or reasoning."
                )
            reasoning = {}
        if self.instructions:
            if not messages or messages[0]["role"] not in ("system", "developer"):
                messages.insert(0, {"role": "system", "content": self.instructions})
            else:
                messages[0]["content"] = f"{self.instructions}\n\n{_text(messages[0]['content'])}"
        return _MESSAGES.validate_python(messages)


def _of_item(item: dict[str, Any], name: str) -> str:
    """A text that an item of `input` must have."""
    if not isinstance(text := item.get(name), str):
        raise ValueError(f"The `{name}` of an item of the type {item['type']!r} is {_shown(text)}; it must be text.")
    return text


BODIES: dict[str, type[Body]] = {each.endpoint: each for each in (ChatBody, CompletionBody, ResponseBody)}
ENDPOINTS: dict[str, dict[str, Rule]] = {
    endpoint: {name: Rule("applied", each.description or "") for name, each in body.model_fields.items()}
    | OTHERS[endpoint]
    for endpoint, body in BODIES.items()
}
"""Each field of requests, by endpoint."""


def read_body(kind: type[Body], data: bytes) -> Body:
    """Read the body of a request.

    Raises:
        ValueError: It is no object in JSON, or a field has a wrong type, is outside its limits, or is refused.
    """
    if (marks := sum(data.count(mark) for mark in (b"[", b"{", b":", b","))) > MOST_MARKS:
        raise ValueError(
            f"The body has {marks:,} brackets, colons and commas; at most {MOST_MARKS:,} are read. Send text."
        )
    return kind.model_validate_json(data)


def sentence(error: ValueError) -> str:
    """What is wrong with a request."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    where, said = ".".join(str(part) for part in first["loc"] if part != "[key]"), first["msg"]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if not first["loc"]:
        return f"The body of a request must be an object in JSON. {said}."
    if first["type"] == "missing":
        return f"The request has no `{where}`."
    return f"`{where}` is {_shown(first['input'])}. {said}."
