"""The kernel of attention over latents compiles for every NVIDIA card from Ampere on, and its loop over packed blocks
spills nothing where it was tuned. Needs no GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from tq_kernels.latents import launch
from tq_kernels.latents.launch import fitted, latent_config
from tq_kernels.layout import BlockLayout

from examples.measure.compile.builds import build_latents, build_small_latents
from examples.measure.compile.sass import SHARED, loops, target_of
from tests.kernels.test_decode_compile import BITS
from tests.support.helpers import slow
from tests.support.kernel_cases import INTERPRETED
from tests.support.limits import HOLD

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")


def packed_loop(compiled: Any) -> Any:
    """The shorter loop with products: that over packed blocks, which unpack more than dense rows are converted."""
    found = [loop for loop in loops(compiled) if loop["HGMMA"] + loop["HMMA"] > 8]
    return min(found, key=lambda loop: loop.total())


@pytest.mark.parametrize(("rows", "paged"), [(16, True), (128, False), slow(16, False), slow(128, True)])
def test_the_loop_over_blocks_spills_nothing_on_sm_90(rows: int, paged: bool) -> None:
    compiled = build_latents(90, (4, 8), rows=rows, paged=paged)
    loop, config = packed_loop(compiled), latent_config(rows, target_of(90))
    assert compiled.metadata.shared <= SHARED[90] * 1024 // config.programs_per_multiprocessor - 1024
    # Latents reach products by matrix loads, or from shared memory: no fragment is assembled by hand.
    # 64 rows: 36 products of 32 columns and 16 of 64, each once. Two warpgroups may compute all columns, and did.
    assert loop["HGMMA"] == 52 if rows > 16 else loop["LDSM"] > 40
    assert not (HOLD and loop["STL"] + loop["LDL"] > 4)
    assert not (HOLD and loop.total() > {16: 1300, 128: 1150}[rows])


@pytest.mark.parametrize(
    ("arch", "preset", "options"),
    [
        (80, "4bit_nc", dict(rows=20)),
        slow(90, "2bit_nc", dict(rows=16, mask=1)),
        slow(86, "3bit_nc", dict(rows=20, paged=True)),
        slow(86, "3bit_nc", dict(rows=16)),
        slow(80, "4bit_nc", dict(rows=16, paged=True)),
        slow(90, "k8v4", dict(rows=64, mask=2)),
        slow(89, "4bit_nc", dict(rows=20, dtype="fp16")),
        slow(100, "4bit_nc", dict(rows=128)),
        slow(90, "4bit_nc", dict(rows=40, dim=256, rotary=32, dtype="fp32")),
        slow(90, "k8v4", dict(rows=64, paged=True)),
        slow(89, "4bit_nc", dict(rows=20, dtype="fp16", paged=True)),
        slow(100, "4bit_nc", dict(rows=128, paged=True)),
        slow(90, "4bit_nc", dict(rows=40, dim=256, rotary=32, dtype="fp32", paged=True)),
    ],
    ids=str,
)
def test_compiles_for(arch: int, preset: str, options: dict[str, Any]) -> None:
    compiled = build_latents(arch, (BITS[preset][0], 8), **options)
    assert compiled.metadata.shared <= SHARED[arch] * 1024 - 1024


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        slow(80, {}),
        (90, dict(dim=64, rotary=16, dtype="fp32")),
        *[slow(arch, {}) for arch in (86, 89, 90, 100)],
        slow(90, dict(dim=256, rotary=32)),
        slow(86, dict(dim=128, rotary=64, dtype="fp16")),
    ],
    ids=str,
)
def test_the_kernels_around_it_compile_for(arch: int, options: dict[str, Any]) -> None:
    for compiled in build_small_latents(arch, (4, 8), **options):
        assert compiled.metadata.shared <= SHARED[arch] * 1024 - 1024


def test_cards_and_sizes_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(arch: int | str, *sizes: int) -> bool:
        monkeypatch.setattr(launch, "target", lambda device: target_of(arch))
        return launch.takes_latents(BlockLayout(*sizes), torch.device("cpu"))

    assert taken(80, 512, 64, 4, 8) and taken(90, 256, 32, 2, 4)
    assert not any(taken(arch, 512, 64, 4, 8) for arch in (75, "gfx942"))
    assert not any(taken(90, *sizes) for sizes in ((512, 64, 4, 3), (384, 64, 4, 8), (1024, 64, 4, 8), (512, 8, 4, 8)))


@pytest.mark.parametrize("preset", ["4bit_nc", "3bit_nc", "k8v4"])
@pytest.mark.parametrize(("dim", "rotary"), [(64, 16), (64, 64), (256, 32), (512, 64)])
@pytest.mark.parametrize("tile", [32, 64])
def test_a_thread_unpacks_both_halves_of_a_word(preset: str, dim: int, rotary: int, tile: int) -> None:
    """A thread with one half gets numbers of nothing for the other: tests of such tiles failed on an H200."""
    layout = BlockLayout(dim, rotary, BITS[preset][0], 8)
    config = fitted(replace(latent_config(16, target_of(90)), tile=tile), layout)
    for channels in (dim // config.chunks, rotary):
        assert tile // 4 * channels >= 2 * 32 * config.warps
    assert config.warps & (config.warps - 1) == 0 and config.chunks % (4 if layout.key_bits < 4 else 1) == 0


@pytest.mark.parametrize("bits", [(4, 8), (2, 8)])
def test_compiled_tiles_are_unpacked_in_pairs(bits: tuple[int, int]) -> None:
    compiled = build_latents(90, bits, dim=64, rotary=16, rows=5)
    tiles = re.findall(r"elementwise_inline_asm .*packed_element = 2.* : tensor<(\d+)x(\d+)xi16", compiled.asm["ttgir"])
    assert tiles
    threads = 32 * compiled.metadata.num_warps
    assert min(int(rows) * int(columns) for rows, columns in tiles) >= 2 * threads
