"""Cross-entropy: loss and gradient from one read of the logits, whole or as shards of the vocabulary.

Of a sharded vocabulary each rank calls `cross_entropy_stats`, gathers the [tokens, 3] float32 results (12 bytes a
token and rank: the only communication), and calls `cross_entropy_finish`. No buffer of [tokens, vocabulary] is made
but the gradient, and none at all with `in_place`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton import launch, reference, rows
from kernels_triton.checks import expect, floats, scalars, shaped, typed

BIASED = 3  # blocks of a longer row that registers hold beside what is added to them


def cross_entropy(
    logits: Tensor, target: Tensor, grad_scale: Tensor | None = None, ignore: int = -100, in_place: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, lse, dlogits), a row of `logits` [tokens, vocabulary] each. `dlogits` is the gradient of the sum of
    losses, times `grad_scale` (0-dim). A target that is `ignore` has loss and gradient 0; one out of range, NaN."""
    _check("cross_entropy", logits, target, in_place, grad_scale)
    if not launch.on_triton(logits):
        return reference.cross_entropy(logits, target, grad_scale, ignore, in_place)
    flat = rows.as_rows(logits)
    loss, lse = (launch.empty((flat.shape[0],), torch.float32, logits) for _ in range(2))
    grad = flat if in_place else launch.empty(logits.shape, logits.dtype, logits)
    cross_entropy_into(flat, target, grad_scale, ignore, loss, lse, grad)
    return loss, lse, logits if in_place else grad


def cross_entropy_into(
    flat: Tensor,
    target: Tensor,
    grad_scale: Tensor | None,
    ignore: int,
    loss: Tensor,
    lse: Tensor,
    grad: Tensor,
    parts: bool = False,
    inverse: bool = False,
    bias: Tensor | None = None,
) -> None:
    """Of rows, `bias` added to each. `parts`: `loss` gets the target's logit less the row's maximum, or 0 without one;
    `lse`, the sum of exp(x - maximum). `inverse`: `grad_scale` is one over the scale."""
    logits, (count, cols) = flat, flat.shape
    schedule = rows.kept_schedule("cross_entropy", logits, cols)
    pairs = _pairs(flat)
    # Singly, 16-bit numbers take twice the registers.
    chunks = schedule.chunks if pairs or logits.element_size() == 4 else min(schedule.chunks, 4)
    if bias is not None and chunks * schedule.block < cols:
        chunks = min(chunks, BIASED)
    launch.run(
        "cross_entropy.cross_entropy_rows",
        (schedule.programs(count, logits),),
        *(flat, None if bias is None else bias.contiguous(), target.contiguous(), grad_scale, loss, lse, grad, count),
        *(rows.row_stride(flat), rows.row_stride(grad), ignore),
        COLS=cols,
        CHUNKS=chunks,
        BLOCK=schedule.block,
        GROUP=16 // logits.element_size(),
        STAGES=schedule.stages,
        PAIRS=pairs,
        PARTS=parts,
        INVERSE=inverse,
        warps=schedule.warps,
        registers=schedule.registers,
    )


def _pairs(x: Tensor) -> bool:
    """Whether rows are whole 32-bit words of 16-bit numbers."""
    starts = x.storage_offset() % 2 == 0 and (x.is_meta or x.data_ptr() % 4 == 0)
    return x.element_size() == 2 and x.shape[1] % 2 == 0 and rows.row_stride(x) % 2 == 0 and starts


def cross_entropy_stats(logits: Tensor, target: Tensor, start: int = 0) -> Tensor:
    """[tokens, 3] of a shard whose first class is `start`: maximum, sum of exp(x - maximum), target's logit or 0."""
    _check("cross_entropy_stats", logits, target, False)
    if not launch.on_triton(logits):
        return reference.cross_entropy_stats(logits, target, start)
    flat = rows.as_rows(logits)
    count, cols = flat.shape
    stats = launch.empty((count, 3), torch.float32, logits)
    schedule = rows.vocabulary_schedule("cross_entropy_stats", logits, cols)
    launch.run(
        "cross_entropy.cross_entropy_stats",
        (schedule.programs(count, logits),),
        *(flat, target.contiguous(), stats, count, rows.row_stride(flat), start),
        COLS=cols,
        BLOCK=schedule.block,
        GROUP=16 // logits.element_size(),
        STAGES=schedule.stages,
        warps=schedule.warps,
    )
    return stats


def cross_entropy_finish(
    logits: Tensor,
    target: Tensor,
    stats: Tensor,
    classes: int,
    start: int = 0,
    grad_scale: Tensor | None = None,
    ignore: int = -100,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, lse, this shard's dlogits), given every shard's `stats` [shards, tokens, 3]; `classes` in all."""
    op = "cross_entropy_finish"
    _check(op, logits, target, in_place, grad_scale)
    shaped(op, "stats", stats, (*stats.shape[:1], logits.shape[0], 3), logits)
    floats(op, logits, stats=stats)
    if not launch.on_triton(logits):
        return reference.cross_entropy_finish(logits, target, stats, classes, start, grad_scale, ignore, in_place)
    flat = rows.as_rows(logits)
    count, cols = flat.shape
    loss, lse = (launch.empty((count,), torch.float32, logits) for _ in range(2))
    grad = flat if in_place else launch.empty(logits.shape, logits.dtype, logits)
    schedule = rows.vocabulary_schedule(op, logits, cols)
    launch.run(
        "cross_entropy.cross_entropy_finish",
        (schedule.programs(count, logits),),
        *(flat, target.contiguous(), stats.contiguous(), grad_scale, loss, lse, grad, count),
        *(rows.row_stride(flat), rows.row_stride(grad), ignore, classes, start, stats.shape[0]),
        COLS=cols,
        BLOCK=schedule.block,
        GROUP=16 // logits.element_size(),
        STAGES=schedule.stages,
        warps=schedule.warps,
    )
    return loss, lse, logits if in_place else grad


def _check(op: str, logits: Tensor, target: Tensor, in_place: bool, grad_scale: Tensor | None = None) -> None:
    expect(logits.dim() == 2, op, f"logits are {list(logits.shape)}", hint="reshape them to [tokens, vocabulary]")
    floats(op, logits, logits=logits, grad_scale=grad_scale)
    typed(op, "target", target, torch.int64)
    scalars(op, logits, grad_scale=grad_scale)
    shaped(op, "target", target, logits.shape[:1], logits)
    # A copy would take the gradient in the caller's place.
    wide = not in_place or logits.shape[-1] <= 1 or logits.stride(-1) == 1
    expect(wide, op, "in_place needs logits with contiguous columns", hint="pass in_place=False")
