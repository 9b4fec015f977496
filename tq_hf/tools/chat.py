"""`tq-hf chat`: a conversation on one compressed cache, in a terminal."""

from __future__ import annotations

import json
import os
import sys
import unicodedata
from io import TextIOWrapper
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from transformers import TextStreamer

from ..cache import TurboQuantCache
from ..compat import as_input
from ..config import TurboQuantConfig
from ..saving.cache_file import load_cache, save_cache
from .display import print_error

COMMANDS = {
    "/mem": "show the memory that the cache holds",
    "/save PATH": "write the conversation and its cache to a file",
    "/load PATH": "resume a saved conversation",
    "/reset": "start over",
    "/help": "show this list",
    "/quit": "end (also Ctrl-D)",
}


class Chat:
    """A conversation on one cache. Each turn runs only new tokens through the model. A template may change earlier
    tokens (some drop earlier thoughts). The cache is then cropped to the common prefix. Without a chat template, the
    model continues plain text. After `load`, `preset` is the configuration of the file."""

    def __init__(self, model: Any, tokenizer: Any, preset: str | TurboQuantConfig, max_new_tokens: int) -> None:
        self.model, self.tokenizer, self.preset, self.max_new_tokens = model, tokenizer, preset, max_new_tokens
        self.reset()

    def reset(self) -> None:
        self.cache = TurboQuantCache(self.model.config, self.preset, model=self.model)
        self.ids: list[int] = []
        self.messages: list[dict[str, str]] = []

    def _prompt(self, text: str) -> list[int]:
        """Tokens of the whole conversation, with `text` as the newest message."""
        if not self.tokenizer.chat_template:
            return self.ids + self.tokenizer(text, add_special_tokens=not self.ids)["input_ids"]
        messages = [*self.messages, {"role": "user", "content": text}]
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]

    def holds_conversation(self) -> bool:
        """Whether the cache holds all tokens of the conversation except the last, which no step has read yet."""
        return int(self.cache.get_seq_length()) >= len(self.ids) - 1

    def _crop(self, length: int, interrupted: bool = False) -> None:
        """Crop every layer to `length` tokens. Replace the cache by an empty one if it cannot be cropped, as with
        sliding windows and linear attention."""
        surplus = int(self.cache.get_seq_length()) - length
        try:
            if length and (surplus > 0 or interrupted):
                self.cache.crop(-surplus)
        except ValueError:
            length = 0
        if not length:
            self.cache = TurboQuantCache(self.model.config, self.preset, model=self.model)

    def say(self, text: str, streamer: Any = None) -> str:
        """Generate the answer to `text`. After an exception (also Ctrl-C), the conversation is the same as before."""
        prompt = self._prompt(text)
        if not prompt:
            return ""
        longest = min(int(self.cache.get_seq_length()), len(prompt) - 1)  # a step needs one new token
        self._crop(next((i for i in range(longest) if self.ids[i] != prompt[i]), longest))
        before = int(self.cache.get_seq_length())
        ids = torch.tensor([prompt], device=self.model.device)
        try:
            output = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=self.max_new_tokens,
                streamer=streamer,
                pad_token_id=self.tokenizer.pad_token_id or self.tokenizer.eos_token_id,
                **as_input(self.cache),
            )
        except BaseException:
            self._crop(before, interrupted=True)  # a step may have stopped between two layers, which then differ
            raise
        self.ids = output[0].tolist()
        answer = self.tokenizer.decode(self.ids[len(prompt) :], skip_special_tokens=True)
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        return answer

    def save(self, path: str) -> None:
        notes = {"ids": json.dumps(self.ids), "messages": json.dumps(self.messages)}
        save_cache(self.cache, path, self.model, notes)

    def load(self, path: str) -> None:
        """Resume a conversation that `save` wrote. Raise `ValueError` if the file is damaged, belongs to another model,
        or has no conversation, and `FileNotFoundError` if there is none."""
        if not os.path.exists(path):
            raise FileNotFoundError(f"There is no file {path}; `/save {path}` writes one.")
        cache, notes = load_cache(TurboQuantCache, path, self.model)
        try:
            ids, messages = json.loads(notes["ids"]), json.loads(notes["messages"])
            valid = len(ids) >= int(cache.get_seq_length()) and all(type(token) is int for token in ids)
            valid = valid and all({type(message[key]) for key in ("role", "content")} == {str} for message in messages)
        except (KeyError, TypeError, ValueError, RecursionError):
            valid = False
        if not valid:
            raise ValueError(f"{path} holds a cache but no conversation. Load a file that `/save` wrote.")
        self.cache, self.ids, self.messages = cache, ids, messages
        self.preset = cache.config


class Printer(TextStreamer):
    """Streamer that prints words as they are generated."""

    def __init__(self, tokenizer: Any, console: Console) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.console = console

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        text = "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")
        self.console.out(text, end="\n" if stream_end else "", highlight=False)


def converse(chat: Chat, console: Console) -> None:
    """Read commands and messages until the user quits."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a pasted byte may be of another encoding
    while True:
        try:
            line = console.input("[bold]> [/]")
        except (EOFError, KeyboardInterrupt):
            console.print()  # start a new line for the prompt of the shell
            return
        command = line.strip()
        if command == "/quit":
            return
        try:
            if command.startswith("/"):
                _execute(chat, command, console)
            elif command:
                _say(chat, line, console)
        except (ValueError, OSError) as error:
            print_error(error, console)


def _say(chat: Chat, line: str, console: Console) -> None:
    try:
        chat.say(line, Printer(chat.tokenizer, console))
    except KeyboardInterrupt:
        console.print("\nStopped. The conversation is the same as before this message.")
        if not chat.holds_conversation():
            console.print("The cache of this model cannot be cropped: the next message reads the conversation again.")


def _execute(chat: Chat, line: str, console: Console) -> None:
    """Execute a command: a line that begins with "/"."""
    name, _, argument = line.partition(" ")
    if name in ("/save", "/load"):
        if not argument:
            console.print(f"Name a file: {name} PATH.")
            return
        (chat.save if name == "/save" else chat.load)(argument.strip())
        done = "Saved" if name == "/save" else "Loaded"
        console.print(f"{done} {int(chat.cache.get_seq_length()):,} tokens.")
    elif name == "/mem":
        console.print(f"{int(chat.cache.get_seq_length()):,} tokens: {chat.cache.memory_footprint()}")
    elif name == "/reset":
        chat.reset()
        console.print("The conversation starts over.")
    else:
        if name != "/help":
            console.print(f"There is no command {escape(name)}. The commands:")
        for command, meaning in COMMANDS.items():
            console.print(f"{command:12} {meaning}")
