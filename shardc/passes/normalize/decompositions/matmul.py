"""Fused products taken apart: a bias must be added once, not once for every pending sum.

addmm(b, x, w)  ->  mm(x, w) + b          convolution(x, w, b)  ->  convolution(x, w) + b
"""

from __future__ import annotations

from typing import Any

from shardc.ir.graph import info, update
from shardc.passes.normalize.decompositions.table import KEEP, Emit, Node, Result, aten, decompose, shape_of


@decompose(aten.addmm.default, sometimes=True)
def addmm(e: Emit, bias: Node, a: Node, b: Node, beta: float, alpha: float) -> Result:
    if _of_whole_matrices(e.at, bias):
        return KEEP
    return _scaled_sum(e, bias, e(aten.mm.default, a, b), beta, alpha)


@decompose(aten.baddbmm.default, sometimes=True)
def baddbmm(e: Emit, bias: Node, a: Node, b: Node, beta: float, alpha: float) -> Result:
    if _of_whole_matrices(e.at, bias):
        return KEEP
    return _scaled_sum(e, bias, e(aten.bmm.default, a, b), beta, alpha)


@decompose(aten.addmv.default)
def addmv(e: Emit, bias: Node, a: Node, v: Node, beta: float, alpha: float) -> Result:
    return _scaled_sum(e, bias, _mv(e, a, v), beta, alpha)


@decompose(aten.mv.default)
def mv(e: Emit, a: Node, v: Node) -> Result:
    return _mv(e, a, v)


@decompose(aten.dot.default, aten.vdot.default)
def dot(e: Emit, a: Node, b: Node) -> Result:
    return e.sum(e.mul(a, b), [0])


def _of_whole_matrices(call: Node, bias: Node) -> bool:
    """An optimizer's, whose matrices are whole: nothing is pending in it, and eager PyTorch rounds it once."""
    return info(call).phase == "opt" and shape_of(bias) == shape_of(call)


def _mv(e: Emit, a: Node, v: Node) -> Node:
    return e.view(e(aten.mm.default, a, e.view(v, [*shape_of(v), 1])), shape_of(a)[:1])


def _scaled_sum(e: Emit, bias: Node, product: Node, beta: float, alpha: float) -> Node:
    product = product if alpha == 1 else e.mul(product, alpha)
    if beta == 0:  # torch promises that a NaN in the bias is not seen then
        return product
    return e.add(product, bias if beta == 1 else e.mul(bias, beta))


@decompose(aten.convolution.default, sometimes=True)
def convolution(e: Emit, x: Node, w: Node, bias: Node | None, *options: Any) -> Result:
    if bias is None:
        return KEEP
    out = e(aten.convolution.default, x, w, None, *options)
    ndim = len(shape_of(out))
    return e.add(out, e.along(bias, ndim - len(shape_of(w)) + 1, ndim))


@decompose(aten.convolution_backward.default, sometimes=True)
def convolution_backward(e: Emit, g: Node, x: Node, w: Node, bias_sizes: Any, *options: Any) -> Result:
    *geometry, mask = options
    if not mask[2]:
        return KEEP
    channel = len(shape_of(g)) - len(shape_of(w)) + 1
    gb = e.sum(g, [d for d in range(len(shape_of(g))) if d != channel])
    # The call stays, for the other two results.
    e.at.args = (g, x, w, None, *geometry, [*mask[:2], False])
    update(e.at, results=(*info(e.at).results[:2], None))
    return (None, None, gb)
