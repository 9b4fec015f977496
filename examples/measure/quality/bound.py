"""Bound what other codes of 2 bits could win: a model's divergence with variants of the codec, before one is built.

    python -m examples.measure.quality.bound FOLDER text.txt --tokens 1408 --documents 2    # a minute a row

A text is read in one pass. In each layer a query attends to the packed blocks that a cache would hold when its chunk is
read, round-tripped by a variant of `tq_hf.codec.reference`, and to all other tokens exactly: the numbers are those of a
cache that is read in chunks (a test compares them). A row shows the mean KL divergence from the exact model in nats,
the same with every position clipped at 0.1, its median, and the relative squared error of the last hidden states. Few
positions, mostly recalled facts, make most of the mean: of two rows that are near, the clipped mean tells more.

An *ideal coder* of R bits is a Gaussian test channel: the squared error 4^-R of rate-distortion theory, unbiased.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tq_kernels.format import CODES
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer

from tq_hf.codec import reference
from tq_hf.codec.balance import channel_scales
from tq_hf.codec.rotation import rotate, rotate_back

CHUNK, SINKS, RESIDUAL, BLOCK = 256, 4, 128, 128
"""Number of tokens read at a time, and those of a cache by default."""
EVERY = 3
"""One position of this number is scored."""


class Codes(NamedTuple):
    """Codes of a layer.

    Args:
        key_bits, value_bits: Bits of keys and values, `None` for exact states.
        key_error, value_error: Relative squared error of Gaussian noise in place of codes, if given.
        mean_tokens: Number of tokens of a key mean.
        gains: Multiply the mean by a gain per key, in eighths from 0 to 15/8.
        shrink: Factor of key scales, over that of the codec.
        balance: Whether channels are balanced.
    """

    key_bits: int | None = 2
    value_bits: int | None = 2
    key_error: float | None = None
    value_error: float | None = None
    mean_tokens: int = BLOCK
    gains: bool = False
    shrink: float = 1.0
    balance: bool = True


Variant = Callable[[int, int], Codes]
"""Codes by the index of a layer and the number of layers."""


def alike(**options: Any) -> Variant:
    """The same codes in all layers."""
    return lambda layer, layers: Codes(**options)


def more(chosen: Callable[[float], bool], **options: Any) -> Variant:
    """Keys of 3 bits in layers whose depth, from 0 to 1, is `chosen`; the codes of `options` in the others."""
    return lambda layer, layers: Codes(key_bits=3) if chosen(layer / layers) else Codes(**options)


VARIANTS: dict[str, Variant] = {
    "2bit_nc": alike(),
    "keys by an ideal coder": alike(key_error=4.0**-2),
    "3-bit keys in 10 to 37% of the depth": more(lambda depth: 0.095 < depth < 0.365),
    "3-bit keys in 40 to 67%": more(lambda depth: 0.395 < depth < 0.66),
    "gains of means": alike(gains=True),
    "3-bit keys, 1-bit values": alike(key_bits=3, value_error=0.338),
    "2.5bit_nc": alike(key_bits=3),
    "mean of 32 tokens": alike(mean_tokens=32),
    "key scales not shrunk": alike(shrink=1 / CODES[2].key_shrink),
    "key scales shrunk twice": alike(shrink=CODES[2].key_shrink),
    "no balance": alike(balance=False),
    "3-bit keys in the first 27%": more(lambda depth: depth < 0.265),
    "3-bit keys in the last 27%": more(lambda depth: depth > 0.73),
    "2.5bit_nc, gains of means": alike(key_bits=3, gains=True),
    "4bit_nc": alike(key_bits=4, value_bits=4),
    "4bit_nc, gains of means": alike(key_bits=4, value_bits=4, gains=True),
    "keys alone": alike(value_bits=None),
    "values alone": alike(key_bits=None),
}
"""A trellis of 1 bit in words of 16 has the error 0.338 (simulated)."""


def round_trip(z: torch.Tensor, bits: int, error: float | None, shrink: float, *, is_value: bool) -> torch.Tensor:
    """Rotated vectors `[..., 128, D]` as they are read back."""
    if error is not None:
        noise = torch.randn(z.shape, generator=torch.Generator().manual_seed(0)).to(z.device)
        return z + noise * (z.square().mean(-1, keepdim=True) * error / (1 - error)).sqrt()
    codes, scale = reference.quantize(z.contiguous(), bits, is_value=is_value)
    return reference.levels_of(codes, bits, is_value=is_value) * (scale.float() * shrink)[..., None]


def packed(
    codes: Codes, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of `blocks` blocks behind the sinks as a cache of `codes` reads them, `[B, Hkv, n * 128, D]`."""
    scales = [queries.new_ones(()), queries.new_ones(())]
    if codes.balance:
        # The last call before the first block is encoded decides.
        decided = channel_scales(*(x[:, :, CHUNK : 2 * CHUNK] for x in (queries, keys, values)), first=0)
        scales = [x.float()[:, :, None, None] for x in decided]
    part = slice(SINKS, SINKS + blocks * BLOCK)
    keys, values = keys[:, :, part], values[:, :, part]
    if codes.key_bits is not None:
        y = rotate((keys.unflatten(2, (blocks, BLOCK)) * scales[0]).float(), 0)
        mean = y.unflatten(3, (-1, codes.mean_tokens)).mean(4, keepdim=True).half().float()
        mean = mean.expand(*mean.shape[:4], codes.mean_tokens, -1).flatten(3, 4)
        if codes.gains:
            gain = (y * mean).sum(-1, keepdim=True) / mean.square().sum(-1, keepdim=True).clamp_min(1e-20)
            mean = mean * ((8 * gain).round().clamp(0, 15) / 8)
        y = round_trip(y - mean, codes.key_bits, codes.key_error, codes.shrink, is_value=False) + mean
        keys = (rotate_back(y, 0) / scales[0]).flatten(2, 3)
    if codes.value_bits is not None:
        y = rotate((values.unflatten(2, (blocks, BLOCK)) * scales[1]).float(), 0)
        y = round_trip(y, codes.value_bits, codes.value_error, 1.0, is_value=True)
        values = (rotate_back(y, 0) / scales[1]).flatten(2, 3)
    return keys, values


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, codes: Codes | None, scaling: float
) -> torch.Tensor:
    """Causal attention of a whole text, chunk by chunk, over what a cache of `codes` holds then; exact for `None`."""
    length, read = keys.shape[2], (keys, values)
    blocks = max(0, length - SINKS - RESIDUAL) // BLOCK
    if codes is not None and blocks:
        read = packed(codes, query, keys, values, blocks)
    out = query.new_empty(*query.shape[:3], values.shape[3])
    for start in range(0, length, CHUNK):
        stop = min(start + CHUNK, length)
        tokens = max(0, start - SINKS - RESIDUAL) // BLOCK * BLOCK
        exact = (keys[:, :, :stop], values[:, :, :stop])
        if codes is not None and tokens:
            exact = tuple(
                torch.cat([x[:, :, :SINKS], y[:, :, :tokens], x[:, :, SINKS + tokens : stop]], 2)
                for x, y in zip((keys, values), read, strict=True)
            )
        mask = torch.ones(stop - start, stop, dtype=torch.bool, device=query.device).tril(start)
        out[:, :, start:stop] = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, start:stop], *exact, attn_mask=mask, scale=scaling, enable_gqa=True
        )
    return out


@contextmanager
def read_with(model: Any, variant: Variant | None) -> Iterator[None]:
    """Let `model` attend with a variant's codes."""
    layers = model.config.get_text_config().num_hidden_layers

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> Any:
        codes = None if variant is None else variant(module.layer_idx, layers)
        return attend(query, key, value, codes, scaling).transpose(1, 2).contiguous(), None

    AttentionInterface.register("bound", attention)
    AttentionMaskInterface.register("bound", lambda *args, **kwargs: None)
    before = model.config._attn_implementation
    model.set_attn_implementation("bound")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def hidden(model: Any, ids: torch.Tensor, variant: Variant | None, first: int, every: int = 1) -> torch.Tensor:
    """Last hidden states `[n, D]` of tokens `first`, `first + every`, ... of a text `[1, T]`."""
    with read_with(model, variant):
        return model.get_decoder()(ids, use_cache=False).last_hidden_state[0, first::every]


@torch.no_grad()
def divergence(model: Any, exact: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL divergence of next tokens by position, from last hidden states."""
    parts = []
    for rows in zip(exact.split(CHUNK), other.split(CHUNK), strict=True):
        p, q = (model.get_output_embeddings()(x).float().log_softmax(-1) for x in rows)
        parts.append((p.exp() * (p - q)).sum(-1))
    return torch.cat(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or name of a decoder with full attention in all layers")
    parser.add_argument("text", type=Path, nargs="+", help="text files; a document is a part of one")
    parser.add_argument("--tokens", type=int, default=1408, help="tokens of a document")
    parser.add_argument("--documents", type=int, default=2)
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer, texts = AutoTokenizer.from_pretrained(options.model), [path.read_text("utf-8") for path in options.text]
    documents = []
    for i in range(options.documents):
        text = texts[i % len(texts)]
        start = (i // len(texts) + 1) * len(text) // (options.documents + 2)
        documents.append(tokenizer(text[start : start + 12 * options.tokens], return_tensors="pt").input_ids)
    documents = [ids[:, : options.tokens] for ids in documents]
    exact = [hidden(model, ids, None, CHUNK + BLOCK, EVERY) for ids in documents]
    print("| codes | KL | clipped | median | hidden states |\n| --- | ---: | ---: | ---: | ---: |")
    for name, variant in VARIANTS.items():
        states = [hidden(model, ids, variant, CHUNK + BLOCK, EVERY) for ids in documents]
        kl = torch.cat([divergence(model, *pair) for pair in zip(exact, states, strict=True)])
        error = (torch.cat(states) - torch.cat(exact)).square().sum() / torch.cat(exact).square().sum()
        row = (kl.mean(), kl.clamp(max=0.1).mean(), kl.median(), error)
        print(f"| {name} |", " | ".join(f"{x:.5f}" for x in row), "|", flush=True)


if __name__ == "__main__":
    main()
