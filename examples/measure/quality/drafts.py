"""Tokens of assisted decoding on real weights, next to plain decoding on the same cache.

    python -m examples.measure.quality.drafts --model smollm2

The prompt asks the model to copy a passage of real text, which is what drafts are for. Greedy decoding with drafts
gives the tokens of plain decoding, except where two logits nearly tie: a call of several tokens rounds differently than
calls of one. An answer is compared up to the first token that differs, and the gap between the two largest logits of
plain decoding there is reported. In float32 no token should differ.

The assistant is the model itself in bfloat16. `generate()` gives it a `DynamicCache`, `graph_decoding` a packed cache.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.measure.speed.bench_assisted import StepClock
from examples.provenance import RESULTS, provenance, slug
from examples.real_model import model_folder, text_file
from tq_hf import TurboQuantCache, graph_decoding
from tq_hf.compat import as_input

DRAFTS = 4
WAYS: dict[str, dict[str, Any]] = {"generate()": {}, "graph_decoding": {"custom_generate": graph_decoding}}


def prompts(tokenizer: Any, text: str, tokens: int, count: int) -> list[torch.Tensor]:
    """Prompts `[1, T]` int64 that ask for a copy of `count` passages of `tokens` tokens from places of the text."""
    made = []
    for index in range(count):
        start = text.index("\n", len(text) * (2 * index + 1) // (2 * count)) + 1
        passage = tokenizer(text[start : start + 10 * tokens], add_special_tokens=False)["input_ids"][:tokens]
        message = {"role": "user", "content": f"Copy this text:\n\n{tokenizer.decode(passage)}"}
        asked = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_tensors="pt")
        made.append(asked["input_ids"])
    return made


def compare(model: Any, ids: list[torch.Tensor], new: int, drafts: dict[str, Any], way: str) -> dict[str, Any]:
    """Compare answers of up to `new` tokens with and without drafts."""
    equal, tokens, calls, gaps = 0, 0, 0, []
    for prompt in ids:
        prompt = prompt.to(model.device)
        held = dict(attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=new, **WAYS[way])
        room = prompt.shape[1] + new + DRAFTS + 1

        def cache(room: int = room) -> dict[str, TurboQuantCache]:
            return as_input(TurboQuantCache(model.config, "4bit_nc", max_cache_len=room))

        plain = model.generate(prompt, **held, **cache(), return_dict_in_generate=True, output_logits=True)
        clock = StepClock()
        found = model.generate(prompt, **held, **cache(), streamer=clock, **drafts)
        answers = [each[0, prompt.shape[1] :].tolist() for each in (plain.sequences, found)]
        alike = next((i for i, (x, y) in enumerate(zip(*answers, strict=False)) if x != y), len(answers[0]))
        if alike < len(answers[0]):
            top = plain.logits[alike][0].float().topk(2).values
            gaps.append(float(top[0] - top[1]))
        equal, tokens, calls = equal + alike, tokens + len(answers[1]), calls + len(clock.times) - 1
    return {"equal": equal, "gaps": gaps, "tokens_per_call": tokens / calls}


def main(
    model: Annotated[str, typer.Option(help="Folder of a chat model, or smollm2.")] = "smollm2",
    passages: Annotated[int, typer.Option(help="Number of passages.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of a passage.")] = 400,
    new: Annotated[int, typer.Option(help="New tokens of an answer, at most.")] = 160,
    device: Annotated[str, typer.Option(help="Device of torch.")] = "cuda",
    output: Annotated[Path, typer.Option(help="Folder for the JSON file.")] = RESULTS,
) -> None:
    """Compare tokens with drafts of a lookup and of an assistant, in float32 and bfloat16."""
    folder, place = model_folder(model), torch.device(device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = prompts(tokenizer, text_file().read_text(encoding="utf-8"), tokens, passages)
    assistant = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="turboquant")
    assistant.to(place).generation_config.num_assistant_tokens = DRAFTS
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    record = provenance(place, model)
    record["rows"] = rows = []
    for dtype in (torch.float32, torch.bfloat16):
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="turboquant").to(place)
        for way in WAYS:
            for kind, drafts in {
                "prompt lookup": {"prompt_lookup_num_tokens": DRAFTS},
                "assistant": {"assistant_model": assistant},
            }.items():
                row = {"dtype": str(dtype).removeprefix("torch."), "way": way, "kind": kind, "passages": passages}
                rows.append(row | compare(loaded, ids, new, drafts, way))
                print(rows[-1], flush=True)
    (output / f"drafts-{slug(place)}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
