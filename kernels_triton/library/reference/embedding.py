"""The gradient of an embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton.library.reference.wide import wide


def embedding_backward(grad: Tensor, index: Tensor, classes: int, padding: int = -1) -> Tensor:
    """Row i of [classes, columns] is the sum of the rows of grad [tokens, columns] whose index [tokens] is i.

    The row of index `padding` is 0. An index out of range adds to no row. Raises torch's IndexError for other than one
    index a row.
    """
    counts = (index >= 0) & (index < classes) & (index != padding)
    sums = wide(grad).new_zeros((classes + 1, grad.shape[1]))
    return sums.index_add_(0, torch.where(counts, index, classes), wide(grad))[:classes].to(grad.dtype)
