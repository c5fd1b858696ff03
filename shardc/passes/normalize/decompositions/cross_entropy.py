"""Cross entropy in pieces that a sharded vocabulary can run: a one-hot comparison instead of a gather.

    m   = amax(x, V)                      all_reduce(max) of [tokens]
    s   = x - m
    lse = log(sum(exp(s), V))             all_reduce(sum) of [tokens]
    picked = sum(where(arange(V) == target, s, 0))          all_reduce(sum)
    loss = (sum(lse) - sum(picked)) / count

A target that is no class equals none, so `check_index` looks at the targets first. `lse` and `-s` are both
non-negative, so summing them apart cancels nothing. The backward pair, log_softmax's of nll's, is known to be
`(softmax - onehot) * row` and needs no reduction over the vocabulary at all:

    dx  = exp(s) * (row / sum(exp(s))) - where(onehot, row, 0)        row = valid * g / count
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardc.ir.ops.check_index import check_index
from shardc.passes.normalize.decompositions.table import Emit, Node, Result, aten, decompose, dtype_of, shape_of

MEAN, SUM = 1, 2  # torch's codes of a loss's `reduction`; 0 is none


@dataclass(frozen=True)
class LogSoftmax:
    """The parts of a log_softmax taken apart; all but `shifted` and `exp` have size 1 along `dim`."""

    dim: int
    shifted: Node
    exp: Node
    total: Node
    log_total: Node


@decompose(aten._log_softmax.default)
def log_softmax(e: Emit, x: Node, dim: int, half_to_float: bool) -> Result:
    out = torch.float32 if half_to_float else dtype_of(x)
    if not shape_of(x):
        return e.full([], 0.0, out)
    dim %= len(shape_of(x))
    x = e.wide(x)
    shifted = e.sub(x, e(aten.amax.default, x, [dim], True))
    exp = e.exp(shifted)
    total = e.sum(exp, [dim], True)
    parts = LogSoftmax(dim, shifted, exp, total, e.log(total))
    result = e.cast(e.sub(shifted, parts.log_total), out)
    e.memo["log_softmax", result] = parts
    return result


@decompose(aten._log_softmax_backward_data.default)
def log_softmax_backward(e: Emit, g: Node, output: Node, dim: int, dtype: torch.dtype) -> Result:
    if not shape_of(output):
        return e.full([], 0.0, dtype)
    dim %= len(shape_of(output))
    memoized = e.memo.get(("nll_backward", g))
    parts = e.memo.get(("log_softmax", output))
    if memoized is not None and parts is not None and memoized.log_probs is output and parts.dim == dim:
        softmax = e.mul(parts.exp, e.div(e.cast(memoized.row, dtype_of(parts.exp)), parts.total))
        hot = e.where(memoized.hot, e.cast(memoized.row, dtype_of(softmax)), 0.0)
        return e.cast(e.sub(softmax, hot), dtype)
    g, output = e.wide(g), e.wide(output)
    return e.cast(e.sub(g, e.mul(e.exp(output), e.sum(g, [dim], True))), dtype)


# ---------------------------------------------------------------------- negative log likelihood
@dataclass(frozen=True)
class NllBackward:
    """grad of nll = -where(hot, row, 0); `row` has size 1 along the classes."""

    log_probs: Node
    hot: Node
    row: Node


@dataclass(frozen=True)
class _Targets:
    """What a loss needs of its targets: where they count, which class they hit, and that class's weight."""

    dim: int  # of the classes
    hot: Node  # [.., V, ..]: the class is the target
    valid: Node  # [.., 1, ..]: the target is not to be ignored
    weight: Node | None  # [.., 1, ..]: of the target's class


def _targets(e: Emit, x: Node, target: Node, weight: Node | None, ignore: int) -> _Targets:
    def make() -> _Targets:
        ndim = len(shape_of(x))
        dim = 0 if ndim == 1 else 1
        checked = e(check_index, target, shape_of(x)[dim], ignore)
        column = e(aten.unsqueeze.default, checked, dim)
        classes = e(aten.arange.default, shape_of(x)[dim], dtype=dtype_of(target))
        hot = e(aten.eq.Tensor, e.along(classes, dim, ndim), column)
        valid = e(aten.ne.Scalar, column, ignore)
        if weight is None:
            return _Targets(dim, hot, valid, None)
        spread = e.expand(e.along(weight, dim, ndim), shape_of(x))
        picked = e.sum(e.where(hot, spread, 0.0), [dim], True)
        return _Targets(dim, hot, valid, e.where(valid, picked, 0.0))

    # Backward meets the same targets; the mask of a million tokens is not made twice.
    return e.once(("targets", shape_of(x), dtype_of(x), target, weight, ignore), make)


@decompose(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(
    e: Emit, log_probs: Node, target: Node, weight: Node | None, reduction: int, ignore: int
) -> Result:
    t = _targets(e, log_probs, target, weight, ignore)
    out, ndim = dtype_of(log_probs), len(shape_of(log_probs))
    out = out if weight is None else torch.promote_types(out, dtype_of(weight))
    parts: LogSoftmax | None = e.memo.get(("log_softmax", log_probs))
    split = parts is not None and parts.dim == t.dim
    values = parts.shifted if parts is not None and split else e.wide(log_probs)

    def weighed(x: Node) -> Node:
        return x if t.weight is None else e.mul(x, t.weight)

    picked = weighed(e.where(t.valid, e.sum(e.where(t.hot, values, 0.0), [t.dim], True), 0.0))
    base = weighed(e.where(t.valid, parts.log_total, 0.0)) if parts is not None and split else None
    if reduction not in (MEAN, SUM) and ndim > 1:
        rows = e.neg(picked) if base is None else e.sub(base, picked)
        return e(aten.squeeze.dim, e.cast(rows, out), t.dim), e.full([], 0.0, out)
    every = list(range(ndim))
    counted = e.cast(t.valid, dtype_of(values)) if t.weight is None else t.weight
    count = e.sum(counted, every)
    total = e.sum(picked, every)
    loss = e.neg(total) if base is None else e.sub(e.sum(base, every), total)
    if reduction == MEAN:
        loss = e.div(loss, count)
    return e.cast(loss, out), e.cast(count, out)


@decompose(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    e: Emit, g: Node, log_probs: Node, target: Node, weight: Node | None, reduction: int, ignore: int, total: Node
) -> Result:
    t = _targets(e, log_probs, target, weight, ignore)
    ndim = len(shape_of(log_probs))
    if reduction == MEAN:
        g = e.div(g, total)
    g = e(aten.unsqueeze.default, g, t.dim) if shape_of(g) else e.view(g, [1] * ndim)
    row = e.where(t.valid, g, 0.0)
    if t.weight is not None:
        row = e.mul(row, e.cast(t.weight, dtype_of(row)))
    result = e.where(t.hot, e.neg(row), 0.0)
    e.memo["nll_backward", result] = NllBackward(log_probs, t.hot, row)
    return result
