"""What lies behind a row's last column: padding that may be read, and zeros that an output asks for.

    x   bf16[8192,5008]@0:5008,1 over 5001 columns      its loads end with column 5007, what they find there is not used
    y = bf16[8192,5008]@0:5008,1+0                      as do its stores, which write zeros there

A GPU moves 16 bytes at a time only if none of them is masked apart, so rows of an odd number of columns would be moved
element by element however well they are aligned. Both end with a whole UNIT of columns, and so do blocks of columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels_triton.fused.kernel import Input, Walk

UNIT = 8  # columns: 16 bytes of the narrowest floats
BYTES = 16


def end(cols: int) -> int:
    """Where the last unit of columns ends."""
    return -(-cols // UNIT) * UNIT


def readable(given: Input, space: Sequence[int]) -> bool:
    """Is there something to read to the end of the last unit, in rows that begin with 16 bytes?"""
    cols, walk, step = space[-1], given.walk, max(1, BYTES // given.dtype.itemsize)
    aligned = walk.strides[-1] == 1 and not any(at % step for at in (walk.offset, *walk.strides[:-1]))
    return bool(cols % UNIT) and aligned and walk.last(space) + end(cols) - cols < math.prod(given.shape)


def padded(walk: Walk, shape: Sequence[int], space: Sequence[int]) -> bool:
    """Is a tensor, walked so, one of whole rows in some order, each with zeros to the end of its last unit?"""
    cols = space[-1]
    wide = end(cols)
    rows = sorted((stride, n) for stride, n in zip(walk.strides[:-1], space[:-1], strict=True) if n > 1)
    apart = [wide * math.prod(n for _, n in rows[:at]) for at in range(len(rows))]
    whole = walk.offset == 0 and walk.strides[-1] == 1 and [stride for stride, _ in rows] == apart
    return whole and UNIT < cols < wide and math.prod(shape) == wide * math.prod(space[:-1])
