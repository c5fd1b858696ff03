"""Random connected kernels whose values stay small and smooth, so that float32 may be held against float64.

Every kind of value meets every other: full, row, column and scalar inputs in several dtypes and walks; pointwise ops,
comparisons of what is exact, casts, reductions one after another, sums over rows and what follows them. Integers near
their dtypes' limits meet one another and wrap, float16 overflows and is compared, and values are stored over more of
the space than they vary along.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels_triton.fused.behind import UNIT
from kernels_triton.fused.corpus import Draft
from kernels_triton.fused.kernel import Kernel, Output, Ref, Step, Store, Walk, broadcast, whole
from kernels_triton.rows import Schedule, power_of_two

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTS = (torch.int64, torch.int32, torch.bool)
NARROW = (torch.int8, torch.uint8, torch.int16)  # drawn over all of their range
LITERALS = (1, -1, 2, 127, -128, 255, 2**31 - 1, -(2**31), 2**62 + 1)
ONE = ("tanh", "sigmoid", "abs", "neg", "sin", "cos", "erf", "bounded_exp", "bounded_log", "root", "rounded")
TWO = ("add", "sub", "mul", "maximum", "minimum", "div", "where")


@dataclass
class Grower:
    """A draft, and the floats among its values by whether they vary along rows and columns, or come of a sum."""

    k: Draft
    draw: st.DrawFn
    floats: list[Ref] = field(default_factory=list)
    exact: list[Ref] = field(default_factory=list)  # small integers and bools: what may be compared
    whole: list[Ref] = field(default_factory=list)  # integers of any size, which floats never meet
    bools: list[Ref] = field(default_factory=list)
    loaded: list[Ref] = field(default_factory=list)  # floats that are inputs

    def input(self) -> None:
        space = self.k.space
        dtype = self.draw(st.sampled_from(FLOATS + FLOATS + INTS + NARROW))
        kind = self.draw(st.sampled_from(("full", "full", "half", "strided", "wide", "row", "col", "scalar", "some")))
        if kind == "half":  # of a packed tensor
            shape = (*space[:-1], 2 * space[-1])
            offset = self.draw(st.sampled_from((0, space[-1])))
            made = self.k.input(dtype, shape, Walk(offset, whole(shape).strides))
        elif kind == "strided":
            order = self.draw(st.permutations(range(len(space))))
            shape, walk = permuted(space, order)
            made = self.k.input(dtype, shape, walk)
        elif kind == "wide":
            made = self.k.in_wide_rows(dtype)
        else:
            shape = {
                "full": space, "half": space, "strided": space, "row": (*space[:-1], 1), "col": space[-1:], "scalar": ()
            }.get(kind) or tuple(n if self.draw(st.booleans()) else 1 for n in space)  # fmt: skip
            shape = () if kind == "scalar" else shape
            made = self.k.input(dtype, shape, broadcast(shape, space))
        if dtype.is_floating_point:
            self.loaded.append(made)
        if dtype == torch.bool:
            self.bools.append(made)
        (self.floats if dtype.is_floating_point else self.whole if dtype in NARROW else self.exact).append(made)

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

    def integers(self) -> None:
        """Arithmetic whose result wraps in a dtype that was drawn."""
        k, op = self.k, self.draw(st.sampled_from(("add", "sub", "mul", "neg", "abs", "square", "maximum", "where")))
        one, other = (self.draw(st.sampled_from(self.whole)) for _ in range(2))
        right = self.draw(st.sampled_from((other, *LITERALS)))
        if op in ("neg", "abs", "square"):
            made = k(op, one)
        else:
            made = k(op, *((self.condition(),) if op == "where" else ()), one, right)
        self.whole.append(k("cast", made, dtype=self.draw(st.sampled_from((*NARROW, torch.int32, torch.int64)))))

    def condition(self) -> Ref:
        """A bool, of small integers, of large ones, of a float16 that may be infinite, or of two bools."""
        k, kind = self.k, self.draw(st.sampled_from(("small", "small", "large", "half", "two")))
        if kind == "large" and self.whole:
            left, right = (self.draw(st.sampled_from(self.whole)) for _ in range(2))
            made = k(self.draw(st.sampled_from(("eq", "lt", "ge"))), left, right)
        elif kind == "half" and self.loaded:
            half = k("cast", k("mul", self.draw(st.sampled_from(self.loaded)), 5e4), dtype=torch.float16)
            made = k(self.draw(st.sampled_from(("eq", "gt"))), half, self.draw(st.sampled_from((float("inf"), 6e4))))
        elif kind == "two" and self.bools:
            left, right = (self.draw(st.sampled_from(self.bools)) for _ in range(2))
            made = k(self.draw(st.sampled_from(("and", "or", "xor"))), left, right)
        else:
            made = self.compared()
        self.bools.append(made)
        return made

    def compared(self) -> Ref:
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
    k = Draft((*rows, draw(st.sampled_from((1, 3, 8, 16, 33, 70)))), batch=draw(st.integers(0, len(rows))))
    grower = Grower(k, draw)
    for _ in range(draw(st.integers(1, 4))):
        grower.input()
    if not grower.floats:
        number = (grower.exact or grower.whole)[0]
        grower.floats.append(k("tanh", k("cast", number, dtype=torch.float32)))
    for _ in range(draw(st.integers(1, 8))):
        if grower.whole and draw(st.booleans()):
            grower.integers()
        else:
            grower.step()
    stored = draw(st.lists(st.sampled_from(grower.floats), min_size=0, max_size=3, unique=True))
    exact = (*grower.whole, *grower.bools, *grower.exact)
    counted = draw(st.lists(st.sampled_from(exact), max_size=2, unique=True)) if exact else []
    for value in draw(st.lists(st.sampled_from(grower.floats), min_size=0 if stored else 1, max_size=2, unique=True)):
        total = k("csum", value)
        stored.append(total)
        if draw(st.booleans()):  # what follows a sum over rows
            stored.append(k("mul", total, 0.5))
    probed = _probed(k)
    for value in stored + counted:
        # As large as the value, or larger.
        larger = [draw(st.booleans()) and draw(st.booleans()) for _ in k.space]
        if probed.late[value.index]:
            larger[k.batch : -1] = [False] * (len(larger) - 1 - k.batch)
        along = [a or b for a, b in zip(probed.varies[value.index], larger, strict=True)]
        shape = tuple(n if a else 1 for n, a in zip(k.space, along, strict=True))
        dtype = draw(st.sampled_from((*NARROW, *INTS) if value in counted else FLOATS))
        if shape == k.space and k.space[-1] > UNIT and draw(st.booleans()):
            k.out_before_zeros(value, dtype)
        elif shape == k.space and draw(st.booleans()):
            shape, walk = permuted(shape, draw(st.permutations(range(len(shape)))))
            k.joined(dtype, shape, (value, walk))
        else:
            k.out(value, dtype, shape)
    return k.kernel("fused_random")


def _probed(k: Draft) -> Kernel:
    """The kernel, before it has outputs: with one that stores a sum of everything."""
    last = len(k.inputs) + len(k.steps)
    total = (Step("rsum", (Ref(0),)), Step("cast", (Ref(last),), dtype=torch.float32), Step("csum", (Ref(last + 1),)))
    walk = Walk(0, (*whole(k.space[: k.batch]).strides, *[0] * (len(k.space) - k.batch)))
    stored = Output(torch.float32, k.space[: k.batch], (Store(Ref(last + 2), walk),))
    return Kernel("probe", k.space, tuple(k.inputs), (*k.steps, *total), (stored,), k.batch)


def arguments(kernel: Kernel, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made: list[Tensor] = []
    for given in kernel.inputs:
        if given.dtype.is_floating_point:
            made.append(torch.randn(given.shape, generator=generator).to(given.dtype))
        elif given.dtype in NARROW:
            least, most = torch.iinfo(given.dtype).min, torch.iinfo(given.dtype).max
            made.append(torch.randint(least, most + 1, given.shape, generator=generator).to(given.dtype))
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
