"""Launching and allocating without what torch and Triton do around it: the one file here for their unstable parts.

A compiled kernel's own launcher looks up the device and the stream, and asks the driver about every tensor. Where its
arguments are addresses and the stream is given, what is left is the C function that Triton compiled for it. Its
arguments are as in Triton 3.6 or as in 3.9; for any other Triton, or a kernel that needs more (scratch memory), the
launcher is used as it is. Triton's launch hooks are passed by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from kernels_triton import launch

NEEDS = ("global_scratch_size", "profile_scratch_size", "gsan_enabled")  # more than this file gives, unless 0


@dataclass(frozen=True)
class Direct:
    """How to launch a compiled kernel on a grid: `call(*before, stream, *after, *arguments)`, tensors as addresses; or
    with the arguments as one tuple, if `together`."""

    call: Callable[..., Any]
    before: tuple[Any, ...] = ()
    after: tuple[Any, ...] = ()
    together: bool = False

    def __call__(self, stream: int, *arguments: Any) -> None:
        own = (arguments,) if self.together else arguments
        self.call(*self.before, stream, *self.after, *own)


def bound(compiled: Any, grid: tuple[int, int, int]) -> Direct:
    """A compiled kernel on a grid."""
    run = compiled.run
    if launch.triton_version() not in ((3, 6), (3, 9)) or any(getattr(run, name, 0) for name in NEEDS):
        runner = compiled[grid]
        return Direct(lambda stream, *arguments: runner(*arguments, stream=stream))
    first = (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
    if launch.triton_version() == (3, 6):
        # Then: scratch for all and for profiling, metadata, and launch metadata and hooks before and after.
        return Direct(run.launch, grid, (*first, None, None, compiled.packed_metadata, None, None, None))
    last = (run.arg_annotations, run.kernel_signature)
    return Direct(run.launch, grid, (*first, compiled.packed_metadata, *[None] * 5, *last), together=True)


@cache
def current_device() -> Callable[[], int]:
    """The number of the current device, which is in use."""
    return getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)  # pyright: ignore[reportPrivateUsage]


@cache
def stream_of() -> Callable[[int], int]:
    """Of a device's number the handle of its current stream."""
    found = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # pyright: ignore[reportPrivateUsage]
    return found or (lambda index: torch.cuda.current_stream(index).cuda_stream)


def maker(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """What allocates a contiguous tensor on the current device, `device`."""
    size = tuple(shape)
    strides = torch.empty(size, dtype=dtype, device="meta").stride()
    try:
        from torch._C._dynamo.guards import _empty_strided_cuda as allocate  # pyright: ignore
    except ImportError:
        return partial(torch.empty_strided, size, strides, dtype=dtype, device=device)
    return partial(allocate, size, strides, dtype)
