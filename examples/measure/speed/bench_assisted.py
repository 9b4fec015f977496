"""Time of assisted decoding in `graph_decoding`, over the same without drafts, on an 8B-shaped random Llama.

The models are made to repeat themselves: each token's embedding is 50 times as large as usual and stands, for the token
before it, in the output matrix too. So the most likely next token is that of one permutation of the vocabulary, with a
cycle of 200 tokens in the prompt, whatever attention gives; and every draft of a lookup, or of an assistant made in the
same way, is right. A step of k drafts accepts k and generates k + 1 tokens. How many drafts are right on real text is
for the text to say; what a step costs, this shows.

The cache is filled with random keys and values for most of the context, and the prompt is the rest.
"""

from __future__ import annotations

import gc
import json
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

from examples.measure.speed.bench_generate import fill
from examples.provenance import LLAMA_8B, RESULTS, provenance, slug
from tq_hf import TurboQuantCache, graph_decoding
from tq_hf.compat import as_input

CYCLE = 200
PROMPT = 256
"""Tokens that the model reads; the cache holds random states before them."""
NEW_TOKENS = 160
SMALL = dict(hidden_size=1536, intermediate_size=4864, num_hidden_layers=16, num_attention_heads=12,
             num_key_value_heads=4, head_dim=128)  # fmt: skip
"""A tenth of the model, with the same vocabulary: 0.8 billion weights, half of them embeddings."""


class StepClock:
    """Streamer that notes when it gets tokens: those of the prompt, then those of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to end."""


def repeating_llama(device: torch.device, **shape: Any) -> LlamaForCausalLM:
    """A Llama in bf16 whose next token is the next in a cycle of `CYCLE` tokens."""
    config = LlamaConfig(**{**LLAMA_8B, **shape}, attn_implementation="turboquant")
    torch.manual_seed(0)
    with device:
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(dtype)
    with torch.no_grad():
        embedding, out = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding.normal_(std=1.0)
        embedding.mul_(50)
        out.copy_(embedding.roll(1, 0) / 50)  # token t follows token t - 1
        out[0].copy_(embedding[CYCLE - 1] / 50)
        out[CYCLE].zero_()
    return model


def measure(model: LlamaForCausalLM, context: int, room: int, rounds: int, **drafts: Any) -> dict[str, float]:
    """Milliseconds of a step, median of `rounds` generations after a first one, and what the steps generate.

    The time of a generation's step is the mean of its second half, as the streamer gets tokens.
    """
    cache = TurboQuantCache(model.config, "4bit_nc", max_cache_len=room)
    ids = torch.arange(context, device=model.device)[None] % CYCLE
    took = []
    with torch.no_grad():
        for _ in range(rounds + 1):
            cache.reset()
            fill(cache, model, 1, context - PROMPT)
            torch.cuda.synchronize()
            clock = StepClock()
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                **as_input(cache),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                custom_generate=graph_decoding,
                streamer=clock,
                **drafts,
            )
            expected = torch.arange(context, context + NEW_TOKENS, device=ids.device) % CYCLE
            right = int((out[0, context:] == expected).sum())
            # The first notes are of the prompt, of compilation and of the capture.
            steps = len(clock.times) - 2
            half = clock.times[len(clock.times) // 2 :]
            took.append((half[-1] - half[0]) / (len(half) - 1))
    per_step = sorted(took[1:])[len(took[1:]) // 2]
    del cache
    gc.collect()
    torch.cuda.empty_cache()
    return {"ms_per_step": 1e3 * per_step, "steps": steps, "tokens_per_step": (NEW_TOKENS - 1) / steps, "right": right}


def main(
    contexts: Annotated[list[int], typer.Option(help="Tokens in the cache.")] = [2048, 8192, 32768],  # noqa: B006
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 32,
    drafts: Annotated[int, typer.Option(help="Drafts of a step.")] = 4,
    rounds: Annotated[int, typer.Option(help="Generations of each kind; the median counts.")] = 3,
    assistant: Annotated[bool, typer.Option(help="Also with an assistant.")] = True,
    output: Annotated[Path, typer.Option(help="Folder for the JSON file.")] = RESULTS,
) -> None:
    """Measure steps without drafts, with a lookup and with an assistant."""
    device = torch.device("cuda")
    model = repeating_llama(device, num_hidden_layers=layers)
    record = provenance(device, f"random Llama, 8B shape, {layers} layers, made to repeat itself")
    record["rows"] = rows = []
    small = None
    if assistant:
        small = repeating_llama(device, **SMALL)
        small.generation_config.num_assistant_tokens = drafts
        record["assistant_weights"] = sum(p.numel() for p in small.parameters())
    for context in contexts:
        kinds: dict[str, dict[str, Any]] = {"plain": {}, "prompt lookup": dict(prompt_lookup_num_tokens=drafts)}
        if small is not None:
            kinds["assistant"] = dict(assistant_model=small)
        base = None
        for kind, options in kinds.items():
            row = {"context": context, "kind": kind, "drafts": drafts} | measure(
                model, context, max(contexts) + NEW_TOKENS + 32, rounds, **options
            )
            row["ms_per_token"] = row["ms_per_step"] / row["tokens_per_step"]
            base = base or row
            row["step_over_plain"] = row["ms_per_step"] / base["ms_per_step"]
            row["tokens_per_second_over_plain"] = base["ms_per_token"] / row["ms_per_token"]
            rows.append(row)
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    path = output / f"assisted-{slug(device)}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
