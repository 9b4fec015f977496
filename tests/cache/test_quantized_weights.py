"""Weights that are a subclass of tensors with a product and little else, like those of torchao."""

from typing import Any

import pytest
import torch

from tests.support.tiny_models import build, token_ids
from tq_hf import TurboQuantCache
from tq_hf.compat import as_input

IDS = token_ids(1, 310)


class Quantized(torch.Tensor):
    """Codes times a scale. Knows `linear`; has no `t`, `view`, `expand` or `index`."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], *_: Any) -> Any:
        return Quantized(**parts)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            states, weight, *bias = args
            return func(states, weight.codes * weight.scale, *bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} of a quantized weight")


def quantized(name: str, factor: float = 1.0) -> Any:
    model = build(name)
    for module in model.get_decoder().modules():
        if isinstance(module, torch.nn.Linear):
            scale = module.weight.abs().amax(1, keepdim=True).detach() / 127
            codes = (module.weight.detach() / scale).round().to(torch.int8)
            module.weight = torch.nn.Parameter(Quantized(codes, scale * factor), requires_grad=False)
    return model


def logits(model: Any, cache: Any, attention: str) -> torch.Tensor:
    model.set_attn_implementation(attention)
    model(IDS[:, :300], **as_input(cache))
    return torch.cat([model(IDS[:, part], **as_input(cache)).logits for part in (slice(300, 301), slice(301, 310))], 1)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 400}], ids=str)
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_models_with_quantized_weights_run_and_are_saved(tmp_path, name, options):
    model = quantized(name)
    expected = logits(model, TurboQuantCache(model.config, **options), "sdpa")
    cache = TurboQuantCache(model.config, **options)
    torch.testing.assert_close(logits(model, cache, "turboquant"), expected, rtol=1e-4, atol=1e-4)
    cache.save(tmp_path / "c.safetensors", model)
    loaded = TurboQuantCache.load(tmp_path / "c.safetensors", model)
    found, expected = (model(IDS[:, :5], **as_input(each)).logits for each in (loaded, cache))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"other weights \(.*other quantization\)"):
        TurboQuantCache.load(tmp_path / "c.safetensors", quantized(name, 1.001))


def test_batches_refuse_latents_of_quantized_weights():
    model = quantized("deepseek_v3")
    model.set_attn_implementation("turboquant")
    batching = pytest.importorskip("tq_hf.batching", exc_type=ImportError)
    with pytest.raises(ValueError, match="layer 0 has no weight of `kv_b_proj`, or a quantized one"):
        batching.TurboQuantBatching(model).generate_batch([IDS[0].tolist()], max_new_tokens=2, progress_bar=False)
