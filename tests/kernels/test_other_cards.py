"""What other cards would run, run on the GPU at hand: every kernel compiled for sm_75, 80, 86 and 89 as far as PTX,
which is then assembled for this GPU, and the plain spelling of AMD and Intel.

One child process a target, all at once, because the target is one of a process (`TQ_HF_TARGET`). Compiling takes the
time: a child spreads its kernels over its share of the processors.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_decode_kernel as decode
import test_dequantize_kernel as dequantize
import test_encode_kernel as encode
import test_latent_kernel as latents
import test_paged_kernel as paged
import test_prefix_kernel as prefix
import torch
from tq_kernels.common import device

from examples.measure.compile.builds import build_rotate
from examples.measure.compile.sass import disassemble
from tests.support import target_override
from tests.support.kernel_cases import INTERPRETED, Case, gpu
from tests.support.paged_cases import Step
from tests.support.target_override import OTHER_CARDS, VARIABLE, assemble_for, wanted_card
from tq_hf.config import PRESETS

ROOT = Path(__file__).resolve().parents[2]
GENERATE = ROOT / "tests/cache/test_generate_cuda.py"
BASE = Case(Hq=8, Hkv=2, Dk=128, Dv=128, blocks=5, capacity=6)
BF16, FP32 = torch.bfloat16, torch.float32

DECODE = [BASE.with_(preset=preset) for preset in PRESETS] + [
    BASE.with_(blocks=61, capacity=64, B=5),
    BASE.with_(Dk=64, Dv=64, Hq=2, dtype=BF16, preset="3bit_nc", residual=1),
    BASE.with_(Dk=256, Dv=256, Hq=4),
    BASE.with_(Dk=72, Dv=100, preset="3bit_nc", Hq=2),
    BASE.with_(Hq=24, mask="padding", B=3, preset="3bit_nc"),
    BASE.with_(mask="full", S=5, Dk=64, Dv=64),
    BASE.with_(softcap=30.0, s_aux=True, S=2, sinks=11, preset="k8v4", Dk=64, Dv=64),
    BASE.with_(dtype=FP32, blocks=0, residual=23, Dk=64, Dv=64),
]
PREFIX = [
    (BASE.with_(S=37, residual=53), True),
    (BASE.with_(S=101, residual=120, residual_capacity=128, preset="3bit_nc", mask="padding", B=2, Hq=4), False),
    (BASE.with_(S=19, residual=40, preset="k8v4", dtype=BF16, Dk=64, Dv=64, s_aux=True), True),
    (BASE.with_(S=20, residual=20, preset="2bit_nc", mask="full", causal=False, Dk=80, Dv=96, softcap=20.0), True),
    (BASE.with_(S=300, residual=341, residual_capacity=384, blocks=31, capacity=32), True),
]

RECIPE = dict(D=128, Hq=8, Hkv=2, sinks=4, residual=128)
PAGED = [
    *[Step(past=(1, 300, 131, 259, 900), new=(1,) * 5, preset=preset, **RECIPE) for preset in PRESETS],
    Step(past=(200, 0, 700, 3), new=(1, 0, 1, 1), nobody=2, softcap=15.0, s_aux=True, **RECIPE),
    Step(past=(0, 300, 131, 700), new=(300, 2, 130, 1), **RECIPE),
]
LATENTS = [
    latents.BASE,
    latents.BASE.with_(Hq=16, Dk=512, Dv=64, blocks=4, balanced=True),
    latents.BASE.with_(Hq=40, Dk=512, Dv=64, B=2, dtype=BF16, mask="padding"),
    latents.BASE.with_(S=5, Dk=256, Dv=32, preset="3bit_nc"),
]
HEADS = [(128, 64), (64, 128), (128, 128), (256, 256), (80, 96)]
CALLS: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
    *[(decode.check, (case,)) for case in DECODE],
    (decode.test_pending_tokens, ()),
    *[(prefix.check, case) for case in PREFIX],
    *[(encode.check, (encode.Case(recipe, 128, 64),)) for recipe in PRESETS.values()],
    *[(dequantize.check, (dequantize.Case(r, *dims, torch.float16),)) for r in PRESETS.values() for dims in HEADS],
    *[(paged.check, (step,)) for step in PAGED],
    *[(latents.check, (case,)) for case in LATENTS],
]
"""Checks of other files, and what they are called with."""

if wanted_card() is None:

    @pytest.fixture(scope="module")
    def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[subprocess.Popen[bytes], Path]]]:
        """A child and its log for each card."""
        workers = str(len(os.sched_getaffinity(0)) // len(OTHER_CARDS))  # 0: in the child itself
        command = [sys.executable, "-m", "pytest", "-v", "-m", "cuda", "-p", "no:cacheprovider", "-n", workers]
        # pytest-benchmark, where it is installed, warns of workers, and a warning is an error here.
        command += ["-p", "no:benchmark", "--dist", "worksteal"]
        tests = [
            __file__,
            f"{GENERATE}::test_a_passkey_is_recalled_from_packed_blocks[4bit_nc-eager]",
            f"{GENERATE}::test_kernels_and_reads_agree_in_logits",
        ]
        own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
        logs, running = tmp_path_factory.mktemp("cards"), {}
        for name in OTHER_CARDS:
            log = logs / f"{name}.log"
            with log.open("w") as out:
                child = subprocess.Popen(
                    [*command, *tests], env=own | {VARIABLE: name}, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT
                )
            running[name] = child, log
        yield running
        for child, _ in running.values():
            child.kill()

    @gpu
    @pytest.mark.parametrize("name", OTHER_CARDS)
    def test_kernels_of(name: str, children: dict[str, tuple[subprocess.Popen[bytes], Path]]) -> None:
        child, log = children[name]
        status = child.wait()
        report = log.read_text()
        print(f"{name}: {report.strip().splitlines()[-1]}")
        assert status == 0, report[-6000:]

    def test_checks_take_these_arguments() -> None:
        """Only a GPU runs the calls: a check that has changed since shows here."""
        for check, arguments in CALLS:
            inspect.signature(check).bind(*arguments)

else:

    def lacks(check: Callable[..., None], case: Any) -> str | None:
        """Why this card does not run a call: `None` if it does."""
        capability = wanted_card().capability
        # AMD's GPUs find codes of 2 and 3 bits with an instruction of their own, which `plain` leaves out.
        config = case.config if check is encode.check else PRESETS[case.preset] if check is paged.check else None
        if capability == (0, 0) and config is not None and min(config.key_bits, config.value_bits) < 4:
            return "LLVM makes wrong code of encoding 2 and 3 bits without inline assembly"
        if capability == (7, 5) and (check is prefix.check or (check is paged.check and max(case.new) > 1)):
            return "sm_75 has no kernel of many queries"
        if capability in ((7, 5), (0, 0)) and check is latents.check:
            return "kernels over latents need Ampere's instructions"
        return None

    @gpu
    def test_tables_know_the_card() -> None:
        from tq_kernels.common.device import target

        wanted = wanted_card()
        assert wanted is not None
        assert target(torch.device("cuda", 0)).capability == wanted.capability
        assert target(torch.device("cuda", 0)).shared_bytes == wanted.shared_bytes

    @gpu
    @torch.no_grad()
    @pytest.mark.parametrize(("check", "arguments"), CALLS, ids=lambda x: x.__module__ if callable(x) else str(*x[:1]))
    def test_kernels(check: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if reason := lacks(check, *arguments[:1] or [None]):
            pytest.skip(reason)
        check(*arguments)


def test_an_unknown_target_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "sm_61")
    with pytest.raises(ValueError, match="'sm_61'.*sm_75"):
        wanted_card()
    monkeypatch.delenv(VARIABLE)
    assert wanted_card() is None


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_ptx_of_turing_is_assembled_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia.compiler import CUDABackend

    for name in ("make_cubin", "hash"):  # put back afterwards
        monkeypatch.setattr(CUDABackend, name, getattr(CUDABackend, name))
    assemble_for(90)
    compiled = build_rotate(75, (4, 4), dim=64)
    assert ".target sm_75" in compiled.asm["ptx"]
    assert "sm_90" in disassemble(compiled, "-sass")


def test_tables_are_told_the_named_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """`target` asks the override, which gives the card's capability and memory and keeps this GPU's multiprocessors."""
    monkeypatch.setattr(device, "override", None)
    monkeypatch.setattr(target_override, "pretend", lambda: target_override.OTHER_CARDS["sm_75"])
    properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_multiprocessor=233472, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(device, "interpreted", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    at_hand = torch.device("cuda", 0)
    assert device.target.__wrapped__(at_hand).capability == (9, 0)
    target_override.install()
    assert device.target.__wrapped__(at_hand) == device.Target(132, 64 * 1024, (7, 5), True)
