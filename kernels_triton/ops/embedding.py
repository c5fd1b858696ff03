"""The gradient of an embedding from that of its result."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton.launch import launch, row_schedule
from kernels_triton.library import reference
from kernels_triton.library.checks import (
    checked,
    expect,
    expect_dtype,
    expect_floats,
    expect_shape,
    expect_writable,
    integer_in_range,
    mark_written,
)

LONG = 64  # tokens of one index: more are summed by several programs
ROWS, BLOCK, TILE = 4, 1024, 8


@checked
def embedding_backward(
    grad: Tensor, index: Tensor, classes: int, padding: int = -1, total: Tensor | None = None
) -> Tensor:
    """[classes, columns] of grad's dtype: row i is the sum of the rows of grad whose index is i.

    grad [tokens, columns]; index, int64 [tokens]. The row of index `padding` is 0. An index out of range adds to no
    row. Sums are in the order of tokens. With total [classes, columns], contiguous, of float32 or grad's dtype, they
    are added to it in place, and it is returned: only those of its rows that have tokens are read and written.

    Raises SC530 for a wrong operand (see `kernels_triton.ops`), and for fewer than one class.
    """
    op = "embedding_backward"
    expect(grad.dim() == 2, op, f"grad is {list(grad.shape)}, expected [tokens, columns]", "pass grad.flatten(0, -2)")
    expect_floats(op, grad, grad=grad)
    expect_dtype(op, "index", index, torch.int64)
    expect_shape(op, "index", index, grad.shape[:1], grad)
    integer_in_range(op, "classes", classes, 1)
    integer_in_range(op, "padding", padding)
    if total is not None:
        expect_shape(op, "total", total, (classes, grad.shape[1]), grad)
        if total.dtype != torch.float32:
            expect_dtype(op, "total", total, grad.dtype)
        expect(total.is_contiguous(), op, f"total is of strides {list(total.stride())}", "pass a contiguous total")
        expect_writable(op, total=total)
    if not launch.runs_on_triton(grad):
        return reference.embedding_backward(grad, index, classes, padding, total)
    y = sum_rows(grad, index, classes, padding, total=total)
    mark_written(total)
    return y


def sum_rows(
    grad: Tensor,
    index: Tensor,
    classes: int,
    padding: int,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    total: Tensor | None = None,
) -> Tensor:
    """The launches of `embedding_backward`, for operands that were checked. The sums are of `dtype`, or grad's; they
    are written to `out`, or added to `total`, which are contiguous."""
    flat = row_schedule.as_rows(grad)
    tokens, cols = flat.shape
    narrow = torch.int32 if classes < 1 << 31 else torch.int64  # half the passes of a radix sort
    found, order = torch.sort(index.clamp(-1, classes).to(narrow), stable=True)
    starts = torch.searchsorted(found, torch.arange(classes + 1, dtype=narrow, device=flat.device))
    chunks = -(-tokens // LONG)
    parts = launch.empty((2 * chunks if tokens > LONG else 1, cols), torch.float32, flat)
    block = min(BLOCK, row_schedule.power_of_two(cols))
    blocks = -(-cols // block)
    warps = max(1, min(4, block * flat.element_size() // 512))  # a thread moves 16 bytes at once
    y = out if total is None else total
    y = launch.empty((classes, cols), dtype or flat.dtype, flat) if y is None else y
    if tokens > LONG:
        launch.run(
            "embedding.long_runs",
            (chunks, blocks),
            *(flat, found, order, starts, parts, tokens, classes, flat.stride(0)),
            COLS=cols,
            LONG=LONG,
            BLOCK=block,
            TILE=TILE,
            warps=warps,
        )
    launch.run(
        "embedding.embedding_rows",
        (-(-classes // ROWS), blocks),
        *(flat, order, starts, parts, y, classes, flat.stride(0), padding),
        COLS=cols,
        LONG=LONG,
        ROWS=ROWS,
        BLOCK=block,
        TILE=TILE,
        ADD=total is not None,
        warps=warps,
    )
    return y
