"""Random connected kernels whose values stay small and smooth, so that float32 may be held against float64.

Every kind of value meets every other: full, row, column and scalar inputs in several dtypes and walks; pointwise ops,
comparisons of what is exact, casts, reductions one after another, sums over rows and what follows them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels_triton.fused.corpus import Draft
from kernels_triton.fused.kernel import Kernel, Output, Ref, Step, Store, Walk, broadcast, whole
from kernels_triton.rows import Schedule, power_of_two

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTS = (torch.int64, torch.int32, torch.bool)
ONE = ("tanh", "sigmoid", "abs", "neg", "sin", "cos", "erf", "bounded_exp", "bounded_log", "root", "rounded")
TWO = ("add", "sub", "mul", "maximum", "minimum", "div", "where")


@dataclass
class Grower:
    """A draft, and the floats among its values by whether they vary along rows and columns, or come of a sum."""

    k: Draft
    draw: st.DrawFn
    floats: list[Ref] = field(default_factory=list)
    exact: list[Ref] = field(default_factory=list)  # integers and bools: what may be compared

    def input(self) -> None:
        space = self.k.space
        dtype = self.draw(st.sampled_from(FLOATS + INTS))
        kind = self.draw(st.sampled_from(("full", "full", "half", "strided", "row", "col", "scalar", "some")))
        if kind == "half":  # of a packed tensor
            shape = (*space[:-1], 2 * space[-1])
            offset = self.draw(st.sampled_from((0, space[-1])))
            made = self.k.input(dtype, shape, Walk(offset, whole(shape).strides))
        elif kind == "strided":
            order = self.draw(st.permutations(range(len(space))))
            shape, walk = permuted(space, order)
            made = self.k.input(dtype, shape, walk)
        else:
            shape = {
                "full": space, "half": space, "strided": space, "row": (*space[:-1], 1), "col": space[-1:], "scalar": ()
            }.get(kind) or tuple(n if self.draw(st.booleans()) else 1 for n in space)  # fmt: skip
            shape = () if kind == "scalar" else shape
            made = self.k.input(dtype, shape, broadcast(shape, space))
        (self.floats if dtype.is_floating_point else self.exact).append(made)

    def pick(self) -> Ref:
        return self.draw(st.sampled_from(self.floats))

    def step(self) -> None:
        k, op = self.k, self.draw(st.sampled_from((*ONE, *TWO, "rsum", "rmax", "rmin", "rsum")))
        if op in ("rsum", "rmax", "rmin"):
            made = k(op, self.pick())
            made = k("mul", made, 1.0 / k.space[-1]) if op == "rsum" else made
        elif op == "bounded_exp":
            made = k("exp", k("minimum", self.pick(), 1.0))
        elif op == "bounded_log":
            made = k(self.draw(st.sampled_from(("log", "log2"))), k("add", k("abs", self.pick()), 1.0))
        elif op == "root":
            made = k(
                self.draw(st.sampled_from(("sqrt", "rsqrt", "reciprocal"))), k("add", k("square", self.pick()), 1.0)
            )
        elif op == "rounded":
            made = k("cast", self.pick(), dtype=self.draw(st.sampled_from(FLOATS)))
        elif op == "div":
            made = k("div", self.pick(), k("add", k("abs", self.pick()), 1.0))
        elif op == "where":
            made = k("where", self.condition(), self.pick(), self.draw(st.sampled_from((self.pick(), 0.5, 2))))
        elif op in ONE:
            made = k(op, self.pick())
        else:
            made = k(op, self.pick(), self.draw(st.sampled_from((self.pick(), 0.75, *self.exact))))
        if op in ("mul", "add", "sub", "bounded_exp"):
            made = k("tanh", made)
        self.floats.append(made)

    def condition(self) -> Ref:
        k = self.k
        if not self.exact or self.draw(st.booleans()):
            self.exact.append(k("iota", attributes=(self.draw(st.integers(0, len(k.space) - 1)),)))
        left = self.draw(st.sampled_from(self.exact))
        if self.draw(st.booleans()):
            left = k("add", left, self.draw(st.sampled_from((*self.exact, 2))))
        made = k(self.draw(st.sampled_from(("eq", "ne", "lt", "le", "gt", "ge"))), left, self.draw(st.integers(0, 6)))
        made = k("not", made) if self.draw(st.booleans()) else made
        self.exact.append(made)
        return made


def permuted(space: tuple[int, ...], order: list[int]) -> tuple[tuple[int, ...], Walk]:
    """A whole tensor whose dims are the space's in another order."""
    shape = tuple(space[d] for d in order)
    strides = whole(shape).strides
    return shape, Walk(0, tuple(strides[order.index(d)] for d in range(len(space))))


@st.composite
def kernels(draw: st.DrawFn) -> Kernel:
    rows = draw(st.lists(st.integers(1, 6), min_size=0, max_size=2))
    k = Draft((*rows, draw(st.sampled_from((1, 3, 8, 16, 33, 70)))))
    grower = Grower(k, draw)
    for _ in range(draw(st.integers(1, 4))):
        grower.input()
    if not grower.floats:
        grower.floats.append(k("cast", grower.exact[0], dtype=torch.float32))
    for _ in range(draw(st.integers(1, 8))):
        grower.step()
    stored = draw(st.lists(st.sampled_from(grower.floats), min_size=0, max_size=3, unique=True))
    for value in draw(st.lists(st.sampled_from(grower.floats), min_size=0 if stored else 1, max_size=2, unique=True)):
        total = k("csum", value)
        stored.append(total)
        if draw(st.booleans()):  # what follows a sum over rows
            stored.append(k("mul", total, 0.5))
    varies = _varies(k)
    for value in stored:
        shape = tuple(n if along else 1 for n, along in zip(k.space, varies[value.index], strict=True))
        if shape == k.space and draw(st.booleans()):
            shape, walk = permuted(shape, draw(st.permutations(range(len(shape)))))
            k.joined(draw(st.sampled_from(FLOATS)), shape, (value, walk))
        else:
            k.out(value, draw(st.sampled_from(FLOATS)), shape)
    return k.kernel("fused_random")


def _varies(k: Draft) -> tuple[tuple[bool, ...], ...]:
    """Of each value, before the kernel has outputs: one that stores a sum of everything."""
    last = len(k.inputs) + len(k.steps)
    total = (Step("rsum", (Ref(0),)), Step("cast", (Ref(last),), dtype=torch.float32), Step("csum", (Ref(last + 1),)))
    walk = Walk(0, (0,) * len(k.space))
    stored = Output(torch.float32, (), (Store(Ref(last + 2), walk),))
    return Kernel("probe", k.space, tuple(k.inputs), (*k.steps, *total), (stored,)).varies


def arguments(kernel: Kernel, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made: list[Tensor] = []
    for given in kernel.inputs:
        if given.dtype.is_floating_point:
            made.append(torch.randn(given.shape, generator=generator).to(given.dtype))
        else:
            high = 2 if given.dtype == torch.bool else 6
            made.append(torch.randint(0, high, given.shape, generator=generator).to(given.dtype))
    return made


@st.composite
def schedules(draw: st.DrawFn, kernel: Kernel, style: str) -> Schedule:
    """Tiles small enough that there are several, large enough that the interpreter is soon done."""
    cols, rows = power_of_two(kernel.cols), power_of_two(kernel.rows)
    tile = draw(st.sampled_from([n for n in (1, 2, 4, 8, 16) if n >= rows // 8]))
    if style == "rows":
        chunks = draw(st.sampled_from((1, 1, 2, 3)))
        return Schedule(power_of_two(-(-kernel.cols // chunks)), chunks, tile, 4, 2, draw(st.integers(0, 1)))
    block = draw(st.sampled_from([n for n in (8, 16, 32, 64) if n >= cols // 4]))
    return Schedule(block, 0 if style == "loops" else 1, tile, 4, 1, draw(st.integers(0, 1)))
