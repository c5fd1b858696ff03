"""Means, variances, norms: sums divided by the *global* count, so that a shard's part is a pending sum."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardc.passes.normalize.decompositions.table import (
    HALF,
    KEEP,
    Emit,
    Node,
    Result,
    aten,
    canonical_dims,
    decompose,
    dtype_of,
    extent,
    shape_of,
)

Dims = int | Sequence[int] | None


@decompose(aten.sum.default)
def sum_all(e: Emit, x: Node, dtype: torch.dtype | None) -> Result:
    return sum_dims(e, x, None, False, dtype)


@decompose(aten.sum.dim_IntList, sometimes=True)
def sum_dims(e: Emit, x: Node, dim: Dims, keepdim: bool, dtype: torch.dtype | None) -> Result:
    dims = canonical_dims(dim, len(shape_of(x)))
    if dims == dim:
        return KEEP
    if not dims and not dtype_of(x).is_floating_point:
        return e.cast(x, dtype or torch.int64)
    return e.sum(x, dims, keepdim, dtype)


@decompose(aten.nansum.default)
def nansum(e: Emit, x: Node, dim: Dims, keepdim: bool, dtype: torch.dtype | None) -> Result:
    if dtype_of(x).is_floating_point:
        x = e.where(e(aten.isnan.default, x), e.full([], 0.0, dtype_of(x)), x)
    return e.sum(x, canonical_dims(dim, len(shape_of(x))), keepdim, dtype_of(e.at))


@decompose(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def count_nonzero(e: Emit, x: Node, dim: Dims = None) -> Result:
    dims = canonical_dims(dim, len(shape_of(x)))
    return e.sum(e.cast(e(aten.ne.Scalar, x, 0), torch.int64), dims)


@decompose(aten.any.dims, aten.all.dims, sometimes=True)
def truth_over(e: Emit, x: Node, dim: Sequence[int] | None, keepdim: bool) -> Result:
    """Over an empty list of dims nothing is reduced, where sums and extremes take all."""
    return KEEP if dim is None or dim else e.cast(e(aten.ne.Scalar, x, 0), dtype_of(e.at))


@decompose(aten.mean.default)
def mean_all(e: Emit, x: Node, dtype: torch.dtype | None) -> Result:
    return mean(e, x, None, False, dtype)


@decompose(aten.mean.dim)
def mean(e: Emit, x: Node, dim: Dims, keepdim: bool, dtype: torch.dtype | None) -> Node:
    dims = canonical_dims(dim, len(shape_of(x)))
    out = dtype or dtype_of(x)
    # A sum of halves may overflow where their mean does not.
    total = e.sum(x, dims, keepdim, torch.float32 if out in HALF else dtype)
    return e.cast(e.div(total, extent(x, dims)), out)


# ---------------------------------------------------------------------- variances
def moments(e: Emit, x: Node, dims: Sequence[int], correction: float = 0) -> tuple[Node, Node]:
    """Variance and mean, dims kept. Two passes: E[x^2] - E[x]^2 would cancel."""
    n = extent(x, dims)
    centre = e.div(e.sum(x, dims, True), n)
    off = e.sub(x, centre)
    return e.div(e.sum(e.mul(off, off), dims, True), max(0, n - correction)), centre


def _spread(e: Emit, x: Node, dim: Dims, correction: float | None, keepdim: bool, root: bool) -> tuple[Node, Node]:
    dims = canonical_dims(dim, len(shape_of(x)))
    shape = [n if d not in dims else 1 for d, n in enumerate(shape_of(x)) if keepdim or d not in dims]
    var, centre = moments(e, e.wide(x), dims, 1 if correction is None else correction)
    if root:
        var = e(aten.sqrt.default, var)
    return e.view(e.cast(var, dtype_of(x)), shape), e.view(e.cast(centre, dtype_of(x)), shape)


@decompose(aten.var.correction)
def var(e: Emit, x: Node, dim: Dims, correction: float | None, keepdim: bool) -> Result:
    return _spread(e, x, dim, correction, keepdim, root=False)[0]


@decompose(aten.std.correction)
def std(e: Emit, x: Node, dim: Dims, correction: float | None, keepdim: bool) -> Result:
    return _spread(e, x, dim, correction, keepdim, root=True)[0]


@decompose(aten.var_mean.correction)
def var_mean(e: Emit, x: Node, dim: Dims, correction: float | None, keepdim: bool) -> Result:
    return _spread(e, x, dim, correction, keepdim, root=False)


@decompose(aten.std_mean.correction)
def std_mean(e: Emit, x: Node, dim: Dims, correction: float | None, keepdim: bool) -> Result:
    return _spread(e, x, dim, correction, keepdim, root=True)


# ---------------------------------------------------------------------- norms
@decompose(aten.linalg_vector_norm.default)
def vector_norm(e: Emit, x: Node, ord: float, dim: Dims, keepdim: bool, dtype: torch.dtype | None) -> Result:
    dims = canonical_dims(dim, len(shape_of(x)))
    out = dtype or dtype_of(x)
    x = e.wide(x if dtype is None else e.cast(x, dtype))
    size = e(aten.abs.default, x)
    if not dims:
        return e.cast(size, out)
    if ord == math.inf:
        norm = e(aten.amax.default, size, dims, keepdim)
    elif ord == -math.inf:
        norm = e(aten.amin.default, size, dims, keepdim)
    elif ord == 0:
        norm = e.sum(e.cast(e(aten.ne.Scalar, x, 0), dtype_of(x)), dims, keepdim)
    elif ord == 1:
        norm = e.sum(size, dims, keepdim)
    elif ord == 2:
        norm = e(aten.sqrt.default, e.sum(e.mul(x, x), dims, keepdim))
    else:
        total = e.sum(e(aten.pow.Tensor_Scalar, size, ord), dims, keepdim)
        norm = e(aten.pow.Tensor_Scalar, total, 1 / ord)
    return e.cast(norm, out)


@decompose(aten.norm.Scalar)
def norm_all(e: Emit, x: Node, p: float) -> Result:
    return vector_norm(e, x, p, None, False, None)


@decompose(aten.norm.ScalarOpt_dim)
def norm_dim(e: Emit, x: Node, p: float | None, dim: Dims, keepdim: bool) -> Result:
    return vector_norm(e, x, 2 if p is None else p, dim, keepdim, None)


@decompose(aten.norm.ScalarOpt_dtype)
def norm_all_in(e: Emit, x: Node, p: float | None, dtype: torch.dtype) -> Result:
    return vector_norm(e, x, 2 if p is None else p, None, False, dtype)


@decompose(aten.norm.ScalarOpt_dim_dtype)
def norm_dim_in(e: Emit, x: Node, p: float | None, dim: Dims, keepdim: bool, dtype: torch.dtype) -> Result:
    return vector_norm(e, x, 2 if p is None else p, dim, keepdim, dtype)


@decompose(aten.dist.default)
def dist(e: Emit, x: Node, other: Node, p: float) -> Result:
    return vector_norm(e, e.sub(x, other), p, None, False, None)


@decompose(aten.logsumexp.default, sometimes=True)
def logsumexp(e: Emit, x: Node, dim: Dims, keepdim: bool) -> Result:
    dims = canonical_dims(dim, len(shape_of(x)))
    if not dims or not dtype_of(x).is_floating_point:
        return KEEP
    wide = e.wide(x)
    top = e(aten.amax.default, wide, dims, True)
    infinite = e(aten.eq.Scalar, e(aten.abs.default, top), math.inf)  # inf - inf is NaN
    top = e.where(infinite, e.full([], 0.0, dtype_of(top)), top)
    total = e.add(e.log(e.sum(e.exp(e.sub(wide, top)), dims, True)), top)
    result_shape = [1 if d in dims else n for d, n in enumerate(shape_of(x)) if keepdim or d not in dims]
    return e.view(e.cast(total, dtype_of(x)), result_shape)


# ---------------------------------------------------------------------- pooling to one element
@decompose(aten._adaptive_avg_pool2d.default, sometimes=True)
def adaptive_avg_pool2d(e: Emit, x: Node, size: Sequence[int]) -> Result:
    if tuple(size) == shape_of(x)[-2:]:
        return x
    if tuple(size) != (1, 1):
        return KEEP
    ndim = len(shape_of(x))
    return mean(e, x, [ndim - 2, ndim - 1], True, None)


@decompose(aten._adaptive_avg_pool2d_backward.default, sometimes=True)
def adaptive_avg_pool2d_backward(e: Emit, g: Node, x: Node) -> Result:
    if shape_of(g) == shape_of(x):
        return g
    if shape_of(g)[-2:] != (1, 1):
        return KEEP
    return e.expand(e.div(g, math.prod(shape_of(x)[-2:])), shape_of(x))
