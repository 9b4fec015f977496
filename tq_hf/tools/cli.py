"""Command line `tq-hf`: options, and errors as sentences.

Commands import what they run, torch and transformers among it, when they run: help comes at once.
"""

from __future__ import annotations

import importlib
import json
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from typer import Option

import tq_hf

from .display import ERRORS, print_error, with_progress, working

if TYPE_CHECKING:
    from ..config import TurboQuantConfig

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"  # exists in a checkout only; contains a small model

DEFAULT_CONTEXT = 32768
GREETING = """This model is trained to recall text that it read. Try these lines, one after the other:
  Some words about the weather. <<green lamp = 493817>> And some about the sea.
  What was it? <<green lamp =
"""

app = typer.Typer(
    name="tq-hf",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # the lines of a docstring flow together
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"tq-hf {tq_hf.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """TurboQuant KV-cache compression for Hugging Face transformers."""


PRESET_HELP = "by default 4bit_nc. `tq-hf estimate` lists all presets."
DTYPES = "bfloat16, float16 or float32"
HELP = {
    "model": "A folder or a model of the Hugging Face hub. Default: the small model of the checkout.",
    "prompt": f"Number of prompt tokens. Default: {DEFAULT_CONTEXT}, or the model's limit.",
    "allocated": "Number of tokens to preallocate, as for compiled decoding; more than the context.",
    "presets": "A preset, or presets by layer as 4bit_nc,0=k8v4,-1=dense. Repeatable. Default: all presets.",
    "gpu": "Memory of the GPU, as 24GB or 24GiB (24 alone is GiB). Adds the largest context and batch that fit.",
    "weights": "Memory of the weights, as 13GB. Default: counted, quantized as the config says.",
    "bytes": "Memory for the cache, as 500000000, 500MB, or 25% of 16 bits: find presets that fit.",
    "counted": "Number of tokens for which bytes are counted, as in `estimate`.",
    "rounding": f"{DTYPES}. In bfloat16 the model's own rounding hides small differences.",
    "question": "What to ask about the text, by default a summary. Without a chat template it is not asked.",
    "cache": "Number of packed tokens of all requests together. Default: as many as fit into memory; on a CPU 16 "
    "requests of 8192 tokens, or of the model's positions if those are fewer.",
    "share": "Share of the free memory to use. Default: transformers' own on a GPU.",
    "level": "Compile level of layers, in the background; 0 for none. Default: 1 on a GPU.",
    "prefixes": "Folder for the beginnings of prompts, which are not read again after a restart. Default: none.",
}
"""Help of options that is longer than a line."""
Model = Annotated[str | None, typer.Argument(help=HELP["model"])]
DtypeName = Literal["bfloat16", "float16", "float32"]
Dtype = Annotated[DtypeName | None, Option(metavar="DTYPE", help=f"{DTYPES}. Default: that of the checkpoint.")]
Text = Annotated[Path | None, Option(help="A file with text to read. Default: the filler of the checkout.")]
Tokens = Annotated[int, Option(min=1, help="Maximum number of tokens of the text.")]
NewTokens = Annotated[int, Option(min=1, help="Maximum number of tokens of an answer.")]
Presets = Annotated[list[str] | None, Option(help="A preset. Repeatable. Default: all presets.")]
Device = Annotated[str | None, Option(help="Device, as cpu or cuda:0. Default: a GPU if there is one.")]


def _shortened(error: Exception) -> str:
    return textwrap.shorten(str(error) or type(error).__name__, 300, placeholder=" ...")


@contextmanager
def _errors_as_sentences() -> Iterator[Console]:
    """Context with a console. It prints errors the user can correct and ends the command with status 1."""
    try:
        with working("Importing torch and transformers"):
            tq_hf.set_up()
        yield Console(highlight=False)
    except (ValueError, OSError) as error:
        print_error(error, ERRORS)
        raise typer.Exit(1) from None


def _shipped(name: str, instead: str) -> Path:
    """Return the path of a file or folder of the small model in a checkout. Raises `ValueError` without a checkout."""
    path = EXAMPLES / "needle" / name
    if not path.exists():
        raise ValueError(f"The default is a part of the tq_hf repository, and {path} does not exist. {instead}")
    return path


def _model_name(model: str | None) -> str:
    instead = "Run `pip install -e .` in a clone, or name a model, e.g. `Qwen/Qwen3-0.6B`."
    return str(_shipped("", instead)) if model is None else model


def _preset_by_layer(text: str) -> TurboQuantConfig:
    """Parse a preset with presets by layer: "4bit_nc" or "4bit_nc,0=k8v4,-1=dense"."""
    from ..config import TurboQuantConfig

    name, *others = text.split(",")
    layers: dict[int, str | None] = {}
    for other in others:
        if (match := re.fullmatch(r"(-?\d+)=(.+)", other)) is None:
            raise ValueError(f"{other!r} in `--preset` is no layer; write for example 4bit_nc,0=k8v4,-1=dense.")
        layers[int(match[1])] = None if match[2] == "dense" else match[2]
    return TurboQuantConfig.from_preset(name, layers=layers)


@app.command("estimate")
def estimate_command(
    model: Model = None,
    context: Annotated[int | None, Option(min=1, help=HELP["prompt"])] = None,
    batch: Annotated[int, Option(min=1, help="Number of sequences.")] = 1,
    max_cache_len: Annotated[int | None, Option(min=2, help=HELP["allocated"])] = None,
    preset: Annotated[list[str] | None, Option(help=HELP["presets"])] = None,
    gpu_memory: Annotated[str | None, Option(help=HELP["gpu"])] = None,
    reserve: Annotated[float, Option(min=0.0, max=1.0, help="Share of the GPU's memory to leave free.")] = 0.1,
    dtype: Dtype = None,
    weights: Annotated[str | None, Option(help=HELP["weights"])] = None,
    json_wanted: Annotated[bool, Option("--json", help="Print the numbers as JSON, in bytes.")] = False,
) -> None:
    """Estimate the memory of a model's KV cache, and the largest context and batch that fit.

    Only the model's config is read: no weights are downloaded. Sliding windows, linear attention and latent attention
    are counted correctly. The weights of the model are subtracted from the memory of the GPU.
    """
    with _errors_as_sentences() as console:
        import torch
        from transformers import AutoConfig
        from transformers.utils import logging

        from ..config import PRESETS
        from .estimate import Estimator, Report, as_json, estimate, parse_memory, print_table

        name = _model_name(model)
        presets = [_preset_by_layer(one) for one in preset or PRESETS]
        memory = None if gpu_memory is None else parse_memory(gpu_memory)
        logging.set_verbosity_error()
        with working(f"Estimating {name} from its config"):
            try:
                config = AutoConfig.from_pretrained(name)
            except Exception as error:  # remote code of a config may raise any exception
                raise ValueError(f"Cannot read the config of the model {name!r}: {_shortened(error)}") from None
            estimator = Estimator(
                config, dtype and getattr(torch, dtype), None if weights is None else parse_memory(weights)
            )
            if context is None:
                context = min(DEFAULT_CONTEXT, estimator.max_positions or DEFAULT_CONTEXT)
                context = context if max_cache_len is None else min(context, max_cache_len - 1)
            free = None if memory is None else max(0, int(memory * (1 - reserve)) - estimator.weight_bytes)
            rows = list(estimate(estimator, [None, *presets], context, batch, free, max_cache_len))
        report = Report(name, estimator, context, batch, max_cache_len, memory, free, rows)
        if json_wanted:
            typer.echo(json.dumps(as_json(report), indent=2))
        else:
            print_table(report, console)


def _device(name: str | None) -> str:
    """Return the device `name`, or the default. Raises `ValueError` if torch cannot use the device."""
    import torch

    device = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA raises `AssertionError`
        raise ValueError(f"Cannot run on {device!r}: {_shortened(error)}") from None
    return device


def _loaded(name: str, dtype: DtypeName | None, device: str) -> tuple[Any, Any]:
    """Load a model in eval mode with the attention "turboquant", and its tokenizer. `dtype` is by default that of the
    checkpoint."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    options = {"dtype": dtype or "auto", "attn_implementation": "turboquant"}
    with working(f"Loading {name}"):
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
            model: Any = AutoModelForCausalLM.from_pretrained(name, **options)
        except (OSError, ValueError) as error:
            raise ValueError(f"Cannot load the model {name!r}: {error}") from None
        try:
            return model.to(device).eval(), tokenizer
        except RuntimeError as error:
            raise ValueError(f"Cannot run on {device!r}: {_shortened(error)}") from None


def _text(path: Path | None) -> str:
    try:
        return (path or _shipped("filler.txt", "Pass a text: `--text FILE`.")).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text in UTF-8. Convert the file, or pass another `--text`.") from None


@app.command("sweep")
def sweep_command(
    model: Model = None,
    text: Text = None,
    tokens: Tokens = 2048,
    preset: Presets = None,
    bytes_wanted: Annotated[str | None, Option("--bytes", help=HELP["bytes"])] = None,
    context: Annotated[int | None, Option(min=1, help=HELP["counted"])] = None,
    dtype: Annotated[DtypeName, Option(metavar="DTYPE", help=HELP["rounding"])] = "float32",
    device: Device = None,
    output: Annotated[Path | None, Option(help="A JSON file for all numbers.")] = None,
) -> None:
    """Measure the loss of each layer at each preset, and find the presets by layer that fit into a number of bytes.

    The model reads a text with one layer packed and all others dense. The loss of a layer is the KL divergence of the
    next tokens from those with all layers dense. With --bytes, all layers start at the smallest preset. The layer with
    the largest gain in KL per byte is raised (up to dense) while bytes are left. The result is measured as a whole.
    """
    with _errors_as_sentences() as console:
        from transformers import AutoConfig

        from ..config import PRESETS, preset_name
        from .estimate import Estimator, parse_memory
        from .sweep import Reader, fit, print_sweep, spelled, sweep

        presets = [preset_name(one) for one in preset or PRESETS]
        name, device = _model_name(model), _device(device)
        share = re.fullmatch(r"(\d+(?:\.\d+)?)%", bytes_wanted or "")
        most = None
        if bytes_wanted is not None and share is None:
            most = int(bytes_wanted) if bytes_wanted.isdecimal() else parse_memory(bytes_wanted)
        if output is not None and not output.parent.is_dir():
            raise ValueError(f"There is no folder {output.parent} for {output.name}.")
        words = _text(text)
        loaded, tokenizer = _loaded(name, dtype, device)
        estimator = Estimator(AutoConfig.from_pretrained(name))  # dtype of the checkpoint, not of this run
        positions = estimator.max_positions or DEFAULT_CONTEXT
        ids = tokenizer(words, return_tensors="pt")["input_ids"][:, : min(tokens, positions)]
        reader = Reader(loaded, ids.to(device))
        context = context or min(DEFAULT_CONTEXT, positions)
        if share is not None:
            most = int(float(share[1]) / 100 * estimator.footprint(None, context).bf16_equivalent)
        result = sweep(reader, estimator, presets, context, most)
        print_sweep(result, console)
        numbers = {"model": name, "dtype": dtype, "tokens": ids.shape[1]} | asdict(result)
        if most is not None:
            config, line = spelled(fit(result.kl, result.more_bytes, most - result.whole_bytes[presets[-1]]))
            kl, size = reader.kl(config), estimator.footprint(config, context).total
            console.print(f"In {size:,} of {most:,} bytes, with a KL of {kl:.1e}:")
            console.print(line, soft_wrap=True)
            numbers["fit"] = {"config": line, "kl": kl, "bytes": size, "bytes_allowed": most}
        if output is not None:
            output.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


@app.command("compare")
def compare_command(
    model: Model = None,
    text: Text = None,
    question: Annotated[str | None, Option(help=HELP["question"])] = None,
    tokens: Tokens = 2048,
    max_new_tokens: NewTokens = 64,
    preset: Presets = None,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Compare caches on one prompt: memory, times, and the answers side by side.

    The prompt is read and answered greedily on a `DynamicCache` and on a cache of each preset. KL and top-1 are those
    of the answer of the `DynamicCache`, which every cache reads. In bfloat16 the model's own rounding hides small
    differences: measure them with --dtype float32.
    """
    with _errors_as_sentences() as console:
        from ..config import PRESETS, number_of_positions, preset_name
        from .compare import BASELINE, QUESTION, Comparison, print_answers, print_numbers, prompt_ids

        presets = [preset_name(one) for one in preset or PRESETS]
        name, device = _model_name(model), _device(device)
        words = _text(text)
        loaded, tokenizer = _loaded(name, dtype, device)
        config = loaded.config.get_text_config(decoder=True)
        positions = number_of_positions(config, alone=True) or DEFAULT_CONTEXT
        ids = prompt_ids(tokenizer, words, question or QUESTION, tokens)
        if ids.shape[1] + max_new_tokens > positions:
            raise ValueError(
                f"The prompt has {ids.shape[1]:,} tokens, and with {max_new_tokens:,} new ones that is more than the "
                f"{positions:,} positions of the model. Pass fewer `--tokens`."
            )
        console.print(f"{name}, a prompt of {ids.shape[1]:,} tokens on {device}.", soft_wrap=True)
        comparison = Comparison(loaded, ids.to(device), max_new_tokens)
        caches = with_progress([BASELINE, *presets], "answers", ERRORS)
        answers = [comparison.answer(one) for one in caches]
        print_numbers(answers, console)
        print_answers(answers, tokenizer, console)


@app.command("chat")
def chat_command(
    model: Model = None,
    preset: Annotated[str, Option(help=f"Preset of the cache, {PRESET_HELP}")] = "4bit_nc",
    max_new_tokens: NewTokens = 512,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Chat with a model. The whole conversation stays in one compressed cache.

    In the chat, /mem shows the memory of the cache, /save PATH and /load PATH save and load a conversation with its
    cache, /reset starts over and /quit ends. A model without a chat template, as the small model of the checkout,
    continues your text.
    """
    with _errors_as_sentences() as console:
        from ..config import preset_name
        from .chat import Chat, converse

        preset, name, device = preset_name(preset), _model_name(model), _device(device)
        loaded, tokenizer = _loaded(name, dtype, device)
        chat = Chat(loaded, tokenizer, preset, max_new_tokens)
    console.print(f"{name} with a {preset} cache. Type /help for the commands.")
    if not tokenizer.chat_template:
        console.print("This model has no chat template: it continues your text.")
    if name == str(EXAMPLES / "needle"):
        console.print(GREETING, markup=False)
    converse(chat, console)


@app.command("serve")
def serve_command(
    model: Model = None,
    preset: Annotated[str, Option(help=f"Preset of the pages, {PRESET_HELP}")] = "4bit_nc",
    host: Annotated[str, Option(help="Address of the server.")] = "localhost",
    port: Annotated[int, Option(min=1, max=65535, help="Port of the server.")] = 8000,
    dtype: Dtype = None,
    device: Device = None,
    cache_tokens: Annotated[int | None, Option(min=1, help=HELP["cache"])] = None,
    memory_share: Annotated[float | None, Option(min=0.0, max=1.0, help=HELP["share"])] = None,
    batch_tokens: Annotated[int | None, Option(min=1, help="Maximum number of prompt tokens read in one step.")] = None,
    sink_tokens: Annotated[int, Option(min=0, help="Number of first tokens of a request that stay dense.")] = 4,
    residual_length: Annotated[int, Option(min=0, help="Number of newest tokens of a request that stay dense.")] = 128,
    compile_level: Annotated[int | None, Option(min=0, max=3, help=HELP["level"])] = None,
    prefix_cache: Annotated[Path | None, Option(help=HELP["prefixes"])] = None,
    prefix_cache_size: Annotated[str, Option(help="Maximum size of `--prefix-cache`, as 20GB.")] = "20GB",
    api_key: Annotated[
        str | None, Option(envvar="TQ_HF_API_KEY", show_envvar=True, help="Key that clients must send. Default: none.")
    ] = None,
    max_body_size: Annotated[int, Option(min=1, help="Maximum bytes of a request's body. Others are refused.")] = 4
    << 20,
    cors: Annotated[bool, Option("--cors", help="Allow web pages of other origins.")] = False,
) -> None:
    """Serve a model with the API of OpenAI, with the tokens of all requests in packed pages.

    Needs the extra `serving` and transformers 5.19. Requests start and end at any time. Requests with a common prefix
    share pages. Each request has its own temperature, top_p, seed and stop strings.
    """
    with _errors_as_sentences() as console:
        from ..compat import check_required_names
        from ..config import TurboQuantConfig, preset_name
        from .estimate import parse_memory

        preset, name, device = preset_name(preset), _model_name(model), _device(device)
        config = TurboQuantConfig.from_preset(preset, sink_tokens=sink_tokens, residual_length=residual_length)
        if memory_share == 0:
            raise ValueError("`--memory-share` is 0; the cache needs a share above 0. Leave it out for a default.")
        try:
            check_required_names("tq-hf serve", "Use `TurboQuantBatching` in Python.")
            from transformers import ContinuousBatchingConfig

            server = importlib.import_module(".serve", __package__)
        except ImportError as error:  # transformers is too old, or a package is missing
            missing = f'A package of the server is missing ({error.name}): `pip install "tq-hf[serving]"`.'
            raise ValueError(missing if error.name else str(error)) from None
        server.check_access(host, port, api_key)
        loaded, tokenizer = _loaded(name, dtype, device)
        # The option counts pages of transformers' default size. `engine_options` converts them.
        blocks = None if cache_tokens is None else -(-cache_tokens // ContinuousBatchingConfig.page_size)
        level = int(device.startswith("cuda")) if compile_level is None else compile_level
        options = ContinuousBatchingConfig(
            num_blocks=blocks,
            max_memory_percent=memory_share,
            max_batch_tokens=batch_tokens,
            default_compile_level=level,
            scheduler_type="shortest_first",
        )
        say = partial(console.print, soft_wrap=True)
        prefixes = server.PrefixFolder(prefix_cache, parse_memory(prefix_cache_size)) if prefix_cache else None
        more: dict[str, Any] = {"access": (api_key, cors), "most_bytes": max_body_size, "prefixes": prefixes}
        server.serve(name, loaded, tokenizer, config, options, address=(host, port), say=say, **more)


if __name__ == "__main__":
    app()
