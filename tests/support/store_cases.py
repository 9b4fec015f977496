"""Configurations, rooms and lengths that stores are tested with."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from tq_kernels.types import KeyValue

from tests.support.helpers import all_packed, rows
from tq_hf import PRESETS, TurboQuantConfig
from tq_hf.stores import graph_ops
from tq_hf.tensors.layer import DeviceCounts, View

CONFIGS = {
    "all_packed": all_packed(),
    "sinks": all_packed(sink_tokens=5, key_bits=8),
    "residual": TurboQuantConfig(residual_length=60, sink_tokens=4, key_bits=3),
    "default": PRESETS["2.5bit_nc"],
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
rooms = pytest.mark.parametrize("room", [None, 1200], ids=["growing", "preallocated"])

SIZES = st.one_of(st.integers(1, 5), st.sampled_from([60, 127, 128, 129, 256]), st.integers(1, 420))


def shown(view: View) -> KeyValue:
    """Tokens that queries of a call attend to, dequantized. Empty rows after them are zeros."""
    states = graph_ops.dense(view)
    length = view.length
    if isinstance(view.counts, DeviceCounts):
        assert view.past_length is not None and states[0].shape[2] == length
        length = view.past_length + 1
        assert not any(part.any() for part in rows(states, length))
    return rows(states, 0, length)
