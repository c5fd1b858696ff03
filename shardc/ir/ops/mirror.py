"""The rows of a dim in the other order, of which ranks have parts.

    mirror        x, of a whole dim           0 1 2 3 4 5 6 7  ->  7 6 5 4 3 2 1 0
    mirror_rows   a rank's rows, each in the place of the rank as far from the end       rank 0: 0 1  ->  7 6

Of a zigzag a rank has the rows of both ends, so that `mirror` of its own is all that there is to do.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from kernels_triton.base.library import define
from shardc.ir.ops.collectives import COLLECTIVES, Exchange, Steps, run_collective
from shardc.ir.ops.context import current


def _mirror(x: Tensor, dim: int) -> Tensor:
    return x.flip(dim).contiguous()


def _mirror_rows(x: Tensor, axes: list[str], dim: int) -> Steps:
    source = tuple(reversed(range(current().mesh.size(axes))))
    received = yield Exchange("permute", _mirror(x, dim), tuple(axes), source=source)
    return received


MIRROR = define("mirror(Tensor x, int dim) -> Tensor", _mirror, lambda x, dim: x.new_empty(x.shape))
MIRROR_ROWS = define(
    "mirror_rows(Tensor x, str[] axes, int dim) -> Tensor",
    partial(run_collective, _mirror_rows),
    lambda x, axes, dim: x.new_empty(x.shape),
)
COLLECTIVES[MIRROR_ROWS] = _mirror_rows
