"""Reductions and scans. A sum's or a maximum's shards combine; everything else needs its dims whole.

    sum.dim_IntList(x, [1])   a b c -> a c    sum="b"     sharding b leaves a pending sum
    argmax(x, 1)              a b c -> a c    whole="b"   an index counts from the start of the whole dim

Means and variances divide by a global count; `normalize` has taken them apart, and what is left is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from shardc.ir.ops.gathered import WHOLE_DIM
from shardc.ir.ops.squares import SUM_OF_SQUARES
from shardc.rules.notation import Dims, Notation
from shardc.rules.registry import example, rule

aten = torch.ops.aten


def reduced(
    x: Dims, dims: Sequence[int] | None, keepdim: bool, how: Literal["sum", "max", "min", "whole"], results: int = 1
) -> Notation:
    """`x` without `dims` (all of them if none are given), which combine as `how` says."""
    reduced_dims = {x.dim(d) for d in dims} if dims else set(range(x.ndim))
    kept_labels = ["1" if d in reduced_dims else x[d] for d in range(x.ndim) if keepdim or d not in reduced_dims]
    result = ", ".join([" ".join(kept_labels) or "()"] * results)
    notation = Notation(f"{x if x.ndim else '()'} -> {result}")
    names = " ".join(x[d] for d in sorted(reduced_dims))
    match how:
        case "sum":
            return replace(notation, sum=names, linear="joint")
        case "max":
            return replace(notation, max=names)
        case "min":
            return replace(notation, min=names)
        case "whole":
            return replace(notation, whole=names)


DIMS = [((4, 6, 3), (1,)), ((4, 6, 3), (0, -1), True), ((4, 6), (1,), True), ((5,), (0,))]
ALL = [((4, 6),), ((),), ((3, 1, 5),)]


@rule(aten.sum.dim_IntList, examples=[*DIMS, ((4, 6), None), ((4, 6), ()), example((4, 6), (1,), ints={"self": 9})])
def sum_dims(self: Dims, dim: Sequence[int] | None, keepdim: bool, dtype: Any = None) -> Notation:
    return reduced(self, dim, keepdim, "sum")


@rule(SUM_OF_SQUARES, examples=[((4, 6),), ((),), ((3, 1, 5),)])
def sum_of_squares(x: Dims) -> Notation:
    return replace(reduced(x, None, False, "sum"), linear=())


@rule(aten.sum.default, examples=[*ALL, example((4, 6), ints={"self": 9}), example((4, 6), bools=("self",))])
def sum_all(self: Dims, dtype: Any = None) -> Notation:
    return reduced(self, None, False, "sum")


EXTREMES = [*DIMS, ((4, 6), ()), example((4, 6), (1,), ints={"self": 9})]


@rule(aten.amax.default, examples=EXTREMES)
def amax(self: Dims, dim: Sequence[int], keepdim: bool) -> Notation:
    return reduced(self, dim, keepdim, "max")


@rule(aten.amin.default, examples=EXTREMES)
def amin(self: Dims, dim: Sequence[int], keepdim: bool) -> Notation:
    return reduced(self, dim, keepdim, "min")


TRUTHS = [example((4, 6), bools=("self",)), example((5,), bools=("self",))]


@rule(aten.max.default, examples=ALL)
def max_all(self: Dims) -> Notation:
    return reduced(self, None, False, "max")


@rule(aten.min.default, examples=ALL)
def min_all(self: Dims) -> Notation:
    return reduced(self, None, False, "min")


# Truth values are ordered: `any` is their maximum, `all` their minimum. On numbers the result is a truth value too,
# but the padding of the operand is not, so it is the operand that must be one.
@rule([aten.any.default], examples=TRUTHS)
def any_all(self: Dims) -> Notation:
    return reduced(self, None, False, "max")


@rule([aten.all.default], examples=TRUTHS)
def all_all(self: Dims) -> Notation:
    return reduced(self, None, False, "min")


TRUTHS_DIM = [example((4, 6), 1, bools=("self",)), example((4, 6), 0, True, bools=("self",))]


@rule(aten.any.dim, examples=TRUTHS_DIM)
def any_dim(self: Dims, dim: int, keepdim: bool) -> Notation:
    return reduced(self, [dim], keepdim, "max")


@rule(aten.all.dim, examples=TRUTHS_DIM)
def all_dim(self: Dims, dim: int, keepdim: bool) -> Notation:
    return reduced(self, [dim], keepdim, "min")


TRUTHS_DIMS = [example((4, 6, 3), (0, 1), bools=("self",)), example((4, 6), None, True, bools=("self",))]


@rule(aten.any.dims, examples=TRUTHS_DIMS)
def any_dims(self: Dims, dim: Sequence[int] | None, keepdim: bool) -> Notation:
    return reduced(self, dim, keepdim, "max")


@rule(aten.all.dims, examples=TRUTHS_DIMS)
def all_dims(self: Dims, dim: Sequence[int] | None, keepdim: bool) -> Notation:
    return reduced(self, dim, keepdim, "min")


# ------------------------------------------------------------------------------------------------ whole dims
@rule(
    [aten.prod.default, aten.mean.default, aten.var.default, aten.std.default, aten.norm.Scalar, aten.median.default]
    + [aten.nanmedian.default],
    examples=[((4, 6),), ((5,),)],
)
def whole_all(self: Dims, *options: Any) -> Notation:
    return reduced(self, None, False, "whole")


@rule([aten.mean.dim, aten.logsumexp.default], examples=DIMS)
def whole_dims(self: Dims, dim: Sequence[int] | None, keepdim: bool, *options: Any) -> Notation:
    return reduced(self, dim, keepdim, "whole")


@rule([aten.var.dim, aten.std.dim], examples=[((4, 6, 3), (1,)), ((4, 6), (0,), False, True)])
def var_dim(self: Dims, dim: Sequence[int] | None, unbiased: bool, keepdim: bool) -> Notation:
    return reduced(self, dim, keepdim, "whole")


@rule(
    [aten.var.correction, aten.std.correction],
    examples=[((4, 6, 3), (1,)), example((4, 6), (0,), correction=0, keepdim=True)],
)
def var_correction(self: Dims, dim: Sequence[int] | None, correction: Any, keepdim: bool) -> Notation:
    return reduced(self, dim, keepdim, "whole")


@rule(aten.var_mean.correction, examples=[((4, 6, 3), (1,)), example((4, 6), (0,), correction=0, keepdim=True)])
def var_mean(self: Dims, dim: Sequence[int] | None, correction: Any, keepdim: bool) -> Notation:
    return reduced(self, dim, keepdim, "whole", results=2)


@rule(
    [aten.norm.ScalarOpt_dim, aten.linalg_vector_norm.default], examples=[((4, 6, 3), 2, (1,)), ((4, 6), 2, (0,), True)]
)
def norm(self: Dims, p: Any, dim: Sequence[int] | None, keepdim: bool, *options: Any) -> Notation:
    return reduced(self, dim, keepdim, "whole")


DIM = [((4, 6, 3), 1), ((4, 6), -1, True), ((4, 6), 0)]


@rule(aten.prod.dim_int, examples=DIM)
def prod(self: Dims, dim: int, keepdim: bool, dtype: Any = None) -> Notation:
    return reduced(self, [dim], keepdim, "whole")


@rule([aten.argmax.default, aten.argmin.default], examples=[*DIM, ((4, 6),), ((4, 6), None, True)])
def arg_extreme(self: Dims, dim: int | None, keepdim: bool) -> Notation:
    return reduced(self, None if dim is None else [dim], keepdim, "whole")


@rule([aten.max.dim, aten.min.dim, aten.median.dim, aten.nanmedian.dim, aten.mode.default], examples=DIM)
def extreme_dim(self: Dims, dim: int, keepdim: bool) -> Notation:
    return reduced(self, [dim], keepdim, "whole", results=2)


@rule(aten.kthvalue.default, examples=[((4, 6, 3), 2, 1), ((4, 6), 6, -1, True), ((4, 6), 1, 0)])
def kthvalue(self: Dims, k: int, dim: int, keepdim: bool) -> Notation:
    return reduced(self, [dim], keepdim, "whole", results=2)


@rule(aten.aminmax.default, examples=[example((4, 6), dim=1), example((4, 6), dim=0, keepdim=True), ((4, 6),)])
def aminmax(self: Dims, dim: int | None, keepdim: bool) -> Notation:
    return reduced(self, None if dim is None else [dim], keepdim, "whole", results=2)


# ------------------------------------------------------------------------------------------------ runs of rows
def _segments(data: Dims, counts: Dims, axis: int, label: str) -> tuple[str, str, str]:
    """Labels of the counts and of the result. Counts of the dims before `axis` are checked, and padding's are wrong."""
    before, after = data.labels[:axis], data.labels[axis + 1 :]
    return " ".join([*before, label]), " ".join([*before, "s", *after]), " ".join([*before, data[axis], label, "s"])


@rule(
    aten.segment_reduce.default,
    examples=[
        example((4, 3), "sum", lengths=(1,), ints={"lengths": range(4, 5)}),
        example((4, 3), "max", lengths=(2,), ints={"lengths": range(2, 3)}),
        example((2, 4, 3), "mean", lengths=(2, 2), axis=1, ints={"lengths": range(2, 3)}),
    ],
)
def segment_reduce(
    data: Dims, reduce: str, lengths: Dims | None, indices: Dims | None, offsets: Dims | None, axis: int,
    unsafe: bool, initial: float | None,
) -> Notation:  # fmt: skip
    counts = lengths if lengths is not None else offsets
    assert counts is not None
    label = "s" if lengths is not None else "edges"
    ins, out, whole = _segments(data, counts, data.dim(axis), label)
    return Notation(f"{data}, {ins} -> {out}", whole=whole)


@rule(
    aten._segment_reduce_backward.default,
    examples=[
        example((2, 3), (2, 3), (4, 3), "sum", lengths=(2,), ints={"lengths": range(2, 3)}),
        example((1, 3), (1, 3), (4, 3), "mean", offsets=(2,), ints={"offsets": range(1)}),
    ],
)
def segment_reduce_backward(
    grad: Dims, output: Dims, data: Dims, reduce: str, lengths: Dims | None, offsets: Dims | None, axis: int,
    initial: float | None,
) -> Notation:  # fmt: skip
    counts = lengths if lengths is not None else offsets
    assert counts is not None
    label = "s" if lengths is not None else "edges"
    ins, out, whole = _segments(data, counts, data.dim(axis), label)
    return Notation(f"{out}, {out}, {data}, {ins} -> {data}", whole=whole, linear=(0,))


# ---------------------------------------------------------------------------------------------- scans and orders
def _along(x: Dims, dim: int, results: int) -> Notation:
    """Same shape, one dim whole."""
    text = str(x) if x.ndim else "()"
    return Notation(f"{text} -> {', '.join([text] * results)}", whole=x[x.dim(dim)] if x.ndim else "")


@rule(WHOLE_DIM, examples=[((4, 6), 1), ((4, 6), -2), ((6,), 0)])
def whole(x: Dims, dim: int) -> Notation:
    return _along(x, dim, 1)


@rule(aten.cumsum.default, examples=[((4, 6), 1), ((4, 6), -2), ((), 0), example((4, 6), 1, ints={"self": 9})])
def cumsum(self: Dims, dim: int, dtype: Any = None) -> Notation:
    return replace(_along(self, dim, 1), linear="joint")


@rule([aten.cumprod.default, aten.logcumsumexp.default], examples=[((4, 6), 1), ((4, 6), -2)])
def scan(self: Dims, dim: int, *options: Any) -> Notation:
    return _along(self, dim, 1)


@rule([aten.cummax.default, aten.cummin.default], examples=[((4, 6), 1), ((4, 6), -2)])
def scan_extreme(self: Dims, dim: int) -> Notation:
    return _along(self, dim, 2)


@rule(aten.sort.default, examples=[((4, 6),), ((4, 6), 0, True)])
def sort(self: Dims, dim: int, descending: bool) -> Notation:
    return _along(self, dim, 2)


@rule(aten.sort.stable, examples=[example((4, 6), stable=True), example((4, 6), stable=True, dim=0)])
def sort_stable(self: Dims, stable: bool | None, dim: int, descending: bool) -> Notation:
    return _along(self, dim, 2)


@rule(aten.topk.default, examples=[((4, 6), 2), ((4, 6), 3, 0), ((4, 6), 1), ((4, 6), 6)])
def topk(self: Dims, k: int, dim: int, largest: bool, sorted: bool) -> Notation:
    label = self[self.dim(dim)]
    result = self.replace(dim, f"top_{label}")
    return Notation(f"{self} -> {result}, {result}", whole=f"{label} top_{label}")


@rule(
    aten.histc.default,
    padding="largest",
    examples=[((20,), 5, 0, 1), ((4, 6), 5, -1, 1), ((20,), 3, 0, 0), ((20,), 4, -9, 9)],
)
def histc(self: Dims, bins: int, min: float, max: float) -> Notation:
    """Counts of shards add up, unless the bins depend on the least and the largest value."""
    notation = Notation(f"{self if self.ndim else '()'} -> bins", whole="bins")
    if min == max:
        return replace(notation, whole=f"{self} bins")
    return replace(notation, sum=str(self))
