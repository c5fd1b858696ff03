"""Weight norm, one gain for each index of a dim: w = v * g / |v|, with |v| over all the other dims.

In pieces, so that these may be sharded as well: a shard's part of |v|^2 is a pending sum.
"""

from __future__ import annotations

from shardc.passes.normalize.decompositions.table import Emit, Node, aten, decompose, dtype_of, shape_of


def _over_others(e: Emit, x: Node, dim: int) -> Node:
    """The sum over all dims but one, which are kept."""
    ndim = len(shape_of(x))
    return e.sum(x, [d for d in range(ndim) if d != dim % ndim], True)


@decompose(aten._weight_norm_interface.default)
def weight_norm(e: Emit, v: Node, g: Node, dim: int) -> tuple[Node, Node]:
    wide = e.wide(v)
    norm = e(aten.sqrt.default, _over_others(e, e.mul(wide, wide), dim))
    # The declared dtype of the norm differs where v has 16 bits.
    norm_dtype = next((dtype_of(user) for user in e.at.users if user.args[1] == 1), dtype_of(norm))
    return e.cast(e.mul(wide, e.div(e.wide(g), norm)), dtype_of(v)), e.cast(norm, norm_dtype)


@decompose(aten._weight_norm_interface_backward.default)
def weight_norm_backward(e: Emit, grad: Node, v: Node, g: Node, norm: Node, dim: int) -> tuple[Node, Node]:
    """Of the gradient only what is across v turns it; what is along v changes the gain."""
    grad, wide, gain, norm = e.wide(grad), e.wide(v), e.wide(g), e.wide(norm)
    along = e.div(_over_others(e, e.mul(grad, wide), dim), norm)
    across = e.sub(grad, e.mul(wide, e.div(along, norm)))
    return e.cast(e.mul(across, e.div(gain, norm)), dtype_of(v)), e.cast(along, dtype_of(g))
