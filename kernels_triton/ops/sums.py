"""The second stage of a sum over rows: each program left one row of partial sums; add them in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton import launch, rows

TILE = 4096  # elements of a partial tile
MOST = 3  # buffers that one launch sums


def partials(programs: int, cols: int, like: Tensor) -> Tensor:
    return launch.empty((programs, cols), torch.float32, like)


def summed(
    first: Tensor | None, second: Tensor | None, dtype: torch.dtype, like: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The column sums of one or two [programs, cols] buffers, in one launch."""
    given = (first, second)
    out = [None if p is None else launch.empty((p.shape[1],), dtype, like) for p in given]
    sum_into(given, out)
    return out[0], out[1]


def sum_into(given: tuple[Tensor | None, ...], out: list[Tensor | None]) -> None:
    """The column sums of some [programs, cols] buffers, each into its place, in one launch."""
    pairs = [(p, to) for p, to in zip(given, out, strict=True) if p is not None and to is not None]
    if not pairs:
        return
    programs, cols = pairs[0][0].shape
    if programs == 0:  # no rows: nothing was launched, nothing is to be added
        for _, to in pairs:
            to.zero_()
        return
    # All lines are on their way at once, where they are not very many.
    height = min(1024, rows.power_of_two(programs))
    block = max(8 if cols <= 2048 else 16, min(64, TILE // height))
    args = [*[p for p, _ in pairs], *[None] * (MOST - len(pairs)), *[to for _, to in pairs]]
    args += [None] * (2 * MOST - len(args))
    grid = (-(-cols // block), len(pairs))
    launch.run("norm.column_sums", grid, *args, programs, COLS=cols, ROWS=height, BLOCK=block, warps=8)
