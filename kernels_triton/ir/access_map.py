"""Access maps: the memory offset of a tensor's element as an affine function of a kernel's indices.

x   f32[4, 6], transposed, over a space of (6, 4)      offset 0, strides (1, 6)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AccessMap:
    """The element of a contiguous tensor that a point of the space reads or writes: `offset + sum(strides *
    indices)`."""

    offset: int
    strides: tuple[int, ...]

    def last_element(self, space: Sequence[int]) -> int:
        """The largest offset that any point of the space accesses."""
        return self.offset + sum(max(s, 0) * (n - 1) for s, n in zip(self.strides, space, strict=True))

    def first_element(self, space: Sequence[int]) -> int:
        """The smallest offset that any point of the space accesses."""
        return self.offset + sum(min(s, 0) * (n - 1) for s, n in zip(self.strides, space, strict=True))


def contiguous_map(space: Sequence[int], offset: int = 0) -> AccessMap:
    """The map of a tensor with one element for each point of the space, in row-major order."""
    strides = [math.prod(space[i + 1 :]) if n > 1 else 0 for i, n in enumerate(space)]
    return AccessMap(offset, tuple(strides))


def broadcast_map(shape: Sequence[int], space: Sequence[int]) -> AccessMap:
    """The map of a tensor whose shape broadcasts to the space; dims are aligned at the right, as in torch."""
    padded = (*(1,) * (len(space) - len(shape)), *shape)
    assert len(padded) == len(space), (shape, space)
    assert all(n in (1, m) for n, m in zip(padded, space, strict=True)), (shape, space)
    return contiguous_map(padded)
