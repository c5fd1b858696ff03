"""Where a kernel meets a device: every launch goes through `run`, so that one place can run, record or refuse it.

`on_triton(x)` decides who computes: Triton, for tensors on a GPU (and for any tensor where Triton interprets, or a
recorder listens); the plain-torch reference otherwise. `recording` hands launches to a listener in place of running
them: on `meta` tensors that is how the compile gate learns what to compile, with no GPU. `prepare` runs an op once
and keeps its launches: calling the result repeats them on the same buffers, with no Python of the op between.

    step = prepare(ops.layer_norm, x, w, b, 1e-5)     # compiled, loaded, outputs allocated: step.outputs
    step()                                            # the same kernels again, into the same outputs
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from kernels_triton import spills

HAS_TRITON = importlib.util.find_spec("triton") is not None
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Launch:
    """One launch: `args` in the order of the kernel's parameters, `constants` by name."""

    name: str
    grid: tuple[int, int, int]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int
    registers: int = 0  # a thread may have; 0: as many as the compiler finds good, and more where it spills (`limit`)

    def __call__(self) -> Any:
        """Launch; the compiled kernel."""
        on_gpu = bool(self.args) and isinstance(self.args[0], Tensor) and self.args[0].is_cuda
        registers = self.registers or (limit(self) if on_gpu else 0)
        return kernel(self.name)[self.grid](*self.args, **self.constants, **options(self.warps, registers))


Listener = Callable[[Launch], None]
_listeners: list[Listener] = []
_limits: dict[Hashable, int] = {}  # of each kind of launch, as `limit` finds them
generated: dict[str, Any] = {}  # kernels made from text (`kernels_triton.fused`), beside those of the files


@cache
def triton_version() -> tuple[int, int]:
    """(3, 9); (0, 0) where there is none."""
    if not HAS_TRITON:
        return 0, 0
    major, minor = metadata.version("triton").split(".")[:2]
    return int(major), int(minor)


def listening() -> bool:
    return bool(_listeners)


def interpreting() -> bool:
    """Whether Triton's kernels run in Python. Triton reads the variable when a kernel is defined: set it before."""
    return HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"


def on_triton(x: Tensor) -> bool:
    """Whether an op on `x` is for Triton: float64, CPU tensors and what has no elements are the reference's."""
    if x.dtype not in DTYPES or not HAS_TRITON or x.numel() == 0:
        return False
    return x.is_cuda or (x.is_meta and bool(_listeners)) or (x.device.type == "cpu" and interpreting())


def options(warps: int, registers: int = 0) -> dict[str, Any]:
    """Triton's own options. Fusing a*b+c is pinned: its default is about to change, and with it the numbers."""
    most = {"maxnreg": registers} if registers else {}
    return {"num_warps": warps, "enable_fp_fusion": True, **most}


def limit(one: Launch) -> int:
    """The limit of registers, 0: none, with which a launch on a GPU spills nothing. The first of its kind compiles."""
    key = (one.name, one.warps, one.args[0].get_device(), tuple(one.constants.items()), tuple(map(_kind, one.args)))
    found = _limits.get(key)
    if found is None:
        function = kernel(one.name)

        def compiled(registers: int) -> Any:
            return function.warmup(*one.args, grid=one.grid, **one.constants, **options(one.warps, registers))

        found = _limits[key] = 0 if interpreting() else spills.without(compiled, one.warps)[1]
    return found


def _kind(x: Any) -> Hashable:
    """What of an argument makes another kernel: Triton compiles for what can be divided by 16, and for 1."""
    kind = type(x)
    if kind is int:
        return x == 1, x % 16 == 0, -(1 << 31) <= x < 1 << 31
    return (x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, Tensor) else kind


@cache
def kernel(name: str) -> Any:
    """`norm.norm_forward`: a kernel by its file and name. Triton is imported when the first is asked for."""
    if name in generated:
        return generated[name]
    module, _, function = name.partition(".")
    return getattr(importlib.import_module(f"kernels_triton.kernels.{module}"), function)


def run(name: str, grid: tuple[int, ...], *args: Any, warps: int, registers: int = 0, **constants: Any) -> None:
    """Launch a kernel on a grid of programs; one of no programs is none."""
    if not all(grid):
        return
    x, y, z = (*grid, 1, 1)[:3]
    launch = Launch(name, (x, y, z), args, constants, warps, registers)
    if _listeners:
        _listeners[-1](launch)
    elif args and isinstance(args[0], Tensor) and args[0].is_cuda:
        with torch.cuda.device(args[0].device):
            launch()
    else:
        launch()


@contextmanager
def recording(listener: Listener) -> Generator[None]:
    """Launches go to `listener`, which decides whether they run."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.pop()


@dataclass(frozen=True)
class Prepared:
    """The launches of one call of an op, its kernels compiled and loaded, and the outputs they write."""

    launches: tuple[Callable[[], None], ...]
    outputs: Any

    def __call__(self) -> Any:
        for launch in self.launches:
            launch()
        return self.outputs


def prepare(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Prepared:
    """Run an op once and keep what it launched. Its arguments must keep their addresses, and their small integers."""
    launches: list[Callable[[], None]] = []

    def keep(launch: Launch) -> None:
        launch()
        launches.append(launch)

    with recording(keep):
        outputs = op(*args, **kwargs)
    return Prepared(tuple(launches), outputs)


def empty(shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Where every output and scratch buffer comes from (tests replace it, to see what is written and what is not)."""
    return torch.empty(tuple(shape), dtype=dtype, device=like.device)


@dataclass(frozen=True)
class Device:
    """What a schedule depends on. `name` is CUDA's, by which its table is found."""

    name: str
    sms: int
    shared_bytes: int  # that one program may have


H200 = Device("NVIDIA H200", 132, 227 << 10)
A100 = Device("NVIDIA A100-SXM4-80GB", 108, 163 << 10)
_assumed = [H200]


@contextmanager
def assuming(device: Device) -> Generator[None]:
    """Within, tensors on no GPU (`meta`, interpreted) are scheduled for this one."""
    _assumed.append(device)
    try:
        yield
    finally:
        _assumed.pop()


@cache
def _device(index: int) -> Device:
    found = torch.cuda.get_device_properties(index)
    return Device(found.name, found.multi_processor_count, found.shared_memory_per_block_optin)


def device_of(x: Tensor) -> Device:
    return _device(x.device.index or 0) if x.is_cuda else _assumed[-1]
