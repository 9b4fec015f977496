r"""Train small byte-level models that recall facts from their context.

They exist to test KV-cache compression on a real attention pattern without a download: grouped-query attention, and
greedy recall that fails visibly when the cache is damaged. One GPU and a few minutes suffice::

    python -m examples.measure.quality.train_needle --minutes 6              # the one in examples/needle
    python -m examples.measure.quality.train_needle --model needle-10m --minutes 3.5 --output DIR \
        --contexts 512 1024 4096 --enough 0.97

``needle-10m`` and ``needle-10m-bias`` have 10 million parameters and are what ``evaluate.py`` measures presets
on: the one with normalised queries and keys, as Qwen3 has them, the other with biases on its projections, as Qwen2.
``needle-latents`` has latent attention, as DeepSeek-V3, for ``latents.py``.

Training data: the Python sources of the standard library (PSF License Version 2), less the modules that
``needle/filler.txt`` was made from, and of accelerate and transformers (Apache License 2.0), numpy and torch (BSD
3-Clause), as installed for the running interpreter.
Half of the sequences are plain text. The others carry facts ``<<key = 123456>>`` at random places, which are
asked for again at random later places and at the end.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import random
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import accelerate
import numpy as np
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin, set_seed
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GenerationConfig,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from examples import needle_data as needle

BOS, EOS, PAD = 256, 257, 258
STAGE_ENDS = (0.15, 0.65, 1.0)
"""Share of the training at which each context of ``--contexts`` ends; short contexts first learn recall sooner."""
ANSWER_WEIGHT = 8.0
TOKENS_PER_STEP, LEARNING_RATE = 65_536, 2e-3
WARMUP_STEPS = 200
CHECK_STEPS = 200
"""Steps between looks at held-out recall, at the longest context."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level tokenizer: the id of a byte is its value, and 256..258 are the special tokens."""
    printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    vocab = {chr(byte): byte for byte in printable}
    # ByteLevel writes the remaining bytes, in order, as the characters from 256 on.
    vocab |= {chr(256 + i): byte for i, byte in enumerate(b for b in range(256) if b not in printable)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|bos|>", "<|eos|>", "<|pad|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        model_max_length=8192,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # text that spells out a special token stays text, so one token is one byte
    )


_QWEN_SIZES = dict(hidden_size=384, intermediate_size=1024, num_hidden_layers=5, sliding_window=None)
MODELS = {
    "llama": LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
    ),
    "needle-10m": Qwen3Config(**_QWEN_SIZES, num_attention_heads=6, num_key_value_heads=2, head_dim=128),
    "needle-10m-bias": Qwen2Config(**_QWEN_SIZES, num_attention_heads=12, num_key_value_heads=4, head_dim=64),
    "needle-latents": DeepseekV3Config(
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=5,
        first_k_dense_replace=5,
        num_attention_heads=6,
        num_key_value_heads=6,
        q_lora_rank=None,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
    ),
}
"""Shapes: 3.9, 10.0, 10.0 and 8.7 million parameters."""


def build_model(name: str) -> PreTrainedModel:
    """An untrained model of ``MODELS``, for 8,192 bytes of context."""
    config = copy.deepcopy(MODELS[name])
    config.update(
        dict(
            vocab_size=259,
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
            tie_word_embeddings=False,
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
    )
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(do_sample=False, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    return model


class NeedleDataset(Dataset):
    """Sequences made on the fly; sequence ``index`` depends on the seed, the context and the index alone."""

    def __init__(self, text: np.ndarray, context: int, seed: int) -> None:
        """``text``: (n_bytes,) int16 token ids of the corpus, its files joined by end-of-sequence tokens."""
        self.text, self.context, self.seed = text, context, seed
        self.max_facts = max(1, min(32, context // 96))

    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """``tokens`` (context + 1,) int64, and ``weights`` (context + 1,) float32 of each as a target."""
        rng = random.Random(f"{self.seed} {self.context} {index}")
        events = self._events(rng) if rng.random() < 0.5 else []
        room = self.context + 1 - sum(len(line) for _, line, _ in events)
        start = rng.randrange(len(self.text) - room)
        text = self.text[start : start + room]
        tokens, weights, previous = [], [], 0
        for place, line, weight in sorted(events, key=lambda event: event[0]):
            cut = int(place * room)
            answer = line.rindex(b" = ") + 3
            tokens += [text[previous:cut], np.frombuffer(line, np.uint8).astype(np.int16)]
            line_weights = np.ones(len(line), np.float32)
            line_weights[answer : answer + needle.ANSWER_TOKENS] = weight
            weights += [np.ones(cut - previous, np.float32), line_weights]
            previous = cut
        tokens.append(text[previous:])
        weights.append(np.ones(room - previous, np.float32))
        return {
            "tokens": torch.from_numpy(np.concatenate(tokens).astype(np.int64)),
            "weights": torch.from_numpy(np.concatenate(weights)),
        }

    def _events(self, rng: random.Random) -> list[tuple[float, bytes, float]]:
        """Facts, and questions with their answers: (place in [0, 1], line, weight of the answer's tokens).

        The digits of a fact weigh nothing where it is planted: nothing predicts them.
        """
        passkey_only = rng.random() < 0.2
        keys = [needle.PASSKEY] if passkey_only else self._keys(rng, rng.randint(1, self.max_facts))
        lines = [needle.fact(key, needle.random_answer(rng)).encode() for key in keys]
        # One fact in five goes to the very beginning, which uniform places would seldom reach.
        places = [rng.random() * (0.02 if rng.random() < 0.2 else 1.0) for _ in keys]
        events = [(place, line, 0.0) for place, line in zip(places, lines, strict=True)]
        for place, line in zip(places, lines, strict=True):
            if not passkey_only and rng.random() < 0.7:
                events.append((place + (1.0 - place) * rng.random(), line, ANSWER_WEIGHT))
        asked_last = rng.sample(lines, rng.randint(1, min(8, len(lines))))
        return events + [(1.0, line, ANSWER_WEIGHT) for line in asked_last]

    @staticmethod
    def _keys(rng: random.Random, count: int) -> list[str]:
        """Distinct two-word keys from few words, so that keys share words and the whole key has to match."""
        if rng.random() < 0.5:
            pools = [rng.sample(needle.ADJECTIVES, 12), rng.sample(needle.NOUNS, 12)]
        else:  # made-up words, so that recall does not depend on having seen the words before
            made_up = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 8))) for _ in range(24)]
            pools = [made_up[:12], made_up[12:]]
        keys: dict[str, None] = {}
        while len(keys) < count:
            keys[" ".join(rng.choice(pool) for pool in pools)] = None
        return list(keys)


def train(model: PreTrainedModel, accelerator: Accelerator, args: argparse.Namespace) -> dict[str, float]:
    """Train until ``--steps`` or ``--minutes`` is used up; the learning rate falls linearly to zero by then.

    Once recall of held-out facts is ``--enough``, what is left of the schedule is cut to a quarter of the time used.
    """
    documents = needle.training_sources()
    corpus = np.concatenate(
        [np.append(np.frombuffer(text.encode(), np.uint8).astype(np.int16), np.int16(EOS)) for text in documents]
    )
    accelerator.print(f"corpus: {len(documents)} files, {len(corpus) / 1e6:.1f} MB")
    on_gpu = accelerator.device.type == "cuda"
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=on_gpu
    )
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    wrapped.train()
    started, step, tokens_seen, minutes, recall = time.monotonic(), 0, 0, args.minutes, 0.0

    def elapsed() -> float:
        return (time.monotonic() - started) / 60

    def batches(context: int) -> Iterator[dict[str, torch.Tensor]]:
        size = max(1, TOKENS_PER_STEP // context)
        data = NeedleDataset(corpus, context, args.seed)
        yield from accelerator.prepare(DataLoader(data, size, num_workers=args.workers, pin_memory=True))

    for context, end in zip(args.contexts, STAGE_ENDS, strict=True):
        for batch in batches(context):
            done = max(step / args.steps, elapsed() / minutes)
            if done >= end:
                break
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * (1.0 - done)
            inputs, targets, weights = batch["tokens"][:, :-1], batch["tokens"][:, 1:], batch["weights"][:, 1:]
            logits = wrapped(input_ids=inputs, use_cache=False).logits
            losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").view_as(weights)
            accelerator.backward((losses * weights).sum() / weights.sum())
            accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            tokens_seen += targets.numel() * accelerator.num_processes
            if step % 500 == 0 or step == 1:
                answers, plain = weights > 1, weights == 1
                right = (logits.argmax(-1) == targets)[answers].float().mean().item()
                accelerator.print(
                    f"step {step} context {context} minutes {elapsed():.2f} text {losses[plain].mean().item():.3f} "
                    f"answers {losses[answers].mean().item():.4f} right {right:.4f}",
                    flush=True,
                )
            if context == args.contexts[-1] and recall < args.enough and step % CHECK_STEPS == 0:
                with accelerator.autocast():
                    recall = held_out_recall(model, context, accelerator.device)  # not compiled: another shape
                accelerator.print(f"step {step} minutes {elapsed():.2f} held-out recall {recall:.3f}", flush=True)
                if recall >= args.enough:
                    minutes = min(minutes, 1.25 * elapsed())
    return {"steps": step, "tokens": tokens_seen, "minutes": round(elapsed(), 2), "corpus_bytes": len(corpus)}


@torch.inference_mode()
def held_out_recall(model: torch.nn.Module, context: int, device: torch.device) -> float:
    """Share of facts in held-out text that greedy decoding would recall, from one pass with the answers given."""
    facts = min(16, context // 128)
    texts, starts = zip(
        *(needle.answered(*needle.recall_prompt(context - 40 * facts, facts, 10**6 + seed)) for seed in range(8)),
        strict=True,
    )
    right = []
    for text, places in zip(texts, starts, strict=True):
        ids = torch.tensor(list(text.encode())[:context], device=device)[None]
        guesses = model(input_ids=ids, use_cache=False).logits.argmax(-1)
        right += needle.recalled_at(guesses, ids, [place for place in places if place + 8 <= context])
    return sum(right) / len(right)


@torch.inference_mode()
def recalled(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, cases: list[tuple[str, str]], batch: int = 16
) -> list[bool]:
    """Whether free greedy generation gives each ``(prompt, answer)``'s digits and the terminator."""
    found = []
    for first in range(0, len(cases), batch):
        prompts, answers = zip(*cases[first : first + batch], strict=True)
        inputs = tokenizer(list(prompts), return_tensors="pt", padding=True).to(model.device)
        output = model.generate(**inputs, max_new_tokens=needle.ANSWER_TOKENS)
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :])
        found += [needle.is_recalled(text, answer) for text, answer in zip(texts, answers, strict=True)]
    return found


@torch.inference_mode()
def nats_per_byte(model: PreTrainedModel, context: int) -> float:
    """Mean cross-entropy on the held-out filler text, in full windows of ``context`` bytes."""
    data = torch.tensor(list(needle.filler_text().encode()), device=model.device)
    windows = data[: len(data) // context * context].view(-1, context)
    losses = [model(input_ids=w[None], labels=w[None]).loss.item() for w in windows]
    return sum(losses) / len(losses)


def evaluate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, length: int, seeds: int) -> dict[str, object]:
    """Greedy recall from prompts of ``length`` bytes: passkey at 21 depths, and 16 facts asked one by one."""
    by_depth = {}
    for depth in (i / 20 for i in range(21)):
        cases = [needle.passkey_prompt(length, depth, seed=1000 * seed + int(depth * 100)) for seed in range(seeds)]
        by_depth[f"{depth:.2f}"] = float(np.mean(recalled(model, tokenizer, cases)))
    cases = []
    for seed in range(2 * seeds):
        prompt, asked = needle.recall_prompt(length, n_facts=min(16, length // 64), seed=seed)
        cases += [(prompt + ask, answer) for ask, answer in asked]
    return {
        "prompt_bytes": length,
        "dtype": str(model.dtype).removeprefix("torch."),
        "passkey_prompts": 21 * seeds,
        "passkey_recall": float(np.mean(list(by_depth.values()))),
        "passkey_recall_by_depth": by_depth,
        "multi_query_questions": len(cases),
        "multi_query_recall": float(np.mean(recalled(model, tokenizer, cases))),
        "nats_per_byte": round(nats_per_byte(model, length), 4),
    }


def main() -> None:
    """Train, save in bfloat16, evaluate what was saved, and write ``training.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--output", type=Path, default=needle.FILLER_PATH.parent, help="where the checkpoint goes")
    parser.add_argument("--minutes", type=float, default=6.0, help="time limit of the training")
    parser.add_argument("--enough", type=float, default=1.1, help="held-out recall at which training winds down")
    parser.add_argument("--steps", type=int, default=100_000, help="step limit of the training")
    parser.add_argument("--contexts", type=int, nargs=3, default=[1024, 4096, 8192], help="context of each stage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=8, help="processes that make sequences")
    parser.add_argument("--eval-seeds", type=int, default=12, help="prompts for each depth; 0 skips the evaluation")
    args = parser.parse_args()
    set_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    # Compiling the repeated layer instead of the whole model takes seconds rather than a minute for each context.
    plugin = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
    accelerator = Accelerator(mixed_precision="bf16", dynamo_plugin=plugin)
    model, tokenizer = build_model(args.model), build_tokenizer()
    record: dict[str, object] = {"parameters": model.num_parameters()} | train(model, accelerator, args)
    accelerator.wait_for_everyone()
    if not accelerator.is_main_process:
        return
    fresh = build_model(args.model)
    fresh.load_state_dict(model.state_dict())
    fresh.to(torch.bfloat16).save_pretrained(args.output, max_shard_size="15MB")
    tokenizer.save_pretrained(args.output)

    torch.set_float32_matmul_precision("highest")
    record["evaluation"] = []
    if args.eval_seeds:
        lengths = [max(256, context - 64) for context in args.contexts]
        for dtype, length in [*((torch.bfloat16, length) for length in lengths), (torch.float32, lengths[1])]:
            saved = AutoModelForCausalLM.from_pretrained(args.output, dtype=dtype).to(accelerator.device).eval()
            record["evaluation"].append(evaluate(saved, tokenizer, length, args.eval_seeds))
            print(json.dumps(record["evaluation"][-1]), flush=True)
    record |= {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "command": "python -m examples.measure.quality.train_needle",
        "arguments": {name: value for name, value in vars(args).items() if name != "output"},
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, accelerate, np)}
        | {"python": platform.python_version()},
    }
    (args.output / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
