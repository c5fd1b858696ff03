"""`check_index`: positions, unchanged, once they are known to lie in the dim that they count in.

An op that looks a position up in a whole dim refuses one that lies outside. Two do not notice: a lookup in a sharded
dim, where each rank masks what it does not own and nobody owns this one, and cross-entropy in pieces, which compares
classes with targets and finds none. Every rank sees global positions, so each can tell for itself.

On a GPU nothing is read back: a bad position is a device-side assertion, as it is in torch's own kernels.
"""

from __future__ import annotations

import torch

from kernels_triton.base.library import define
from shardc.torch_compat import assert_async


def allowed(index: torch.Tensor, low: int, size: int, ignored: int | None) -> torch.Tensor:
    """Where `index` lies in [low, size) or is the ignored value."""
    index = index.long()  # a narrow dtype does not hold `size`
    good = (index >= low) & (index < size)
    return good if ignored is None else good | (index == ignored)


def _check_index(index: torch.Tensor, size: int, ignored: int | None = None) -> torch.Tensor:
    if index.is_cpu and index.numel():  # where the least and the most are in range, all are
        low, high = torch.aminmax(index.long())
        if low.item() >= 0 and high.item() < size:
            return index.clone()
    good = allowed(index, 0, size, ignored).all()
    if index.is_cuda:
        assert_async(good, f"an index is not in [0, {size})")
    elif not good:
        raise IndexError(f"an index is not in [0, {size})")
    return index.clone()


check_index = define(
    "check_index(Tensor index, int size, int? ignored=None) -> Tensor",
    _check_index,
    lambda index, size, ignored=None: index.clone(),
)
