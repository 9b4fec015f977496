"""Private API of torch and transformers, each with the versions it was read in. `tq_kernels.common.compat` has what the
kernels' host side uses."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.utils.import_utils import is_tracing

__all__ = ["attention_implementation", "current_raw_stream", "is_tracing", "mark_static_address", "storage_id"]


def current_raw_stream(device: int) -> int:
    """The current CUDA stream's handle, without a `torch.cuda.Stream` around it (torch 2.9 to 2.13)."""
    return torch._C._cuda_getCurrentRawStream(device)


def mark_static_address(tensor: torch.Tensor) -> None:
    """Promise `torch.compile` that `tensor` stays where it is, so that graphs do not copy it (torch 2.9 to 2.13)."""
    torch._dynamo.mark_static_address(tensor)


def storage_id(tensor: torch.Tensor) -> int:
    """The same for tensors that share their memory, whatever part of it they see (torch 2.9 to 2.13)."""
    return tensor.untyped_storage()._cdata


def attention_implementation(config: PreTrainedConfig | None) -> str | None:
    """`config._attn_implementation` (transformers 5.17 to 5.23).

    Configurations look up attributes in Python, which takes as long as a kernel launch and comes with every update of
    every layer. Outside of compilation this reads what is stored beneath the property.
    """
    if not torch.compiler.is_compiling() and config is not None:
        kept: dict[str, Any] = object.__getattribute__(config, "__dict__")
        if "_attn_implementation_internal" in kept:
            return kept["_attn_implementation_internal"]
    return getattr(config, "_attn_implementation", None)
