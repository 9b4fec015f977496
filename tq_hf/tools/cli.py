"""The command `tq-hf`: estimate what a cache will take, chat on a compressed one, run the benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TextStreamer
from transformers.utils import logging

from ..config import PRESETS
from ..memory import MemoryFootprint
from .chat import Chat
from .estimate import Estimate, Estimator, estimate, parse_memory

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
"""The folder with the shipped model and the benchmark; there in a checkout, not in an installed wheel."""

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DEFAULT_CONTEXT = 32768
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of a command whose options, --help among them, are those of the script it runs."""

app = typer.Typer(
    name="tq-hf",
    help="TurboQuant KV-cache compression for Hugging Face transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str | None,
    typer.Argument(help="A folder or a model of the Hugging Face hub. By default the small model of the checkout."),
]
Preset = Annotated[str, typer.Option(help=f"What to compress to: {', '.join(PRESETS)}, or auto.")]
Dtype = Annotated[
    str | None,
    typer.Option(help="The dtype the model is loaded in: bfloat16, float16 or float32. By default its own."),
]


def _print_error(error: Exception, console: Console) -> None:
    console.print(f"[red]Error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)


@contextmanager
def _errors_as_sentences() -> Iterator[None]:
    """What the user can act on is printed and ends the command with status 1."""
    try:
        yield
    except (ValueError, OSError) as error:
        _print_error(error, Console(stderr=True))
        raise typer.Exit(1) from None


def _example(name: str, what: str) -> Path:
    """A file or folder of `examples/`.

    Raises:
        ValueError: This is not a checkout.
    """
    path = EXAMPLES / name
    if not path.exists():
        raise ValueError(
            f"{what} is `examples/{name}` of the tq_hf repository and not part of an installed package ({path} does "
            "not exist). Clone the repository and run `pip install -e .` there."
        )
    return path


def _model_name(model: str | None) -> str:
    if model is not None:
        return model
    try:
        return str(_example("needle", "The small model used by default"))
    except ValueError as error:
        raise ValueError(f"{error} Or name a model, e.g. `Qwen/Qwen3-0.6B`.") from None


def _dtype(name: str | None) -> torch.dtype | None:
    if name is not None and name not in DTYPES:
        raise ValueError(f"`--dtype` is {name!r}; it must be one of {', '.join(DTYPES)}.")
    return None if name is None else DTYPES[name]


def _check_preset(preset: str) -> None:
    if preset not in PRESETS:
        raise ValueError(f"Unknown preset {preset!r}. Valid presets: {', '.join(PRESETS)}.")


@app.command("estimate")
def estimate_command(
    model: Model = None,
    context: Annotated[
        int | None,
        typer.Option(min=1, help=f"Tokens of the prompt. By default {DEFAULT_CONTEXT}, or the most the model takes."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences generated at once.")] = 1,
    max_cache_len: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens to preallocate for, as for compiled decoding; more than the context."),
    ] = None,
    preset: Annotated[
        list[str] | None,
        typer.Option(help="A preset to show; repeat it for several. By default all of them."),
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(help="Memory of the GPU, as 24GB or 24GiB (24 alone is GiB): also finds what fits in it."),
    ] = None,
    reserve: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of the GPU's memory to leave for everything else.")
    ] = 0.1,
    dtype: Dtype = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON, in bytes.")] = False,
) -> None:
    """Say how much memory the KV cache of a model takes, and how much context or how many sequences fit.

    Only the model's config is read: no weights are downloaded. Sliding windows, linear attention and latent attention
    are counted as what they are. What fits is what is left beside the decoder's weights, unquantised in its dtype.
    """
    with _errors_as_sentences():
        name = _model_name(model)
        for one in preset or ():
            _check_preset(one)
        memory = None if gpu_memory is None else parse_memory(gpu_memory)
        logging.set_verbosity_error()
        try:
            config = AutoConfig.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise ValueError(f"Cannot read the config of the model {name!r}: {error}") from None
        estimator = Estimator(config, _dtype(dtype))
        if context is None:
            context = min(DEFAULT_CONTEXT, estimator.max_positions or DEFAULT_CONTEXT)
            context = context if max_cache_len is None else min(context, max_cache_len - 1)
        left = None if memory is None else max(0, int(memory * (1 - reserve)) - estimator.weight_bytes)
        rows = list(estimate(estimator, [None, *(preset or PRESETS)], context, batch, left, max_cache_len))
    if as_json:
        typer.echo(json.dumps(_as_json(name, estimator, context, batch, max_cache_len, memory, left, rows), indent=2))
    else:
        _print_estimate(name, estimator, context, batch, max_cache_len, memory, left, rows)


def _kinds(footprint: MemoryFootprint) -> dict[str, int]:
    sizes = asdict(footprint)
    del sizes["by_device"]
    return sizes | {"total": footprint.total}


def _as_json(
    name: str,
    estimator: Estimator,
    context: int,
    batch: int,
    max_cache_len: int | None,
    memory: int | None,
    left: int | None,
    rows: list[Estimate],
) -> dict[str, Any]:
    presets = []
    for row in rows:
        found: dict[str, Any] = {"preset": row.preset, "after_prefill": _kinds(row.footprint)}
        found["decoding"] = _kinds(row.decoding)
        if left is not None:
            found |= {"max_context": row.max_context, "max_batch": row.max_batch}
        presets.append(found)
    return {
        "model": name,
        "dtype": str(estimator.dtype).removeprefix("torch."),
        "context": context,
        "batch": batch,
        "max_cache_len": max_cache_len,
        "weight_bytes": estimator.weight_bytes,
        "max_position_embeddings": estimator.max_positions,
        "gpu_memory_bytes": memory,
        "cache_memory_bytes": left,
        "presets": presets,
    }


def _print_estimate(
    name: str,
    estimator: Estimator,
    context: int,
    batch: int,
    max_cache_len: int | None,
    memory: int | None,
    left: int | None,
    rows: list[Estimate],
) -> None:
    console = Console()
    unit, size_of = ("GiB", 2**30) if max(row.footprint.total for row in rows) >= 10 * 2**30 else ("MiB", 2**20)
    sequences = "one sequence" if batch == 1 else f"{batch} sequences"
    room = "" if max_cache_len is None else f", preallocated for {max_cache_len:,}"
    title = f"KV cache of {name}, {sequences} of {context:,} tokens{room}, in {unit}"
    console.print(title, highlight=False, soft_wrap=True)
    # Only a DynamicCache's sliding-window layers change: they hold the whole prompt until the first new token.
    shrinks = any(row.footprint.total > 1.01 * row.decoding.total for row in rows)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("preset", no_wrap=True)
    # What fits takes the place of what there is of which kind: both are too wide for a terminal.
    headings = [] if left is not None else ["packed", "dense", "other\nlayers"]
    headings += ["after\nprefill", "decoding"] if shrinks else ["total"]
    headings += ["of\n16 bit"] + (["max\ncontext", "max\nbatch"] if left is not None else [])
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        held = row.decoding
        sizes = [] if left is not None else [held.packed + held.metadata, held.window + held.sinks, held.uncompressed]
        sizes += [row.footprint.total, held.total] if shrinks else [row.footprint.total]
        cells = [f"{size / size_of:,.1f}" for size in sizes] + [f"{held.ratio:.1%}"]
        if left is not None:
            cells += ["any" if most is None else f"{most:,}" for most in (row.max_context, row.max_batch)]
        table.add_row(row.preset or ("DynamicCache" if max_cache_len is None else "StaticCache"), *cells)
    console.print(table)
    if shrinks:
        console.print(
            "A DynamicCache's sliding-window layers hold the whole prompt until the first new token, and their window "
            "from then on. What fits is what fits after the prefill."
        )
    if left is not None and memory is not None:
        console.print(
            f"Of {memory / 2**30:,.1f} GiB, {left / 2**30:,.1f} GiB are left for the cache beside "
            f"{estimator.weight_bytes / 2**30:,.1f} GiB of weights and the reserve.",
            highlight=False,
        )
        if estimator.max_positions is not None:
            console.print(f"The model is made for up to {estimator.max_positions:,} tokens.", highlight=False)


class _Printer(TextStreamer):
    """Prints words as they are generated."""

    def __init__(self, tokenizer: Any, console: Console) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.console = console

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        # What a model says must not steer the terminal.
        text = "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")
        self.console.out(text, end="\n" if stream_end else "", highlight=False)


COMMANDS = {
    "/mem": "shows the memory the cache holds",
    "/save PATH": "writes the conversation and its cache to a file",
    "/load PATH": "takes up a saved conversation",
    "/reset": "starts over",
    "/quit": "ends (as does Ctrl-D)",
}


def _command(chat: Chat, line: str, console: Console) -> None:
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
            _print_error(error, console)
            return
        done = "Saved" if name == "/save" else "Loaded"
        console.print(f"{done} {int(chat.cache.get_seq_length()):,} tokens.", highlight=False)
    elif name == "/mem":
        held = int(chat.cache.get_seq_length())
        console.print(f"{held:,} tokens: {chat.cache.memory_footprint()}", highlight=False, soft_wrap=True)
    elif name == "/reset":
        chat.reset()
        console.print("The conversation starts over.")
    else:
        for command, meaning in COMMANDS.items():
            console.print(f"{command:12} {meaning}", highlight=False)


@app.command("chat")
def chat_command(
    model: Model = None,
    preset: Preset = "4bit_nc",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest answer, in tokens.")] = 512,
    dtype: Dtype = None,
    device: Annotated[
        str | None,
        typer.Option(help="Where to run, as cpu or cuda:0. By default a GPU if there is one."),
    ] = None,
) -> None:
    """Chat with a model; the whole conversation stays in one compressed cache.

    In the chat, /mem shows the memory held, /save PATH and /load PATH keep a conversation with its cache, /reset starts
    over and /quit ends. A model without a chat template, as the small one of the checkout, continues your text.
    """
    console = Console()
    with _errors_as_sentences():
        if preset != "auto":
            _check_preset(preset)
        name = _model_name(model)
        where = device or ("cuda" if torch.cuda.is_available() else "cpu")
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                name, dtype=_dtype(dtype) or "auto", attn_implementation="turboquant"
            )
        except (OSError, ValueError) as error:
            raise ValueError(f"Cannot load the model {name!r}: {error}") from None
        try:
            loaded = loaded.to(torch.device(where)).eval()
        except RuntimeError as error:
            raise ValueError(f"Cannot run on {where!r}: {str(error)[:200]}") from None
        chat = Chat(loaded, tokenizer, preset, max_new_tokens)
    chosen = "an automatically chosen" if preset == "auto" else f"a {preset}"
    console.print(f"{name} with {chosen} cache. Type /help for the commands.", highlight=False)
    if not tokenizer.chat_template:
        console.print("This model has no chat template: it continues your text.")
    while True:
        try:
            line = console.input("[bold]> [/]")
        except (EOFError, KeyboardInterrupt):
            break
        if line.strip() == "/quit":
            break
        if line.startswith("/"):
            _command(chat, line.strip(), console)
        elif line:
            try:
                chat.say(line, _Printer(tokenizer, console))
            except KeyboardInterrupt:
                console.print("\nStopped.")
            except ValueError as error:
                _print_error(error, console)


@app.command("bench", context_settings=PASS_ON)
def bench_command(context: typer.Context) -> None:
    """Measure memory and speed against other caches: runs the checkout's examples/measure/benchmark.py.

    `tq-hf bench --help` shows the benchmark's own options.
    """
    with _errors_as_sentences():
        script = _example("measure/benchmark.py", "The benchmark")
    raise typer.Exit(subprocess.run([sys.executable, str(script), *context.args], check=False).returncode)


if __name__ == "__main__":
    app()
