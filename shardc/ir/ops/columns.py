"""A number of each row, by its column: what cross-entropy takes of its logits, and of their gradient.

    pick_column(values, column)              [N, V], [N, 1] -> [N, 1]: values[n, column[n]]
    subtract_at(values, column, amount)      the same values, less amount[n] at values[n, column[n]]

A row whose column is none of the V yields 0, and stays as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton.base.library import define


def _at_columns(values: Tensor, column: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which rows have their column, a column of each row, and the values there."""
    inside = column.clamp(0, values.shape[1] - 1)
    return inside == column, inside, values.gather(1, inside)


def _pick_column(values: Tensor, column: Tensor) -> Tensor:
    exists, _, picked = _at_columns(values, column)
    return torch.where(exists, picked, 0.0)


def _subtract_at(values: Tensor, column: Tensor, amount: Tensor) -> Tensor:
    return write_subtract_at(values, column, amount, out=values.clone(memory_format=torch.contiguous_format))


def write_subtract_at(values: Tensor, column: Tensor, amount: Tensor, *, out: Tensor) -> Tensor:
    """The same, where `out` has the values already: their own memory, or a copy."""
    exists, column, picked = _at_columns(values, column)
    return out.scatter_(1, column, torch.where(exists, picked - amount, picked))


PICK_COLUMN = define(
    "pick_column(Tensor values, Tensor column) -> Tensor",
    _pick_column,
    lambda values, column: values.new_empty(column.shape),
)
SUBTRACT_AT = define(
    "subtract_at(Tensor values, Tensor column, Tensor amount) -> Tensor",
    _subtract_at,
    lambda values, column, amount: values.new_empty(values.shape),
)
