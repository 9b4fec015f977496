"""Bodies of requests in OpenAI's format: each field is applied, changes no answer, or is refused in a sentence.

The models below have the fields that are applied, with their types and limits. All limits hold before a prompt is
rendered or tokenized.
"""

from __future__ import annotations

from inspect import signature
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import from_json
from transformers import PreTrainedTokenizerBase

from ..batching.grammars import calls_grammar
from ..batching.options import MOST_BIASES, MOST_LOGPROBS, NEUTRAL, REQUEST_FIELDS, shown

MOST_ANSWERS = 128
"""Answers that a request can ask for, as in OpenAI's API."""
MOST_STOPS, LONGEST_STOP = 4, 256
"""Number of stop strings, as in OpenAI's API, and characters of one. The engine searches for them at each token."""
MOST_MESSAGES, MOST_TOOLS = 4096, 128
MOST_MARKS = 250_000
"""Commas of a body; an opening bracket or a colon counts twice. Python runs nothing else while it makes objects."""
DEFAULT_TOKENS = 1024
"""New tokens of a request that names no limit."""

WITHOUT_EFFECT = frozenset(
    "user metadata safety_identifier service_tier store prompt_cache_key prompt_cache_options prompt_cache_retention "
    "prediction stream_options".split()
)
"""Fields that change no answer."""
UNCHANGED: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "best_of": (1,),
    "truncation": ("disabled",),
    "suffix": ("",),
    "top_logprobs": (0,),
    "reasoning": ({},),
    **dict.fromkeys(("functions", "include"), ([],)),
    **dict.fromkeys(("echo", "background"), (False,)),
}
"""Values of refused fields that change no answer, besides `null`. All fields that are not listed here are refused."""
_ARGUMENTS = {"messages", *signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"kwargs"}
"""Names that are no variables of a chat template: arguments of the call, a template among them."""


def _text(content: Any) -> Any:
    """Text of a message: its content, or the texts of its parts."""
    if not isinstance(content, list):
        return "" if content is None else content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in ("text", "input_text", "output_text", "reasoning_text") or not isinstance(part.get("text"), str):
            raise ValueError(
                f"A message has a part of the type {shown(kind)}, and the model reads parts with a `text` only. Leave "
                "it out."
            )
        texts.append(part["text"])
    return "".join(texts)


def _calls(calls: Any) -> Any:
    """Tool calls of a message. Templates read arguments as objects."""
    read = []
    for call in calls if isinstance(calls, list) else [calls] if calls else []:
        function: Any = call.get("function", call) if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if not isinstance(arguments, str | dict):
            raise ValueError(
                f"`tool_calls` has {shown(call)}; it must be a list of objects, each with a `function` that has "
                "`arguments`."
            )
        read.append(call | {"function": function | {"arguments": _object("arguments", arguments or {})}})
    return read or None


def _object(name: str, value: Any) -> dict[str, Any]:
    """An object, or that of a text in JSON."""
    try:
        found = from_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"`{name}` is {shown(value)}; it must be an object in JSON. {error}.") from None
    if not isinstance(found, dict):
        raise ValueError(f"`{name}` is {shown(value)}; it must be an object in JSON.")
    return found


class Message(BaseModel):
    """A message of a chat. Fields that no template reads are dropped."""

    model_config = ConfigDict(strict=True)
    role: str = Field(min_length=1, max_length=64)
    content: Annotated[str, BeforeValidator(_text)] = ""
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[dict[str, Any]] | None, BeforeValidator(_calls)] = None
    reasoning_content: str | None = None


def _prompts(given: Any) -> list[Any]:
    """Prompts of a request: a text, token ids, or a list of them, which the engine checks."""
    return given if isinstance(given, list) and given and type(given[0]) is not int else [given]


def _items(given: Any) -> Any:
    """Items of `input`: a text, or the parts of a text, are one message."""
    if isinstance(given, list) and given and all(isinstance(each, dict) for each in given):
        parts = "role" not in given[0] and str(given[0].get("type")).endswith("_text")
        return [{"role": "user", "content": given}] if parts else given
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    raise ValueError(f"`input` is {shown(given)}; it must be a text or a list of messages.")


def _field(note: str = "", **limits: Any) -> Any:
    return Field(None, description=note, **limits)


_MESSAGES: Any = TypeAdapter(Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)])
Tokens = Annotated[int, Field(ge=1, lt=2**31)]


class Body(BaseModel):
    """Fields that all endpoints apply. A field that is `null` is as good as none."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    limits: ClassVar[tuple[str, ...]] = ("max_tokens",)
    """Names of the maximum number of new tokens. The first one that is set counts."""

    model: str | None = _field("the served model only")
    stream: bool | None = _field()
    temperature: float | None = _field("0 is greedy", ge=0, le=100)
    top_p: float | None = _field(gt=0, le=1)
    seed: int | None = _field("as in a batch, above", ge=-(2**63), lt=2**64 - MOST_ANSWERS)
    generation_config: Any = _field("JSON of a generation config; its fields are applied or refused as above")

    @model_validator(mode="after")
    def _check_others(self) -> Body:
        for name, value in (self.model_extra or {}).items():
            neutral = any(type(value) is type(each) and value == each for each in (None, *UNCHANGED.get(name, ())))
            if name not in WITHOUT_EFFECT and not neutral:
                raise ValueError(
                    f"`{name:.60}` is {shown(value)}, and this server does not apply it here. Leave it out."
                )
        return self

    def options(self) -> dict[str, Any]:
        """Options of the engine: those of `generation_config`, replaced by those of the fields. A temperature above 0,
        top_p or a seed turn sampling on, even if the model's generation config is greedy. Raise `ValueError` if fields
        contradict each other."""
        config = _object("generation_config", self.generation_config or {})
        options = {name: value for name, value in config.items() if value is not None and name not in NEUTRAL}
        asked, top = getattr(self, "logprobs", None), getattr(self, "top_logprobs", None)
        if top and asked is not True:
            raise ValueError(f"`top_logprobs` is {top} without `logprobs`. Set `logprobs` to true.")
        own = {
            **{name: getattr(self, name, None) for name in ("temperature", "top_p", *REQUEST_FIELDS)},
            "top_logprobs": (top or 0) if asked is True else None if asked is False else asked,
            "stop_strings": getattr(self, "stop", None) or None,
            "num_return_sequences": getattr(self, "n", None),
            "max_new_tokens": next(filter(None, (getattr(self, name) for name in self.limits)), None),
        }
        options |= {name: value for name, value in own.items() if value is not None}
        if self.temperature == 0:
            options |= {"do_sample": False, "temperature": 1.0}
        elif any(value is not None for value in (self.temperature, self.top_p, self.seed)):
            options["do_sample"] = True
        return options


class GeneratingBody(Body):
    """Fields that both endpoints of completions apply."""

    max_tokens: Tokens | None = _field(
        f"default: {DEFAULT_TOKENS:,}, or the `max_new_tokens` of the model if that is larger"
    )
    stop: Any = _field(f"the text ends before it; up to {MOST_STOPS} of {LONGEST_STOP} characters")
    frequency_penalty: float | None = _field("over the answer", ge=-2, le=2)
    presence_penalty: float | None = _field("over the answer", ge=-2, le=2)
    logit_bias: dict[str, Any] | None = _field(max_length=MOST_BIASES)
    n: int | None = _field(
        f"up to {MOST_ANSWERS}; the prompt is read once; the seed of answer `i` is `seed + i`", ge=1, le=MOST_ANSWERS
    )
    stream_options: dict[str, Any] | None = _field("`include_usage`: a last part has the usage")
    response_format: dict[str, Any] | None = _field("as in a batch, above")
    structured_outputs: dict[str, Any] | None = _field("as in a batch, above")


class CompletionBody(GeneratingBody):
    """A request to continue texts."""

    prompt: Annotated[list[Any], BeforeValidator(_prompts)] = Field(description="text or token ids, or a list of them")
    logprobs: int | None = _field(f"0 to {MOST_LOGPROBS}; of the model, before other options", ge=0, le=MOST_LOGPROBS)


class ToolBody(Body):
    """Fields that both endpoints of chats apply."""

    tools: Annotated[list[dict[str, Any]], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = _field(
        "if the chat template has them; `strict` for forced calls only"
    )
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = _field(
        "`none`: the template gets no tools; `required`, or a function: one call, by its schema"
    )
    parallel_tool_calls: bool | None = _field("false: an answer has one call")

    def forced(self) -> list[dict[str, Any]]:
        """Functions to choose a call from; none if the answer needs no call."""
        functions: Any = [tool.get("function", tool) for tool in self.tools or ()]
        functions = [each for each in functions if isinstance(each, dict) and isinstance(each.get("name"), str)]
        if self.tool_choice in (None, "auto", "none"):
            if self.tool_choice != "none" and (strict := [each for each in functions if each.get("strict")]):
                raise ValueError(
                    f"`strict` of the tool {shown(strict[0]['name'])} is {shown(strict[0]['strict'])}, and only calls "
                    "that are forced follow a schema. Leave it out, or set `tool_choice` to `required` or a function."
                )
            return []
        if isinstance(self.tool_choice, dict):
            chosen: Any = self.tool_choice.get("function", self.tool_choice)
            functions = [each for each in functions if isinstance(chosen, dict) and each["name"] == chosen.get("name")]
        if not functions:
            raise ValueError(f"`tool_choice` is {shown(self.tool_choice)}, which is no function of `tools`.")
        return functions

    def options(self) -> dict[str, Any]:
        options = super().options()
        if functions := self.forced():
            options["structured_outputs"] = options.get("structured_outputs", {}) | calls_grammar(functions)
        return options

    def template_options(self) -> dict[str, Any]:
        """Arguments of the chat template besides the messages."""
        tools = self.tools if self.tools and self.tool_choice != "none" else ()
        nested = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
        return {"tools": nested or None, "add_generation_prompt": True}


class ChatBody(GeneratingBody, ToolBody):
    """A request for the next message of a chat."""

    limits = ("max_completion_tokens", "max_tokens")
    messages: list[Message] = Field(description="text only", min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    max_completion_tokens: Tokens | None = _field()
    logprobs: bool | None = _field("of the model, before other options")
    top_logprobs: int | None = _field(f"0 to {MOST_LOGPROBS}, with `logprobs`", ge=0, le=MOST_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = _field("variables of the chat template, as `enable_thinking`")
    add_generation_prompt: bool | None = _field("false: no message begins")
    continue_final_message: bool | None = _field(
        "the last message is continued; with `add_generation_prompt` set to false"
    )

    def template_options(self) -> dict[str, Any]:
        begins, continues = self.add_generation_prompt is not False, bool(self.continue_final_message)
        variables = self.chat_template_kwargs or {}
        if refused := sorted(variables.keys() & _ARGUMENTS):
            raise ValueError(
                f"`chat_template_kwargs` has {refused[0]}, which is no variable of a chat template. Leave it out."
            )
        own = {"add_generation_prompt": begins, "continue_final_message": continues}
        return variables | super().template_options() | own


class ResponseBody(ToolBody):
    """A request for a response."""

    limits = ("max_output_tokens",)
    input: Annotated[list[dict[str, Any]], BeforeValidator(_items)] = Field(description="text only")
    instructions: str | None = _field("before a system message of `input`")
    max_output_tokens: Tokens | None = _field("default: as `max_tokens`")
    text: dict[Literal["format"], dict[str, Any]] | None = _field("its `format` as `response_format`")

    def options(self) -> dict[str, Any]:
        options = super().options()
        if self.text:
            options["response_format"] = self.text["format"]
        if options.get("num_return_sequences", 1) != 1 or "top_logprobs" in options:
            raise ValueError(
                "`generation_config` asks for several answers or log-probabilities, and this endpoint gives one answer "
                "as text. Leave out `num_return_sequences` and `top_logprobs`, or use chat/completions."
            )
        return options

    @property
    def messages(self) -> list[Message]:
        """Messages for the chat template. Calls and reasoning join the assistant's message beside them."""
        messages: list[dict[str, Any]] = []
        thoughts: dict[str, Any] = {}
        for item in self.input:
            kind, before, thoughts = item.get("type"), thoughts, {}
            if "role" in item:
                own = before if item["role"] == "assistant" else {}
                messages.append({"role": item["role"], "content": item.get("content"), **own})
            elif kind == "reasoning":
                thoughts = {"reasoning_content": _text(item.get("content") or [])}
            elif kind == "function_call":
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", **before})
                function = {name: _of_item(item, name) for name in ("name", "arguments")}
                call = {"id": _of_item(item, "call_id"), "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
            elif kind == "function_call_output":
                own = {"tool_call_id": _of_item(item, "call_id"), "content": item.get("output")}
                messages.append({"role": "tool", **own})
            else:
                raise ValueError(
                    f"`input` has an item of the type {shown(kind)}; without a `role` it must be function_call, "
                    "function_call_output or reasoning."
                )
        if self.instructions:
            if not messages or messages[0]["role"] not in ("system", "developer"):
                messages.insert(0, {"role": "system", "content": self.instructions})
            else:
                messages[0]["content"] = f"{self.instructions}\n\n{_text(messages[0]['content'])}"
        return _MESSAGES.validate_python(messages)


def _of_item(item: dict[str, Any], name: str) -> Any:
    """A text that an item of `input` must have."""
    if not isinstance(text := item.get(name), str):
        raise ValueError(f"The `{name}` of an item of the type {item['type']!r} is {shown(text)}; it must be text.")
    return text


BODIES: dict[str, type[Body]] = {"chat/completions": ChatBody, "completions": CompletionBody, "responses": ResponseBody}
"""Bodies of requests by endpoint."""


def read_body(kind: type[Body], data: bytes) -> Any:
    """Read the body of a request. Raise `ValueError` if it is no object in JSON, or if a field has a wrong type, is
    outside its limits, or is refused."""
    marks = data.count(b",") + 2 * sum(map(data.count, (b"[", b"{", b":")))
    if marks > MOST_MARKS:
        raise ValueError(
            f"The body has too many brackets, colons and commas: {MOST_MARKS:,} commas or half as many others fit."
        )
    return kind.model_validate_json(data)


def check_limits(stops: tuple[str, ...], answers: int) -> None:
    """Raise `ValueError` if a request has more or longer stop strings, or asks for more answers, than are allowed."""
    if len(stops) > MOST_STOPS or max(map(len, stops), default=0) > LONGEST_STOP:
        raise ValueError(f"`stop_strings` must be up to {MOST_STOPS} texts of {LONGEST_STOP} characters.")
    if answers > MOST_ANSWERS:
        raise ValueError(f"The request asks for {answers:,} answers; at most {MOST_ANSWERS} are given.")


def sentence(error: ValueError) -> str:
    """Say what is wrong with a request."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"] if part != "[key]")
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if not where:
        return f"The body of a request must be an object in JSON. {first['msg']}."
    if first["type"] == "missing":
        return f"The request has no `{where}`."
    return f"`{where}` is {shown(first['input'])}. {first['msg']}."
