"""A step over pages: what requests attend to, what is written where, and what stays untouched."""

from __future__ import annotations

import pytest
import torch
from tq_kernels.format import due_blocks
from tq_kernels.types import AttentionOptions, ChannelScales, Sequences, Tokens

from tests.support.helpers import BLOCK, all_packed, cumulative, dequantized, encoded, every_pair, marked
from tests.support.window_cases import CHUNKS, HEADS, QUERY_HEADS, TOTALS, Steps
from tq_hf import TurboQuantConfig
from tq_hf.ops.cpu.attention import attend_dense
from tq_hf.ops.dispatch import paged_step
from tq_hf.tensors.pages import LayerPages

PAGES, LAYERS = 160, 3


def layer_pages(
    config: TurboQuantConfig, dim: int, dtype: torch.dtype = torch.float32
) -> tuple[LayerPages, torch.Tensor]:
    """The middle layer of a pool of noise, and the pool."""
    pool = torch.zeros(PAGES, LAYERS, HEADS, config.layout(dim).block_bytes, dtype=torch.uint8)
    pool.random_(0, 60, generator=torch.Generator().manual_seed(5))
    pages = LayerPages.of(pool[:, 1], config, config.layout(dim), dtype)
    keys, values = (1 + torch.rand(1, HEADS, dim, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    keys = marked(keys, torch.Generator().manual_seed(4))
    return pages.with_channel_scales(ChannelScales(keys.bfloat16().half(), values.bfloat16().half())), pool


class Requests(Steps):
    """Requests with shuffled pages of blocks and rings."""

    def __init__(
        self, config: TurboQuantConfig, dim: int, totals: list[int], dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(totals, (QUERY_HEADS, HEADS, dim), dtype)
        self.config, self.prefix = config, [0] * len(totals)
        self.pages, self.pool = layer_pages(config, dim, dtype)
        free = torch.randperm(PAGES, generator=torch.Generator().manual_seed(3)).int()
        needed = [self.pages.tensors.first_block_column + due_blocks(n, config.sink_tokens, 0) for n in totals]
        self.block_table = torch.full((len(totals), max(needed)), -1, dtype=torch.int32)
        for row, own in zip(self.block_table, free[: sum(needed)].split(needed), strict=True):
            row[: len(own)] = own
        self.unused = free[sum(needed) :].long()

    def compute(self, tokens: Tokens, new: list[int], lengths: list[int], **options) -> torch.Tensor:
        packed = torch.tensor([self.packed(i) for i in range(len(new))])
        sequences = Sequences(cumulative(new), cumulative(lengths), self.block_table, packed, max(new))
        return paged_step(tokens, self.pages, sequences, AttentionOptions(0.2, **options))

    def packed(self, i: int) -> int:
        """Blocks that request i reads packed in its next step."""
        return max(self.prefix[i], self.config.num_blocks(self.done[i]))

    def expected(self, i: int, span: slice, **options) -> torch.Tensor:
        keys, values = (x[:, :, : span.stop].clone() for x in self.tokens[i])
        start = self.config.sink_tokens
        stop = start + self.packed(i) * BLOCK
        old = keys[:, :, start:stop], values[:, :, start:stop]
        blocks = encoded(self.config, *old, self.pages.channel_scales)
        for states_, read in zip((keys, values), dequantized(self.config, blocks, old), strict=True):
            states_[:, :, start:stop] = read
        return attend_dense(self.queries[i][:, :, span], (keys, values), None, AttentionOptions(0.2, **options))[0]


@pytest.mark.parametrize("bits", [(4, 4), (8, 4), (3, 2)], ids=str)
@pytest.mark.parametrize("dim", [16, 64, 80])
def test_a_step_attends_to_packed_blocks_ring_rows_and_new_tokens(dim: int, bits: tuple[int, int]) -> None:
    requests = Requests(all_packed(key_bits=bits[0], value_bits=bits[1]), dim, TOTALS)
    for new in CHUNKS:
        for out, expected in requests.step(new, padding=3):
            torch.testing.assert_close(out, expected, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("sinks", "residual", "capped"), every_pair((0, 1, 4, 8), (0, 40, 128, 200), (False, True)), ids=str
)
def test_sinks_and_the_newest_tokens_are_read_as_rows(sinks: int, residual: int, capped: bool) -> None:
    options = {"softcap": 2.0, "s_aux": torch.linspace(-1, 1, QUERY_HEADS)} if capped else {}
    grow = [[1, 100, 3, 127], [2, 100, 126, 1], [126, 2, 5, 7], *[[1, 1, 1, 1]] * 3, [1, 300, 260, 2], [1, 1, 9, 1]]
    for chunks in (CHUNKS, grow):
        totals = [sum(column) for column in zip(*chunks, strict=True)]
        requests = Requests(all_packed(sink_tokens=sinks, residual_length=residual), 16, totals)
        for new in chunks:
            for out, expected in requests.step(new, padding=3, **options):
                torch.testing.assert_close(out, expected, atol=3e-5, rtol=1e-4)


def test_a_request_that_began_with_blocks_reads_them_packed() -> None:
    """Its ring has no rows of them: noise is there."""
    config = all_packed(sink_tokens=4, residual_length=128)
    owner, guest = (Requests(config, 16, [4 + 2 * BLOCK + 300]) for _ in range(2))
    owner.step([4 + 2 * BLOCK])
    ring = owner.pages.tensors.ring_pages
    shared = [pages.block_table[0, ring:][:4].long() for pages in (owner, guest)]
    guest.pool[shared[1]] = owner.pool[shared[0]]
    guest.done, guest.prefix = [4 + 2 * BLOCK], [2]
    for n in (1, 100, 27, 1, 1, 126, 44):
        for out, expected in guest.step([n]):
            torch.testing.assert_close(out, expected, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rings_are_of_the_models_dtype(dtype: torch.dtype) -> None:
    requests = Requests(all_packed(), 64, TOTALS, dtype)
    assert requests.pages.tensors.rows.dtype == dtype and requests.pages.tensors.page_rows == 32
    for new in CHUNKS:
        for out, expected in requests.step(new):
            assert out.dtype == dtype
            torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


def test_pages_of_a_request_do_not_depend_on_its_company_or_chunks() -> None:
    """Blocks are shared by what they are the blocks of."""
    config = all_packed(sink_tokens=4, residual_length=128)
    together, alone = Requests(config, 16, TOTALS), Requests(config, 16, TOTALS)
    for new in CHUNKS:
        together.step(new)
    for i, total in enumerate(TOTALS):
        alone.step([total if i == j else 0 for j in range(len(TOTALS))])
    for i, total in enumerate(TOTALS):
        first, ring = together.pages.tensors.first_block_column, together.pages.tensors.ring_pages
        own = together.block_table[i, first:][: due_blocks(total, 4, 0)].long()
        assert torch.equal(together.pool[own, 1], alone.pool[own, 1])
        a, b = (each.pages.rows(together.block_table[i, : ring + 1].long()) for each in (together, alone))
        rows = min(total - 4, together.pages.tensors.ring_rows)
        assert torch.equal(a[:, :, :rows], b[:, :, :rows]) and torch.equal(a[:, :, -4:], b[:, :, -4:])


def test_a_step_writes_to_no_page_of_others_and_no_other_layer() -> None:
    requests = Requests(all_packed(), 16, TOTALS)
    before = requests.pool.clone()
    for new in CHUNKS:
        requests.step(new, padding=2)
    assert torch.equal(requests.pool[:, [0, 2]], before[:, [0, 2]])
    assert torch.equal(requests.pool[requests.unused], before[requests.unused])
    assert not torch.equal(requests.pool, before)


def test_blocks_and_rows_of_a_page_share_their_strides_in_bytes() -> None:
    pages, pool = layer_pages(all_packed(), 128, torch.bfloat16)
    assert pages.layout.block_bytes == 17680 and pages.tensors.rows.shape == (PAGES, HEADS, 32, 256)
    assert pages.tensors.ring_pages == 4
    blocks, rows = pages.tensors.blocks, pages.tensors.rows
    assert {tuple(n * x.itemsize for n in x.stride()[:2]) for x in (blocks, rows)} == {(pool.stride(0), pool.stride(2))}
    assert rows.data_ptr() == blocks.data_ptr()


@pytest.mark.parametrize("bits", [(8, 4), (4, 4), (4, 3), (3, 4), (3, 3), (3, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_blocks_are_aligned_and_rings_are_whole_pages(dim: int, bits: tuple[int, int]) -> None:
    pages, _ = layer_pages(all_packed(key_bits=bits[0], value_bits=bits[1]), dim, torch.float16)
    assert pages.layout.block_bytes % (16 if pages.layout.loud else 128) == 0
    assert pages.tensors.ring_rows == BLOCK
    assert 2 * pages.tensors.page_rows * dim * 2 <= pages.layout.block_bytes


def test_packed_blocks_of_a_request_are_one_behind_the_other() -> None:
    """As kernels count from block to block, whatever pages they are in."""
    pages, _ = layer_pages(TurboQuantConfig(sink_tokens=0, residual_length=0), 16)
    chosen = torch.tensor([5, 3, 9])
    blocks = pages.packed(chosen)
    assert blocks.block_strides == (HEADS * 3, 3)
    assert blocks.data.is_contiguous() and torch.equal(blocks.data[0].transpose(0, 1), pages.tensors.blocks[chosen])
