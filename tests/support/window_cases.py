"""Requests whose steps are computed over pages: of sliding windows, for a kernel and for torch alike."""

from __future__ import annotations

import torch
from tq_kernels.types import AttentionOptions, Sequences, Tokens

from tests.support.helpers import cumulative, states
from tq_hf.ops.dispatch import windowed_step
from tq_hf.ops.reference import attend
from tq_hf.ops.sliding_pages import plan_step
from tq_hf.tensors.pages import LayerWindows

HEADS, QUERY_HEADS, DIM, PAGES = 2, 6, 16, 64
CHUNKS = [[300, 1, 0, 40], [1, 127, 5, 88], [127, 1, 250, 0], [1, 1, 1, 1], [130, 256, 1, 1]]
CHUNKS += [[2, 3, 0, 2], [0, 1, 1, 1]]
"""New tokens of four requests by step: prompts, single tokens, blocks completed by one and by many, and windows that
begin to slide in either."""
TOTALS = [sum(column) for column in zip(*CHUNKS, strict=True)]


class Steps:
    """Requests with tokens of their own, run step by step.

    Args:
        totals: Tokens of each request, of all steps.
        shape: Query heads, KV heads and channels.
        dtype: Of all states.
    """

    def __init__(self, totals: list[int], shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        query_heads, heads, dim = shape
        self.tokens = [states(i, 1, heads, n, dim, dtype=dtype) for i, n in enumerate(totals)]
        self.queries = [states(90 + i, 1, query_heads, n, dim, dtype=dtype)[0] for i, n in enumerate(totals)]
        self.done = [0] * len(totals)

    def step(self, new: list[int], padding: int = 0, **options) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Outputs of the next tokens of each request that has any, next to those by definition, `[n, Hq, D]`."""
        spans = [slice(done, done + n) for done, n in zip(self.done, new, strict=True)]
        keys, values = ([x[i] for x in self.tokens] for i in (0, 1))
        packed = [
            torch.cat([x[0, :, span].transpose(0, 1) for x, span in zip(tensors, spans, strict=True)])
            for tensors in (self.queries, keys, values)
        ]
        packed = [torch.cat([x, torch.full_like(x[:1], torch.nan).expand(padding, -1, -1)]) for x in packed]
        lengths = [span.stop if n else 0 for span, n in zip(spans, new, strict=True)]
        out = self.compute(Tokens(*packed), new, lengths, **options)
        assert (out[sum(new) :] == 0).all()
        parts = out[: sum(new)].split(new)
        pairs = [(parts[i], self.expected(i, span, **options)) for i, span in enumerate(spans) if new[i]]
        self.done = [span.stop for span in spans]
        return pairs


class Requests(Steps):
    """Requests with shuffled pages of windows. Pages are full of NaN before.

    Args:
        window: Tokens of a window.
        rows: Tokens of a page.
        device: Where steps are computed; what is expected is computed on the CPU.
        store: Whether a step stores its tokens.
    """

    def __init__(
        self,
        window: int,
        rows: int,
        totals: list[int],
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        shape: tuple[int, int, int] = (QUERY_HEADS, HEADS, DIM),
        store: bool = True,
    ) -> None:
        super().__init__(totals, shape, dtype)
        _, heads, dim = shape
        self.pages = -(-window // rows)  # of a request with a full window
        pages = max(PAGES, 2 + len(totals) * self.pages)
        # Pages end in bytes that no row takes.
        pool = torch.full((pages, 3 * 2 * rows * heads * dim + 64), torch.nan, dtype=dtype, device=device)
        pool[0] = 0
        self.pool = pool[:, :-64].unflatten(1, (3, 2, rows, heads, dim))
        self.device, self.windows, self.store = device, LayerWindows(self.pool[:, 1], window, trash=1), store
        free = 2 + torch.randperm(pages - 2, generator=torch.Generator().manual_seed(3)).int()
        self.block_table = free[: len(totals) * self.pages].view(len(totals), -1)

    def compute(self, tokens: Tokens, new: list[int], lengths: list[int], **options) -> torch.Tensor:
        # Pages that a request has not reached yet are none.
        reached = torch.tensor(lengths)[:, None] > torch.arange(self.pages) * self.windows.rows_per_page
        table = (cumulative(new), cumulative(lengths), self.block_table.where(reached, -1))
        sequences = Sequences(*(x.to(self.device) for x in table), None, max(new))
        tokens = Tokens(*(x.to(self.device) for x in tokens))
        plan = plan_step(sequences, len(tokens.query))
        there = {name: x.to(self.device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        return windowed_step(tokens, self.windows, plan, AttentionOptions(0.2, **there), store=self.store).cpu()

    def expected(self, i: int, span: slice, **options) -> torch.Tensor:
        position = torch.arange(span.stop)
        own = position[span, None]
        mask = (position <= own) & (position > own - self.windows.window)
        held = tuple(x[:, :, : span.stop] for x in self.tokens[i])
        return attend(self.queries[i][:, :, span], held, mask[None, None], AttentionOptions(0.2, **options))[0]


OPTIONS = [{}, {"softcap": 2.0}, {"s_aux": torch.linspace(-1, 1, QUERY_HEADS)}]
