"""Cross-entropy: loss and gradient from one read of the logits, whole or as shards of the vocabulary.

Of a sharded vocabulary each rank calls `cross_entropy_stats`, gathers the [tokens, 3] float32 results (12 bytes a
token and rank: the only communication), and calls `cross_entropy_finish`. No buffer of [tokens, vocabulary] is made
but the gradient, and none at all with `in_place`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton import launch, reference, rows
from kernels_triton.checks import apart, checked, expect, floats, scalars, shaped, statistics, typed, whole, written

BIASED = 3  # blocks of a longer row that registers hold beside what is added to them


@checked
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    grad_scale: Tensor | None = None,
    ignore: int = -100,
    in_place: bool = False,
    padded: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, lse, dlogits) of logits [tokens, vocabulary] against target, int64 [tokens].

    loss and lse, the log-sum-exp, are float32 [tokens]. dlogits, of the logits' shape and dtype, is the gradient of the
    sum of losses, times grad_scale [] or None: 0 where that is 0, be there NaN or infinities among the logits. A target
    that is `ignore` has loss and gradient 0; one out of range, NaN. Of a row that is all minus infinity lse is that
    too, loss and gradient are NaN. Maximum and sum are taken in one pass, the sum rescaled as the maximum grows
    (Milakov & Gimelshein 2018, algorithm 3).

    `in_place`: dlogits is logits, overwritten. `padded`: the rows of dlogits are whole 16 bytes apart, as products want
    them, and zeros are between them.

    Raises SC530 for a wrong operand (see `kernels_triton.ops`), for no classes, for `in_place` with `padded`, and in
    place for logits that overlap themselves or whose columns lie apart.
    """
    _check("cross_entropy", logits, target, in_place, grad_scale, padded)
    if not launch.on_triton(logits):
        return reference.cross_entropy(logits, target, grad_scale, ignore, in_place, padded)
    flat = rows.as_rows(logits)
    loss, lse = (launch.empty((flat.shape[0],), torch.float32, logits) for _ in range(2))
    grad = flat if in_place else _gradient(flat, padded)
    cross_entropy_into(flat, target, grad_scale, ignore, loss, lse, grad, padded=padded)
    if in_place:
        written(logits)
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
    padded: bool = False,
) -> None:
    """Of rows, `bias` added to each. `parts`: `loss` gets the target's logit less the row's maximum, or 0 without one;
    `lse`, the sum of exp(x - maximum). `inverse`: `grad_scale` is one over the scale. `padded`: what lies between the
    rows of `grad` becomes 0."""
    logits, (count, cols) = flat, flat.shape
    # What is added takes registers, which the measured schedules have for the logits alone.
    schedule = rows.kept_schedule("cross_entropy" if bias is None else "cross_entropy_biased", logits, cols)
    read, write = _readable(flat), grad.stride(0) if padded else cols
    pairs = _pairs(flat, read)
    # Singly, 16-bit numbers take twice the registers, and so does a store of single ones.
    singly = logits.element_size() == 2 and (not pairs or write % 2)
    chunks = min(schedule.chunks, 4, 32 // schedule.warps) if singly else schedule.chunks
    older = launch.device_of(logits).shared_bytes < rows.NEWER  # sm_80: its compiler sooner puts a scalar aside
    if bias is not None and chunks * schedule.block < cols:
        # Of three blocks of float32 it does, to fit one more program; of four it cannot.
        chunks = min(chunks, BIASED + (older and logits.element_size() == 4))
    if read > cols > chunks * schedule.block:  # where a row ends is seen to in the loops over its rest
        chunks = max(1, chunks - 1 - older)
    registers = schedule.registers
    if bias is not None and not registers:  # untold, the compiler puts some aside for more programs than there are
        registers = min(255, (1 << 16) // (32 * schedule.warps * max(1, schedule.waves)))
    (x_stride, x_unit), (dx_stride, dx_unit) = _strides(flat), _strides(grad)
    launch.run(
        "cross_entropy.cross_entropy_rows",
        (schedule.programs(count, logits),),
        *(flat, None if bias is None else bias.contiguous(), target.contiguous(), grad_scale, loss, lse, grad, count),
        *(x_stride, dx_stride, ignore),
        COLS=cols,
        READ=read,
        WRITE=write,
        X_UNIT=x_unit,
        DX_UNIT=dx_unit,
        CHUNKS=chunks,
        BLOCK=schedule.block,
        GROUP=16 // logits.element_size(),
        STAGES=schedule.stages,
        PAIRS=pairs,
        PARTS=parts,
        INVERSE=inverse,
        AGAIN=pairs and bias is None and 0 < registers < chunks * 16 // logits.element_size(),
        warps=schedule.warps,
        registers=registers,
    )


def _gradient(flat: Tensor, padded: bool) -> Tensor:
    """Rows for a result; `padded` ones begin with 16 bytes."""
    unit = 16 // flat.element_size() if padded else 1
    wide = -(-flat.shape[1] // unit) * unit
    return launch.empty((flat.shape[0], wide), flat.dtype, flat)[:, : flat.shape[1]]


def _pairs(x: Tensor, read: int) -> bool:
    """Whether what is read of a row are whole 32-bit words of 16-bit numbers."""
    starts = x.storage_offset() % 2 == 0 and (x.is_meta or x.data_ptr() % 4 == 0)
    return x.element_size() == 2 and read % 2 == 0 and rows.row_stride(x) % 2 == 0 and starts


def _strides(x: Tensor) -> tuple[int, int]:
    """The distance between rows in units of as many elements as a load has, if they are so many apart: then what a
    thread loads is known to be aligned. (Triton itself tells multiples of 16 from others, and 50264 is none.)"""
    stride, unit = rows.row_stride(x), 16 // x.element_size()
    return (stride, 1) if stride % unit else (stride // unit, unit)


def _readable(x: Tensor) -> int:
    """How many columns may be read: a row to the end of its last 16 bytes, where its storage goes on so far."""
    unit = 16 // x.element_size()
    end = -(-x.shape[1] // unit) * unit
    reach = x.storage_offset() + (x.shape[0] - 1) * rows.row_stride(x) + end
    there = rows.row_stride(x) >= end and reach * x.element_size() <= x.untyped_storage().nbytes()
    return end if there and rows.row_stride(x) % unit == 0 else x.shape[1]


@checked
def cross_entropy_stats(logits: Tensor, target: Tensor, start: int = 0) -> Tensor:
    """What a shard of the vocabulary, whose first class is `start`, has of each token: float32 [tokens, 3].

    logits [tokens, columns], all of which count; target, int64 [tokens], classes of the whole vocabulary. The three are
    the maximum, the sum of exp(x - maximum), and the target's logit, 0 where it lies in another shard: ranks exchange
    these, and no logits (Shoeybi et al. 2019, "Megatron-LM", section 3).

    Raises SC530 for a wrong operand (see `kernels_triton.ops`), for no columns, and for a negative start.
    """
    _check("cross_entropy_stats", logits, target, False)
    whole("cross_entropy_stats", "start", start, 0)
    if not launch.on_triton(logits):
        return reference.cross_entropy_stats(logits, target, start)
    flat = rows.as_rows(logits)
    count, cols = flat.shape
    stats = launch.empty((count, 3), torch.float32, logits)
    schedule = rows.vocabulary_schedule("cross_entropy_stats", logits, cols)
    x_stride, x_unit = _strides(flat)
    launch.run(
        "cross_entropy.cross_entropy_stats",
        (schedule.programs(count, logits),),
        *(flat, target.contiguous(), stats, count, x_stride, start),
        COLS=cols,
        READ=_readable(flat),
        X_UNIT=x_unit,
        BLOCK=schedule.block,
        GROUP=16 // logits.element_size(),
        # Single numbers on their way take a register each for their address.
        STAGES=schedule.stages if x_unit > 1 else min(schedule.stages, 2),
        warps=schedule.warps,
    )
    return stats


@checked
def cross_entropy_finish(
    logits: Tensor,
    target: Tensor,
    stats: Tensor,
    classes: int,
    start: int = 0,
    grad_scale: Tensor | None = None,
    ignore: int = -100,
    in_place: bool = False,
    padded: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, lse, this shard's dlogits), given what `cross_entropy_stats` returned on every shard.

    logits [tokens, columns], as `cross_entropy_stats` had them; target, int64 [tokens]; stats, float32
    [shards, tokens, 3]; `classes`, in all shards; `start`, the first of this one. The results, grad_scale [] or None,
    `ignore`, `in_place` and `padded` are as in `cross_entropy`. Every column is a class: the columns that pad the last
    shard are no part of logits, in either call (`logits[:, :classes - start]` is a view).

    Raises SC530 as `cross_entropy`, and for columns outside of 0 to `classes`.
    """
    op = "cross_entropy_finish"
    _check(op, logits, target, in_place, grad_scale, padded)
    whole(op, "start", start, 0)
    end = start + logits.shape[1]
    told = f"logits are {list(logits.shape)}, classes {start} to {end - 1}, of {classes} classes"
    hint = "padding would count in the sum: pass logits[:, :classes - start], here and to cross_entropy_stats"
    expect(end <= classes, op, told, hint)
    shards = stats.shape[0] if stats.dim() else 0
    shaped(op, "stats", stats, (max(1, shards), logits.shape[0], 3), logits)
    statistics(op, logits, stats=stats)
    if not launch.on_triton(logits):
        given = (logits, target, stats, classes, start, grad_scale, ignore)
        return reference.cross_entropy_finish(*given, in_place, padded)
    flat = rows.as_rows(logits)
    count, cols = flat.shape
    loss, lse = (launch.empty((count,), torch.float32, logits) for _ in range(2))
    grad = flat if in_place else _gradient(flat, padded)
    schedule = rows.flat_schedule(op, logits, cols)
    (x_stride, x_unit), (dx_stride, dx_unit) = _strides(flat), _strides(grad)
    write = grad.stride(0) if padded else cols
    launch.run(
        "cross_entropy.cross_entropy_finish",
        (count * -(-write // schedule.block),),
        *(flat, target.contiguous(), stats.contiguous(), grad_scale, loss, lse, grad, count),
        *(x_stride, dx_stride, ignore, classes, start, stats.shape[0]),
        COLS=cols,
        READ=_readable(flat),
        WRITE=write,
        X_UNIT=x_unit,
        DX_UNIT=dx_unit,
        SHARDS=rows.power_of_two(stats.shape[0]),
        BLOCK=schedule.block,
        GROUP=min(schedule.block, 16 // logits.element_size()),
        warps=schedule.warps,
    )
    if in_place:
        written(logits)
    return loss, lse, logits if in_place else grad


def _check(
    op: str, logits: Tensor, target: Tensor, in_place: bool, grad_scale: Tensor | None = None, padded: bool = False
) -> None:
    told = f"logits are {list(logits.shape)}, expected [tokens, vocabulary]"
    expect(logits.dim() == 2, op, told, "pass logits.view(-1, logits.shape[-1])")
    floats(op, logits, logits=logits, grad_scale=grad_scale)
    typed(op, "target", target, torch.int64)
    scalars(op, logits, grad_scale=grad_scale)
    shaped(op, "target", target, logits.shape[:1], logits)
    expect(logits.shape[1] > 0, op, f"logits are {list(logits.shape)}: no classes", hint="leave a rank without any out")
    if in_place:
        apart(op, "logits", logits)
    # A copy would take the gradient in the caller's place.
    wide = not in_place or logits.shape[-1] <= 1 or logits.stride(-1) == 1
    expect(not (in_place and padded), op, "in_place leaves the rows where they are", hint="pass padded=False")
    told = f"logits are of strides {list(logits.stride())}: in_place needs contiguous columns"
    expect(wide, op, told, hint="pass in_place=False")
