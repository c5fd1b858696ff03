"""Batch norm as sums over the whole batch: what one device computes, however the batch is sharded.

Training statistics are `sum / N` with the global N, so a sharded batch sums them over its axes ("synchronised"
batch norm) without anyone asking for it. Low precision is computed in float32, as torch does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardc.ir.graph import type_of, update
from shardc.passes.normalize.decompositions.reductions import moments
from shardc.passes.normalize.decompositions.table import HALF, Emit, Node, Result, aten, decompose, dtype_of, shape_of


def _channels(e: Emit, vector: Node | None, x: Node) -> Node:
    """A per-channel vector in the broadcast shape [1, C, 1, ...], wide."""
    assert vector is not None, "batch norm without the statistics that it needs"
    return e.along(e.wide(vector), 1, len(shape_of(x)))


def _others(x: Node) -> list[int]:
    return [d for d in range(len(shape_of(x))) if d != 1]


def _scale_shift(e: Emit, xhat: Node, weight: Node | None, bias: Node | None, x: Node) -> Node:
    out = xhat if weight is None else e.mul(xhat, _channels(e, weight, x))
    out = out if bias is None else e.add(out, _channels(e, bias, x))
    return e.cast(out, dtype_of(x))


def _flat(e: Emit, vector: Node) -> Node:
    return e.view(vector, [math.prod(shape_of(vector))])


def _rstd(e: Emit, var: Node, eps: float) -> Node:
    return e(aten.rsqrt.default, e.add(var, eps))


def _training(e: Emit, x: Node, weight: Node | None, bias: Node | None, eps: float) -> tuple[Node, Node, Node, Node]:
    """Output, mean, rstd and the biased variance, the last three flat."""
    wide = e.wide(x)
    var, mean = moments(e, wide, _others(x))
    rstd = _rstd(e, var, eps)
    out = _scale_shift(e, e.mul(e.sub(wide, mean), rstd), weight, bias, x)
    return out, _flat(e, mean), _flat(e, rstd), _flat(e, var)


def _declare(e: Emit, running: Sequence[Node] = ()) -> None:
    """Statistics for backward have the dtype that they are computed in, running ones their own; fakes say otherwise."""
    for user in e.at.users:
        position = user.args[1]
        assert isinstance(position, int)
        if position in (1, 2) and dtype_of(user) in HALF:
            update(user, type=type_of(user).with_dtype(torch.float32))
        elif position > 2:
            update(user, type=type_of(user).with_dtype(dtype_of(running[position - 3])))


def _inference(
    e: Emit, x: Node, weight: Node | None, bias: Node | None, mean: Node | None, var: Node | None, eps: float
) -> Node:
    centre, spread = _channels(e, mean, x), _channels(e, var, x)
    return _scale_shift(e, e.mul(e.sub(e.wide(x), centre), _rstd(e, spread, eps)), weight, bias, x)


def _updated(e: Emit, running: Node, now: Node, momentum: float) -> Node:
    mixed = e.add(e.mul(now, momentum), e.mul(running, 1 - momentum))
    return e.cast(mixed, dtype_of(running))


@decompose(aten._native_batch_norm_legit_functional.default)
def batch_norm_functional(
    e: Emit, x: Node, weight: Node | None, bias: Node | None, mean: Node, var: Node,
    training: bool, momentum: float, eps: float,
) -> Result:  # fmt: skip
    _declare(e, (mean, var))
    if not training:
        empty = e.full([0], 0.0, dtype_of(e.wide(x)))
        return _inference(e, x, weight, bias, mean, var, eps), empty, empty, mean, var
    out, now, rstd, biased = _training(e, x, weight, bias, eps)
    n = math.prod(shape_of(x)[d] for d in _others(x))
    unbiased = e.mul(biased, n / max(1, n - 1))
    return out, now, rstd, _updated(e, mean, now, momentum), _updated(e, var, unbiased, momentum)


@decompose(aten.native_batch_norm.default)
def native_batch_norm(
    e: Emit, x: Node, weight: Node | None, bias: Node | None, mean: Node | None, var: Node | None,
    training: bool, momentum: float, eps: float,
) -> Result:  # fmt: skip
    _declare(e)
    if not training:
        empty = e.full([0], 0.0, dtype_of(e.wide(x)))
        return _inference(e, x, weight, bias, mean, var, eps), empty, empty
    return _training(e, x, weight, bias, eps)[:3]


@decompose(aten._native_batch_norm_legit.no_stats)
def batch_norm_no_stats(
    e: Emit, x: Node, weight: Node | None, bias: Node | None, training: bool, momentum: float, eps: float
) -> Result:
    _declare(e)
    return _training(e, x, weight, bias, eps)[:3]


@decompose(aten._native_batch_norm_legit_no_training.default)
def batch_norm_no_training(
    e: Emit, x: Node, weight: Node | None, bias: Node | None, mean: Node, var: Node, momentum: float, eps: float
) -> Result:
    _declare(e)
    empty = e.full([0], 0.0, dtype_of(e.wide(x)))
    return _inference(e, x, weight, bias, mean, var, eps), empty, empty


@decompose(aten.native_batch_norm_backward.default)
def batch_norm_backward(
    e: Emit, g: Node, x: Node, weight: Node | None, mean: Node | None, var: Node | None,
    save_mean: Node | None, save_rstd: Node | None, training: bool, eps: float, mask: Sequence[bool],
) -> Result:  # fmt: skip
    dims, grad = _others(x), e.wide(g)
    centre = _channels(e, save_mean if training else mean, x)
    spread = _channels(e, save_rstd if training else var, x)
    rstd = spread if training else _rstd(e, spread, eps)
    xhat = e.mul(e.sub(e.wide(x), centre), rstd)
    sum_g, sum_gx = e.sum(grad, dims, True), e.sum(e.mul(grad, xhat), dims, True)
    if training:
        n = math.prod(shape_of(x)[d] for d in dims)
        grad = e.sub(e.sub(grad, e.div(sum_g, n)), e.mul(xhat, e.div(sum_gx, n)))
    scale = rstd if weight is None else e.mul(rstd, _channels(e, weight, x))
    dx = e.cast(e.mul(grad, scale), dtype_of(x))
    kind = dtype_of(x) if weight is None else dtype_of(weight)
    dweight, dbias = e.cast(_flat(e, sum_gx), kind), e.cast(_flat(e, sum_g), kind)
    return tuple(value if needed else None for value, needed in zip((dx, dweight, dbias), mask, strict=True))
