"""Parts of the recipe as switches, for scripts and tests that show what each is worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from ..config import Correction, TurboQuantConfig


@dataclass(frozen=True)
class Ablation(TurboQuantConfig):
    """A configuration in which what `TurboQuantConfig` has settled can be switched. Caches of it are not saved.

    Args:
        random_signs: Flip the signs of random channels before the Hadamard transform. Without it (as in vLLM) a mean
            that is aligned with a row of the matrix ends up in one channel.
        rotate_values: Rotate values like keys. Unrotated values are read by the torch path only, on a GPU too.
        key_mean: Remove the mean key of each block before quantizing and add `q . mean` back to the logits. Exact in
            real arithmetic; without it models with a key bias (Qwen2) break.
        key_correction: What scale to store (see `tq_hf.config.Correction`).
        value_correction: The same for values.

    Raises:
        ValueError: An option is outside its range. The message says what came and what is allowed.
    """

    random_signs: bool = True
    rotate_values: bool = True
    key_mean: bool = True
    key_correction: Correction = "inner"
    value_correction: Correction = "inner"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("random_signs", "rotate_values", "key_mean"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"`{name}` is {getattr(self, name)!r}; it must be True or False.")
        for name in ("key_correction", "value_correction"):
            if getattr(self, name) not in get_args(Correction):
                raise ValueError(
                    f"`{name}` is {getattr(self, name)!r}; it must be one of {', '.join(get_args(Correction))}."
                )
