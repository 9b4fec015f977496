"""A chat on a terminal, in a process of its own."""

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.test_cli import saved_model

pty = pytest.importorskip("pty")
fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")

ANSWER = 120
PROMPT = r"\x1b\[1m> "  # in bold; an answer may hold the same characters
CTRL_C = b"\x03"
CHAT = f"""
import functools, runpy, time
from transformers import LlamaForCausalLM

calls, forward = [], LlamaForCausalLM.forward

@functools.wraps(forward)
def waiting(*args, **kwargs):
    calls.append(None)
    while len(calls) == {2 * ANSWER - 10}:
        time.sleep(0.01)
    return forward(*args, **kwargs)

LlamaForCausalLM.forward = waiting
runpy.run_module("tq_hf.tools.cli", run_name="__main__")
"""
"""The second answer does not end: it waits to be interrupted."""


class Terminal:
    """A child that believes that somebody sits before it."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, b"\x18\x00\x50\x00\x00\x00\x00\x00")  # 24 lines of 80

        def begin() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the keys' signals are for this child
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        command = [sys.executable, "-c", CHAT, "chat", *arguments]
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "NO_COLOR": "1"}
        self.child = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True, preexec_fn=begin
        )
        os.close(slave)
        self.shown = ""

    def read(self) -> bool:
        """Take what the child has printed; whether it may print more."""
        if select.select([self.master], [], [], 0.1)[0]:
            try:
                content = os.read(self.master, 4096)
            except OSError:  # how Linux says that the other end is closed
                return False
            self.shown += content.decode(errors="replace")
            return bool(content)
        return True

    def until(self, pattern: str) -> str:
        """What is shown since the last call, up to this."""
        while (found := re.search(pattern, self.shown)) is None:
            assert self.read(), self.shown
        text, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return text

    def type(self, keys: str | bytes) -> None:
        os.write(self.master, keys.encode() if isinstance(keys, str) else keys)

    def rest(self) -> str:
        """All that is shown until the child ends."""
        while self.read():
            pass
        assert self.child.wait() == 0
        return self.shown


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    # Of four layers, whose first answer has no special token: its text is read again as the tokens it was.
    folder = saved_model("llama", tmp_path, num_hidden_layers=4)
    terminal = Terminal(str(folder), "--max-new-tokens", str(ANSWER))
    terminal.until(PROMPT)
    yield terminal
    terminal.child.kill()
    terminal.child.wait()
    os.close(terminal.master)


def test_ctrl_c_takes_back_one_message_and_at_the_prompt_ends_on_a_line_of_its_own(terminal, tmp_path):
    terminal.type("  /mem\n")
    terminal.until("0 tokens: ")
    terminal.until(PROMPT)
    terminal.type("/exit\n")
    assert "There is no command /exit." in terminal.until("/quit")
    terminal.until(PROMPT)
    terminal.type("hello\n")
    terminal.until("hello")
    terminal.until(PROMPT)
    terminal.type("/mem\n")
    held = int(re.search(r"([\d,]+) tokens: ", terminal.until("bf16"))[1])
    assert held == 22 + ANSWER - 1
    terminal.until(PROMPT)
    terminal.type("tell me more\n")
    terminal.until(r"more\s+\S+")  # the answer has begun
    terminal.type(CTRL_C)
    assert "the same as before this message" in terminal.until(PROMPT)
    terminal.type(f"/mem\n/save {tmp_path / 'chat.safetensors'}\n")
    assert f"{held} tokens: " in terminal.until("bf16")
    terminal.until(f"Saved {held} tokens")
    terminal.until(PROMPT)
    # A signal between the prompt and the wait for keys is noticed at the next one: CPython's readline looks before it
    # waits, and people press again.
    for _ in range(10):
        terminal.type(CTRL_C)
        end = time.monotonic() + 60
        while "\n" not in terminal.shown and time.monotonic() < end:
            terminal.read()
        if "\n" in terminal.shown:
            break
    assert terminal.rest().endswith("\n")
