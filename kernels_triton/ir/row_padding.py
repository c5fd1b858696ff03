"""Row padding: lanes after a row's last column that loads may read, and stores that write zeros there.

    x   bf16[8192,5008]@0:5008,1 over 5001 columns      loads end with column 5007; the padding's values are not used
    y = bf16[8192,5008]@0:5008,1+0                      stores end there too, and write zeros to the padding

A GPU moves 16 bytes at a time only if no element among them is masked on its own. Rows of an odd number of columns
would be moved element by element, however well they are aligned. With padding, loads and stores end with a whole UNIT
of columns, as blocks of columns do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kernels_triton.ir.access_map import AccessMap

UNIT = 8  # columns: 16 bytes of the narrowest floats
BYTES = 16


def padded_columns(cols: int) -> int:
    """The number of columns, rounded up to whole units."""
    return -(-cols // UNIT) * UNIT


def padding_is_readable(access_map: AccessMap, shape: Sequence[int], dtype: torch.dtype, space: Sequence[int]) -> bool:
    """Whether the tensor has elements up to the end of the last unit, in rows that are aligned to 16 bytes."""
    cols, elements = space[-1], max(1, BYTES // dtype.itemsize)
    aligned = access_map.strides[-1] == 1 and not any(
        number % elements for number in (access_map.offset, *access_map.strides[:-1])
    )
    return (
        bool(cols % UNIT)
        and aligned
        and access_map.last_element(space) + padded_columns(cols) - cols < math.prod(shape)
    )


def is_padded_output(access_map: AccessMap, shape: Sequence[int], space: Sequence[int]) -> bool:
    """Whether an access map covers whole rows of a tensor, in some order, each row with padding to the end of its last
    unit."""
    cols = space[-1]
    padded = padded_columns(cols)
    row_strides = sorted((stride, n) for stride, n in zip(access_map.strides[:-1], space[:-1], strict=True) if n > 1)
    expected = [padded * math.prod(n for _, n in row_strides[:index]) for index in range(len(row_strides))]
    is_dense = (
        access_map.offset == 0 and access_map.strides[-1] == 1 and [stride for stride, _ in row_strides] == expected
    )
    return is_dense and UNIT < cols < padded and math.prod(shape) == padded * math.prod(space[:-1])
