"""Cross-entropy: loss and gradient from one read of the logits, for a whole or a sharded vocabulary.

With a sharded vocabulary each rank calls `cross_entropy_stats`, gathers the [tokens, 3] float32 results (12 bytes a
token and rank, the only communication), and calls `cross_entropy_finish`. The gradient is the only [tokens, vocabulary]
buffer that is allocated; with `in_place` there is none.
"""

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
    expect_no_overlap,
    expect_scalars,
    expect_shape,
    expect_statistics,
    integer_in_range,
    mark_written,
)

BIASED_CHUNKS = 3  # blocks of a longer row that fit into registers together with the bias


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
    sum of losses, times grad_scale [] or None. It is 0 where grad_scale is 0, even with NaN or infinities among the
    logits. A target that is `ignore` has loss and gradient 0; a target out of range gives NaN. If a row is all minus
    infinity, so is lse, and loss and gradient are NaN. Maximum and sum are computed in one pass; the sum is rescaled as
    the maximum grows (Milakov & Gimelshein 2018, algorithm 3).

    `in_place`: dlogits overwrites logits. `padded`: the row stride of dlogits is a multiple of 16 bytes, as matrix
    products need it, and the padding is 0.

    Raises SC530 for a wrong operand (see `kernels_triton.ops`), for no classes, for `in_place` with `padded`, and in
    place for logits that overlap themselves or whose columns lie apart.
    """
    _check("cross_entropy", logits, target, in_place, grad_scale, padded)
    if not launch.runs_on_triton(logits):
        return reference.cross_entropy(logits, target, grad_scale, ignore, in_place, padded)
    flat = row_schedule.as_rows(logits)
    loss, lse = (launch.empty((flat.shape[0],), torch.float32, logits) for _ in range(2))
    grad = flat if in_place else _gradient_rows(flat, padded)
    cross_entropy_into(flat, target, grad_scale, ignore, loss, lse, grad, padded=padded)
    if in_place:
        mark_written(logits)
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
    """For rows; `bias` is added to each. `parts`: `loss` gets the target's logit minus the row's maximum, or 0 without
    a target, and `lse` gets the sum of exp(x - maximum). `inverse`: `grad_scale` is the reciprocal of the scale.
    `padded`: the padding of `grad`'s rows becomes 0."""
    logits, (count, cols) = flat, flat.shape
    # The bias takes registers; schedules were measured without it.
    schedule = row_schedule.vocabulary_register_schedule(
        "cross_entropy" if bias is None else "cross_entropy_biased", logits, cols
    )
    read, write = _readable_columns(flat), grad.stride(0) if padded else cols
    pairs = _reads_word_pairs(flat, read)
    # 16-bit numbers that are loaded or stored one by one take twice the registers.
    single_elements = logits.element_size() == 2 and (not pairs or write % 2)
    chunks = min(schedule.chunks, 4, 32 // schedule.warps) if single_elements else schedule.chunks
    older = (
        launch.device_of(logits).shared_bytes < row_schedule.SM90_SHARED
    )  # sm_80: its compiler spills a scalar earlier
    if bias is not None and chunks * schedule.block < cols:
        # With three blocks of float32 it does, to fit one more program; with four it cannot.
        chunks = min(chunks, BIASED_CHUNKS + (older and logits.element_size() == 4))
    if read > cols > chunks * schedule.block:  # the loops over the rest of the row handle its end
        chunks = max(1, chunks - 1 - older)
    registers = schedule.registers
    if (
        bias is not None and not registers
    ):  # without a limit the compiler reserves registers for more programs than there are
        registers = min(255, (1 << 16) // (32 * schedule.warps * max(1, schedule.waves)))
    (x_stride, x_unit), (dx_stride, dx_unit) = _stride_in_units(flat), _stride_in_units(grad)
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


def _gradient_rows(flat: Tensor, padded: bool) -> Tensor:
    """Rows for a result; `padded` rows are aligned to 16 bytes."""
    unit = 16 // flat.element_size() if padded else 1
    wide = -(-flat.shape[1] // unit) * unit
    return launch.empty((flat.shape[0], wide), flat.dtype, flat)[:, : flat.shape[1]]


def _reads_word_pairs(x: Tensor, read: int) -> bool:
    """Whether a row is read as whole 32-bit words of two 16-bit numbers."""
    starts = x.storage_offset() % 2 == 0 and (x.is_meta or x.data_ptr() % 4 == 0)
    return x.element_size() == 2 and read % 2 == 0 and row_schedule.row_stride(x) % 2 == 0 and starts


def _stride_in_units(x: Tensor) -> tuple[int, int]:
    """(stride, unit): the row stride in units of a load's elements, if it is a multiple of them. The compiler then
    knows that loads are aligned. (Triton itself recognises multiples of 16 only, and 50264 is none.)"""
    stride, unit = row_schedule.row_stride(x), 16 // x.element_size()
    return (stride, 1) if stride % unit else (stride // unit, unit)


def _readable_columns(x: Tensor) -> int:
    """The columns that may be read: a row to the end of its last 16 bytes, if its storage extends that far."""
    unit = 16 // x.element_size()
    end = -(-x.shape[1] // unit) * unit
    reach = x.storage_offset() + (x.shape[0] - 1) * row_schedule.row_stride(x) + end
    is_readable = row_schedule.row_stride(x) >= end and reach * x.element_size() <= x.untyped_storage().nbytes()
    return end if is_readable and row_schedule.row_stride(x) % unit == 0 else x.shape[1]


@checked
def cross_entropy_stats(logits: Tensor, target: Tensor, start: int = 0) -> Tensor:
    """A vocabulary shard's statistics for each token, float32 [tokens, 3]. `start` is the shard's first class.

    logits [tokens, columns], all of which count; target, int64 [tokens], classes of the whole vocabulary. The three are
    the maximum, the sum of exp(x - maximum), and the target's logit (0 if it lies in another shard). Ranks exchange
    these instead of logits (Shoeybi et al. 2019, "Megatron-LM", section 3).

    Raises SC530 for a wrong operand (see `kernels_triton.ops`), for no columns, and for a negative start.
    """
    _check("cross_entropy_stats", logits, target, False)
    integer_in_range("cross_entropy_stats", "start", start, 0)
    if not launch.runs_on_triton(logits):
        return reference.cross_entropy_stats(logits, target, start)
    flat = row_schedule.as_rows(logits)
    count, cols = flat.shape
    stats = launch.empty((count, 3), torch.float32, logits)
    schedule = row_schedule.vocabulary_schedule("cross_entropy_stats", logits, cols)
    x_stride, x_unit = _stride_in_units(flat)
    launch.run(
        "cross_entropy.cross_entropy_stats",
        (schedule.programs(count, logits),),
        *(flat, target.contiguous(), stats, count, x_stride, start),
        COLS=cols,
        READ=_readable_columns(flat),
        X_UNIT=x_unit,
        BLOCK=schedule.block,
        GROUP=16 // logits.element_size(),
        # Unaligned loads in flight take a register each for their address.
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
    """(loss, lse, this shard's dlogits), from the `cross_entropy_stats` of all shards.

    logits [tokens, columns], as `cross_entropy_stats` had them; target, int64 [tokens]; stats, float32
    [shards, tokens, 3]; `classes`, in all shards; `start`, the first of this one. The results, grad_scale [] or None,
    `ignore`, `in_place` and `padded` are as in `cross_entropy`. Every column is a class: leave the padding of the last
    shard out of logits in both calls (`logits[:, :classes - start]` is a view).

    Raises SC530 as `cross_entropy`, and for columns outside of 0 to `classes`.
    """
    op = "cross_entropy_finish"
    _check(op, logits, target, in_place, grad_scale, padded)
    integer_in_range(op, "start", start, 0)
    end = start + logits.shape[1]
    message = f"logits are {list(logits.shape)}, classes {start} to {end - 1}, of {classes} classes"
    hint = "padding would count in the sum: pass logits[:, :classes - start], here and to cross_entropy_stats"
    expect(end <= classes, op, message, hint)
    shards = stats.shape[0] if stats.dim() else 0
    expect_shape(op, "stats", stats, (max(1, shards), logits.shape[0], 3), logits)
    expect_statistics(op, logits, stats=stats)
    if not launch.runs_on_triton(logits):
        arguments = (logits, target, stats, classes, start, grad_scale, ignore)
        return reference.cross_entropy_finish(*arguments, in_place, padded)
    flat = row_schedule.as_rows(logits)
    count, cols = flat.shape
    loss, lse = (launch.empty((count,), torch.float32, logits) for _ in range(2))
    grad = flat if in_place else _gradient_rows(flat, padded)
    schedule = row_schedule.row_block_schedule(op, logits, cols)
    (x_stride, x_unit), (dx_stride, dx_unit) = _stride_in_units(flat), _stride_in_units(grad)
    write = grad.stride(0) if padded else cols
    launch.run(
        "cross_entropy.cross_entropy_finish",
        (count * -(-write // schedule.block),),
        *(flat, target.contiguous(), stats.contiguous(), grad_scale, loss, lse, grad, count),
        *(x_stride, dx_stride, ignore, classes, start, stats.shape[0]),
        COLS=cols,
        READ=_readable_columns(flat),
        WRITE=write,
        X_UNIT=x_unit,
        DX_UNIT=dx_unit,
        SHARDS=row_schedule.power_of_two(stats.shape[0]),
        BLOCK=schedule.block,
        GROUP=min(schedule.block, 16 // logits.element_size()),
        warps=schedule.warps,
    )
    if in_place:
        mark_written(logits)
    return loss, lse, logits if in_place else grad


def _check(
    op: str, logits: Tensor, target: Tensor, in_place: bool, grad_scale: Tensor | None = None, padded: bool = False
) -> None:
    message = f"logits are {list(logits.shape)}, expected [tokens, vocabulary]"
    expect(logits.dim() == 2, op, message, "pass logits.view(-1, logits.shape[-1])")
    expect_floats(op, logits, logits=logits, grad_scale=grad_scale)
    expect_dtype(op, "target", target, torch.int64)
    expect_scalars(op, logits, grad_scale=grad_scale)
    expect_shape(op, "target", target, logits.shape[:1], logits)
    expect(logits.shape[1] > 0, op, f"logits are {list(logits.shape)}: no classes", hint="leave a rank without any out")
    if in_place:
        expect_no_overlap(op, "logits", logits)
    # A copy would get the gradient instead of the caller's tensor.
    wide = not in_place or logits.shape[-1] <= 1 or logits.stride(-1) == 1
    expect(not (in_place and padded), op, "in_place leaves the rows where they are", hint="pass padded=False")
    message = f"logits are of strides {list(logits.stride())}: in_place needs contiguous columns"
    expect(wide, op, message, hint="pass in_place=False")
