"""The questions of `needle_recall.yaml` and the texts of `needle_text.yaml`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import datasets

sys.path.append(str(Path(__file__).resolve().parents[1]))
import needle_data as needle

TOKENS, FACTS, PROMPTS = 1500, 8, 3


def documents(**metadata: Any) -> dict[str, datasets.Dataset]:
    """Eight facts in each of three prompts, a question for each; `metadata` is the task's and changes nothing."""
    found = []
    for seed in range(PROMPTS):
        text, asked = needle.recall_prompt(TOKENS, FACTS, seed)
        found += [{"prompt": text + question, "answer": answer + needle.TERMINATOR} for question, answer in asked]
    return {"test": datasets.Dataset.from_list(found)}


def texts(**metadata: Any) -> dict[str, datasets.Dataset]:
    """Texts with eight facts each, their questions and answers at the end; `metadata` changes nothing."""
    found = [{"text": needle.answered(*needle.recall_prompt(TOKENS, FACTS, seed))[0]} for seed in range(PROMPTS)]
    return {"test": datasets.Dataset.from_list(found)}
