"""Parts of the recipe as switches: caches that encode and read with one of them switched, to show what each is worth.

The package has no such options. The method stands here a second time, in torch, and replaces the package's operations
on packed blocks within `switched`:

    with switched(Switches(key_mean=False)):
        model(ids, cache=TurboQuantCache(model.config))
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
from tq_kernels.format import code_of
from tq_kernels.types import AttentionOptions, KeyValue, PackedBlocks

from tq_hf import TurboQuantConfig
from tq_hf.codec import reference
from tq_hf.codec.packing import pack
from tq_hf.codec.rotation import rotate, rotate_back
from tq_hf.ops import backend, dispatch
from tq_hf.ops.cpu.attention import attend_dense
from tq_hf.tensors.layer import View

Correction = Literal["none", "norm", "inner", "projection"]
"""How a stored scale makes up for quantization, with z the rotated key and c its centroids: "none" stores
|z| / sqrt(D); "norm" |z| / |c|; "inner" |z|^2 / <z, c>, for keys times `Code.key_shrink`; "projection" <z, c> / <c, c>
(least squares). FP8 codes have a scale of their own and take no correction. All but "inner" shrink what a key or value
has in common with itself by the error of its codes, the same share for every token: noise averages out over the tokens
that attention sums, a common share does not."""


class Switches(NamedTuple):
    """What of the recipe is switched; the defaults are the recipe.

    Args:
        random_signs: Flip the signs of random channels before the Hadamard transform. Without it (as in vLLM) a mean
            that is aligned with a row of the matrix ends up in one channel.
        rotate_values: Rotate values like keys.
        key_mean: Remove the mean key of each block before quantizing and add `q . mean` back to the logits. Exact in
            real arithmetic; without it models with a key bias (Qwen2) break. Blocks then have a mean of zero, but for
            loud channels.
        key_correction: What scale to store.
        value_correction: The same for values.
    """

    random_signs: bool = True
    rotate_values: bool = True
    key_mean: bool = True
    key_correction: Correction = "inner"
    value_correction: Correction = "inner"


RECIPE = Switches()


def quantize(
    z: torch.Tensor, bits: int, correction: Correction, *, is_value: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`tq_hf.codec.reference.quantize` of `[..., 128, D]`, with the scale of another correction."""
    codes, scale = reference.quantize(z, bits, is_value=is_value)
    if code_of(bits).is_fp8 or correction == "inner":
        return codes, scale
    level, square = reference.levels_of(codes, bits, is_value=is_value), z.square().sum(-1)
    if correction == "none":
        sigma = (square / z.shape[-1]).sqrt()
        trellis = code_of(bits).trellis
        exact = sigma if trellis is None else sigma * (trellis.steps / trellis.unit)
    elif correction == "norm":
        exact = (square / level.square().sum(-1)).sqrt()
    else:
        exact = (z * level).sum(-1) / level.square().sum(-1)
    return codes, exact.half()


def encode(
    switches: Switches,
    config: TurboQuantConfig,
    states: KeyValue,
    out: PackedBlocks,
    start: int,
    tokens: tuple[int, int] | None = None,
) -> None:
    """`tq_hf.ops.dispatch.encode`, with switches."""
    layout = out.layout
    keys, values = (x[:, :, slice(*(tokens or (None,)))] for x in states)
    target = out.slice(start, start + keys.shape[2] // layout.tokens)
    words = target.key_words[..., : layout.loud_at]
    kinds = (
        (keys, words, layout.key_dim_padded, layout.key_bits, switches.key_correction),
        (values, target.value_words, layout.value_dim_padded, layout.value_bits, switches.value_correction),
    )
    scales, (of_keys, of_values) = [], out.channel_scales
    factors = of_keys.clamp(min=0) if layout.loud else of_keys.abs(), of_values
    reference.encode_loud(keys.unflatten(2, (-1, layout.tokens)), target)
    for is_value, ((x, words, dim, bits, correction), factor) in enumerate(zip(kinds, factors, strict=True)):
        z = x.float() * factor.float()[:, :, None]
        z = torch.nn.functional.pad(z, (0, dim - z.shape[-1])).unflatten(2, (-1, layout.tokens))  # [B, Hkv, n, 128, D]
        if switches.rotate_values or not is_value:
            z = rotate(z, config.seed if switches.random_signs else None)
        if not is_value:
            means = (z.mean(3) * switches.key_mean).half()
            target.key_means[..., :dim] = means
            z = z - means.float()[:, :, :, None]
        codes, scale = quantize(z, bits, correction, is_value=bool(is_value))
        words.copy_(pack(codes, bits, is_value=bool(is_value)))
        scales.append(scale)
    target.scales.copy_(torch.stack(scales, -1).view(torch.int32).squeeze(-1))


def dequantize(
    switches: Switches, config: TurboQuantConfig, blocks: PackedBlocks, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """`tq_hf.ops.dispatch.dequantize`, with switches."""
    seed = config.seed if switches.random_signs else None
    key, value = reference.dequantize_rotated(blocks)
    key, value = rotate_back(key, seed), rotate_back(value, seed) if switches.rotate_values else value
    both = reference.with_loud(key, blocks), value
    for out, states, factor in zip((keys, values), both, blocks.channel_scales, strict=True):
        out.copy_(states.flatten(2, 3)[..., : out.shape[-1]] / factor.abs().float()[:, :, None])


def attend(query: torch.Tensor, view: View, mask: torch.Tensor | None, options: AttentionOptions) -> torch.Tensor:
    """`tq_hf.ops.dispatch.attend`, over everything dequantized."""
    return attend_dense(query, dispatch.dense(view), mask, options).contiguous()


@contextmanager
def switched(switches: Switches) -> Iterator[None]:
    """Let the caches that are filled and read within encode and read with these switches, in torch. Of the recipe
    itself nothing is replaced."""
    if switches == RECIPE:
        yield
        return
    own: dict[str, Any] = {
        "encode": lambda *arguments: encode(switches, *arguments),
        "dequantize": lambda *arguments: dequantize(switches, *arguments),
        "attend": attend,
    }
    with patch.multiple(dispatch, **own), patch.object(backend, "chosen", "torch"):
        yield
