"""Reinforcement learning whose rollouts are generated on packed pages: GRPO of TRL on the small model.

    pip install -e ".[trl]"    # in a clone
    python examples/rollouts.py --steps 4
    python examples/rollouts.py --model Qwen/Qwen3-0.6B --tokens 4000 --prompts 8 --generations 8

The task is the needle: a long prompt hides a pass key, and what is sampled after its question is rewarded for every
digit that is right. TRL asks the model for the answers of a whole batch (`generate_batch`); within
`continuous_batching(trainer.model, ...)` they are generated from packed pages, which the generations of one prompt
share as far as its blocks are complete. Gradients are those of the model itself. A rollout is therefore sampled from a
policy that differs a little from the one that is trained, as with any compressed cache.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from needle_data import passkey_prompt
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tq_hf import continuous_batching

SHIPPED_MODEL = str(Path(__file__).resolve().parent / "needle")
CLOSED = 0.1
"""Reward for closing the answer. All digits together earn 1."""


def digits_right(completions: list[str], passkey: list[str], **_: Any) -> list[float]:
    """Reward of each completion: the share of digits before the first wrong one, and a small bonus for closing."""
    rewards = []
    for text, key in zip(completions, passkey, strict=True):
        right = next((i for i, digit in enumerate(key) if text[i : i + 1] != digit), len(key))
        rewards.append(right / len(key) + CLOSED * text.startswith(f"{key}>>"))
    return rewards


def needles(prompts: int, tokens: int, seed: int) -> Dataset:
    """Make prompts of this number of bytes, with their hidden digits."""
    pairs = [passkey_prompt(tokens, depth=(i + 0.5) / prompts, seed=seed + i) for i in range(prompts)]
    return Dataset.from_list([{"prompt": prompt, "passkey": key} for prompt, key in pairs])


def train(arguments: argparse.Namespace, folder: str) -> GRPOTrainer:
    """Train; return the trainer after all steps."""
    on_gpu = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16 if on_gpu else torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    options = GRPOConfig(
        output_dir=folder,
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.prompts * arguments.generations,
        num_generations=arguments.generations,
        max_completion_length=8,
        temperature=arguments.temperature,
        learning_rate=arguments.learning_rate,
        use_transformers_continuous_batching=True,
        transformers_continuous_batching_config={"num_blocks": arguments.blocks} if arguments.blocks else None,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=arguments.seed,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=digits_right,
        args=options,
        train_dataset=needles(arguments.prompts * arguments.steps, arguments.tokens, arguments.seed),
        processing_class=tokenizer,
    )
    dense = dict(sink_tokens=arguments.sink_tokens, residual_length=arguments.residual_length)
    with continuous_batching(trainer.model, arguments.preset, **dense):
        trainer.train()
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SHIPPED_MODEL, help="a model of the hub or a folder")
    parser.add_argument("--preset", default="4bit_nc", help="what pages are packed to")
    parser.add_argument("--sink-tokens", type=int, default=4, help="first tokens of an answer's text that stay dense")
    parser.add_argument("--residual-length", type=int, default=128, help="newest tokens that stay dense")
    parser.add_argument("--steps", type=int, default=4, help="steps of the optimiser")
    parser.add_argument("--prompts", type=int, default=2, help="prompts of a step")
    parser.add_argument("--generations", type=int, default=4, help="answers sampled for each prompt")
    parser.add_argument("--tokens", type=int, default=600, help="bytes of a prompt, which are the small model's tokens")
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--blocks", type=int, help="pages of 256 tokens the cache has room for; by default what fits")
    parser.add_argument("--seed", type=int, default=0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = train(parser.parse_args(), folder)
    for entry in trainer.state.log_history:
        if "reward" in entry:
            print(f"step {entry['step']}: mean reward {entry['reward']:.3f}, gradient norm {entry['grad_norm']:.3f}")


if __name__ == "__main__":
    main()
