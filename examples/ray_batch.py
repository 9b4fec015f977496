"""Answer the prompts of Parquet files on packed pages, a model on each GPU: Ray Data.

    pip install -e ".[ray]"    # in a clone
    python examples/ray_batch.py prompts/ answers/ --model Qwen/Qwen3-4B --workers 2

A file with a column `prompt` becomes a file of the same name with a column `answer` beside it. A file is one piece of
work, and is written once it is whole: if a worker dies another does its file again, and a second start goes on with the
files that have no answers yet.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tq_hf import TurboQuantBatching


class Worker:
    """A model, with one pool of pages for all batches."""

    def __init__(self, model: str, preset: str, new_tokens: int, answers: str) -> None:
        on_gpu = torch.cuda.is_available()
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto" if on_gpu else torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.batching = TurboQuantBatching(loaded.to("cuda" if on_gpu else "cpu"), preset)
        self.generation = GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=loaded.generation_config.eos_token_id
        )
        self.answers = Path(answers)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Answer the prompts of one file, `{"path": [path]}`."""
        (path,) = batch["path"]
        table = parquet.read_table(path)
        prompts = [self.tokenizer(text).input_ids for text in table["prompt"].to_pylist()]
        results = list(self.batching.generate_batch(prompts, self.generation).values())
        if errors := [result.error for result in results if result.error]:
            raise RuntimeError(f"{len(errors)} prompts of {path} have no answer, the first because: {errors[0]}")
        texts = [self.tokenizer.decode(result.generated_tokens, skip_special_tokens=True) for result in results]
        unfinished = self.answers / f".{Path(path).name}.{os.getpid()}"
        parquet.write_table(table.append_column("answer", [texts]), unfinished)
        os.replace(unfinished, self.answers / Path(path).name)
        return {"path": [path], "prompts": [len(prompts)]}


def answer(prompts: Path, answers: Path, workers: int, kind: type = Worker, **options: Any) -> int:
    """Answer all files of a folder without answers in the output folder; return the number of prompts."""
    answers.mkdir(parents=True, exist_ok=True)
    files = [str(path) for path in sorted(prompts.glob("*.parquet")) if not (answers / path.name).exists()]
    if not files:
        return 0
    work = ray.data.from_items([{"path": path} for path in files], override_num_blocks=len(files))
    done = work.map_batches(
        kind,
        fn_constructor_kwargs={"answers": str(answers), **options},
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(workers, len(files))),
        num_gpus=1 if torch.cuda.is_available() else 0,
    )
    count = 0
    for i, row in enumerate(done.iter_rows(), 1):
        count += row["prompts"]
        print(f"{i} of {len(files)} files, {count} prompts: {row['path']}", flush=True)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, help="a folder of Parquet files that all workers see")
    parser.add_argument("answers", type=Path, help="a folder for theirs")
    parser.add_argument("--model", default=str(Path(__file__).resolve().parent / "needle"))
    parser.add_argument("--preset", default="4bit_nc", help="what pages are packed to")
    parser.add_argument("--new-tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--workers", type=int, default=1, help="models, each on a GPU if there are any")
    arguments = vars(parser.parse_args())
    answer(arguments.pop("prompts").resolve(), arguments.pop("answers").resolve(), **arguments)


if __name__ == "__main__":
    main()
