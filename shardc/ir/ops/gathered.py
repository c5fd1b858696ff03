"""`whole_dim`: a tensor, unchanged, one dim of which every rank must hold whole.

A model's head shards the vocabulary; who chooses the next token by what the library's own code makes of all logits
reads a whole row of them. The rows stay where they are.
"""

from __future__ import annotations

from torch import Tensor

from kernels_triton.base.library import define

WHOLE_DIM = define(
    "whole_dim(Tensor x, int dim) -> Tensor",
    lambda x, dim: x.clone(),
    lambda x, dim: x.new_empty(x.shape),
)


def whole_dim(x: Tensor, dim: int) -> Tensor:
    """The same tensor; a compiled program gathers the dim."""
    return WHOLE_DIM(x, dim)
