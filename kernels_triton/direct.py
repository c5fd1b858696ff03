"""Launching and allocating without what torch and Triton do around it: the one file here for their unstable parts.

A compiled kernel's own launcher looks up the device and the stream, and asks the driver about every tensor. Where its
arguments are addresses and the stream is given, what is left is the C function that Triton compiled for it. Its
arguments are as in Triton 3.6 or as in 3.9; for any other Triton, or a kernel that needs more (scratch memory), the
launcher is used as it is. Triton's launch hooks are passed by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from kernels_triton import launch

Direct = Callable[..., None]  # (stream, *addresses)
NEEDS = ("global_scratch_size", "profile_scratch_size", "gsan_enabled")  # more than this file gives, unless 0


def bound(compiled: Any, grid: tuple[int, int, int]) -> Direct:
    """A compiled kernel on a grid, as a function of a stream and of all its arguments, tensors as addresses."""
    run = compiled.run
    if launch.triton_version() not in ((3, 6), (3, 9)) or any(getattr(run, name, 0) for name in NEEDS):
        runner = compiled[grid]
        return lambda stream, *arguments: runner(*arguments, stream=stream)
    (x, y, z), function, packed, call = grid, compiled.function, compiled.packed_metadata, run.launch
    cooperative, dependent = run.launch_cooperative_grid, run.launch_pdl
    if launch.triton_version() == (3, 6):
        # Then: scratch for all and for profiling, metadata, and launch metadata and hooks before and after.
        def older(stream: int, *arguments: Any) -> None:
            call(x, y, z, stream, function, cooperative, dependent, None, None, packed, None, None, None, *arguments)

        return older
    annotations, signature = run.arg_annotations, run.kernel_signature

    def recent(stream: int, *arguments: Any) -> None:
        call(x, y, z, stream, function, cooperative, dependent, packed, None, None, None, None, None, annotations,
             signature, arguments)  # fmt: skip

    return recent


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
