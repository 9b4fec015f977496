"""Trellis codes within a word: the tables of levels, and what other designs would give.

    python -m examples.measure.quality.trellis train    # the tables below, from seeds; minutes on a CPU
    python -m examples.measure.quality.trellis codes    # squared error and instructions of each

Presets of 2 and 3 bits have "2: signed levels" and "3: neighbour's bit" (`tq_hf.codec.trellis`).

A code's level depends on the codes before it in the same word of 16, and the first follows the last (tail-biting), so
that any word decodes alone and no byte is added. The level is looked up as at 4 bits: three bits of a window choose one
of eight magnitudes, each a byte in units of 1/64, and one bit is the sign; or one of eight levels that have signs. The
bits are parities of the window, which words give by shifts and XOR.

`encode` finds the path of least squared error for every first state and takes the best. Units are rounded to 1/64
before, so that errors are whole numbers below 2**24 and float32 sums them exactly: every order of summing gives the
same bits. At equal error the path wins that comes from the lowest predecessor (state, then code), step by step; at
equal totals the lowest first state.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist
from typing import Any

import torch

from examples.measure.compile.trellis_unpack import PROGRAMS, counted
from examples.measure.quality.peers import nearest
from examples.provenance import RESULTS, provenance

WORD = 16
"""Codes of a chain: those of a word of crumbs."""
UNIT = 64
"""Levels and rounded channels are multiples of 1 / UNIT."""
LARGEST = 6 * UNIT
"""Channels are clamped to six standard deviations: (384 + 255)**2 * 16 < 2**24."""


def _parity(x: torch.Tensor, mask: int) -> torch.Tensor:
    bits = [x >> place & 1 for place in range(mask.bit_length()) if mask >> place & 1]
    return torch.stack(bits).sum(0) & 1 if bits else torch.zeros_like(x)


@dataclass(frozen=True)
class Trellis:
    """A code whose level depends on the codes before it.

    Args:
        bits: Bits of a code.
        memory: Codes before it that matter.
        index: Masks of the window whose parities are the bits of the magnitude's index, lowest first. The window has
            the code in its low `bits`, the code before in the next, and so on.
        sign: Mask whose parity is the sign, 1 for negative.
        magnitudes: Eight of them, in 1 / UNIT.
    """

    bits: int
    memory: int
    index: tuple[int, int, int]
    sign: int
    magnitudes: tuple[int, ...]

    @cached_property
    def table(self) -> torch.Tensor:
        """Level of each window in 1 / UNIT, `[2**(bits * (memory + 1))]` int32."""
        window = torch.arange(1 << self.bits * (self.memory + 1), dtype=torch.int32)
        place = sum(_parity(window, mask) << i for i, mask in enumerate(self.index))
        return torch.tensor(self.magnitudes, dtype=torch.int32)[place] * (1 - 2 * _parity(window, self.sign))

    @cached_property
    def _places(self) -> torch.Tensor:
        """Magnitude's index of each window, with 8 for the sign: what states are told apart by."""
        window = torch.arange(1 << self.bits * (self.memory + 1))
        masks = (*self.index, self.sign)
        return torch.stack([_parity(window, mask) << i for i, mask in enumerate(masks)]).sum(0)

    @cached_property
    def states(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The fewest states: the state after each, `[S, 2**bits]`, and a window of each, the same shape."""
        codes, count = 1 << self.bits, 1 << self.bits * self.memory
        windows = torch.arange(count * codes).view(count, codes)
        after = windows % count
        kind = torch.zeros(count, dtype=torch.long)
        while True:  # refined until states of a kind have equal levels and successors of equal kinds
            key = torch.cat([self._places[windows], kind[after]], 1)
            _, refined = torch.unique(key, dim=0, return_inverse=True)
            if refined.max() == kind.max():
                break
            kind = refined
        first = torch.stack([(kind == k).nonzero()[0, 0] for k in range(int(kind.max()) + 1)])
        return kind[after[first]], windows[first]

    def _branches(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Into each state, in the order of (state before, code): state before, code and level, `[S, 2**bits]`."""
        after, windows = self.states
        order = torch.argsort(after.flatten(), stable=True).view(len(after), -1)
        before, code = order >> self.bits, order & (1 << self.bits) - 1
        return before.to(device), code.to(device), self.table[windows.flatten()[order]].to(device)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Codes of least squared error.

        Args:
            x: `[N, T]` in units of standard deviations, a chain a row.

        Returns:
            `[N, T]` int32.
        """
        at_a_time = (1 << 17 if x.device.type == "cpu" else 1 << 26) // (len(self.states[0]) ** 2 << self.bits)
        return torch.cat([self._encode(part) for part in x.split(at_a_time)]) if len(x) else x.int()

    def _encode(self, x: torch.Tensor) -> torch.Tensor:
        before, code, level = self._branches(x.device)
        states, branches = before.shape
        unit = (x.mT * UNIT).round().clamp_(-LARGEST, LARGEST).to(torch.int32)  # [T, N]
        place = torch.arange(branches, dtype=torch.int32, device=x.device)[:, None]
        # The branch stands in the lowest bits of its error: the least number is the first branch of least error.
        error = torch.full((states, states, 1), 1 << 28, dtype=torch.int32, device=x.device)
        error[range(states), range(states)] = 0
        error = error.expand(states, states, len(x))  # [first state, state, N]
        came = []
        for row in unit:
            new = (row - level[..., None]).square_().mul_(branches).add_(place)  # [state, branch, N]
            best = error.index_select(1, before.flatten()).unflatten(1, before.shape).add_(new).amin(2)
            back = best & branches - 1
            came.append(back.to(torch.uint8))
            error = best.sub_(back)
        closed = error.diagonal(dim1=0, dim2=1) // branches * states  # [N, state]
        first = (closed + torch.arange(states, dtype=torch.int32, device=x.device)).amin(-1).long() % states
        column, state, codes = torch.arange(len(x), device=x.device), first, []
        for back in reversed(came):
            branch = back[first, state, column].long()
            codes.append(code[state, branch])
            state = before[state, branch]
        return torch.stack(codes[::-1], -1).to(torch.int32)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Levels of chains `[..., T]`, float32 multiples of 1 / UNIT."""
        window = codes.long()
        for back in range(1, self.memory + 1):
            window = window | codes.long().roll(back, -1) << self.bits * back
        return self.table.to(codes.device)[window] / UNIT

    def squared_error(self, x: torch.Tensor) -> float:
        """Mean squared error of chains `[N, T]`."""
        return (x - self.decode(self.encode(x))).square().mean().item()


def _two(sign: int, memory: int, *magnitudes: int) -> Trellis:
    """2 bits: the index is (this code's low bit, the code before), which a nibble holds."""
    return Trellis(2, memory, (0b0100, 0b1000, 0b0001), sign, magnitudes)


def _three(third: int, memory: int, *magnitudes: int) -> Trellis:
    """3 bits, sign and crumb: the index is (`third`, the crumb), and the sign is the code's own."""
    return Trellis(3, memory, (0b001, 0b010, third), 0b100, magnitudes)


DESIGNS = {
    "2: 4 states": _two(0b000110, 1, 70, 33, 17, 100, 14, 135, 69, 35),
    "2: 8 states": _two(0b010110, 2, 19, 31, 66, 94, 69, 136, 16, 30),
    "2: 8 states, 4 taps": _two(0b111110, 2, 136, 16, 71, 31, 30, 62, 17, 93),
    "2: signed levels": Trellis(2, 2, (0b011000, 0b01, 0b10), 0, (69, -35, -69, 35, 15, -118, -15, 118)),
    "3: neighbour's bit": _three(0b000001000, 1, 42, 14, 112, 79, 14, 155, 72, 43),
    "3: crumbs' parity": _three(0b010011000, 2, 65, 111, 13, 37, 15, 44, 82, 155),
    "3: parity": _three(0b001111000, 2, 83, 15, 156, 45, 35, 64, 10, 111),
    "3: neighbour's sign": Trellis(3, 1, (1, 2, 4), 8, (-84, 113, 157, 68, -14, -42, 43, 14)),
}
"""By bits and name. In "signed levels" and "neighbour's sign" the magnitudes have signs of their own."""


def _moved(design: Trellis, exact: torch.Tensor, x: torch.Tensor) -> tuple[Trellis, torch.Tensor]:
    """Each magnitude moved towards the mean of the channels `[N, T]` that chose it, `exact` `[8]` before rounding."""
    codes = design.encode(x).cpu().long()
    window = codes
    for back in range(1, design.memory + 1):
        window = window | codes.roll(back, -1) << design.bits * back
    place, x = design._places[window].flatten(), x.cpu().double().flatten()
    mean = torch.bincount(place % 8, torch.where(place >= 8, -x, x), 8) / torch.bincount(
        place % 8, minlength=8
    ).clamp_min(1)
    # Means of rounded levels' cells move by less than a unit: the sum of such steps moves them in the end.
    exact = exact + 1.5 * (UNIT * mean - torch.tensor(design.magnitudes))
    least = -255 if min(design.magnitudes) < 0 else 0
    return replace(design, magnitudes=tuple(exact.round().clamp(least, 255).int().tolist())), exact


def train(design: Trellis, device: torch.device, seeds: int = 24, words: int = 32768, rounds: int = 32) -> Trellis:
    """The best of `seeds` starts, random orders of quantiles, refined on `words` chains: the same on every device.

    Signed magnitudes are refined only.
    """

    def drawn(seed: int, count: int) -> torch.Tensor:
        return torch.randn(count, WORD, generator=torch.Generator().manual_seed(seed)).to(device)

    def refined(start: Trellis, seed: int, count: int, rounds: int) -> Trellis:
        best, exact = start, torch.tensor(start.magnitudes).double()
        tries = []
        for step in range(rounds):
            best, exact = _moved(best, exact, drawn(seed + step % 2, count))
            tries.append(best)
        x = drawn(1 << 20, count)
        return min(tries[-4:], key=lambda one: one.squared_error(x))

    starts = [design]
    if min(design.magnitudes) >= 0:
        quantiles = [NormalDist().inv_cdf(0.5 + (k + 0.5) / 16) for k in range(8)]
        for seed in range(seeds):
            order = torch.randperm(8, generator=torch.Generator().manual_seed(seed)).tolist()
            first = replace(design, magnitudes=tuple(round(UNIT * quantiles[k]) for k in order))
            starts.append(refined(first, 100 * seed, 512, 12))
        starts = starts[1:]
    x = drawn(1 << 21, 4096)
    return refined(min(starts, key=lambda one: one.squared_error(x)), 1 << 22, words, rounds)


def codes() -> None:
    """Squared error on Gaussian channels, and the time to choose codes on one thread of a CPU, against scalar codes."""
    torch.set_num_threads(1)
    x = torch.randn(16384, WORD, generator=torch.Generator().manual_seed(99))
    rows: list[dict[str, Any]] = []
    for bits in (2, 3):
        variants: dict[str, Trellis | None] = {f"{bits}: scalar": None}
        variants |= {name: design for name, design in DESIGNS.items() if design.bits == bits}
        for name, design in variants.items():
            started = time.monotonic()
            level = nearest(x, bits) if design is None else design.decode(design.encode(x))
            took = time.monotonic() - started
            error = (x - level).square().mean().item()
            row = {
                "code": name,
                "states": 1 if design is None else len(design.states[0]),
                "squared_error": error,
                "over_scalar": error / (rows[-1]["squared_error"] / rows[-1]["over_scalar"] if design else error),
                "ns_a_channel": 1e9 * took / x.numel(),
                "instructions": counted(PROGRAMS[name]).total() if name in PROGRAMS else None,
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    record = provenance(torch.device("cpu"), "Gaussian channels") | {"rows": rows}
    (RESULTS / "trellis-codes.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "codes"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    if arguments.what == "codes":
        codes()
        return
    held_out = torch.randn(16384, WORD, generator=torch.Generator().manual_seed(99)).to(arguments.device)
    for name, design in DESIGNS.items():
        found = train(design, torch.device(arguments.device))
        print(f"{name}: {found.magnitudes}, squared error {found.squared_error(held_out):.6f}", flush=True)


if __name__ == "__main__":
    main()
