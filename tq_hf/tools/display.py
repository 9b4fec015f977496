"""Output of the command: tables for 80 columns, progress of what takes long, and errors as sentences."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Timer
from typing import TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

PATIENCE = 2.0
"""Seconds of silence after which a line says what is going on, if there is no terminal for a spinner."""
ERRORS = Console(stderr=True, highlight=False, soft_wrap=True)
"""Console of the error stream."""
REPORTS = 20
"""Number of lines about progress if there is no terminal for a bar."""
Item = TypeVar("Item")


def print_error(error: Exception, console: Console) -> None:
    """Print an error without its traceback."""
    text = str(error)
    if isinstance(error, OSError) and error.filename and error.strerror:
        text = f"{error.filename}: {error.strerror}."
    console.print(f"[red]Error:[/] {escape(text)}", highlight=False, soft_wrap=True)


def print_rows(headings: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    """Print a table. Headings and the names in the first column may wrap; numbers in the others may not."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, heading in enumerate(headings):
        width = max(map(len, (*heading.split(), *(row[number] for row in rows)))) if number else None
        table.add_column(heading, justify="right" if number else "left", width=width, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Context that says `what` on the error stream: by a spinner in a terminal, or by a line if it takes long."""
    if ERRORS.is_terminal:
        with ERRORS.status(f"{what} ..."):
            yield
        return
    timer = Timer(PATIENCE, ERRORS.print, (f"{what} ...",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def with_progress(items: Sequence[Item], what: str, console: Console) -> Iterator[Item]:
    """Yield `items`, readings for example (`what`), and print progress on `console`: after the first one, the
    estimated time of all. A terminal then shows a bar, other consoles about `REPORTS` lines."""
    lines, every, start = not console.is_terminal, max(1, len(items) // REPORTS), time.monotonic()
    shown = items if lines else track(items, what.capitalize(), console=console, transient=True)
    for done, item in enumerate(shown, 1):
        yield item
        seconds = (time.monotonic() - start) / done
        if done == 1:
            whole = duration(seconds * len(items))
            console.print(f"All {what} take about {whole}: the first took {seconds:.1f} s.")
        elif lines and done % every == 0:
            left = duration(seconds * (len(items) - done))
            console.print(f"{done} of {len(items)} {what}, about {left} left.")


def duration(seconds: float) -> str:
    """Format a time, in minutes from two minutes on."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
