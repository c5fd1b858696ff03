"""The second step of a sum over rows: adds the programs' rows of partial sums, in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton.launch import launch, row_schedule

TILE = 4096  # elements of a partial tile
MOST_BUFFERS = 3  # buffers that one launch sums


def partial_sum_buffer(programs: int, cols: int, like: Tensor) -> Tensor:
    return launch.empty((programs, cols), torch.float32, like)


def sum_columns(
    first: Tensor | None, second: Tensor | None, dtype: torch.dtype, like: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The column sums of one or two [programs, cols] buffers, in one launch."""
    buffers = (first, second)
    out = [None if p is None else launch.empty((p.shape[1],), dtype, like) for p in buffers]
    sum_columns_into(buffers, out)
    return out[0], out[1]


def sum_columns_into(buffers: tuple[Tensor | None, ...], out: list[Tensor | None]) -> None:
    """The column sums of some [programs, cols] buffers, each into its output, in one launch."""
    pairs = [(p, to) for p, to in zip(buffers, out, strict=True) if p is not None and to is not None]
    if not pairs:
        return
    programs, cols = pairs[0][0].shape
    if programs == 0:  # no rows: nothing was launched, and the sums are 0
        for _, to in pairs:
            to.zero_()
        return
    # All lines are loaded at once, unless there are very many.
    height = min(1024, row_schedule.power_of_two(programs))
    block = max(8 if cols <= 2048 else 16, min(64, TILE // height))
    args = [*[p for p, _ in pairs], *[None] * (MOST_BUFFERS - len(pairs)), *[to for _, to in pairs]]
    args += [None] * (2 * MOST_BUFFERS - len(args))
    grid = (-(-cols // block), len(pairs))
    launch.run("norm.column_sums", grid, *args, programs, COLS=cols, ROWS=height, BLOCK=block, warps=8)
