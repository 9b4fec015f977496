"""What is said, once, of a model's dtype and of the GPU it is on."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.helpers import states
from tq_hf import TurboQuantConfig
from tq_hf.layers import advice
from tq_hf.layers.compressed import TurboQuantLayer
from tq_hf.ops.triton import blocks as triton_blocks

LAYOUT = TurboQuantConfig().layout(128)
FP16, BF16 = torch.float16, torch.bfloat16


class Config:
    """A model's."""

    def __init__(self, model_type: str, attention: str) -> None:
        self.model_type, self._attn_implementation = model_type, attention


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    type(advice.logger).warning_once.cache_clear()
    advice.checked_states.clear()
    caplog.set_level(logging.WARNING, advice.__name__)
    return lambda: [record.getMessage() for record in caplog.records]


def show(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, model_type: str, major: int = 8, plain: bool = False
) -> None:
    """First states of a model on a card of this capability."""
    card = SimpleNamespace(name="Tesla T4", major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(triton_blocks, "supports_blocks", lambda *_: True)
    monkeypatch.setattr(triton_blocks, "supports_inline_ptx", lambda device: not plain)
    advice.warn_about_states(SimpleNamespace(dtype=dtype, is_cuda=True, device="cuda"), LAYOUT, model_type)  # type: ignore[arg-type]


def test_bf16_on_turing_is_told_to_be_slow_once(monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    for _ in range(3):
        show(monkeypatch, BF16, "qwen3", major=7)
    (line,) = said()
    assert line.startswith("Tesla T4 has no bfloat16 units: the cache's kernels convert")
    assert line.endswith("Load it with `dtype=torch.float16`.")


@pytest.mark.parametrize("model_type", advice.OVERFLOWS)
def test_models_that_overflow_fp16_are_not_sent_there(
    monkeypatch: pytest.MonkeyPatch, said: Any, model_type: str
) -> None:
    show(monkeypatch, BF16, model_type, major=7)
    show(monkeypatch, FP16, model_type, major=7)
    slow, overflows = said()
    assert slow.endswith(f"Load it with float32, because {model_type} is known to exceed float16's range.")
    assert overflows.startswith(f"{model_type} is known to exceed float16's range: load it with `dtype=torch.bfloat16`")


def test_what_runs_well_is_not_talked_about(monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    for dtype, model_type, major in ((BF16, "gemma3_text", 8), (FP16, "llama", 7), (BF16, "llama", 9)):
        show(monkeypatch, dtype, model_type, major)
    assert said() == []


def test_kernels_without_ptx_are_predicted_to_gain_little(monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    show(monkeypatch, BF16, "llama", major=9, plain=True)
    (line,) = said()
    assert "predicted to take about as long as without compression, or longer" in line


def test_kernels_are_plain_where_there_is_neither_ptx_nor_a_fragment(monkeypatch: pytest.MonkeyPatch) -> None:
    device = pytest.importorskip("tq_kernels.common.device")
    for capability, plain in {(0, 0): True, (7, 0): True, (7, 5): False, (8, 0): False, (9, 0): False}.items():
        on = device.Target(1, 1, capability, True)
        monkeypatch.setattr(triton_blocks, "target", lambda _, on=on: on)
        assert triton_blocks.supports_inline_ptx(torch.device("cuda")) is not plain


def test_a_layer_shows_its_first_states(said: Any) -> None:
    config = Config("gemma2", "sdpa")
    layer = TurboQuantLayer(TurboQuantConfig(), model_config=config)  # type: ignore[arg-type]
    for _ in range(2):
        layer.update(*states(0, tokens=5, dtype=FP16))
    assert [line.split()[0] for line in said()] == ["gemma2", "Every"]


@pytest.mark.parametrize(("size", "warns"), [(1.0, False), (1e-9, True), (0.0, False)])
def test_equal_keys_of_padding_are_not_said_to_be_stored_wrong(said: Any, size: float, warns: bool) -> None:
    """The mean of equal rows leaves rounding, and keys that are small leave themselves."""
    keys, values = states(0, tokens=7)
    keys = keys[:, :, :1].expand_as(keys) if size else 0 * keys
    layer = TurboQuantLayer(TurboQuantConfig())
    layer.update(size * (states(1, tokens=7)[0] if warns else keys), values)
    advice.warn_beyond_fp16({0: layer})
    assert any("stored wrong" in line for line in said()) is warns


@pytest.mark.parametrize(
    ("attention", "advised"),
    [("sdpa", 'Load the model with `attn_implementation="turboquant"`'), ("turboquant", "takes dense keys and values")],
)
def test_steps_that_dequantize_are_said_to_be_slower(said: Any, attention: str, advised: str) -> None:
    """At the first prompt, if the config names another attention; at the first step, if "turboquant" is not called."""
    config = Config("llama", attention)
    layer = TurboQuantLayer(TurboQuantConfig(), model_config=config)  # type: ignore[arg-type]
    layer.update(*states(0, tokens=5, dim=128))
    layer.update(*states(0, tokens=3, dim=128))
    assert len(said()) == (attention == "sdpa")
    for _ in range(3):
        layer.update(*states(0, tokens=1, dim=128))
    (line,) = said()
    assert "moves 2.3 times the bytes" in line and advised in line
