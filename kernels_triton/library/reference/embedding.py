"""The gradient of an embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton.library.reference.wide import wide


def embedding_backward(
    grad: Tensor, index: Tensor, classes: int, padding: int = -1, total: Tensor | None = None
) -> Tensor:
    """Row i of [classes, columns] is the sum of the rows of grad [tokens, columns] whose index [tokens] is i.

    The row of index `padding` is 0. An index out of range adds to no row. Given total [classes, columns], the rows are
    added to it, in place. Raises torch's IndexError for other than one index a row.
    """
    counts = (index >= 0) & (index < classes) & (index != padding)
    sums = wide(grad).new_zeros((classes + 1, grad.shape[1]))
    sums.index_add_(0, torch.where(counts, index, classes), wide(grad))
    return sums[:classes].to(grad.dtype) if total is None else total.add_(sums[:classes])
