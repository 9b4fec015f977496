"""Configurations and lengths that stores are tested with."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from tests.support.helpers import all_packed
from tq_hf import PRESETS, TurboQuantConfig

CONFIGS = {
    "all_packed": all_packed(),
    "sinks": all_packed(sink_tokens=5, key_bits=8),
    "residual": TurboQuantConfig(residual_length=60, sink_tokens=4, key_bits=3),
    "default": PRESETS["2.5bit_nc"],
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
gradients = pytest.mark.parametrize("recorded", [False, True], ids=["", "gradients"])

SIZES = st.one_of(st.integers(1, 5), st.sampled_from([60, 127, 128, 129, 256]), st.integers(1, 420))
