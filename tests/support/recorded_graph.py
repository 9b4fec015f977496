"""A CUDA graph without a GPU: the operations of a step, recorded, and done again on the same tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from tq_hf import TurboQuantCache, graph_decoding
from tq_hf.compat import as_input
from tq_hf.graph_decoding import loop as graph_loop

LOOP = {"custom_generate": graph_decoding}
QUIET = [
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
    pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled"),
]
"""Marks of tests with a tiny model that is compiled by transformers alone."""


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class RecordedGraph(TorchDispatchMode):
    """As a CUDA graph, it knows addresses and nothing of the host; and the host may not read a tensor meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "A captured step reads a tensor on the host."
        out = func(*args, **(kwargs or {}))
        self.done.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        """Do all of it again. Capturing has run the step already, unlike on a GPU: the first replay is that."""
        self.replays += 1
        if self.replays == 1:
            return
        for func, args, kwargs, out in self.done:
            given = {_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and _storage(old) not in given:
                    old.copy_(new)


class Streamed(list[Any]):
    """A streamer that keeps what it is given."""

    def put(self, value: torch.Tensor) -> None:
        self.append(value.flatten().tolist())

    def end(self) -> None:
        self.append(["end"])


@contextmanager
def _capturing(graph: RecordedGraph, pool: None) -> Iterator[None]:
    # A step that is compiled takes the operators, which look at lengths when they run.
    with pytest.MonkeyPatch.context() as patch, graph:
        patch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
        yield


def record_graphs(patch: pytest.MonkeyPatch) -> None:
    """Let `graph_decoding` capture and replay on the CPU, and read its flags a step late, as on a GPU."""
    init, flags = graph_loop.Loop.__init__, graph_loop.LateFlags.__init__

    def captures(self: Any, *args: Any) -> None:
        init(self, *args)
        self.captures = True

    def late(self: Any, *args: Any) -> None:
        flags(self, *args)
        self.lag = 1

    patch.setattr(graph_loop.Loop, "__init__", captures)
    patch.setattr(graph_loop.LateFlags, "__init__", late)
    patch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    patch.setattr(torch.cuda, "graph", _capturing)
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    patch.setattr(graph_loop, "ending_failed_capture", lambda device, pool: nullcontext())


def conversation(
    model: PreTrainedModel, loop: dict[str, Any], ids: torch.Tensor, padded: int, new: int, ends: list[list[int] | None]
) -> tuple[torch.Tensor, TurboQuantCache]:
    """A turn on one cache for each entry of `ends`, the tokens that end it. All tokens, and the cache.

    Args:
        ids: The first prompt, `[2, T]`; 7 tokens from 20 on are the next one.
        padded: Tokens of padding of the first sequence.
        new: Most tokens of an answer.
    """
    ids, mask = ids.clone(), torch.ones_like(ids)
    ids[0, :padded], mask[0, :padded] = 0, 0
    ids, mask = ids.to(model.device), mask.to(model.device)
    cache = TurboQuantCache(model.config, residual_length=32, max_cache_len=256)
    for end in ends:
        options = dict(do_sample=False, max_new_tokens=new, eos_token_id=end, pad_token_id=0)
        ids = model.generate(ids, attention_mask=mask, **as_input(cache), **options, **loop)
        ids = torch.cat([ids, ids[:, 20:27]], dim=1)
        mask = torch.cat([mask, mask.new_ones(2, ids.shape[1] - mask.shape[1])], dim=1)
    return ids, cache
