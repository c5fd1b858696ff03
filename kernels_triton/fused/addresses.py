"""Where a tile's elements lie: a tensor's walk as an expression of `r`, the rows of the tile, and `c`, its columns.

`r` numbers the rows of the space, all row dims flattened. Adjacent dims that a tensor walks as one need no division;
for the others the index along them is taken out of `r` by constants, `r // inner % size`, once a kernel. Offsets are
64 bits wide only for a tensor that reaches beyond 2^31 elements. `b`, a program's own, numbers the points of the batch
dims alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kernels_triton.fused.kernel import Kernel, Walk

LIMIT = 2**31 - 1


@dataclass(frozen=True)
class Term:
    """`stride * (r // inner % size)`; size 0: no modulus."""

    inner: int
    size: int
    stride: int
    of: str = "r"

    @property
    def name(self) -> str:
        """The index's: `r`, `r_div_64`, `r_mod_16`, `r_div_64_mod_16`."""
        name = self.of if self.inner == 1 else f"{self.of}_div_{self.inner}"
        return f"{name}_mod_{self.size}" if self.size else name

    @property
    def definition(self) -> str:
        text = self.of if self.inner == 1 else f"{self.of} // {self.inner}"
        return f"{text} % {self.size}" if self.size else text


def terms(space: Sequence[int], strides: Sequence[int], batch: int) -> list[Term]:
    """A walk's batch dims and rows, outermost first; dims that the walk does not move along have none."""
    rows = slice(batch, len(space) - 1)
    return [*_terms(space[:batch], strides[:batch], "b"), *_terms(space[rows], strides[rows], "r")]


def _terms(space: Sequence[int], strides: Sequence[int], of: str) -> list[Term]:
    found: list[tuple[int, int, int]] = []  # (inner, size, stride), innermost first
    inner = 1
    for size, stride in zip(reversed(space), reversed(strides), strict=True):
        if size > 1:
            if found and stride == found[-1][2] * found[-1][1]:
                before = found[-1]
                found[-1] = (before[0], before[1] * size, before[2])
            else:
                found.append((inner, size, stride))
        inner *= size
    every = math.prod(space)
    return [Term(i, 0 if i * n == every else n, s, of) for i, n, s in reversed(found) if s]


def along(space: Sequence[int], dim: int, batch: int) -> Term | None:
    """The index along one row or batch dim; None where it is always 0."""
    found = terms(space, [int(d == dim) for d in range(len(space))], batch)
    return found[0] if found else None


def offset(kernel: Kernel, walk: Walk, column: str, wide: bool | None = None) -> str:
    """The expression of a tile's offsets; "" for the tensor's first element. `column` names the columns."""
    if wide is None:
        wide = walk.last(kernel.space) > LIMIT
    parts = [_product(term.name, term.stride, wide) for term in terms(kernel.space, walk.strides, kernel.batch)]
    if walk.strides[-1]:
        parts.append(_product(column, walk.strides[-1], wide and abs(walk.strides[-1]) * kernel.cols > LIMIT))
    text = " + ".join(parts)
    if walk.offset:
        text = f"{walk.offset} + {text}" if text else str(walk.offset)
    return text


def _product(name: str, stride: int, wide: bool) -> str:
    index = f"{name}.to(tl.int64)" if wide else name
    return index if stride == 1 else f"{index} * {stride}"


def indices(kernel: Kernel) -> Iterator[Term]:
    """Every index that has to be taken out of `b` and `r`, each once."""
    seen: set[str] = set()
    walks = [given.walk.strides for given in kernel.inputs]
    walks += [store.walk.strides for made in kernel.outputs for store in made.stores]
    walks += [step.attributes[1:] for step in kernel.steps if step.op == "uniform"]
    wanted = [term for strides in walks for term in terms(kernel.space, strides, kernel.batch)]
    for step in kernel.steps:
        if step.op == "iota" and step.attributes[0] < len(kernel.space) - 1:
            found = along(kernel.space, step.attributes[0], kernel.batch)
            wanted += [found] if found else []
    for term in wanted:
        if term.name not in ("b", "r") and term.name not in seen:
            seen.add(term.name)
            yield term
