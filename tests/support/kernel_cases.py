"""Inputs for the decode kernels and the fp64 attention they must agree with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from tq_kernels.layout import BlockLayout
from tq_kernels.types import ChannelScales, KeyValue, PackedBlocks

from tests.support.helpers import marked
from tq_hf.codec.reference import dequantize, encode
from tq_hf.codec.rotation import rotation_matrix
from tq_hf.config import TurboQuantConfig

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton reads this when it is imported, so tests that need the interpreter run in a child process with it set."""


if INTERPRETED:
    pytest.importorskip("triton")
    from tests.support import interpreter

    interpreter.mend()
    interpreter.hasten()


def gpu(function: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that needs a GPU."""
    skip = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
    return pytest.mark.cuda(skip(function))


DEVICE = torch.device("cpu") if INTERPRETED else torch.device("cuda", 0)
"""Where kernels run in this process."""


def runs_kernels(function: Callable[..., None]) -> Callable[..., None]:
    """Marks a test of kernels on `DEVICE`: in the interpreter, or on a GPU."""
    return function if INTERPRETED else gpu(function)


def child(file: str) -> Callable[[], None]:
    """A test that runs the tests of `file` that need no GPU again, in a child process with Triton's interpreter. `make`
    leaves these out: `make test-kernels` runs all such files there together, because a child spends much of its time on
    imports."""

    @pytest.mark.child
    @pytest.mark.skipif(INTERPRETED, reason="this is the child process")
    def passes_in_the_interpreter() -> None:
        pytest.importorskip("triton")
        result = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not cuda", "-p", "no:cacheprovider", file],
            env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
        assert " passed" in result.stdout

    return passes_in_the_interpreter


@dataclass(frozen=True)
class Case:
    """One call of a `DecodeLaunch`.

    `blocks` of the store's `capacity` blocks and `residual` of its residual's rows are in use. `mask` is `None`,
    "padding" (`[B, 1, 1, T]`, left padding of a different length per batch row) or "full" (`[B, 1, S, T]`, random).
    `key_offset` is the size of what all packed keys of a head have in common, in units of what they have not. With
    `balanced`, blocks have channel scales, and keys and queries, as values, channels to go with them.
    """

    B: int = 1
    Hq: int = 4
    Hkv: int = 1
    S: int = 1
    Dk: int = 64
    Dv: int = 64
    preset: str = "4bit_nc"
    dtype: torch.dtype = torch.float16
    blocks: int = 3
    capacity: int = 4
    sinks: int = 4
    residual: int = 37
    residual_capacity: int = 96
    mask: str | None = None
    causal: bool = True
    softcap: float | None = None
    s_aux: bool = False
    key_offset: float = 2.0
    value_scale: float = 1.0
    balanced: bool = False

    def __str__(self) -> str:
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return "-".join(f"{f.name}{getattr(self, f.name)}".replace("torch.", "") for f in changed) or "default"

    @property
    def length(self) -> int:
        """Tokens attended to."""
        return self.sinks + 128 * self.blocks + self.residual

    def with_(self, **changes: object) -> Case:
        """This case with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass
class Inputs:
    """Tensors of a case."""

    case: Case
    config: TurboQuantConfig
    query: torch.Tensor
    packed: PackedBlocks
    sinks: tuple[torch.Tensor, torch.Tensor]
    residual: tuple[torch.Tensor, torch.Tensor]
    mask: torch.Tensor | None
    s_aux: torch.Tensor | None
    scaling: float

    @property
    def rows(self) -> torch.Tensor:
        """Dense rows as stores hold them."""
        return dense_rows(self.residual, self.sinks)


def dense_rows(residual: KeyValue, sinks: KeyValue) -> torch.Tensor:
    """A ring, then sinks; a token's key, then its value: `[B, Hkv, ring + sinks, Dk + Dv]`."""
    return torch.cat([torch.cat(both, 2) for both in zip(residual, sinks, strict=True)], 3)


def random_channel_scales(batch: int, heads: int, key_dim: int, value_dim: int) -> ChannelScales:
    """Channel scales as `tq_hf.codec.balance` makes them: ones, but for some channels; another power of two for each
    head; any channels of keys are loud."""
    generator = torch.Generator().manual_seed(0)

    def made(dim: int) -> torch.Tensor:
        channel_scales = torch.exp(1.5 * torch.randn(batch, heads, dim, generator=generator))
        channel_scales = torch.where(torch.rand(batch, heads, dim, generator=generator) < 0.8, 1, channel_scales)
        sizes = torch.randint(-1, 2, (batch, heads, 1), generator=generator)
        return (channel_scales * 2.0**sizes).bfloat16().half()

    return ChannelScales(marked(made(key_dim), generator), made(value_dim))


def residual_start(case: Case) -> int:
    """The slot of the residual's first row."""
    return 128 * case.blocks % case.residual_capacity


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Random inputs. Rows and blocks out of use are poisoned with NaN and random words."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    config = TurboQuantConfig.from_preset(case.preset)
    layout = config.layout(case.Dk, case.Dv)
    packed = PackedBlocks.allocate(layout, case.B, case.Hkv, case.capacity, torch.device("cpu"))
    for tensor in packed.tensors().values():
        tensor.copy_(torch.randint(-(2**15), 2**15, tensor.shape, generator=generator))
    if case.balanced:
        packed = replace(packed, channel_scales=random_channel_scales(case.B, case.Hkv, case.Dk, case.Dv))
    key_channel_scales, value_channel_scales = (factor.float() for factor in packed.channel_scales)
    if case.blocks:
        tokens = 128 * case.blocks
        offset = case.key_offset * randn(case.B, case.Hkv, 1, case.Dk)
        keys = ((randn(case.B, case.Hkv, tokens, case.Dk) + offset) / key_channel_scales[:, :, None]).to(case.dtype)
        values = randn(case.B, case.Hkv, tokens, case.Dv) * case.value_scale / value_channel_scales[:, :, None]
        values = values.to(case.dtype)
        encode(config, keys, values, packed, 0)

    def dense(rows: int, used: int, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        parts = []
        for dim, scale in ((case.Dk, 1.0), (case.Dv, case.value_scale)):
            part = (randn(case.B, case.Hkv, rows, dim) * scale).to(case.dtype)
            part[:, :, used:] = torch.nan
            parts.append(part.roll(start, dims=2).to(device))
        return parts[0], parts[1]

    mask = None
    if case.mask == "padding":
        position = torch.arange(case.length)
        mask = (position >= 5 + 150 * torch.arange(case.B)[:, None])[:, None, None, :].to(device)
    elif case.mask == "full":
        mask = (torch.rand(case.B, 1, case.S, case.length, generator=generator) < 0.5).to(device)
    # Transposed, as models give it.
    query = (
        3
        * randn(case.B, case.S, case.Hq, case.Dk)
        * key_channel_scales.repeat_interleave(case.Hq // case.Hkv, 1)[:, None]
    )
    query = query.to(case.dtype).transpose(1, 2)
    return Inputs(
        case=case,
        config=config,
        query=query.to(device),
        packed=packed.map(lambda tensor: tensor.to(device)),
        sinks=dense(case.sinks, case.sinks),
        residual=dense(case.residual_capacity, case.residual, residual_start(case)),
        mask=mask,
        s_aux=randn(case.Hq).to(device) if case.s_aux else None,
        scaling=case.Dk**-0.5,
    )


def oracle(inputs: Inputs) -> torch.Tensor:
    """fp64 attention over the dequantized keys and values, `[B, S, Hq, Dv]`."""
    case = inputs.case
    packed = inputs.packed.slice(0, case.blocks).map(torch.Tensor.cpu)
    middle = [torch.empty(case.B, case.Hkv, 128 * case.blocks, dim, dtype=torch.float32) for dim in (case.Dk, case.Dv)]
    if case.blocks:
        dequantize(inputs.config, packed, middle[0], middle[1])
    keys, values = (
        torch.cat(
            [
                sinks.cpu().float(),
                packed,
                residual.roll(-residual_start(case), dims=2)[:, :, : case.residual].cpu().float(),
            ],
            dim=2,
        ).double()
        for sinks, packed, residual in zip(inputs.sinks, middle, inputs.residual, strict=True)
    )
    groups = case.Hq // case.Hkv
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    logits = inputs.query.cpu().double() @ keys.transpose(-1, -2) * inputs.scaling
    if case.softcap is not None:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    if inputs.mask is not None:
        logits = logits.masked_fill(~inputs.mask.cpu(), -torch.inf)
    elif case.causal:
        newest = torch.arange(case.length) - case.length + case.S
        logits = logits.masked_fill(newest > torch.arange(case.S)[:, None], -torch.inf)
    if inputs.s_aux is not None:
        aux = inputs.s_aux.cpu().double().view(1, -1, 1, 1).expand(case.B, -1, case.S, 1)
        logits = torch.cat([logits, aux], -1)
        values = torch.cat([values, torch.zeros_like(values[:, :, :1])], 2)
    weights = torch.softmax(logits, -1).nan_to_num(0.0)
    return (weights @ values).transpose(1, 2)


def kernel_rotations(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """sqrt(D) R of keys and of values in fp16, as kernels take them."""
    layout, device = inputs.packed.layout, inputs.query.device
    keys, values = (
        rotation_matrix(dim, inputs.config.seed, device, torch.float32).mul(dim**0.5).half()
        for dim in (layout.key_dim_padded, layout.value_dim_padded)
    )
    return keys, values


def codec_rotations(config: TurboQuantConfig, layout: BlockLayout, device: torch.device) -> Any:
    """Rotations as the codec's kernels take them."""
    keys, values = (
        rotation_matrix(dim, config.seed, device, torch.float32)
        for dim in (layout.key_dim_padded, layout.value_dim_padded)
    )
    return keys, values


def run_decode(inputs: Inputs, scratch_fill: float = torch.nan, held: Any = None) -> torch.Tensor:
    """Decode attention on `inputs`, with scratch and output poisoned."""
    from tq_kernels.decode.launch import DecodeLaunch, held_counts
    from tq_kernels.types import AttentionOptions

    case, packed = inputs.case, inputs.packed
    device = inputs.query.device
    decoder = DecodeLaunch((packed, inputs.rows, case.sinks), kernel_rotations(inputs))
    return decoder(
        inputs.query,
        held_counts(case.blocks, case.residual, case.sinks, device) if held is None else held,
        inputs.mask,
        AttentionOptions(inputs.scaling, case.causal, case.softcap, inputs.s_aux),
        allocate=lambda size: torch.full((size,), scratch_fill, device=device),
        out=torch.full((case.B, case.S, case.Hq, case.Dv), torch.nan, dtype=case.dtype, device=device),
    )


def relative_rms(out: torch.Tensor, expected: torch.Tensor) -> float:
    """|out - expected| / |expected|; NaN if anything is."""
    return ((out.cpu().double() - expected).norm() / expected.norm()).item()
