"""Products that gather their operand, or scatter their result, piece by piece.

    %x = all_gather(%x.shard, [tp], ...)         %x.products = gather_linear(%x.shard, [%wq, %wk], [True, True], ...)
    %q = linear(%x, %wq)                   ->    %q, %k, %x  = %x.products[0], [1], [2]
    %k = linear(%x, %wk)

    %y = linear(%h, %w)                          %y.sum      = linear_scatter(%h, %w, True, sum, [tp], ...)[0]
    %y.sum = reduce_scatter(%y, sum, ...)  ->

Each rank multiplies the rows that it has while those of others are on their way; of what is scattered, it multiplies
the rows of others first and sends them while it multiplies the next (Wang et al. 2023, "Overlap Communication with
Dependent Computation via Decomposition"). The arguments behind the weights are those of the collective alone. A weight
is `turned` where it is [out, in], as that of `linear`; that of `linear_dgrad` and `mm` is [in, out].

Here is what they mean: the collective, then the product, or the other way around, to the bit. A GPU runs it decomposed
where its group has memory that all members reach (`runtime.execute.decomposed_products`). The last result is what there
is meanwhile: the gathered operand, and the product before it is reduced.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor

from kernels_triton.base.library import define
from shardc.ir.ops.collectives import COLLECTIVES, Exchange, all_gather, reduce_scatter, run_collective
from shardc.ir.ops.linear import LINEAR, LINEAR_DGRAD

SeveralSteps = Generator[Exchange, Tensor, list[Tensor]]


def _product(x: Tensor, w: Tensor, turned: bool) -> Tensor:
    return (LINEAR if turned else LINEAR_DGRAD)(x, w)


def _gather_linear(
    x: Tensor,
    ws: Sequence[Tensor],
    turned: Sequence[bool],
    axes: list[str],
    atoms: list[int],
    pos: int,
    size: int,
    shape: list[int],
) -> SeveralSteps:
    whole = yield from COLLECTIVES[all_gather](x, axes, atoms, pos, size, shape)
    return [*(_product(whole, w, turn) for w, turn in zip(ws, turned, strict=True)), whole]


def _linear_scatter(
    x: Tensor, w: Tensor, turned: bool, op: str, axes: list[str], atoms: list[int], pos: int, shape: list[int]
) -> SeveralSteps:
    product = _product(x, w, turned)
    rows = yield from COLLECTIVES[reduce_scatter](product, op, axes, atoms, pos, shape)
    return [rows, product]


def _gather_linear_fake(
    x: Tensor, ws: Sequence[Tensor], turned: Sequence[bool], axes: list[str], atoms: list[int], pos: int, size: int,
    shape: list[int],
) -> list[Tensor]:  # fmt: skip
    whole = x.new_empty(shape)
    return [*(_product(whole, w, turn) for w, turn in zip(ws, turned, strict=True)), whole]


def _linear_scatter_fake(
    x: Tensor, w: Tensor, turned: bool, op: str, axes: list[str], atoms: list[int], pos: int, shape: list[int]
) -> list[Tensor]:
    return [x.new_empty(shape), _product(x, w, turned)]


GATHER_LINEAR = define(
    "gather_linear(Tensor x, Tensor[] ws, bool[] turned, str[] axes, int[] atoms, int pos, int size, int[] shape)"
    " -> Tensor[]",
    partial(run_collective, cast(Any, _gather_linear)),
    _gather_linear_fake,
)
LINEAR_SCATTER = define(
    "linear_scatter(Tensor x, Tensor w, bool turned, str op, str[] axes, int[] atoms, int pos, int[] shape)"
    " -> Tensor[]",
    partial(run_collective, cast(Any, _linear_scatter)),
    _linear_scatter_fake,
)
DECOMPOSED = (GATHER_LINEAR, LINEAR_SCATTER)
COLLECTIVES[GATHER_LINEAR] = cast(Any, _gather_linear)
COLLECTIVES[LINEAR_SCATTER] = cast(Any, _linear_scatter)
