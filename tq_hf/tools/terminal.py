"""The terminal's side of `tq-hf chat`: what is typed, and what is printed."""

from __future__ import annotations

import unicodedata
from typing import Any

from rich.console import Console
from rich.markup import escape
from transformers import TextStreamer

from .chat import Chat

COMMANDS = {
    "/mem": "shows the memory the cache holds",
    "/save PATH": "writes the conversation and its cache to a file",
    "/load PATH": "takes up a saved conversation",
    "/reset": "starts over",
    "/help": "shows this list",
    "/quit": "ends (as does Ctrl-D)",
}


class Printer(TextStreamer):
    """Prints words as they are generated."""

    def __init__(self, tokenizer: Any, console: Console) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.console = console

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print `text`, without what would steer the terminal."""
        text = "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")
        self.console.out(text, end="\n" if stream_end else "", highlight=False)


def print_error(error: Exception, console: Console) -> None:
    """An error as a sentence."""
    console.print(f"[red]Error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)


def converse(chat: Chat, console: Console) -> None:
    """Read lines until the user has had enough: commands, and what is said to the model."""
    while True:
        try:
            line = console.input("[bold]> [/]")
        except (EOFError, KeyboardInterrupt):
            console.print()  # the shell's prompt begins a line of its own
            return
        command = line.strip()
        if command == "/quit":
            return
        if command.startswith("/"):
            _obey(chat, command, console)
        elif command:
            _say(chat, line, console)


def _say(chat: Chat, line: str, console: Console) -> None:
    try:
        chat.say(line, Printer(chat.tokenizer, console))
    except KeyboardInterrupt:
        console.print("\nStopped. The conversation is what it was before this message.", highlight=False)
        if not chat.holds_conversation():
            console.print("This model's cache cannot go back: the next message reads the conversation again.")
    except ValueError as error:
        print_error(error, console)


def _obey(chat: Chat, line: str, console: Console) -> None:
    """Carry out a line that begins with "/"."""
    name, _, argument = line.partition(" ")
    argument = argument.strip()
    if name in ("/save", "/load"):
        if not argument:
            console.print(f"Give a file: {name} PATH.", highlight=False)
            return
        try:
            (chat.save if name == "/save" else chat.load)(argument)
        except (ValueError, OSError) as error:
            print_error(error, console)
            return
        done = "Saved" if name == "/save" else "Loaded"
        console.print(f"{done} {int(chat.cache.get_seq_length()):,} tokens.", highlight=False)
    elif name == "/mem":
        held = int(chat.cache.get_seq_length())
        console.print(f"{held:,} tokens: {chat.cache.memory_footprint()}", highlight=False)
    elif name == "/reset":
        chat.reset()
        console.print("The conversation starts over.")
    else:
        if name != "/help":
            console.print(f"There is no command {escape(name)}. The commands:", highlight=False)
        for command, meaning in COMMANDS.items():
            console.print(f"{command:12} {meaning}", highlight=False)
