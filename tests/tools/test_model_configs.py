"""Estimates for the configs of well-known models, against bytes counted by hand."""

import json
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3PreTrainedModel

from tq_hf.tools.estimate import Estimator

CONFIGS = Path(__file__).parent / "configs"
CONTEXT = 8192


def config_of(name: str):
    return AutoConfig.for_model(**json.loads((CONFIGS / f"{name}.json").read_text()))


@lru_cache
def estimator_of(name: str) -> Estimator:
    return Estimator(config_of(name))


def llama(hidden: int, inner: int, layers: int, queries: int, pairs: int, vocab: int, bias: bool = False) -> int:
    """Parameters of a decoder of Llama's kind with heads of 128 channels and a head of its own: attention (q and o, k
    and v), three matrices of the MLP and two norms a layer, the embedding, the head and a last norm."""
    attention = 2 * hidden * queries * 128 + 2 * hidden * pairs * 128 + bias * (queries + 2 * pairs) * 128
    return layers * (attention + 3 * hidden * inner + 2 * hidden) + 2 * vocab * hidden + hidden


def gpt_oss_20b() -> int:
    """mxfp4: 4 bits for each weight of the experts and a byte for each 32; everything else in bfloat16. The checkpoint
    has 13,761,264,768 bytes."""
    experts = 24 * 32 * (2880 * 2 * 2880 + 2880 * 2880)
    expert_biases = 24 * 32 * (2 * 2880 + 2880)
    attention = 24 * (2 * 2880 * 64 * 64 + 2 * 2880 * 8 * 64 + 64 * 64 + 2 * 8 * 64 + 2880 + 64)  # biases and sinks
    routers = 24 * (32 * 2880 + 32)
    embeddings, norms = 2 * 201088 * 2880, (2 * 24 + 1) * 2880
    return experts // 2 + experts // 32 + 2 * (expert_biases + attention + routers + embeddings + norms)


def deepseek_v3() -> int:
    """fp8: a byte for each weight of a linear layer and 4 for each block of 128 x 128; embedding, head, routers and
    norms in bfloat16, from transformers 5.24 on routers in float32. (Their biases are buffers, 58 x 256 numbers.)"""

    def linear(inputs: int, outputs: int) -> int:
        return inputs * outputs + 4 * -(-inputs // 128) * -(-outputs // 128)

    attention = linear(7168, 1536) + linear(1536, 128 * 192) + linear(7168, 512 + 64)
    attention += linear(512, 128 * 256) + linear(128 * 128, 7168)
    dense = 2 * linear(7168, 18432) + linear(18432, 7168)
    expert = 2 * linear(7168, 2048) + linear(2048, 7168)
    in_float32 = "gate.weight" in DeepseekV3PreTrainedModel._keep_in_fp32_modules_strict
    routers = 58 * (4 if in_float32 else 2) * 256 * 7168
    norms = 2 * (61 * (2 * 7168 + 1536 + 512) + 7168)
    return 61 * attention + 3 * dense + 58 * 257 * expert + routers + norms + 2 * 2 * 129280 * 7168


def gemma_3_27b() -> int:
    """The head is the embedding. Of the vision tower: patches and positions, 27 layers of attention and MLP with
    biases, a last norm; and the projection with its norm."""
    attention = 2 * 5376 * 32 * 128 + 2 * 5376 * 16 * 128 + 2 * 128
    text = 62 * (attention + 3 * 5376 * 21504 + 4 * 5376) + 262208 * 5376 + 5376
    patches = 3 * 14 * 14 * 1152 + 1152 + (896 // 14) ** 2 * 1152
    tower = 27 * (4 * (1152 * 1152 + 1152) + 2 * 1152 * 4304 + 4304 + 1152 + 4 * 1152)
    return 2 * (text + patches + tower + 2 * 1152 + 1152 * 5376 + 1152)


def qwen2_5_vl_7b() -> int:
    """The vision tower: patches of 3 x 2 x 14 x 14, 32 layers with one matrix for q, k and v and three for the MLP,
    all with biases, and a merger of four patches into one."""
    text = llama(3584, 18944, 28, 28, 4, 152064, bias=True)
    attention = 1280 * 3 * 1280 + 3 * 1280 + 1280 * 1280 + 1280
    mlp = 3 * 1280 * 3420 + 2 * 3420 + 1280
    merger = 1280 + 5120 * 5120 + 5120 + 5120 * 3584 + 3584
    return 2 * (text + 3 * 2 * 14 * 14 * 1280 + 32 * (attention + mlp + 2 * 1280) + merger)


def phi_3_mini() -> int:
    """Heads of 96 channels: 32 of queries, keys and values."""
    layer = 4 * 3072 * 3072 + 3 * 3072 * 8192 + 2 * 3072
    return 2 * (32 * layer + 2 * 32064 * 3072 + 3072)


def t5_small() -> int:
    """float32. Encoder and decoder of 6 layers, one embedding for all, biases for 32 distances in the first layers."""
    attention, mlp, norm = 4 * 512 * 8 * 64, 2 * 512 * 2048, 512
    encoder = 6 * (attention + mlp + 2 * norm) + norm + 32 * 8
    decoder = 6 * (2 * attention + mlp + 3 * norm) + norm + 32 * 8
    return 4 * (32128 * 512 + encoder + decoder)


WEIGHTS = {
    "llama-3.1-8b": lambda: 2 * llama(4096, 14336, 32, 32, 8, 128256),
    "qwen2.5-72b": lambda: 2 * llama(8192, 29568, 80, 64, 8, 152064, bias=True),
    "gpt-oss-20b": gpt_oss_20b,
    "deepseek-v3": deepseek_v3,
    "gemma-3-27b": gemma_3_27b,
    "qwen2.5-vl-7b": qwen2_5_vl_7b,
    "mistral-7b-v0.1": lambda: 2 * llama(4096, 14336, 32, 32, 8, 32000),
    "phi-3-mini-4k": phi_3_mini,
    "t5-small": t5_small,
    # 10,670,220,835 parameters, as the hub counts them.
    "llama-3.2-11b-vision": lambda: 2 * 10_670_220_835,
}

FULL = {
    "llama-3.1-8b": (32, 8, 128 + 128),
    "qwen2.5-72b": (80, 8, 128 + 128),
    "gpt-oss-20b": (12, 8, 64 + 64),
    # MLA: one head, whose keys are the latent of 512 and whose values are the 64 rotary channels.
    "deepseek-v3": (61, 1, 512 + 64),
    "gemma-3-27b": (10, 16, 128 + 128),
    "qwen2.5-vl-7b": (28, 4, 128 + 128),
    "mistral-7b-v0.1": (0, 8, 128 + 128),
    "phi-3-mini-4k": (0, 32, 96 + 96),
    "t5-small": (6, 8, 64 + 64),
    # 40 layers, of which 8 look at an image that is not there.
    "llama-3.2-11b-vision": (32, 8, 128 + 128),
}
"""Layers of full attention, KV heads, and channels of a key and a value together."""

SLIDING = {
    "gpt-oss-20b": (12, 8, 64 + 64, 128),
    "gemma-3-27b": (52, 16, 128 + 128, 1024),
    "mistral-7b-v0.1": (32, 8, 128 + 128, 4096),
    "phi-3-mini-4k": (32, 32, 96 + 96, 2047),
}
"""Layers with a sliding window, KV heads, channels, and the window, of which all but one token are kept."""


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_those_counted_by_hand(name):
    assert estimator_of(name).weight_bytes == WEIGHTS[name]()


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_cache_takes_what_is_counted_by_hand(name):
    estimator = estimator_of(name)
    layers, heads, channels = FULL[name]
    full, itemsize = layers * heads * channels, estimator.dtype.itemsize
    # A DynamicCache before the first new token: the whole prompt in every layer, and 8 bytes beside each window.
    windows, sliding_heads, sliding_channels, window = SLIDING.get(name, (0, 0, 0, 0))
    sliding = windows * sliding_heads * sliding_channels
    dynamic = estimator.footprint(None, CONTEXT)
    assert dynamic.total == itemsize * CONTEXT * (full + sliding) + 8 * windows
    # All whole blocks of 128 tokens between 4 sinks and a window of 128: 4 bits a channel; two scales a token and a
    # mean a channel of keys, in 2 bytes each; four loud channels of 132 bytes.
    blocks = (CONTEXT - 4 - 128) // 128
    ours = estimator.footprint("4bit_nc", CONTEXT)
    rotary, keys, loud = (61 * 64, 512, 0) if name == "deepseek-v3" else (0, channels // 2, 4)  # 8 bits a channel
    assert ours.packed == blocks * (128 * (full + rotary) // 2 + layers * heads * (4 * 128 + 2 * keys + 132 * loud))
    assert ours.uncompressed == itemsize * (window - 1) * sliding + 8 * windows if windows else not ours.uncompressed


def test_what_is_not_in_the_table_is_said():
    assert estimator_of("gpt-oss-20b").quantization == "mxfp4"
    assert estimator_of("deepseek-v3").quantization == "fp8"
    (note,) = estimator_of("llama-3.2-11b-vision").notes
    assert note.startswith("8 of 40 layers cache nothing without images")
    # 6 layers of keys and values of 8 heads of 64 channels in float32
    (note,) = estimator_of("t5-small").notes
    assert f"{6 * 2 * 8 * 64 * 4:,} bytes for each token of the encoder's input" in note


LINEAR = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
PLAIN = 2 * (2 * 128256 * 4096 + 65 * 4096)
"""Of the Llama of 8B: weights of its linear layers, and bytes of what is never quantized."""


@pytest.mark.parametrize(
    ("quantization", "linear_bytes"),
    [
        # A 16-bit scale and a 4-bit zero point for each 128.
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, LINEAR // 2 + LINEAR // 128 * 5 // 2),
        ({"quant_method": "gptq", "bits": 8, "group_size": 64}, LINEAR + LINEAR // 64 * 3),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, LINEAR // 2 + LINEAR // 16),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
            LINEAR // 2 + LINEAR // 64 + LINEAR // 64 // 64,
        ),
        # 4 bytes a row: 2 x 4096 and 2 x 1024 rows of attention, 2 x 14336 and 4096 of the MLP.
        (
            {"quant_method": "bitsandbytes", "load_in_8bit": True},
            LINEAR + 4 * 32 * (2 * 4096 + 2 * 1024 + 2 * 14336 + 4096),
        ),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, LINEAR + LINEAR // 128 // 128 * 4),
    ],
    ids=["awq", "gptq", "bnb4", "bnb4 double", "bnb8", "fp8"],
)
def test_a_quantized_checkpoint_is_counted_as_its_config_says(quantization, linear_bytes):
    config = config_of("llama-3.1-8b")
    config.quantization_config = quantization
    estimator = Estimator(config)
    assert estimator.weight_bytes == PLAIN + linear_bytes and not estimator.notes


def test_an_unknown_way_of_quantizing_is_said_and_can_be_told_better():
    config = config_of("llama-3.1-8b")
    config.quantization_config = {"quant_method": "novel"}
    estimator = Estimator(config)
    assert estimator.weight_bytes == WEIGHTS["llama-3.1-8b"]()
    assert "quantized with novel, an unknown method" in estimator.notes[0]
    told = Estimator(config, weight_bytes=5 * 10**9)
    assert told.weight_bytes == 5 * 10**9 and not told.notes


@pytest.mark.parametrize(
    ("model_type", "says"),
    [
        ("dbrx", "DbrxConfig cannot be estimated.*AttributeError.*Load the model, and call"),
        ("bert", "BertConfig is the config of an encoder"),
        ("clip", "no keys and values|no attention heads|keeps no"),
        ("mamba", "no attention heads"),
    ],
)
def test_a_config_that_cannot_be_estimated_is_refused_in_a_sentence(model_type, says):
    with pytest.raises(ValueError, match=says) as caught:
        Estimator(AutoConfig.for_model(model_type))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("model_type", ["bart", "whisper", "qwen2_vl", "llava"])
def test_families_with_something_around_their_decoder_are_estimated(model_type):
    estimator = Estimator(AutoConfig.for_model(model_type))
    assert estimator.footprint("4bit_nc", 1000).packed > 0
    assert estimator.weight_bytes > 0 and estimator.dtype == torch.bfloat16 or model_type != "bart"


@pytest.mark.parametrize(
    ("model_type", "layers", "options"),
    [
        ("biogpt", 24, {}),  # makes masks of values for sdpa
        ("bart", 12, {"is_decoder": True, "is_encoder_decoder": False}),  # the same
        ("m2m_100", 12, {}),  # counts positions by padding tokens, as NLLB does
        ("roberta", 12, {"is_decoder": True}),  # the same
        ("qwen3_asr", 28, {}),  # asks for a padding token
    ],
)
def test_models_that_look_at_tokens_are_estimated(model_type, layers, options):
    if model_type not in CONFIG_MAPPING:
        pytest.skip("of a newer transformers")
    config = AutoConfig.for_model(model_type, **options)
    # 12 or 16 heads of 64 channels, 8 KV heads of 128
    channels = 768 if model_type == "roberta" else 1024
    assert Estimator(config, torch.bfloat16).footprint(None, 1000).total == 2 * layers * 2 * channels * 1000


def test_latents_that_differ_by_layer_are_estimated():
    """Of Dots 3: of 512 channels in 13 layers, which also have an indexer of 128, and of 1,024 in 33 sliding ones."""
    if "dots3_note_text" not in CONFIG_MAPPING:
        pytest.skip("of a newer transformers")
    footprint = Estimator(AutoConfig.for_model("dots3_note_text"), torch.bfloat16).footprint(None, 100)
    assert footprint.bf16_equivalent == 2 * 100 * (13 * (512 + 64 + 128) + 33 * (1024 + 64))
