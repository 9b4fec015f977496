"""Cross-attention over a compressed cache: its queries are of other tokens than its keys."""

import re
from itertools import cycle
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    GPT2Config,
    LlamaConfig,
    MarianConfig,
    MarianMTModel,
    MllamaConfig,
    MllamaForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from examples.measure.quality.family_check import difference
from examples.measure.quality.family_configs import tiny_model
from tests.support.helpers import every_pair
from tests.support.kernel_cases import gpu
from tq_hf import TurboQuantCache
from tq_hf.attention import turboquant_attention
from tq_hf.codec.balance import channel_scales
from tq_hf.compat import as_input
from tq_hf.layers.compressed import TurboQuantLayer

BART = dict(vocab_size=128, d_model=64, max_position_embeddings=1600, pad_token_id=0, forced_eos_token_id=None)
BART |= dict(encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=64)
BART |= dict(decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=64)
T5 = dict(vocab_size=128, d_model=64, d_kv=32, d_ff=64, num_layers=2, num_heads=2, feed_forward_proj="relu")
WHISPER = {**BART, "num_mel_bins": 8, "max_target_positions": 64, "max_source_positions": 1500}
MODELS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "bart": (BartForConditionalGeneration, lambda: BartConfig(**BART)),
    "marian": (MarianMTModel, lambda: MarianConfig(**BART, decoder_start_token_id=0)),
    "t5": (T5ForConditionalGeneration, lambda: T5Config(**T5)),
    "whisper": (WhisperForConditionalGeneration, lambda: WhisperConfig(**WHISPER)),
}


def build(name: str, attention: str = "turboquant", device: str = "cpu") -> PreTrainedModel:
    """A random model with loud channels among keys and values of its cross-attention: channel scales are not all 1."""
    kind, config = MODELS[name]
    torch.manual_seed(0)
    model = kind._from_config(config(), attn_implementation=attention).eval()
    generator = torch.Generator().manual_seed(0)
    loud = torch.linspace(-1, 1, 64)
    for path, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
        found = re.search(r"(?:encoder_attn|EncDecAttention)\.(\w).*weight", path)
        if found is not None and found[1] in "kvo":
            parameter.data *= {"k": 8 ** loud[:, None], "v": 10 ** loud[:, None], "o": 10**-loud}[found[1]]
    return model.to(device)


def ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 99, (batch, length), generator=torch.Generator().manual_seed(1000 * seed + length))


def inputs_of(name: str, length: int, padding: int = 0, batch: int = 2) -> dict[str, torch.Tensor]:
    """Inputs of an encoder that gives `length` tokens; the first row's last `padding` are padding."""
    if name == "whisper":
        features = torch.randn(batch, WHISPER["num_mel_bins"], 2 * length, generator=torch.Generator().manual_seed(1))
        return {"input_features": features}
    inputs = {"input_ids": ids(batch, length, 1), "attention_mask": torch.ones(batch, length, dtype=torch.long)}
    inputs["attention_mask"][0, length - padding :] = 0
    return inputs


def both(model: PreTrainedModel, room: int | None, **options: Any) -> EncoderDecoderCache:
    """A compressed cache for self-attention, and one for cross-attention with the same options."""
    own, cross = (TurboQuantCache(model.config, max_cache_len=room, **options) for _ in range(2))
    return EncoderDecoderCache(own, cross)


def steps(model: PreTrainedModel, cache: Cache, inputs: dict[str, torch.Tensor], tokens: int) -> list[torch.Tensor]:
    """Logits of a decoder's prompt of `tokens` tokens, then of 3 single ones."""
    decoder = ids(len(next(iter(inputs.values()))), tokens + 3, 2).to(model.device)
    inputs = {name: x.to(model.device) for name, x in inputs.items()}
    logits = []
    with torch.no_grad():
        for chunk in decoder.split([tokens, 1, 1, 1], 1):
            logits.append(model(**inputs, decoder_input_ids=chunk, **as_input(cache)).logits)
    return logits


def check(
    name: str, length: int, tokens: int, room: int | None = None, padding: int = 0, device: str = "cpu", **more: str
) -> None:
    """Logits are those of transformers' own caches, and scales those of keys, values and padding alone."""
    came: list[tuple[torch.Tensor, torch.Tensor]] = []
    update = TurboQuantLayer.update

    def spied(self: TurboQuantLayer, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self is cache.cross_attention_cache.layers[0]:
            came.append((keys.cpu(), values.cpu()))
        return update(self, keys, values, *args, **kwargs)

    model, inputs = build(name, device=device, **more), inputs_of(name, length, padding)
    own = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    cache = both(model, room, preset="k8v4")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TurboQuantLayer, "update", spied)
        found = steps(model, cache, inputs, tokens)
    assert difference(found, steps(build(name, "sdpa", device), own, inputs, tokens)) < 0.1
    valid = inputs["attention_mask"].bool() if padding else None
    ((keys, values),) = came
    expected = channel_scales(None, keys, values, first=4, valid=valid)
    there = cache.cross_attention_cache.layers[0].store.blocks.channel_scales
    for a, b in zip(there, expected, strict=True):
        assert ((a.cpu() / b - 1).abs() <= 2**-7).all()
    assert (expected.keys == 1).all() and (length < 36 or (expected.values != 1).any())


CASES = [("bart", length, tokens) for length in (34, 200, 1500) for tokens in (1, 8)]
CASES += [("bart", 200, 200), ("marian", 200, 1), ("t5", 200, 4), ("t5", 200, 200), ("whisper", 1500, 4)]


@pytest.mark.parametrize(
    ("name", "length", "tokens", "room", "attention"),
    [
        (*case, room, attention)
        for case, room, attention in zip(
            CASES, cycle((None, 1600)), cycle(("turboquant", "turboquant", "sdpa")), strict=False
        )
    ],
)
def test_queries_of_a_decoder_decide_nothing_of_an_encoders_keys(name, length, tokens, room, attention):
    check(name, length, tokens, room, attention=attention)


@pytest.mark.parametrize(("name", "tokens", "room"), every_pair(("bart", "t5"), (1, 8, 200), (None, 300)))
def test_padding_of_an_encoder_is_left_out(name: str, tokens: int, room: int | None):
    check(name, 200, tokens, room, padding=150)


def mllama(attention: str) -> PreTrainedModel:
    """A random model of 3 layers, the second of which attends to an image of 4 tiles of 26 tokens."""
    sizes = dict(hidden_size=64, intermediate_size=64, num_attention_heads=2)
    text = dict(vocab_size=128, num_hidden_layers=3, num_key_value_heads=1, cross_attention_layers=[1], pad_token_id=0)
    vision = dict(attention_heads=2, num_hidden_layers=2, num_global_layers=1, image_size=70, patch_size=14)
    vision |= dict(vision_output_dim=128, intermediate_layers_indices=[0], max_num_tiles=4)
    config = MllamaConfig(
        text_config=text | sizes | dict(rope_parameters=dict(rope_type="default", rope_theta=1e4)),
        vision_config=vision | dict(hidden_size=64, intermediate_size=64, supported_aspect_ratios=[[1, 1], [2, 2]]),
        image_token_index=127,
    )
    torch.manual_seed(0)
    model = MllamaForConditionalGeneration._from_config(config, attn_implementation=attention).eval()
    for path, parameter in model.named_parameters():
        if "gate" in path and "proj" not in path:  # else images change nothing
            parameter.data.fill_(2.0)
        elif "cross_attn.k_norm" in path:  # else no channel scale would be far from 1
            parameter.data = 8 ** torch.linspace(-1, 1, len(parameter))
        elif parameter.dim() >= 2:
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5)
    return model


@pytest.mark.parametrize("room", [None, 400])
@pytest.mark.parametrize("tokens", [9, 104, 200])  # the image has 104
def test_text_decides_nothing_of_an_images_keys(tokens: int, room: int | None):
    """Layers of Mllama's decoder attend to an image, in the decoder's own cache."""
    text = ids(1, tokens + 3)
    image = dict(pixel_values=torch.randn(1, 1, 4, 3, 70, 70, generator=torch.Generator().manual_seed(0)))
    image |= dict(aspect_ratio_ids=torch.tensor([[2]]), aspect_ratio_mask=torch.ones(1, 1, 4, dtype=torch.long))
    found = {}
    for attention in ("sdpa", "turboquant"):
        model = mllama(attention)
        cache = TurboQuantCache(model.config, "k8v4", max_cache_len=room)
        cache = cache if attention == "turboquant" else DynamicCache(config=model.config)
        found[attention] = []
        for chunk in text.split([tokens, 1, 1, 1], 1):
            seen = torch.ones(1, chunk.shape[1], 1, 4, dtype=torch.long)
            seen[:, : tokens // 2] = 0 if chunk.shape[1] > 1 else 1  # text before the image
            with torch.no_grad():
                inputs = image if chunk.shape[1] > 1 else {}
                out = model(chunk, cross_attention_mask=seen, **as_input(cache), **inputs)
            found[attention].append(out.logits)
    assert difference(found["turboquant"], found["sdpa"]) < 0.05
    scales = cache.layers[1].store.blocks.channel_scales
    assert (scales.keys == 1).all()
    assert cache.layers[1].get_seq_length() == 104


@pytest.mark.parametrize("tokens", [1, 7])
def test_every_token_attends_to_the_whole_image_without_a_mask(tokens: int):
    """As with "eager": Mllama's module does not say that its cross-attention is not causal."""
    model, eager = mllama("turboquant"), mllama("eager")
    module, right = (m.model.language_model.layers[1].cross_attn for m in (model, eager))
    image, text = torch.randn(1, 104, 64), torch.randn(1, tokens, 64)
    cache = TurboQuantCache(model.config, residual_length=10**6)
    with torch.no_grad():
        expected = right(text, cross_attention_states=image)[0]
        first = module(text, cross_attention_states=image, **as_input(cache))[0]
        later = module(text, **as_input(cache))[0]
    assert difference([first, later], [expected, expected]) < 1e-4


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_self_attention_of_a_decoder_still_shows_its_queries(name: str):
    model = build(name)
    for path, parameter in model.named_parameters():
        if re.search(r"decoder.*(self_attn\.k_proj|SelfAttention\.k)\.weight", path):
            parameter.data *= 8 ** torch.linspace(-1, 1, 64)[:, None]
    cache = both(model, None)
    steps(model, cache, inputs_of(name, 40), 200)
    for layer in cache.self_attention_cache.layers:
        assert (layer.store.blocks.channel_scales.keys != 1).any()


class Attention(torch.nn.Module):
    """An attention module, as transformers writes them; `attributes` are its own."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        vars(self).update(attributes)

    def forward(self, hidden_states, attention_mask=None, past_key_values=None):
        """Of one sequence of tokens."""


class CrossAttention(Attention):
    def forward(self, hidden_states, cross_attention_states=None, past_key_values=None):  # type: ignore[override]
        """Of two."""


@pytest.mark.parametrize(
    ("kind", "attributes", "own"),
    [
        (Attention, dict(is_causal=True), True),
        (Attention, dict(is_causal=False), True),  # PaliGemma, that attends both ways
        (Attention, {}, True),  # Doge
        (CrossAttention, dict(is_causal=True), True),  # BART's module, in its decoder
        (CrossAttention, dict(is_causal=False), False),  # the same, between decoder and encoder
        (CrossAttention, {}, False),  # Mllama
        (CrossAttention, dict(is_causal=True, is_cross_attention=True), False),  # GPTBigCode
        (torch.nn.Module, {}, False),
    ],
)
@pytest.mark.parametrize("queries", [200, 201])
def test_only_a_prompts_own_queries_decide_its_scales(kind: type, attributes: dict[str, Any], own: bool, queries: int):
    """200 queries over 200 keys may be of other tokens, too."""
    module = kind()
    vars(module).update(attributes, num_key_value_groups=1)
    cache = TurboQuantCache(LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=2))
    loud = 8 ** torch.linspace(-1, 1, 32)
    keys, values = cache.update(torch.randn(1, 2, 200, 32) * loud, torch.randn(1, 2, 200, 32), 0)
    turboquant_attention(module, torch.randn(1, 2, queries, 32), keys, values, None)
    scales = cache.layers[0].store.blocks.channel_scales
    assert (scales.keys != 1).any() == (own and queries == 200)


@gpu
@pytest.mark.parametrize("room", [None, 1600])
@pytest.mark.parametrize("padding", [0, 20])
@pytest.mark.parametrize("length", [34, 200, 1500])
@pytest.mark.parametrize("tokens", [1, 8, 200])
def test_queries_of_a_decoder_decide_nothing_of_an_encoders_keys_on_a_gpu(
    tokens: int, length: int, padding: int, room: int | None
):
    check("bart", length, tokens, room, padding, "cuda")


REFUSED = r"with 9 tokens of the decoder, and then with 20 of the encoder.*EncoderDecoderCache\(TurboQuantCache\("


@pytest.mark.parametrize(
    ("name", "attention", "room"), every_pair(("bart", "marian", "t5"), ("sdpa", "turboquant"), (None, 64))
)
def test_one_cache_for_both_attentions_is_refused(name: str, attention: str, room: int | None):
    """It stays as it was: empty, and good for what the sentence says."""
    model, inputs = build(name, attention), inputs_of(name, 20)
    cache = TurboQuantCache(model.config, max_cache_len=room)
    for _ in range(2):
        with pytest.raises(ValueError, match=REFUSED):
            steps(model, cache, inputs, 9)
        assert [int(layer.get_seq_length()) for layer in cache.layers] == [0, 0]
    with pytest.raises(ValueError, match="then with 20 of the encoder"):
        model.generate(**inputs, **as_input(cache), max_new_tokens=2, decoder_start_token_id=0)
    beside = EncoderDecoderCache(cache, DynamicCache(config=model.config))
    own = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    assert difference(steps(model, beside, inputs, 9), steps(model, own, inputs, 9)) < 1e-3


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("room", [None, 64])
def test_a_filled_cache_of_self_attention_alone_is_refused_and_stays(room: int | None, layers: int, monkeypatch):
    monkeypatch.setitem(BART, "decoder_layers", layers)
    model, inputs = build("bart"), inputs_of("bart", 20)
    pair = both(model, room)
    steps(model, pair, inputs, 9)
    held = [layer.keys for layer in pair.self_attention_cache.layers]
    with pytest.raises(ValueError, match=REFUSED):
        steps(model, pair.self_attention_cache, inputs, 9)
    assert all(
        torch.equal(layer.keys, keys) for layer, keys in zip(pair.self_attention_cache.layers, held, strict=True)
    )
    pair.self_attention_cache.crop(-1)  # the refused call left no layer ahead of the others
    assert {int(layer.get_seq_length()) for layer in pair.self_attention_cache.layers} == {11}


@pytest.mark.parametrize("room", [None, 64])
@pytest.mark.parametrize("attention", ["sdpa", "turboquant"])
def test_a_decoder_of_one_layer_is_not_refused(attention: str, room: int | None, monkeypatch):
    """Its only layer is updated in every call, and nothing between."""
    monkeypatch.setitem(BART, "decoder_layers", 1)
    model, inputs = build("bart", attention), inputs_of("bart", 20)
    options = dict(max_new_tokens=6, do_sample=False, decoder_start_token_id=0, eos_token_id=None)
    for more in ({}, dict(num_beams=2), dict(prompt_lookup_num_tokens=2, num_beams=1)):
        if "prompt_lookup_num_tokens" in more:
            inputs = {key: x[:1] for key, x in inputs.items()}
        own = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
        expected = model.generate(**inputs, **options, **more, **as_input(own))
        ours = EncoderDecoderCache(TurboQuantCache(model.config, max_cache_len=room), DynamicCache(config=model.config))
        assert torch.equal(model.generate(**inputs, **options, **more, **as_input(ours)), expected)


@pytest.mark.slow
def test_a_compiled_decoder_of_one_layer_is_not_refused(monkeypatch):
    """Graphs hold the steps of single tokens; calls of several are outside of them."""
    monkeypatch.setitem(BART, "decoder_layers", 1)
    model, inputs = build("bart"), inputs_of("bart", 20, batch=1)
    found = []
    for forward in (model, torch.compile(model, backend="eager")):
        cache = EncoderDecoderCache(TurboQuantCache(model.config, max_cache_len=64), DynamicCache(config=model.config))
        with torch.no_grad():
            for chunk in ids(1, 13).split([5, 1, 1, 6], 1):
                out = forward(**inputs, decoder_input_ids=chunk, **as_input(cache))
        found.append(out.logits)
    assert difference([found[1]], [found[0]]) < 1e-3


def test_a_model_that_makes_the_cache_of_cross_attention_itself_is_told():
    """T5Gemma's `generate` calls the class of the one it was given, with `config` and nothing else that was chosen."""
    model = tiny_model("t5gemma")
    with pytest.raises(ValueError, match="config=.*was called.*lose its preset and options. Pass `EncoderDecoderCache"):
        model.generate(**inputs_of("t5gemma", 20), **as_input(both(model, None)), max_new_tokens=2)


def test_a_decoder_of_images_is_not_refused():
    """The decoder of a VisionEncoderDecoder with its images, and alone as a language model."""
    sizes = dict(vocab_size=128, n_embd=64, n_layer=2, n_head=2, add_cross_attention=True, is_decoder=True)
    vision = ViTConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=32)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, GPT2Config(**sizes))
    torch.manual_seed(0)
    model = VisionEncoderDecoderModel(config).eval()
    pixels = {"pixel_values": torch.randn(2, 3, 32, 32)}
    own = EncoderDecoderCache(DynamicCache(config=config.decoder), DynamicCache(config=config.decoder))
    ours = EncoderDecoderCache(TurboQuantCache(config), TurboQuantCache(config))
    assert difference(steps(model, ours, pixels, 3), steps(model, own, pixels, 3)) < 1e-3
    own.reset()
    for kind in (config, config.decoder):  # GPT-2 itself puts a cache for cross-attention beside one alone
        assert difference(steps(model, TurboQuantCache(kind), pixels, 3), steps(model, own, pixels, 3)) < 1e-3
        own.reset()
    alone = TurboQuantCache(config.decoder)
    for _ in range(3):
        model.decoder(ids(1, 2), **as_input(alone))
    assert alone.get_seq_length() == 6
