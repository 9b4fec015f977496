"""Bound what other codes of 2 bits could win: a model's divergence with variants of the codec, before one is built.

    python -m examples.measure.quality.bound FOLDER text.txt --tokens 1408 --documents 2    # a minute a row

A text is read in one pass. In each layer a query attends to the packed blocks that a cache would hold when its chunk is
read, round-tripped by a variant of `tq_hf.codec.reference`, and to all other tokens exactly: the numbers are those of a
cache that is read in chunks (a test compares them). A row shows the mean KL divergence from the exact model in nats,
the same with every position clipped at 0.1, its median, and the relative squared error of the last hidden states. Few
positions, mostly recalled facts, make most of the mean: of two rows that are near, the clipped mean tells more.

An *ideal coder* of R bits is a Gaussian test channel: the squared error 4^-R of rate-distortion theory, unbiased.

*Parts* give bits where they count. Of a token, a logit is a sum over channels, and with u = RMS of a channel's queries
times RMS of its keys the error of a channel weighs u^2. The channels of a head are sorted by u and cut into parts, each
rotated alone, with a scale of its own. A part is coded in stages: each stage codes the error of the stages before. A
part without stages has its mean only. `2, 2 of 1/16; 2 of 14/16` means: the loudest sixteenth of the channels in two
stages of 2 bits, the quietest sixteenth not at all, the others as today. `4 loud` means: the four loudest channels in
FP8 beside the codes, without a scale for each token; codes and their rotation as today, of keys without these channels.

    python -m examples.measure.quality.bound FOLDER text.txt --tokens 4096 --only parts
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tq_kernels.format import CODES, FP8_MAX
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer

from tq_hf.codec import reference, trellis
from tq_hf.codec.balance import channel_scales
from tq_hf.codec.rotation import rotate, rotate_back

CHUNK, SINKS, RESIDUAL, BLOCK = 256, 4, 128, 128
"""Number of tokens read at a time, and those of a cache by default."""
EVERY = 3
"""One position of this number is scored."""


Parts = tuple[tuple[float, tuple[int, ...]], ...]
"""Share of the channels and bits of each stage, loudest channels first."""


def twice(bits: int, share: float = 1 / 16) -> tuple[Parts]:
    """Loudest channels in two stages of `bits`, as large a share of the quietest not at all, the others once."""
    return (((share, (bits, bits)), (1 - 2 * share, (bits,)), (share, ())),)


def quarters(*stages: tuple[int, ...]) -> Parts:
    """Four parts of equal size."""
    return tuple((0.25, each) for each in stages)


FREE = {
    2: tuple(quarters(*x) for x in (((2, 2), (2,), (1,), (1,)), ((3,), (2,), (2,), (1,)), ((2, 2), (2,), (2,), ()))),
    3: tuple(
        quarters(*x) for x in (((3, 2), (3,), (2,), (2,)), ((2, 2), (3,), (3,), (2,)), ((3, 2), (2, 2), (2,), (1,)))
    ),
}
"""Patterns of four groups from which each head takes the one of least error."""


def rows_of_parts(bits: int) -> dict[str, dict[str, Any]]:
    """Rows of keys of `bits`: options of `Codes` by name."""
    own: dict[str, Any] = dict(key_bits=bits)
    rows = {f"{bits} bits": own} | {f"{bits} bits, {n} loud": own | dict(loud=n) for n in (1, 2, 4, 8, 16)}
    rows |= {f"{bits} bits, 4 loud, power {x}": own | dict(loud=4, power=x) for x in (0.0, 0.5, 1.0)}
    rows[f"{bits} bits, 4 loud, without pairs"] = own | dict(loud=4, pairs=False)
    rows[f"{bits} bits, 4 loud, tokens 4 to 1027 decide"] = own | dict(loud=4, sampled=(4, 1028))
    if bits < 4:
        once, twice_coded = f"{bits} of {{}}/16", f"{bits}, {bits} of {{}}/16; "
        for n in (1, 2):
            rows[(twice_coded + once).format(n, 16 - 2 * n)] = own | dict(parts=twice(bits, n / 16))
        name = twice_coded.format(1) + "one scale a token"
        rows |= {name: own | dict(parts=twice(bits), own_scales=False)}
        rows[f"{bits} bits on average, of four groups, by head"] = own | dict(parts=FREE[bits])
    return rows


PARTS = {name: options for bits in (2, 3, 4) for name, options in rows_of_parts(bits).items()}


class Codes(NamedTuple):
    """Codes of a layer.

    Args:
        key_bits, value_bits: Bits of keys and values, `None` for exact states.
        key_error, value_error: Relative squared error of Gaussian noise in place of codes, if given.
        mean_tokens: Number of tokens of a key mean.
        gains: Multiply the mean by a gain per key, in eighths from 0 to 15/8.
        shrink: Factor of key scales, over that of the codec.
        balance: Whether channels are balanced.
        loud: Number of channels of a head in FP8, beside the codes of the others.
        parts: Parts of the key channels, from which each head takes those of the least expected error; empty for one.
        power: Keys are divided by (RMS of keys / RMS of queries) ** (power / 2), by channel, before they are coded.
        own_scales: Whether every part has a scale for each token. Else one scale, and a constant for each part.
        pairs: Whether RMS are those of rotary pairs of channels i and i + D / 2.
        sampled: Tokens whose queries and keys decide.
        decided: RMS of keys and queries by layer, which the first text leaves for later ones, and the index of this
            layer; `None` if each text decides for itself.
    """

    key_bits: int | None = 2
    value_bits: int | None = 2
    key_error: float | None = None
    value_error: float | None = None
    mean_tokens: int = BLOCK
    gains: bool = False
    shrink: float = 1.0
    balance: bool = True
    loud: int = 0
    parts: tuple[Parts, ...] = ()
    power: float = 0.75
    own_scales: bool = True
    pairs: bool = True
    sampled: tuple[int, int] = (CHUNK, 2 * CHUNK)
    decided: tuple[dict[int, tuple[torch.Tensor, torch.Tensor]], int] | None = None


Variant = Callable[[int, int], Codes]
"""Codes by the index of a layer and the number of layers."""


def alike(**options: Any) -> Variant:
    """The same codes in all layers."""
    return lambda layer, layers: Codes(**options)


def by_first_text(**options: Any) -> Variant:
    """The same codes in all layers. The first text that is read decides for all."""
    decided: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    return lambda layer, layers: Codes(**options, decided=(decided, layer))


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
    **{f"parts: {name}": alike(value_bits=None, **options) for name, options in PARTS.items()},
    **{
        f"parts: {bits} bits, 4 loud of the first text": by_first_text(key_bits=bits, value_bits=None, loud=4)
        for bits in (2, 3)
    },
    **{f"presets: {bits}bit_nc": alike(key_bits=bits, value_bits=bits) for bits in (2, 3, 4)},
    **{
        f"presets: {bits}bit_nc, {loud} loud": alike(key_bits=bits, value_bits=bits, loud=loud)
        for bits in (2, 3, 4)
        for loud in (2, 4, 8)
    },
    "presets: 2bit_nc, 2, 2 of 1/16; 2 of 14/16": alike(parts=twice(2)),
    "presets: 3bit_nc, 3, 3 of 1/16; 3 of 14/16": alike(key_bits=3, value_bits=3, parts=twice(3)),
}
"""A trellis of 1 bit in words of 16 has the error 0.338 (simulated)."""


def levels_of_bits(u: torch.Tensor, bits: int) -> torch.Tensor:
    """Levels of channels `[..., 128, n]` in standard deviations, not scaled."""
    if bits == 1:
        return u.sign()
    if CODES[bits].trellis is None:
        return reference.levels_of(reference.quantize(u.contiguous(), bits, is_value=False)[0], bits, is_value=False)
    channels = u.shape[-1]
    padded = torch.nn.functional.pad(u, (0, -channels % 16))
    codes = trellis.encode(trellis.rounded(padded.contiguous(), bits), bits, is_value=False)
    return reference.levels_of(codes, bits, is_value=False)[..., :channels]


@functools.cache
def stage_constants(stages: tuple[int, ...]) -> tuple[tuple[float, float], ...]:
    """Factor of the levels of each stage and RMS of what it codes, for Gaussian channels."""
    exact = torch.randn(1, 8, BLOCK, 64, generator=torch.Generator().manual_seed(0))
    found, left = list[tuple[float, float]](), exact
    for bits in stages:
        size = left.square().mean().sqrt()
        levels = levels_of_bits(left / size, bits) * size
        unit = (left * levels).sum() / levels.square().sum()
        left = left - unit * levels
        found.append(((unit * size).item(), size.item()))
    return tuple(found)


def staged(u: torch.Tensor, stages: tuple[int, ...]) -> torch.Tensor:
    """Channels `[..., 128, n]` in standard deviations as their stages read back."""
    out = torch.zeros_like(u)
    for bits, (unit, size) in zip(stages, stage_constants(stages), strict=True):
        out = out + unit * levels_of_bits((u - out) / size, bits)
    return out


@functools.cache
def error_of(stages: tuple[int, ...]) -> float:
    """Squared error of stages, relative to Gaussian channels."""
    exact = torch.randn(1, 8, BLOCK, 64, generator=torch.Generator().manual_seed(1))
    return (exact - staged(exact, stages)).square().mean().item() if stages else 1.0


def keys_in_parts(codes: Codes, queries: torch.Tensor, keys: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Keys `[1, Hkv, N, 128, D]` of `blocks` as parts read back; `queries` `[1, Hq, T, D]` and `keys` decide."""
    assert codes.key_bits is not None
    shrink, sampled, (heads, dim) = CODES[codes.key_bits].key_shrink, slice(*codes.sampled), keys.shape[1::2]
    k = keys[0, :, sampled]
    k = k[:, : k.shape[1] // BLOCK * BLOCK].unflatten(1, (-1, BLOCK))
    of_keys = (k - k.mean(2, keepdim=True)).square().mean((1, 2))
    of_queries = queries[0, :, sampled].unflatten(0, (heads, -1)).square().mean((1, 2))
    if codes.pairs:
        of_keys, of_queries = (x.unflatten(1, (2, -1)).mean(1).repeat(1, 2) for x in (of_keys, of_queries))
    of_keys, of_queries = (x.sqrt().maximum(0.01 * x.sqrt().mean(1, keepdim=True)) for x in (of_keys, of_queries))
    if codes.decided is not None:
        of_keys, of_queries = codes.decided[0].setdefault(codes.decided[1], (of_keys, of_queries))
    divisor = (of_keys / of_queries) ** (codes.power / 2)
    mean = blocks.mean(3, keepdim=True).half().float()
    z, weight, out = (blocks - mean) / divisor[:, None, None], of_keys * of_queries, torch.zeros_like(blocks)
    for head in range(heads):
        order = weight[head].argsort(descending=True)

        def cut(parts: Parts, order: torch.Tensor = order) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
            channels = order.split([round(dim * share) for share, _ in parts])
            return list(zip(channels, (stages for _, stages in parts), strict=True))

        def expected(parts: Parts, head: int = head) -> float:
            """Error of the logits: of a part it is spread over all its channels."""
            noise = (
                (of_queries * divisor)[head, at].square().sum()
                * (of_keys / divisor)[head, at].square().mean()
                * error_of(stages)
                for at, stages in cut(parts)
            )
            return float(sum(noise))

        chosen: list[tuple[torch.Tensor, tuple[int, ...]]] = [(torch.arange(dim), (codes.key_bits,))]
        if codes.parts:
            chosen = [(at, stages) for at, stages in cut(min(codes.parts, key=expected)) if stages]
        if codes.loud:
            at, unit = order[: codes.loud], (of_keys / divisor)[head, order[: codes.loud]] / 16
            read = (z[:, head][..., at] / unit).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float() * unit
            z[:, head, :, :, at] = 0
        rotated = [rotate(z[:, head][..., at], 0) for at, _ in chosen]
        sizes = [y.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-12) for y in rotated]
        if not codes.own_scales:
            usual = [(of_keys / divisor)[head, at].square().mean().sqrt() for at, _ in chosen]
            parts = zip(sizes, usual, chosen, strict=True)
            square = sum((size / one) ** 2 * len(at) for size, one, (at, _) in parts)
            common = (square / sum(len(at) for at, _ in chosen)).sqrt()
            sizes = [common * one for one in usual]
        levels = [staged(y / size, stages) for y, size, (_, stages) in zip(rotated, sizes, chosen, strict=True)]
        # Quantizing shall not shrink inner products, of a part or of the key.
        products = [
            ((y / size).square().sum(-1, keepdim=True), (y / size * level).sum(-1, keepdim=True))
            for y, size, level in zip(rotated, sizes, levels, strict=True)
        ]
        if not codes.own_scales:
            squares, inner = (torch.stack(x).sum(0) for x in zip(*products, strict=True))
            products = [(squares, inner)] * len(products)
        for (at, _), size, level, (square, product) in zip(chosen, sizes, levels, products, strict=True):
            scale = (square / product.clamp_min(1e-6) * size * codes.shrink * shrink).half().float()
            out[:, head][..., at] = rotate_back(level * scale, 0)
        if codes.loud:
            out[:, head, :, :, order[: codes.loud]] = read
    return out * divisor[:, None, None] + mean


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
        scales = [x.abs().float()[:, :, None, None] for x in decided]
    part, whole = slice(SINKS, SINKS + blocks * BLOCK), keys
    keys, values = keys[:, :, part], values[:, :, part]
    if codes.parts or codes.loud:
        keys = keys_in_parts(codes, queries, whole, keys.unflatten(2, (blocks, BLOCK)).float()).flatten(2, 3)
    elif codes.key_bits is not None:
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
        if window := getattr(module, "sliding_window", None):
            near = torch.ones(key.shape[2], key.shape[2], dtype=torch.bool).tril().triu(1 - window)
            out = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=near.to(query.device), scale=scaling, enable_gqa=True
            )
            return out.transpose(1, 2).contiguous(), None
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
    parser.add_argument("model", help="folder or name of a decoder; sliding windows stay exact")
    parser.add_argument("text", type=Path, nargs="+", help="text files; a document is a part of one")
    parser.add_argument("--tokens", type=int, default=1408, help="tokens of a document")
    parser.add_argument("--documents", type=int, default=2)
    parser.add_argument("--only", default="", help="a part of the names of the codes to measure")
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
        if options.only not in name:
            continue
        states = [hidden(model, ids, variant, CHUNK + BLOCK, EVERY) for ids in documents]
        kl = torch.cat([divergence(model, *pair) for pair in zip(exact, states, strict=True)])
        error = (torch.cat(states) - torch.cat(exact)).square().sum() / torch.cat(exact).square().sum()
        row = (kl.mean(), kl.clamp(max=0.1).mean(), kl.median(), error)
        print(f"| {name} |", " | ".join(f"{x:.5f}" for x in row), "|", flush=True)


if __name__ == "__main__":
    main()
