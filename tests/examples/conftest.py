"""The model of this repository, for tests of scripts that measure."""

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from examples.provenance import SHIPPED_MODEL


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """The shipped model in float32, whose attention reads packed caches."""
    loaded = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL, dtype=torch.float32, attn_implementation="turboquant")
    return loaded.eval()
