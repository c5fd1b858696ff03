"""Every launch goes through `run`, so that one place can run it, record it or refuse it.

`runs_on_triton(x)` decides what computes: Triton for tensors on a GPU (and for any tensor while Triton interprets or a
recorder is active), otherwise the plain-torch reference. `recording` passes launches to a listener instead of running
them. On `meta` tensors the compile gate thereby learns what to compile, without a GPU. `prepare` runs an op once and
keeps its launches. Calling the result repeats the launches on the same buffers, with no Python of the op between them.

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

from kernels_triton.launch import register_limits

HAS_TRITON = importlib.util.find_spec("triton") is not None
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Launch:
    """One launch. `args` are in the order of the kernel's parameters; `constants` are by name. `registers` limits the
    registers of a thread; 0 leaves the choice to the compiler, with a limit if it would spill (`register_limit`)."""

    name: str
    grid: tuple[int, int, int]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int
    registers: int = (
        0  # a thread may have; 0: as many as the compiler finds good, and more where it spills (`register_limit`)
    )

    def __call__(self) -> Any:
        """Launches, and returns the compiled kernel."""
        on_gpu = bool(self.args) and isinstance(self.args[0], Tensor) and self.args[0].is_cuda
        registers = self.registers or (register_limit(self) if on_gpu else 0)
        return kernel(self.name)[self.grid](*self.args, **self.constants, **compile_options(self.warps, registers))


Listener = Callable[[Launch], None]
_listeners: list[Listener] = []
_register_limits: dict[Hashable, int] = {}  # cache of `register_limit`, by kind of launch
generated_kernels: dict[str, Any] = {}  # generated kernels, in addition to those of the library's files


@cache
def triton_version() -> tuple[int, int]:
    """(3, 9), for example; (0, 0) if Triton is not installed."""
    if not HAS_TRITON:
        return 0, 0
    major, minor = metadata.version("triton").split(".")[:2]
    return int(major), int(minor)


def is_recording() -> bool:
    return bool(_listeners)


def is_interpreting() -> bool:
    """Whether Triton's kernels run in Python. Triton reads the variable when a kernel is defined, so set it before."""
    return HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"


def runs_on_triton(x: Tensor) -> bool:
    """Whether an op on `x` runs on Triton. float64 tensors, CPU tensors and empty tensors go to the reference."""
    if x.dtype not in DTYPES or not HAS_TRITON or x.numel() == 0:
        return False
    return x.is_cuda or (x.is_meta and bool(_listeners)) or (x.device.type == "cpu" and is_interpreting())


def compile_options(warps: int, registers: int = 0) -> dict[str, Any]:
    """Triton's compile options. The contraction of a*b+c is pinned: its default is about to change, which would change
    results."""
    most = {"maxnreg": registers} if registers else {}
    return {"num_warps": warps, "enable_fp_fusion": True, **most}


def register_limit(call: Launch) -> int:
    """The register limit that keeps a launch on a GPU free of spills; 0 for no limit. The first launch of a kind
    compiles."""
    key = (
        call.name,
        call.warps,
        call.args[0].get_device(),
        tuple(call.constants.items()),
        tuple(map(_specialization, call.args)),
    )
    limit = _register_limits.get(key)
    if limit is None:
        function = kernel(call.name)

        def compiled(registers: int) -> Any:
            return function.warmup(
                *call.args, grid=call.grid, **call.constants, **compile_options(call.warps, registers)
            )

        limit = _register_limits[key] = (
            0 if is_interpreting() else register_limits.compile_without_spills(compiled, call.warps)[1]
        )
    return limit


def _specialization(x: Any) -> Hashable:
    """The properties of an argument that Triton specialises on: divisibility by 16, and equality to 1."""
    kind = type(x)
    if kind is int:
        return x == 1, x % 16 == 0, -(1 << 31) <= x < 1 << 31
    return (x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, Tensor) else kind


@cache
def kernel(name: str) -> Any:
    """A kernel by its file and name, as in `norm.norm_forward`. The first call imports Triton."""
    if name in generated_kernels:
        return generated_kernels[name]
    module, _, function = name.partition(".")
    return getattr(importlib.import_module(f"kernels_triton.library.kernels.{module}"), function)


def run(name: str, grid: tuple[int, ...], *args: Any, warps: int, registers: int = 0, **constants: Any) -> None:
    """Launches a kernel on a grid of programs. An empty grid launches nothing."""
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
    """Passes launches to `listener`, which decides whether they run."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.pop()


@dataclass(frozen=True)
class RecordedCall:
    """The launches of one call of an op, with compiled and loaded kernels, and the outputs that they write."""

    launches: tuple[Callable[[], None], ...]
    outputs: Any

    def __call__(self) -> Any:
        for launch in self.launches:
            launch()
        return self.outputs


def prepare(op: Callable[..., Any], *args: Any, **kwargs: Any) -> RecordedCall:
    """Runs an op once and keeps its launches. Its arguments must keep their addresses, and its small integers their
    values."""
    launches: list[Callable[[], None]] = []

    def keep(launch: Launch) -> None:
        launch()
        launches.append(launch)

    with recording(keep):
        outputs = op(*args, **kwargs)
    return RecordedCall(tuple(launches), outputs)


def empty(shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
    """The allocation of every output and scratch buffer. Tests replace it, to see which elements are written."""
    return torch.empty(tuple(shape), dtype=dtype, device=like.device)


@dataclass(frozen=True)
class Device:
    """The device properties that a schedule depends on. `name` is CUDA's; tables are looked up by it."""

    name: str
    sms: int
    shared_bytes: int  # the most that one program may use


H200 = Device("NVIDIA H200", 132, 227 << 10)
A100 = Device("NVIDIA A100-SXM4-80GB", 108, 163 << 10)
_assumed = [H200]


@contextmanager
def assuming(device: Device) -> Generator[None]:
    """Within the context, tensors that are on no GPU (`meta`, interpreted) are scheduled for `device`."""
    _assumed.append(device)
    try:
        yield
    finally:
        _assumed.pop()


@cache
def _device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(properties.name, properties.multi_processor_count, properties.shared_memory_per_block_optin)


def device_of(x: Tensor) -> Device:
    return _device(x.device.index or 0) if x.is_cuda else _assumed[-1]
