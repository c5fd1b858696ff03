"""Launches and allocations without the overhead of torch and Triton. Only this file uses their unstable parts.

A compiled kernel's own launcher looks up the device and the stream, and asks the driver about every tensor. If the
arguments are addresses and the stream is given, only the C function that Triton compiled is left to call. The argument
orders of Triton 3.6 and 3.9 are known here. For any other Triton, or a kernel that needs more (scratch memory),
Triton's launcher is used. Triton's launch hooks are not called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from kernels_triton.launch import launch

UNSUPPORTED = (
    "global_scratch_size",
    "profile_scratch_size",
    "gsan_enabled",
)  # attributes that must be 0: this file cannot provide what they ask for


@dataclass(frozen=True)
class DirectLaunch:
    """How to launch a compiled kernel on a grid: `call(*before, stream, *after, *arguments)`, with tensors as
    addresses. `arguments_as_tuple`: the arguments are passed as one tuple."""

    call: Callable[..., Any]
    before: tuple[Any, ...] = ()
    after: tuple[Any, ...] = ()
    arguments_as_tuple: bool = False

    def __call__(self, stream: int, *arguments: Any) -> None:
        passed = (arguments,) if self.arguments_as_tuple else arguments
        self.call(*self.before, stream, *self.after, *passed)


def direct_launch(compiled: Any, grid: tuple[int, int, int]) -> DirectLaunch:
    """The direct launch of a compiled kernel on a grid."""
    run = compiled.run
    if launch.triton_version() not in ((3, 6), (3, 9)) or any(getattr(run, name, 0) for name in UNSUPPORTED):
        runner = compiled[grid]
        return DirectLaunch(lambda stream, *arguments: runner(*arguments, stream=stream))
    first = (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
    if launch.triton_version() == (3, 6):
        # The rest: global and profiling scratch, metadata, launch metadata, and the enter and exit hooks.
        return DirectLaunch(run.launch, grid, (*first, None, None, compiled.packed_metadata, None, None, None))
    last = (run.arg_annotations, run.kernel_signature)
    return DirectLaunch(
        run.launch, grid, (*first, compiled.packed_metadata, *[None] * 5, *last), arguments_as_tuple=True
    )


@cache
def current_device() -> Callable[[], int]:
    """A function that returns the index of the current device, which must be initialised."""
    return getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)  # pyright: ignore[reportPrivateUsage]


@cache
def stream_of() -> Callable[[int], int]:
    """A function from a device's index to the handle of its current stream."""
    raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # pyright: ignore[reportPrivateUsage]
    return raw_stream or (lambda index: torch.cuda.current_stream(index).cuda_stream)


def allocator(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """A function that allocates a contiguous tensor on the current device, `device`."""
    size = tuple(shape)
    strides = torch.empty(size, dtype=dtype, device="meta").stride()
    try:
        from torch._C._dynamo.guards import _empty_strided_cuda as allocate  # pyright: ignore
    except ImportError:
        return partial(torch.empty_strided, size, strides, dtype=dtype, device=device)
    return partial(allocate, size, strides, dtype)
