"""What `normalize` rewrites, by topic. Importing this package fills the table."""

from shardc.passes.normalize.decompositions import (
    batch_norm,
    canonical,
    cross_entropy,
    embedding_bag,
    indexing,
    losses,
    masked_scatter,
    matmul,
    reductions,
    weight_norm,
)
from shardc.passes.normalize.decompositions.table import DECOMPOSITIONS, KEEP, REMOVED, Emit

__all__ = [
    "DECOMPOSITIONS",
    "KEEP",
    "REMOVED",
    "Emit",
    "batch_norm",
    "canonical",
    "cross_entropy",
    "embedding_bag",
    "indexing",
    "losses",
    "masked_scatter",
    "matmul",
    "reductions",
    "weight_norm",
]
