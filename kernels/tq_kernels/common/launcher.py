"""Launch a Triton kernel cheaply: find the compiled variant by one dictionary look-up, or keep it.

A compiled kernel is launched without Triton's argument analysis, and by the C function behind Triton's launcher where
the launcher only passes arguments on. Addresses stand for tensors: no tensor, and no driver, is asked for them.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar, copy_context
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache, partial, reduce, wraps
from operator import or_
from typing import Any, NamedTuple

import torch
import triton

from .device import compiled_launch, current_device, current_raw_stream, interpreted, members, with_launcher

ALWAYS = {"enable_fp_fusion": True}
"""Options of every compilation. Triton 3.9 warns without `enable_fp_fusion`, and announces that 3.10 will not fuse
multiplications and additions by itself."""

_compiles_only: ContextVar[bool] = ContextVar("compiles_only", default=False)
only_compiles = _compiles_only.get
"""Whether kernels are compiled here, and not launched."""


class Compilers(ThreadPoolExecutor):
    """Threads that compile kernels, and the C code that launches them (Triton 3.5 and 3.6: .3 s a kernel)."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future:
        return super().submit(lambda: with_launcher(function(*arguments, **options)))


def compile_in_threads(code: Callable[[], Any]) -> Callable[[], None]:
    """Call `code`, and begin to compile the kernels that it calls, in threads, instead of launching them.

    Tensors that kernels would write keep what they hold: the code has to bear any numbers. A kernel that was launched
    before may be launched again. One that does not compile fails when it is next launched.

    Returns:
        Function that waits for the kernels. It is called once, in any thread.
    """
    context, mode = copy_context(), triton.AsyncCompileMode(Compilers())
    for call in (partial(_compiles_only.set, True), mode.__enter__, code):
        context.run(call)

    def wait() -> None:
        for kernel in mode.future_kernels.values():
            with suppress(Exception):
                kernel.result()

    return wait


@lru_cache(maxsize=1024)
def specialised(numbers: tuple[int, ...]) -> tuple[tuple[bool, bool, bool], ...]:
    """Key of the integers that a kernel lets Triton specialise: multiples of 16, ones, and numbers beyond 32 bits have
    variants of their own; the last even without specialisation."""
    return tuple([(number % 16 == 0, number == 1, number >= 2**31) for number in numbers])


Strides = namedtuple("Strides", "batch head token")
"""Strides of states, which Triton specialises. The other numbers in tuples decide nothing about what is compiled."""
States = namedtuple("States", "start strides")
"""Pointer to states, and their `Strides`."""


def states_of(tensor: torch.Tensor) -> States:
    """`States` of a tensor `[B, H, T, D]`."""
    return States(tensor, Strides(*tensor.stride()[:3]))


def _stand_in(argument: Any) -> Any:
    """Replace numbers in an argument: Triton specialises every number of a tuple, and none of these."""
    if isinstance(argument, Strides) or not isinstance(argument, tuple | int):
        return argument
    if isinstance(argument, int):
        return 3 if argument < 2**31 else 2**31 + 3
    parts = map(_stand_in, argument)
    return type(argument)(*parts) if hasattr(argument, "_fields") else tuple(parts)


def _take(arguments: Iterable[Any], passed: list[Any], key: list[Any], tensors: list[torch.Tensor]) -> None:
    """List arguments and members of tuples with addresses in `passed`, tensors in `tensors`, and in `key` what decides
    the compiled variant."""
    for x in arguments:
        if isinstance(x, Strides):
            key.append(specialised(x))
            passed.extend(x)
        elif isinstance(x, tuple):
            _take(x, passed, key, tensors)
        elif x is None or isinstance(x, int | float):
            key.append(x if x is None else x >= 2**31)
            passed.append(x)
        else:
            tensors.append(x)
            passed.append(x.data_ptr())
            key.append(passed[-1] % 16)


def on_its_device(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate `launch` to run on the device of its first argument, a tensor or what has a `device`: Triton launches on
    the current one, and layers of a model that is spread over several GPUs are not on it."""

    @wraps(launch)
    def launch_there(states: Any, *arguments: Any, **options: Any) -> Any:
        if states.device.type != "cuda" or states.device.index == current_device():
            return launch(states, *arguments, **options)
        with torch.cuda.device(states.device):
            return launch(states, *arguments, **options)

    return launch_there


class Launcher(NamedTuple):
    """Launcher of a compiled kernel: `call(*grid, stream, *fixed, *arguments)`, with tensors or their addresses, and
    members of tuples one by one."""

    call: Callable[..., Any]
    fixed: tuple[Any, ...]


class Kernel:
    """Triton kernel with its compiled variants, found without Triton's own argument analysis."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.variants: dict[tuple[Any, ...], Launcher] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        numbers: tuple[Any, ...],
        constants: tuple[Any, ...],
        key: tuple[Any, ...],
        **options: Any,
    ) -> Launcher | None:
        """Launch on `arguments`, tensors, numbers, or tuples of them, and then `numbers`, which may be in tuples, too.

        `key` holds all that decides the compiled variant besides `arguments`.

        Returns:
            Launcher of the same variant; `None` in the interpreter and with an unknown Triton: every launch then goes
            through Triton. `None` as well where kernels are only compiled.
        """
        arguments = (*arguments, *numbers)
        if interpreted():
            self.function[grid](*arguments, *constants)
            return None
        passed: list[Any] = []
        of_arguments: list[Any] = [key]
        tensors: list[torch.Tensor] = []
        _take(arguments, passed, of_arguments, tensors)
        key, on_gpu = tuple(of_arguments), tensors[0].is_cuda
        launcher = None if only_compiles() else self.variants.get(key)
        # Triton refuses a tensor on the CPU in words; by its address a kernel would read it.
        if launcher is None or any([tensor.is_cuda != on_gpu for tensor in tensors]):
            given = [_stand_in(x) if isinstance(x, tuple) else x for x in arguments]
            compiled = self.function.warmup(*given, *constants, grid=grid, **ALWAYS, **options)
            if only_compiles():
                return None
            if hasattr(compiled, "result"):  # threads compile it: wait for this kernel alone
                compiled = compiled.result()
            launcher, passed = self.launcher(compiled), members(arguments)
            if launcher is None:
                compiled.__getitem__(grid)(*arguments, *constants)
                return None
            self.variants[key] = launcher
        stream = current_raw_stream(tensors[0].device.index)
        launcher.call(*grid, stream, *launcher.fixed, *passed, *constants)
        return launcher

    def launcher(self, compiled: Any) -> Launcher | None:
        """Launcher of a compiled kernel, if this Triton is known."""
        launch = compiled_launch(compiled)
        return None if launch is None else direct(Launcher(*launch))


@dataclass(eq=False)
class Launch:
    """Launch without its tensors, shared by equal layers.

    Args:
        kernel: Kernel to launch.
        index: Index of the GPU.
        grid, numbers, constants, key, options: As in `Kernel`.
        grouped: Number of first arguments that the kernel takes as one tuple.
    """

    kernel: Kernel
    index: int | None
    grid: tuple[int, int, int]
    numbers: tuple[float, ...]
    constants: tuple[Any, ...]
    key: tuple[Any, ...]
    options: dict[str, Any]
    grouped: int = 0
    ready: Any = field(default=None, init=False)
    """Function, grid, first and last arguments of a launch, once a launch on aligned tensors has compiled it:
    `function(*grid, stream, *first, *addresses, *last)`."""

    def on_tensors(self, aligned: bool) -> Any:
        """Launch that takes tensors. If they are `aligned`, later launches may take addresses (`ready`)."""

        def launch(x: int, y: int, z: int, stream: int, *arguments: Any) -> None:
            if self.grouped:
                arguments = (arguments[: self.grouped], *arguments[self.grouped :])
            launcher = self.kernel((x, y, z), arguments, self.numbers, self.constants, self.key, **self.options)
            if aligned and launcher is not None:
                self.ready = launcher.call, self.grid, launcher.fixed, (*members(self.numbers), *self.constants)

        return launch, self.grid, (), ()


Arguments = Sequence[tuple[Any, ...]]
"""Tensors or their addresses, of several launches."""


def launch_all(launches: Sequence[Launch], addresses: Arguments, tensors: Callable[[], Arguments]) -> None:
    """Launch one after the other: on addresses where all are aligned and this was done before, else on tensors."""
    aligned = not reduce(or_, [address for each in addresses for address in each if address is not None]) & 15
    if aligned and launches[-1].ready is not None:
        stream = current_raw_stream(launches[-1].index)
        for launch, arguments in zip(launches, addresses, strict=True):
            call, grid, first, last = launch.ready
            call(*grid, stream, *first, *arguments, *last)
        return
    for launch, arguments in zip(launches, tensors(), strict=True):
        call, grid, _, _ = launch.on_tensors(aligned)
        call(*grid, 0, *arguments)


def direct(launcher: Launcher) -> Launcher:
    """C function behind Triton's launcher, if the launcher passes on its arguments with constants in between.

    A recorder in place of the C function shows it. Triton 3.5 and 3.6 pass arguments on for NVIDIA. Later ones and
    AMD's keep their launcher, and so does a launcher that allocates memory for each launch.
    """
    if not hasattr(launcher.call, "launch"):
        return launcher
    calls: list[tuple[Any, ...]] = []
    probe = copy(launcher.call)
    probe.launch = lambda *arguments: calls.append(arguments)
    start, end = (1, 2, 3, 0), (object(), object())
    probe(*start, *launcher.fixed, *end)
    fixed = calls[0][4:-2] if calls else ()
    passes_on = calls == [(*start, *fixed, *end)]
    constant = all(isinstance(part, int) or part is None or any(part is x for x in launcher.fixed) for part in fixed)
    return Launcher(launcher.call.launch, fixed) if passes_on and constant else launcher
