"""A product whose result has a place: one `mm` of matrices, which writes it there.

    linear(x, w)         mm(x as [M, K], w.t(), out=y as [M, N])
    linear_dgrad(g, w)   mm(g as [M, N], w, out=x as [M, K])
    linear_wgrad(g, x)   mm(g.t() as [N, M], x as [M, K], out=w)

Of an operand or a place that is the same in every run the view is made here, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from torch import Tensor, fx

from shardc.ir.graph import operands, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.linear import LINEAR, LINEAR_DGRAD, LINEAR_WGRAD
from shardc.runtime.execute.call_arguments import CallArguments, Slot, Viewed

LINEARS = (LINEAR, LINEAR_DGRAD, LINEAR_WGRAD)


def prepare_linear(
    call: fx.Node,
    mesh: Mesh,
    slots: tuple[int, int],
    fixed: Mapping[int, Tensor],
    transposed: Callable[[int], Any],
    place: Any,
) -> CallArguments:
    """The arguments of `torch.mm` for a product of the values in two slots. `place` is where its result goes: a tensor
    that is the same in every run, or of a weight's gradient also a part of a template. `transposed` gives that of a
    matrix in a slot as part of a template."""
    left, right = (
        _matrix(slot, type_of(x).local_shape(mesh), fixed) for slot, x in zip(slots, operands(call), strict=True)
    )
    if call.target is LINEAR:
        right = right.t() if isinstance(right, Tensor) else transposed(slots[1])
    if call.target is LINEAR_WGRAD:
        left = left.t() if isinstance(left, Tensor) else _transposed(left)
    elif isinstance(place, Tensor):
        place = place.view(prod(place.shape[:-1]), place.shape[-1])
    return CallArguments((left, right), {"out": place})


def _matrix(slot: int, shape: tuple[int, ...], fixed: Mapping[int, Tensor]) -> Any:
    """A tensor [..., n] as [M, n]."""
    matrix = prod(shape[:-1]), shape[-1]
    x = fixed.get(slot)
    if x is not None and (x.is_contiguous() or x.dim() == 2):
        return x if x.dim() == 2 else x.view(matrix)
    return Slot(slot) if len(shape) == 2 else Viewed(Slot(slot), "reshape", matrix)


def _transposed(matrix: Any) -> Any:
    return Viewed(matrix, "t")
