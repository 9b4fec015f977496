"""From a request to parts of its answers: the prompt is read in a thread, the engine is asked, tokens become text."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from inspect import signature
from itertools import accumulate, chain, starmap
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from transformers.cli.serving.utils import ToolCall, get_response_template, response_events_to_chunks
from transformers.generation.continuous_batching.requests import RequestState
from transformers.utils.chat_parsing import ResponseParser

from ..batching import TurboQuantBatchingManager
from ..batching.options import RequestOptions, prompt_ids
from ..batching.processors import answer_ids
from .fields import DEFAULT_TOKENS, Body, CompletionBody, ToolBody, check_limits, read_body, sentence

LONG = 65_536
"""Bytes of a body from which a request is read in the threads of long ones, so that short ones do not wait."""
INLINE = 64
"""Tokens up to which text is made on the event loop. A stream has one at a time."""
TEMPLATE_LINES = 1_000_000
"""Lines of a chat template that a request may run."""
WINDOW = 16
"""Tokens that are decoded again with the next one, so that characters of several tokens are whole."""
HANDLED = 60
"""Seconds for which outputs of a cancelled request are still received."""
FLAGS = {
    "`num_blocks`": "`--cache-tokens`",
    "`max_memory_percent`": "`--memory-share`",
    "`max_batch_tokens`": "`--batch-tokens`",
    " of the ContinuousBatchingConfig": "",
}
"""Flags of the command for what messages of the engine name."""
Result = TypeVar("Result")


class Refused(Exception):
    """A request is not answered: a sentence for the client, and the status of HTTP."""

    def __init__(self, reason: object, status: int = 400) -> None:
        super().__init__(in_flags(reason))
        self.status = status


def in_flags(reason: object) -> str:
    """Name the flags of the command in place of the engine's options."""
    text = str(reason)
    for name, flag in FLAGS.items():
        text = text.replace(name, flag)
    return text


def limited(call: Callable[[], Result]) -> Result:
    """Call a function that runs up to `TEMPLATE_LINES` lines of a template, and raise `ValueError` if it runs more."""
    left = TEMPLATE_LINES

    def count(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"it does not end within {TEMPLATE_LINES:,} lines")
        return count if frame.f_code.co_filename == "<template>" else None

    before = sys.gettrace()
    sys.settrace(count)
    try:
        return call()
    finally:
        sys.settrace(before)


class Stops:
    """Search for stop strings in a text that comes in parts. The cost is that of the parts, not of the text."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops, self.held, self.found = stops, "", False

    def feed(self, part: str, last: bool) -> str:
        """Return the text that cannot belong to a stop string. Nothing follows the first one."""
        if self.found:
            return ""
        text = self.held + part
        places = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        self.found = bool(places)
        end = min(places, default=len(text) if last else min([len(text), *(self._begin(text, s) for s in self.stops)]))
        self.held = text[end:]
        return text[:end]

    @staticmethod
    def _begin(text: str, stop: str) -> int:
        """Place where the end of a text begins as `stop` does."""
        at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while at >= 0 and not stop.startswith(text[at:]):
            at = text.find(stop[0], at + 1)
        return len(text) if at < 0 else at


class Detokenized:
    """Text of tokens that come one by one or all at once. A character waits until its last token has come."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode, self.window, self.sent = decode, list[int](), 0

    def feed(self, tokens: list[int], last: bool) -> str:
        """Return the text that the new tokens complete."""
        self.window += tokens
        text = self.decode(self.window)
        whole = len(text) if last else self._whole(text)
        new, self.sent = text[self.sent : whole], max(self.sent, whole)
        if len(self.window) > 4 * WINDOW or (len(self.window) > WINDOW and whole == len(text)):
            self.window = self.window[-4:]
            self.sent = self._whole(self.decode(self.window))
        return new

    @staticmethod
    def _whole(text: str) -> int:
        """Number of characters before an incomplete one, whose bytes (up to 3) decode to U+FFFD."""
        tail = text[-3:]
        return len(text) - len(tail) + len(tail.rstrip("\ufffd"))


class Part(NamedTuple):
    """A part of an answer: texts, `ReasoningText`s and `ToolCall`s, and log-probabilities in OpenAI's form."""

    items: list[Any]
    logprobs: dict[str, Any] | None


class PromptTokens(NamedTuple):
    """A prompt, with the options of its answers: `max_new_tokens` is at most what there is room for."""

    tokens: list[int]
    options: RequestOptions


class Choice:
    """Answer `index` to a request."""

    def __init__(self, engine: Engine, index: int, prompt: PromptTokens, body: Body) -> None:
        self.engine, self.index, self.prompt, self.body = engine, index, prompt, body
        self.stops, self.parser = Stops(prompt.options.stop_strings), engine.parser(prompt, body)
        self.forced = isinstance(body, ToolBody) and bool(body.forced())
        self.text = Detokenized(lambda ids: engine.decode(ids, skip_special_tokens=self.parser is None))
        self.newest: Any = None
        """Newest output of the engine that was not read yet. It has all tokens."""
        self.count = self.shown = self.letters = self.calls = self.sent_calls = self.cached = 0
        """Tokens that were read; tokens and letters of sent log-probabilities; calls that were read, and sent; tokens
        of the prompt that were found in pages."""
        self.finish = self.unsent = ""
        """Why the answer ends; and text of a tool call that is not complete."""
        self.begun = [] if self.parser is None else response_events_to_chunks(self.parser.initial_events)

    def read(self, output: Any) -> Part:
        """Read the tokens that an output has more than the one before."""
        tokens, last = output.generated_tokens, output.is_finished()
        text = self.text.feed(tokens[self.count :], last)
        self.count, self.cached = len(tokens), output.cached_tokens
        text = self.stops.feed(text, last)
        last = last or self.stops.found
        items = self.begun + self._parsed(text, last)
        self.begun = []
        if last:
            most, ends = self.prompt.options.max_new_tokens, self.prompt.options.eos_token_ids
            ended = self.stops.found or most is None or len(tokens) < most or tokens[-1] in ends
            self.finish = "tool_calls" if self.calls else "stop" if ended else "length"
        logprobs = None
        if self.prompt.options.top_logprobs is not None and (items or last):
            logprobs = self._logprobs(tokens, output.top_logprobs, last)
        return Part(items, logprobs)

    def _parsed(self, text: str, last: bool) -> list[Any]:
        """Content, reasoning and tool calls of a text. A call that is no call stays text."""
        if self.forced:
            self.unsent += text
            text = self.unsent if last else ""
            try:
                call, self.calls = json.loads(text), 1
                return [ToolCall(call["name"], json.dumps(call["arguments"]))]
            except (ValueError, RecursionError):
                pass  # a call that is cut, or has a thousand levels, stays text
        if self.parser is None:
            return [text] if text else []
        try:
            events = self.parser.feed(text)
            events += self.parser.finalize()[1] if last else []
            found = []
            for item in response_events_to_chunks(events):
                if isinstance(item, ToolCall):
                    self.calls += 1
                    if self.calls > 1 and getattr(self.body, "parallel_tool_calls", None) is False:
                        continue
                found.append(item)
        except (ValueError, KeyError, TypeError, RuntimeError):
            self.parser = None
            return [self.unsent + text]
        self.unsent += text
        newest = events[-1] if events else {}
        if newest.get("type") == "region_close":
            self.unsent = ""
        elif newest.get("text") and not newest["dirty"]:
            self.unsent = self.unsent.rpartition(newest["text"])[2]
        return found

    def _logprobs(self, tokens: list[int], rows: list[Any], last: bool) -> dict[str, Any] | None:
        """Log-probabilities of the tokens since the last part, without special tokens at the end."""
        end, text_of = min(len(tokens), len(rows)), self.engine.text_of
        while last and end > self.shown and tokens[end - 1] in self.engine.special:
            end -= 1
        new, self.shown = slice(self.shown, end), max(self.shown, end)
        texts = [text_of(token) for token in tokens[new]]
        if not texts:
            return None
        finite = partial(max, -9999.0)  # as OpenAI's: JSON has no infinite numbers, and no NaN
        chosen = [finite(row.logprob) for row in rows[new]]
        top = [[(text_of(token), finite(x)) for token, x in row.top.items()] for row in rows[new]]
        if isinstance(self.body, CompletionBody):
            offsets = list(accumulate(map(len, texts), initial=self.letters))
            self.letters = offsets.pop()
            likely = list(map(dict, top))
            return {"tokens": texts, "token_logprobs": chosen, "top_logprobs": likely, "text_offset": offsets}
        content = [
            _entry(text, x) | {"top_logprobs": list(starmap(_entry, likely))}
            for text, x, likely in zip(texts, chosen, top, strict=True)
        ]
        return {"content": content, "refusal": None}


def _entry(text: str, logprob: float) -> dict[str, Any]:
    # U+FFFD stands for a part of a character, whose bytes are not known here.
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


class Engine:
    """Model, tokenizer and manager of a server. `name` is that of the model for clients. The manager has its pages."""

    def __init__(self, name: str, manager: TurboQuantBatchingManager, tokenizer: Any) -> None:
        self.name, self.manager, self.tokenizer = name, manager, tokenizer
        self.cache: Any = manager.batch_processor.cache  # type: ignore[union-attr]
        self.decode, self.special = tokenizer.decode, frozenset(tokenizer.all_special_ids)
        self.text_of = lru_cache(65_536)(lambda token: tokenizer.decode([token]))
        self.longest = max(map(len, tokenizer.get_vocab()))
        """Characters of the longest token."""
        model: Any = manager.model
        self.default_tokens = max(DEFAULT_TOKENS, model.generation_config.max_new_tokens or 0)
        self.template = get_response_template(tokenizer, model)
        self.short, self.long = ThreadPoolExecutor(4, "short requests"), ThreadPoolExecutor(2, "long requests")
        self.open: set[Exchange] = set()
        self.closing: str | None = None

    @property
    def failure(self) -> str | None:
        """Sentence about why no request is answered; `None` if requests are."""
        error = self.manager.error
        if self.closing or (error is None and self.manager.is_running()):
            return self.closing
        return f"The engine has stopped: {error or 'its thread has ended'}. Restart the server."

    def close(self, reason: str) -> None:
        """Take no more requests, and fail the open ones."""
        self.closing = reason
        for each in self.open:
            each.ready.put_nowait(Refused(reason, 503))

    async def in_thread(self, is_long: bool, call: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function in a thread for short or for long requests."""
        pool = self.long if is_long else self.short
        return await asyncio.get_running_loop().run_in_executor(pool, call, *arguments)

    def parser(self, prompt: PromptTokens, body: Body) -> Any:
        """transformers' parser of reasoning and tool calls; `None` for a model without one, a form, or no chat."""
        if self.template is None or prompt.options.grammar or not isinstance(body, ToolBody):
            return None
        tools = {"tools": body.template_options()["tools"]} if "tools" in signature(ResponseParser).parameters else {}
        return ResponseParser(self.template, prefix=self.tokenizer.decode(prompt.tokens), **tools)

    def read(self, kind: type[Body], data: bytes) -> Exchange:
        """Read a request: its fields, its prompts, and the options of the engine. Nothing is asked yet. Raise `Refused`
        if something is wrong with the request."""
        try:
            body = read_body(kind, data)
            if body.model not in (None, self.name):
                raise ValueError(
                    f"`model` is {body.model!r:.100}; this server serves {self.name!r} only. Leave it out."
                )
            options = {"num_return_sequences": 1} | body.options()
            chosen = not options.keys().isdisjoint(("max_new_tokens", "max_length"))
            given: list[Any] = body.prompt if isinstance(body, CompletionBody) else [self._rendered(body)]
            prompts, answers = list[PromptTokens](), list[Choice]()
            for each in given:
                tokens = prompt_ids(self._tokens(each, body), self.manager.vocabulary)
                if not chosen:
                    room = self.cache.max_request_tokens + 1 - len(tokens)
                    options["max_new_tokens"] = max(1, min(self.default_tokens, room))
                applied = self.manager.options_of(self.manager.generation_config, options, len(tokens))
                asked = RequestState("", initial_tokens=tokens, max_new_tokens=applied.max_new_tokens)
                applied = replace(applied, max_new_tokens=self.cache.check_room(asked))
                stops = applied.stop_strings if options.get("stop_strings") else ()
                check_limits(stops, applied.num_return_sequences * len(given))
                prompts.append(PromptTokens(tokens, applied))
                for _ in range(applied.num_return_sequences):
                    answers.append(Choice(self, len(answers), prompts[-1], body))
            return Exchange(self, body, prompts, answers)
        except ValueError as error:
            raise Refused(sentence(error)) from None

    def _rendered(self, body: Any) -> str:
        template, options = str(self.tokenizer.chat_template or ""), body.template_options()
        if not template:
            raise ValueError("This model has no chat template. Ask /v1/completions to continue a text.")
        if options["tools"] and "tools" not in template:
            raise ValueError("The request has `tools`, and the chat template of this model has no place for them.")
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        try:
            return limited(lambda: self.tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except Exception as error:  # a template may raise any exception
            raise ValueError(f"The chat template of this model refuses the messages: {error!s:.300}.") from None

    def _tokens(self, text: Any, body: Body) -> list[int]:
        """Tokens of a prompt that is text or tokens."""
        if not isinstance(text, str):
            return text
        if len(text) > self.longest * self.cache.max_request_tokens:
            raise ValueError(
                f"A prompt of {len(text):,} characters has more tokens than the cache, which has room for "
                f"{self.cache.max_request_tokens:,}. Shorten it."
            )
        return self.tokenizer(text, add_special_tokens=isinstance(body, CompletionBody))["input_ids"]


class Exchange:
    """A request that was read, and its answers. All methods belong to the event loop."""

    def __init__(self, engine: Engine, body: Any, prompts: list[PromptTokens], answers: list[Choice]) -> None:
        self.engine, self.body, self.prompts, self.answers = engine, body, prompts, answers
        self.ready: asyncio.Queue[Choice | Refused] = asyncio.Queue()
        """Answers with an output that was not read yet."""
        self.names = [answer_ids(uuid4().hex, each.options.num_return_sequences) for each in prompts]
        """Ids of answers in the engine, by prompt. Clients may choose the same ids."""
        self.closed = False

    def _ask(self) -> None:
        """Hand the prompts to the engine, from a thread."""
        for names, prompt in zip(self.names, self.prompts, strict=True):
            if not self.closed:
                self.engine.manager.add_checked(*prompt, names[0], bool(self.body.stream))
        if self.closed:
            self._cancel()

    def _cancel(self) -> None:
        for name in chain(*self.names):
            self.engine.manager.cancel_request(name)  # no effect on an answer that is complete

    def _receive(self, answer: Choice, output: Any) -> None:
        if answer.newest is None and not answer.finish:
            self.ready.put_nowait(answer)
        answer.newest = output

    async def parts(self) -> AsyncIterator[tuple[Choice, Part]]:
        """Yield the parts of all answers as they come. If the caller goes away, the requests are cancelled. Raise
        `Refused` if the engine has failed."""
        engine, left = self.engine, len(self.answers)
        engine.open.add(self)
        try:
            if engine.failure:
                raise Refused(engine.failure, 503)
            for name, each in zip(chain(*self.names), self.answers, strict=True):
                engine.manager.register_result_handler(name, partial(self._receive, each))
            await engine.in_thread(len(self.prompts) > 1, self._ask)
            while left:
                answer: Any = await self.ready.get()
                if isinstance(answer, Refused):
                    raise answer
                if answer.finish:  # an output came while a thread found a stop string in the one before
                    continue
                output, answer.newest = answer.newest, None
                if output.error is not None:
                    status = 400 if output.refused else 500
                    raise Refused(engine.failure or output.error, 503 if engine.failure else status)
                new = len(output.generated_tokens) - answer.count
                if new <= INLINE:
                    part = answer.read(output)
                else:
                    part = await engine.in_thread(new > 16 * INLINE, answer.read, output)
                left -= bool(answer.finish)
                yield answer, part
        finally:
            self.close()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.engine.open.discard(self)
            self._cancel()
            # Without a handler, outputs of the step that runs would be kept.
            asyncio.get_running_loop().call_later(HANDLED, self._forget)

    def _forget(self) -> None:
        for name in chain(*self.names):
            self.engine.manager.output_router.result_handlers.pop(name, None)

    def usage(self) -> tuple[int, int, int]:
        """Number of tokens of all prompts, of all answers, and of prompts that were found in pages."""
        cached = sum(each.cached for each in self.answers[:: len(self.names[0])])
        return sum(len(each.tokens) for each in self.prompts), sum(each.count for each in self.answers), cached
