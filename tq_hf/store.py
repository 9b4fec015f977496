"""The keys and values of one layer: dense sinks, packed blocks, dense window.

    [ sinks: first S0 tokens ][ packed blocks of 128 tokens ][ window: the rest, dense ]

What is packed is a function of the tokens alone: of T tokens, `TurboQuantConfig.num_blocks(T)` blocks, however they
were appended. A call to `append` encodes the blocks that become due, but the view it returns still shows their tokens
dense: the tokens of a call are read exactly in that call, and a decode step never sees half a block change under it.
The dense rows of a block encoded by a short call are dropped at the start of the next one, so that a `crop` in
between (assisted decoding) finds them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import ops
from .blocks import PackedBlocks
from .config import GROWTH, TurboQuantConfig
from .layout import BlockLayout
from .view import KeyValue, StoreView

SHORT_CALL = 128
"""Calls of up to this many tokens go through the window; longer ones are encoded from the model's own tensors."""


class LayerStore:
    """The compressed keys and values of one layer.

    Args:
        config: What to compress to.
        keys: `[B, Hkv, *, Dk]`, a tensor like those that will be appended (its tokens are not stored).
        values: `[B, Hkv, *, Dv]`, likewise.
        max_length: Tokens to preallocate for and never exceed, or `None` to grow without bound.

    Raises:
        ValueError: The tensors do not fit each other.
    """

    def __init__(
        self, config: TurboQuantConfig, keys: torch.Tensor, values: torch.Tensor, max_length: int | None = None
    ) -> None:
        self.config = config
        self.max_length = max_length
        self.layout: BlockLayout = config.layout(keys.shape[-1], values.shape[-1])
        self.device = keys.device
        self.dtype = keys.dtype
        self.num_blocks = 0
        self.num_sinks = 0
        self.num_window = 0
        self.num_pending = 0
        batch, heads = keys.shape[:2]
        self.num_heads = heads
        blocks, window = 0, config.window_capacity(0)
        if max_length is not None:
            blocks = config.num_blocks(max_length)
            window = min(config.residual_length + self.layout.tokens, max_length)
        self.blocks = PackedBlocks.allocate(self.layout, batch, heads, blocks, keys.device)
        self.sinks: KeyValue = (self._dense(keys, config.sink_tokens), self._dense(values, config.sink_tokens))
        self.window: KeyValue = (self._dense(keys, window), self._dense(values, window))

    @staticmethod
    def _dense(like: torch.Tensor, tokens: int) -> torch.Tensor:
        return like.new_zeros(*like.shape[:2], tokens, like.shape[3])

    @property
    def batch_size(self) -> int:
        """Sequences held."""
        return self.blocks.scalars.shape[0]

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.num_sinks + self.num_blocks * self.layout.tokens + self.num_window

    def check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Raise a `ValueError` if these tensors cannot be appended."""
        check_states(keys, values)
        expected = {
            "batch size": (self.batch_size, keys.shape[0]),
            "number of KV heads": (self.num_heads, keys.shape[1]),
            "key head_dim": (self.layout.key_dim, keys.shape[3]),
            "value head_dim": (self.layout.value_dim, values.shape[3]),
            "dtype": (self.dtype, keys.dtype),
            "device": (self.device, keys.device),
        }
        for what, (held, came) in expected.items():
            if held != came:
                raise ValueError(
                    f"This cache holds {self.length} tokens with {what} {held}, but was given keys with {what} {came}. "
                    "Use a new TurboQuantCache for another batch or model, or call `cache.reset()` first."
                )
        if self.max_length is not None and self.length + keys.shape[2] > self.max_length:
            raise ValueError(
                f"Appending {keys.shape[2]} tokens to the {self.length} in this cache exceeds its "
                f"`max_cache_len` of {self.max_length}. Make the cache with a larger `max_cache_len`."
            )

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> StoreView:
        """Store new tokens and return what their queries attend to.

        Args:
            keys: `[B, Hkv, S, Dk]` in the dtype and on the device of this store.
            values: `[B, Hkv, S, Dv]`.

        Raises:
            ValueError: The tensors do not fit the store, or the store is full. Nothing is changed then.
        """
        self.check(keys, values)
        self._drop_pending()
        past, new_tokens = self.length, keys.shape[2]
        to_sinks = min(new_tokens, self.config.sink_tokens - self.num_sinks) if past == self.num_sinks else 0
        sinks_before = self.num_sinks
        for buffer, states in zip(self.sinks, (keys, values), strict=True):
            buffer[:, :, sinks_before : sinks_before + to_sinks] = states[:, :, :to_sinks]
        self.num_sinks += to_sinks
        rest = (keys[:, :, to_sinks:], values[:, :, to_sinks:])
        view = self._append_short if new_tokens <= SHORT_CALL and past > 0 else self._append_long
        return view(past, sinks_before, rest, (keys, values))

    def _append_short(self, past: int, sinks_before: int, rest: KeyValue, new: KeyValue) -> StoreView:
        rows = rest[0].shape[2]
        self._reserve_window(self.num_window + rows)
        for buffer, states in zip(self.window, rest, strict=True):
            buffer[:, :, self.num_window : self.num_window + rows] = states
        self.num_window += rows
        view = self._view(past, self.num_sinks)
        due = self.config.num_blocks(self.length) - self.num_blocks
        if due > 0:
            self._encode(self._window_rows(0, due * self.layout.tokens), self.num_blocks)
            self.num_pending = due
        return view

    def _append_long(self, past: int, sinks_before: int, rest: KeyValue, new: KeyValue) -> StoreView:
        view = self._view(past, sinks_before, new)
        rows, held, tokens = rest[0].shape[2], self.num_window, self.layout.tokens
        due = max(0, self.config.num_blocks(past + new[0].shape[2]) - self.num_blocks)
        old = self._window_rows(0, held)
        # The window's rows lead: complete their last block from the new tokens, then encode the rest in place.
        straddling = min(due, -(-held // tokens))
        taken = straddling * tokens - held if straddling else 0
        if straddling and taken >= 0:
            self._encode(
                tuple(torch.cat([o, r[:, :, :taken]], 2) for o, r in zip(old, rest, strict=True)), self.num_blocks
            )
        elif straddling:
            self._encode(self._window_rows(0, straddling * tokens), self.num_blocks)
        if due > straddling:
            start, stop = max(taken, 0), max(taken, 0) + (due - straddling) * tokens
            self._encode(tuple(r[:, :, start:stop] for r in rest), self.num_blocks + straddling)
        # A new window, not the old one shifted: the view still reads the old.
        kept_old, kept_new = max(0, held - due * tokens), rows - max(0, due * tokens - held)
        size = max(self.window[0].shape[2] if self.max_length else 0, self.config.window_capacity(kept_old + kept_new))
        window = []
        for o, r in zip(old, rest, strict=True):
            buffer = self._dense(r, size)
            buffer[:, :, :kept_old] = o[:, :, held - kept_old :]
            buffer[:, :, kept_old : kept_old + kept_new] = r[:, :, rows - kept_new :]
            window.append(buffer)
        self.window = (window[0], window[1])
        self.num_window = kept_old + kept_new
        self.num_blocks += due
        return view

    def _encode(self, rows: tuple[torch.Tensor, ...], start: int) -> None:
        blocks = rows[0].shape[2] // self.layout.tokens
        if start + blocks > self.blocks.capacity:
            # An exact fit for a prompt; room to spare once the cache is growing.
            capacity = start + blocks if start == 0 else max(start + blocks, int(start * GROWTH) + 1)
            self.blocks = self.blocks.resized(capacity, start)
        ops.encode(self.config, rows[0], rows[1], self.blocks, start)

    def _window_rows(self, start: int, stop: int) -> KeyValue:
        return self.window[0][:, :, start:stop], self.window[1][:, :, start:stop]

    def _reserve_window(self, rows: int) -> None:
        held = self.window[0].shape[2]
        if rows > held:
            more = self.config.window_capacity(rows) - held
            keys, values = (torch.cat([buffer, self._dense(buffer, more)], dim=2) for buffer in self.window)
            self.window = (keys, values)

    def _drop_pending(self) -> None:
        """Drop the dense rows of the blocks the last call encoded."""
        if not self.num_pending:
            return
        rows = self.num_pending * self.layout.tokens
        kept = self.num_window - rows
        for buffer in self.window:
            # The ranges may overlap, so copy what is kept before moving it.
            buffer[:, :, :kept] = buffer[:, :, rows : self.num_window].clone()
        self.num_window = kept
        self.num_blocks += self.num_pending
        self.num_pending = 0

    def _view(self, past: int, num_sinks: int, new: KeyValue | None = None) -> StoreView:
        return StoreView(
            config=self.config,
            sinks=(self.sinks[0][:, :, :num_sinks], self.sinks[1][:, :, :num_sinks]),
            blocks=self.blocks,
            num_blocks=self.num_blocks,
            window_buffer=self.window,
            num_window=self.num_window,
            new=new,
            past_length=past,
        )

    def view(self) -> StoreView:
        """All tokens held, as a query that adds none would read them."""
        self._drop_pending()
        return self._view(self.length, self.num_sinks)

    def crop(self, tokens: int) -> None:
        """Remove the last `tokens` tokens. Exact within the window; a packed block that is cut moves its surviving
        tokens to the window, dequantised."""
        length = max(0, self.length - tokens)
        block = self.layout.tokens
        if (kept := length - self.num_sinks - self.num_blocks * block) >= 0:
            self.num_window = kept
            # Rows of pending blocks are still here: keep packed what a cache of this length would have packed.
            self.num_pending = min(self.num_pending, max(0, self.config.num_blocks(length) - self.num_blocks))
            return
        self.num_pending = 0
        self.num_blocks, self.num_window = divmod(max(0, length - self.num_sinks), block)
        self.num_sinks = min(self.num_sinks, length)
        if self.num_window:
            self._reserve_window(block)
            cut = self.blocks.slice(self.num_blocks, self.num_blocks + 1)
            ops.dequantise(self.config, cut, *self._window_rows(0, block))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace every tensor by `function` of it (batch selection, device moves)."""
        self.blocks = self.blocks.map(function)
        self.sinks = (function(self.sinks[0]), function(self.sinks[1]))
        self.window = (function(self.window[0]), function(self.window[1]))

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Every tensor held, by the kind `memory_footprint` reports."""
        packed = self.blocks.tensors()
        return {
            "packed": [packed["key_words"], packed["value_words"]],
            "metadata": [packed["scalars"]] + [packed[name] for name in ("key_means",) if name in packed],
            "window": list(self.window),
            "sinks": list(self.sinks),
        }


def check_states(keys: torch.Tensor, values: torch.Tensor) -> None:
    """Raise a `ValueError` unless these are keys and values of the same tokens.

    Args:
        keys: `[B, Hkv, S, Dk]`.
        values: `[B, Hkv, S, Dv]`.
    """
    shapes = f"Keys {tuple(keys.shape)} and values {tuple(values.shape)}"
    if keys.dim() != 4 or values.dim() != 4:
        raise ValueError(f"{shapes} must both have the shape [batch, KV heads, tokens, head_dim].")
    if keys.shape[:3] != values.shape[:3]:
        raise ValueError(f"{shapes} must agree in batch, heads and tokens.")
    if keys.device != values.device:
        raise ValueError(f"Keys are on {keys.device} and values on {values.device}; move both to one device.")
    if keys.dtype != values.dtype or not keys.dtype.is_floating_point:
        raise ValueError(f"Keys are {keys.dtype} and values {values.dtype}; both must have one floating-point dtype.")
    if 0 in (keys.shape[1], keys.shape[3], values.shape[3]):
        raise ValueError(f"{shapes} have no heads or a head_dim of 0; there is nothing to cache.")
