"""Inputs for attention of many queries: a decode case, and new tokens in the residual or beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tests.support.kernel_cases import Case, Inputs, dense_rows, kernel_rotations, make_inputs, oracle, residual_start
from tq_hf.tensors.layer import Counts, LayerTensors, View


@dataclass
class PrefixInputs:
    """`inputs` as the oracle reads them, its residual holding the new tokens; `residual` and `new` as the kernel
    does."""

    inputs: Inputs
    residual: tuple[torch.Tensor, torch.Tensor]
    num_residual: int
    new: tuple[torch.Tensor, torch.Tensor] | None


def make_prefix_inputs(case: Case, device: torch.device, *, beside: bool) -> PrefixInputs:
    """`case.residual` counts residual rows and, with `beside`, the S new tokens after them, apart as models give
    them."""
    whole = make_inputs(case, device)
    if not beside:
        return PrefixInputs(whole, whole.residual, case.residual, None)
    start, held = residual_start(case), case.residual - case.S
    assert held >= 0, "the residual of the case holds the new tokens too"
    parts, new = [], []
    for states in whole.residual:
        rows = states.roll(-start, dims=2)
        # Heads behind tokens, as projections make them.
        new.append(rows[:, :, held : case.residual].transpose(1, 2).contiguous().transpose(1, 2))
        rows = rows.clone()
        rows[:, :, held:] = torch.nan
        parts.append(rows.roll(start, dims=2))
    return PrefixInputs(whole, (parts[0], parts[1]), held, (new[0], new[1]))


def run_prefix(prefix: PrefixInputs, **options: object) -> torch.Tensor:
    """`attend_prefix`, with scratch and output poisoned."""
    from tq_kernels.prefix.launch import attend_prefix
    from tq_kernels.types import AttentionOptions

    inputs = prefix.inputs
    case, packed, device = inputs.case, inputs.packed, inputs.query.device
    return attend_prefix(
        inputs.query,
        (packed, dense_rows(prefix.residual, inputs.sinks), case.sinks),
        (case.sinks, case.blocks, prefix.num_residual),
        prefix.new,
        kernel_rotations(inputs),
        inputs.mask,
        AttentionOptions(inputs.scaling, case.causal, case.softcap, inputs.s_aux),
        out=torch.full((case.B, case.S, case.Hq, case.Dv), torch.nan, dtype=case.dtype, device=device),
        allocate=lambda size: torch.full((size,), torch.nan, device=device),
        **options,  # type: ignore[arg-type]
    )


def view_of(prefix: PrefixInputs) -> View:
    """The same as attention is given it."""
    inputs = prefix.inputs
    sinks = inputs.case.sinks
    config = replace(inputs.config, sink_tokens=sinks)
    tensors = LayerTensors(config, inputs.packed, dense_rows(prefix.residual, inputs.sinks))
    counts = Counts(sinks, inputs.case.blocks, prefix.num_residual)
    return View(tensors, counts, inputs.case.length, new=prefix.new)


__all__ = ["PrefixInputs", "make_prefix_inputs", "oracle", "run_prefix", "view_of"]
