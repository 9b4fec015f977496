"""A padded layer exchanges padding among its sinks for real tokens: attention, masks and states that it shows agree.

On a machine without a GPU the file runs again in a child process under Triton's interpreter.
"""

from types import SimpleNamespace

import pytest
import torch
from tq_kernels.types import AttentionOptions

from tests.support.helpers import concatenated, states
from tests.support.kernel_cases import INTERPRETED, child
from tq_hf import TurboQuantConfig, TurboQuantLayer
from tq_hf.attention import turboquant_attention
from tq_hf.ops import reference
from tq_hf.tensors.sinks import Padding

LENGTH, ROOM = 300, 512
PADS = (150, 0, 2)
"""One block is packed of 300 tokens: the first 132. Padding and sinks of the first row are in the second."""
# Empty room may hold anything, NaN too: the interpreter multiplies all of it before a mask hides it.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")
test_under_the_interpreter = child(__file__)


def padded_layer(room: int | None, pads: tuple[int, ...] = PADS, **options) -> tuple[TurboQuantLayer, Padding]:
    config = TurboQuantConfig(**options)
    layer = TurboQuantLayer(config, room)
    mask = torch.arange(ROOM) >= torch.tensor(pads)[:, None]
    pair = states(5, len(pads), tokens=LENGTH, dim=16)
    layer.update(*pair, padding=Padding(mask[:, :LENGTH]))
    return layer, Padding(mask)


@pytest.mark.parametrize("room", [None, ROOM])
@pytest.mark.parametrize("queries", [1, 5, 40, 140])
@pytest.mark.parametrize("kind", ["bool", "float", "one row", "bias", "none"])
def test_attention_reads_what_the_layer_shows(kind, queries, room):
    """Masks and biases are by token, whatever order the store has; a mask may have columns for empty room."""
    if INTERPRETED and (kind != "bool" or queries == 40 or (room is None) == (queries == 1)):
        pytest.skip("takes too long in the interpreter")
    layer, padding = padded_layer(room)
    module = SimpleNamespace(config=None, is_causal=True)
    generator = torch.Generator().manual_seed(1)
    query, bias = torch.randn(3, 4, queries, 16, generator=generator), None
    end, new = LENGTH + queries, states(6, 3, tokens=queries, dim=16)
    shown = concatenated((layer.keys.clone(), layer.values.clone()), new)
    with torch.no_grad():
        keys, values = layer.update(*new, padding=padding)
        mask = torch.ones(queries, end, dtype=torch.bool).tril(end - queries) & padding.mask[:, None, None, :end]
        if kind == "one row":
            mask = mask[1:2]
        if kind == "none":
            mask = None
        if kind == "bias":
            bias = torch.randn(1, 4, queries, end, generator=generator)
        given = mask if kind != "float" else torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        given = None if given is None else torch.nn.functional.pad(given, (0, ROOM - end))
        kwargs = {} if bias is None else {"position_bias": bias}
        if room is not None and queries == 1 and bias is not None:
            kwargs["position_bias"] = torch.nn.functional.pad(bias, (0, ROOM - end))
        out, _ = turboquant_attention(module, query, keys, values, given, **kwargs)
    options = AttentionOptions(16**-0.5, position_bias=bias)
    expected = reference.attend(query, shown, mask, options)
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)


def test_no_token_is_lost_whatever_a_mask_says_later():
    """Padding that is unmasked again is read as it came."""
    layer, _ = padded_layer(None, residual_length=10**6)
    keys, values = states(5, 3, tokens=LENGTH, dim=16)
    assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


@pytest.mark.parametrize("room", [None, ROOM])
def test_written_and_assigned_rows_of_a_padded_layer(room):
    if INTERPRETED and room is None:
        pytest.skip("takes too long in the interpreter")
    layer, _ = padded_layer(room, residual_length=0)
    before = layer.keys.clone()
    changed = before.clone()
    changed[:, :, 280] = 1.0
    layer.keys = changed
    layer.values = layer.values.clone()
    assert layer.store.tensors.order is not None
    assert torch.equal(layer.keys[:, :, :132], before[:, :, :132]), "blocks that did not change"
    assert torch.equal(layer.keys[0, :, 150:154], before[0, :, 150:154])
    layer.keys, layer.values = before[:, :, 40:], layer.values[:, :, 40:].clone()
    assert layer.store.tensors.order is None and int(layer.get_seq_length()) == LENGTH - 40
    assert torch.equal(layer.keys[0, :, :4], before[0, :, 40:44])


@pytest.mark.parametrize("room", [None, ROOM])
def test_rows_move_with_their_order(room):
    layer, _ = padded_layer(room)
    keys, values = layer.keys.clone(), layer.values.clone()
    beams = torch.tensor([2, 0, 0])
    layer.reorder_cache(beams)
    assert torch.equal(layer.keys, keys[beams]) and torch.equal(layer.values, values[beams])
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([3, 1]))
    assert torch.equal(layer.keys, keys[[0, 2]])
    layer.reset()
    assert layer.store is None or layer.store.tensors.order is None


def test_padding_does_not_change_channel_scales():
    """Scales of a padded row are those of another row with other states in its padding, without queries, too."""
    keys, values = states(7, 2, tokens=LENGTH, dim=16)
    keys[1], values[1] = keys[0], values[0]
    keys[1, :, :150], values[1, :, :150] = 50.0, -50.0
    layer = TurboQuantLayer(TurboQuantConfig())
    mask = torch.arange(LENGTH)[None] >= torch.tensor([150, 150])[:, None]
    layer.update(keys, values, padding=Padding(mask))
    layer.store.encode_deferred()
    for scales in layer.store.blocks.channel_scales:
        assert torch.equal(scales[0], scales[1])


def test_memory_is_counted_with_the_index_of_sinks():
    layer, _ = padded_layer(None)
    metadata = layer.by_kind()["metadata"]
    index = layer.store.tensors.order.index
    assert index.tolist() == [[150, 151, 152, 153], [0, 1, 2, 3], [4, 5, 2, 3]]
    assert any(tensor is index for tensor in metadata)
