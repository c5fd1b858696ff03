"""Addresses: a tensor's access map as an expression of `r`, the tile's rows, and `c`, its columns.

`r` numbers the rows of the space, with all row dims flattened. Adjacent dims that an access map steps through uniformly
need no division. For the others the index along them is derived from `r` by constants, `r // inner % size`, once a
kernel. Offsets are 64 bits wide only for tensors that reach beyond 2^31 elements. `b`, constant in a program, numbers
the points of the batch dims in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kernels_triton.ir.access_map import AccessMap
from kernels_triton.ir.kernel import Kernel

INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class IndexTerm:
    """`stride * (r // inner % size)`; size 0 means no modulus."""

    inner: int
    size: int
    stride: int
    of: str = "r"

    @property
    def name(self) -> str:
        """The name of the index: `r`, `r_div_64`, `r_mod_16`, `r_div_64_mod_16`."""
        name = self.of if self.inner == 1 else f"{self.of}_div_{self.inner}"
        return f"{name}_mod_{self.size}" if self.size else name

    @property
    def definition(self) -> str:
        text = self.of if self.inner == 1 else f"{self.of} // {self.inner}"
        return f"{text} % {self.size}" if self.size else text


def index_terms(space: Sequence[int], strides: Sequence[int], batch: int) -> list[IndexTerm]:
    """The terms of an access map's batch and row dims, outermost first. Dims of stride 0 have no term."""
    rows = slice(batch, len(space) - 1)
    return [*_terms_of_dims(space[:batch], strides[:batch], "b"), *_terms_of_dims(space[rows], strides[rows], "r")]


def _terms_of_dims(space: Sequence[int], strides: Sequence[int], of: str) -> list[IndexTerm]:
    merged: list[tuple[int, int, int]] = []  # (inner, size, stride), innermost first
    inner = 1
    for size, stride in zip(reversed(space), reversed(strides), strict=True):
        if size > 1:
            if merged and stride == merged[-1][2] * merged[-1][1]:
                previous = merged[-1]
                merged[-1] = (previous[0], previous[1] * size, previous[2])
            else:
                merged.append((inner, size, stride))
        inner *= size
    total = math.prod(space)
    return [IndexTerm(i, 0 if i * n == total else n, s, of) for i, n, s in reversed(merged) if s]


def index_along(space: Sequence[int], dim: int, batch: int) -> IndexTerm | None:
    """The index along one row or batch dim; None if it is always 0."""
    indices = index_terms(space, [int(d == dim) for d in range(len(space))], batch)
    return indices[0] if indices else None


def tile_offsets(kernel: Kernel, access_map: AccessMap, column: str, wide: bool | None = None) -> str:
    """The expression of a tile's offsets; "" for the tensor's first element. `column` is the name of the column
    indices."""
    if wide is None:
        wide = access_map.last_element(kernel.space) > INT32_MAX
    parts = [
        _product(term.name, term.stride, wide) for term in index_terms(kernel.space, access_map.strides, kernel.batch)
    ]
    if access_map.strides[-1]:
        parts.append(
            _product(column, access_map.strides[-1], wide and abs(access_map.strides[-1]) * kernel.cols > INT32_MAX)
        )
    text = " + ".join(parts)
    if access_map.offset:
        text = f"{access_map.offset} + {text}" if text else str(access_map.offset)
    return text


def _product(name: str, stride: int, wide: bool) -> str:
    index = f"{name}.to(tl.int64)" if wide else name
    return index if stride == 1 else f"{index} * {stride}"


def derived_indices(kernel: Kernel) -> Iterator[IndexTerm]:
    """Every index that is derived from `b` or `r`, each once."""
    names_put: set[str] = set()
    strides_of_maps = [tensor.access_map.strides for tensor in kernel.inputs]
    strides_of_maps += [store.access_map.strides for output in kernel.outputs for store in output.stores]
    strides_of_maps += [step.attributes[1:] for step in kernel.steps if step.op == "uniform"]
    wanted = [term for strides in strides_of_maps for term in index_terms(kernel.space, strides, kernel.batch)]
    for step in kernel.steps:
        if step.op == "iota" and step.attributes[0] < len(kernel.space) - 1:
            index = index_along(kernel.space, step.attributes[0], kernel.batch)
            wanted += [index] if index else []
    for term in wanted:
        if term.name not in ("b", "r") and term.name not in names_put:
            names_put.add(term.name)
            yield term
