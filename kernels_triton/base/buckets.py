"""Where the members of a bucket begin: each is padded to a multiple of `unit` elements."""

from __future__ import annotations

from collections.abc import Sequence

import torch

ALIGNMENT = 16  # bytes: what a kernel that reads a member as a vector asks of its pointer


def unit_of(dtype: torch.dtype) -> int:
    """Elements that each member is padded to a multiple of."""
    return max(1, ALIGNMENT // dtype.itemsize)


def starts(columns: Sequence[int], unit: int) -> list[int]:
    """Where in a row each member begins, and where the row ends."""
    offsets = [0]
    for count in columns:
        offsets.append(offsets[-1] + -(-count // unit) * unit)
    return offsets
