"""Losses that compare two tensors: elementwise, then a sum divided by the global count."""

from __future__ import annotations

from shardc.passes.normalize.decompositions.cross_entropy import MEAN, SUM
from shardc.passes.normalize.decompositions.reductions import mean as mean_of
from shardc.passes.normalize.decompositions.table import Emit, Node, Result, aten, decompose, extent, shape_of


def _reduced(e: Emit, rows: Node, reduction: int) -> Node:
    if reduction == MEAN:
        return mean_of(e, rows, None, False, None)
    return e.sum(rows, list(range(len(shape_of(rows))))) if reduction == SUM else rows


def _scaled(e: Emit, g: Node, x: Node, reduction: int) -> Node:
    """The gradient of each element's own loss."""
    return e.div(g, extent(x, range(len(shape_of(x))))) if reduction == MEAN else g


@decompose(aten.mse_loss.default)
def mse_loss(e: Emit, x: Node, y: Node, reduction: int) -> Result:
    off = e.sub(x, y)
    return _reduced(e, e.mul(off, off), reduction)


@decompose(aten.mse_loss_backward.default)
def mse_loss_backward(e: Emit, g: Node, x: Node, y: Node, reduction: int) -> Result:
    off = e.sub(x, y)
    return e.mul(off, e.mul(_scaled(e, g, off, reduction), 2.0))


@decompose(aten.smooth_l1_loss.default)
def smooth_l1_loss(e: Emit, x: Node, y: Node, reduction: int, beta: float) -> Result:
    off = e(aten.abs.default, e.sub(x, y))
    if beta == 0:
        return _reduced(e, off, reduction)
    small = e.div(e.mul(e.mul(off, off), 0.5), beta)
    return _reduced(e, e.where(e(aten.lt.Scalar, off, beta), small, e.sub(off, 0.5 * beta)), reduction)


@decompose(aten.smooth_l1_loss_backward.default)
def smooth_l1_loss_backward(e: Emit, g: Node, x: Node, y: Node, reduction: int, beta: float) -> Result:
    off = e.sub(x, y)
    slope = e(aten.sign.default, off)
    if beta != 0:
        near = e(aten.lt.Scalar, e(aten.abs.default, off), beta)
        slope = e.where(near, e.div(off, beta), slope)
    return e.mul(slope, _scaled(e, g, off, reduction))


@decompose(aten.huber_loss.default)
def huber_loss(e: Emit, x: Node, y: Node, reduction: int, delta: float) -> Result:
    off = e(aten.abs.default, e.sub(x, y))
    small, large = e.mul(e.mul(off, off), 0.5), e.mul(e.sub(off, 0.5 * delta), delta)
    return _reduced(e, e.where(e(aten.le.Scalar, off, delta), small, large), reduction)


@decompose(aten.huber_loss_backward.default)
def huber_loss_backward(e: Emit, g: Node, x: Node, y: Node, reduction: int, delta: float) -> Result:
    off = e.sub(x, y)
    return e.mul(e(aten.clamp.default, off, -delta, delta), _scaled(e, g, off, reduction))


@decompose(aten.binary_cross_entropy.default)
def binary_cross_entropy(e: Emit, x: Node, y: Node, weight: Node | None, reduction: int) -> Result:
    # torch clamps the logarithms at -100, so that a confident error has a finite loss.
    right = e(aten.clamp.default, e.log(x), -100)
    wrong = e(aten.clamp.default, e(aten.log1p.default, e.neg(x)), -100)
    rows = e.sub(e.mul(e.sub(y, 1), wrong), e.mul(y, right))
    return _reduced(e, rows if weight is None else e.mul(rows, weight), reduction)


@decompose(aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward(e: Emit, g: Node, x: Node, y: Node, weight: Node | None, reduction: int) -> Result:
    spread = e(aten.clamp.default, e.sub(x, e.mul(x, x)), 1e-12)
    slope = e.div(e.sub(x, y), spread)
    slope = slope if weight is None else e.mul(slope, weight)
    return e.mul(slope, _scaled(e, g, x, reduction))


@decompose(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(
    e: Emit, x: Node, y: Node, weight: Node | None, pos_weight: Node | None, reduction: int
) -> Result:
    # (1 - y) x + w log(1 + exp(-x)), with w = 1 + (pos_weight - 1) y, in the form that does not overflow
    flipped = e.neg(x)
    softplus = e.add(e(aten.log1p.default, e.exp(e.neg(e(aten.abs.default, x)))), e(aten.clamp.default, flipped, 0))
    if pos_weight is not None:
        softplus = e.mul(softplus, e.add(e.mul(e.sub(pos_weight, 1), y), 1))
    rows = e.add(e.mul(e.add(e.neg(y), 1), x), softplus)
    return _reduced(e, rows if weight is None else e.mul(rows, weight), reduction)


@decompose(aten.soft_margin_loss.default)
def soft_margin_loss(e: Emit, x: Node, y: Node, reduction: int) -> Result:
    return _reduced(e, e(aten.log1p.default, e.exp(e.mul(e.neg(x), y))), reduction)


@decompose(aten.soft_margin_loss_backward.default)
def soft_margin_loss_backward(e: Emit, g: Node, x: Node, y: Node, reduction: int) -> Result:
    slope = e.neg(e.mul(y, e(aten.sigmoid.default, e.mul(e.neg(x), y))))
    return e.mul(slope, _scaled(e, g, x, reduction))
