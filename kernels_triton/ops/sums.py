"""The second stage of a sum over rows: each program left one row of partial sums; add them in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton import launch, rows

TILE = 4096  # elements of a partial tile


def partials(programs: int, cols: int, like: Tensor) -> Tensor:
    return launch.empty((programs, cols), torch.float32, like)


def summed(
    first: Tensor | None, second: Tensor | None, dtype: torch.dtype, like: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The column sums of one or two [programs, cols] buffers, in one launch."""
    given = first if first is not None else second
    if given is None:
        return None, None
    programs, cols = given.shape
    out = [None if p is None else launch.empty((cols,), dtype, like) for p in (first, second)]
    if programs == 0:  # no rows: nothing was launched, nothing is to be added
        return tuple(None if o is None else o.zero_() for o in out)  # type: ignore[return-value]
    height = min(512, rows.power_of_two(programs))
    block = max(8, min(64, TILE // height))
    grid = (-(-cols // block), 2 if second is not None else 1)
    launch.run("norm.column_sums", grid, first, second, *out, programs, COLS=cols, ROWS=height, BLOCK=block, warps=4)
    return out[0], out[1]
