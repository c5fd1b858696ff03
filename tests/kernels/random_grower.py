"""What random kernels are made of: inputs of every kind, and steps that keep values small and smooth.

Integers wrap and have all of their range; what is compared is exact; float16 overflows, and is compared then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

from kernels_triton.gate.corpus import Draft
from kernels_triton.ir.access_map import AccessMap, broadcast_map, contiguous_map
from kernels_triton.ir.kernel import Ref

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTS = (torch.int64, torch.int32, torch.bool)
NARROW = (torch.int8, torch.uint8, torch.int16)  # drawn over all of their range
LITERALS = (1, -1, 2, 127, -128, 255, 2**31 - 1, -(2**31), 2**62 + 1)
ONE = (
    *("tanh", "sigmoid", "abs", "neg", "sin", "cos", "erf", "atan", "expm1", "bounded_exp", "bounded_log", "root"),
    *("rounded", "stepped", "pow", "tail"),
)
TWO = ("add", "sub", "mul", "maximum", "minimum", "div", "where", "fma")
WHOLE = (  # what integers do
    *("add", "sub", "mul", "neg", "abs", "square", "maximum", "minimum", "where", "shl", "shr"),
    *("bitand", "bitor", "bitxor", "bitnot"),
)
IN_DOUBLE = (*("abs", "neg", "root", "pow"), *TWO)  # what no table of constants approximates
# Of a longer dim: elements before, steps of a walk, elements behind.
PLACES = (*[(0, 1, 0)] * 3, (0, 1, 8), (3, 1, 2), (0, 2, 0), (1, 3, 1), (0, -1, 0), (8, -2, 0))
REDUCTIONS = ("rsum", "rmax", "rmin", "rprod", "moments", "softmax")
OVER_ROWS = ("csum", "csum", "cmax", "cmin", "cprod")


@dataclass
class Grower:
    """A draft, and the floats among its values by whether they vary along rows and columns, or come of a sum."""

    k: Draft
    draw: st.DrawFn
    double: bool = False
    floats: list[Ref] = field(default_factory=list)
    exact: list[Ref] = field(default_factory=list)  # small integers and bools: what may be compared
    whole: list[Ref] = field(default_factory=list)  # integers of any size, which floats never meet
    bools: list[Ref] = field(default_factory=list)
    loaded: list[Ref] = field(default_factory=list)  # floats that are inputs
    seeds: list[Ref] = field(default_factory=list)

    def input(self, *kinds: str) -> None:
        space = self.k.space
        dtype = self.draw(st.sampled_from(FLOATS + FLOATS + INTS + NARROW))
        dtype = torch.float64 if self.double and dtype.is_floating_point else dtype
        every = ("full", "full", "walked", "walked", "windows", "wide", "row", "col", "scalar", "some")
        kind = self.draw(st.sampled_from(kinds or every))
        if kind == "walked":
            made = self.k.input(dtype, *walked(self.draw, space))
        elif kind == "windows" and len(space) > 1:  # element i + j of each point (i, j)
            size, outer = space[-2] + space[-1] - 1, space[:-2]
            strides = (*(n * size for n in contiguous_map(outer).strides), 1, 1)
            made = self.k.input(dtype, (*outer, size), AccessMap(0, strides))
        elif kind == "wide":
            made = self.k.in_wide_rows(dtype)
        else:
            shape = {"row": (*space[:-1], 1), "col": space[-1:], "scalar": ()}.get(kind, space)
            if kind == "some":
                shape = tuple(n if self.draw(st.booleans()) else 1 for n in space)
            made = self.k.input(dtype, shape, broadcast_map(shape, space))
        if dtype.is_floating_point:
            self.loaded.append(made)
        if dtype == torch.bool:
            self.bools.append(made)
        if dtype == torch.int64 and kind == "scalar":
            self.seeds.append(made)
        (self.floats if dtype.is_floating_point else self.whole if dtype in NARROW else self.exact).append(made)

    def start(self) -> None:
        """Without a float among the inputs there is one that is made."""
        if not self.floats:
            wide = torch.float64 if self.double else torch.float32
            self.floats.append(self.k("cast", (self.exact or self.whole)[0], dtype=wide))
            self.floats.append(self.small(self.floats.pop()))

    def small(self, value: Ref) -> Ref:
        """No larger than 1."""
        if not self.double:
            return self.k("tanh", value)
        return self.k("div", value, self.k("add", self.k("abs", value), 1.0))

    def pick(self) -> Ref:
        return self.draw(st.sampled_from(self.floats))

    def step(self, reductions: Sequence[str], others: Sequence[str] = (*ONE, *TWO)) -> None:
        ops = IN_DOUBLE if self.double else (*others, *reductions, *(("uniform", "where") * 3 if self.seeds else ()))
        k, op = self.k, self.draw(st.sampled_from(ops))
        if op in ("rsum", "rmax", "rmin"):
            made = k(op, self.pick())
            made = k("mul", made, 1.0 / k.space[-1]) if op == "rsum" else made
        elif op == "rprod":
            made = k(op, self.near_1(self.pick(), k.space[-1]))
        elif op == "moments":  # two reductions of one pass
            op = self.draw(st.sampled_from(("rsum", "rsum", "rmax", "rmin")))
            one, two = (k(op, each) for each in (self.pick(), k("square", self.pick())))
            made = k("mul", k("add", one, two), 1.0 / k.space[-1])
        elif op == "softmax":
            x = self.pick()
            e = k("exp", k("sub", x, k("rmax", x)))
            made = k("div", e, k("rsum", e))
        elif op == "tail":  # what `strength_reduce` rewrites
            x = self.pick()
            t = k("tanh", x)
            made = self.draw(
                st.sampled_from(
                    (("add", t, 1.0), ("sub", 1.0, k("square", t)), ("add", k("erf", k("mul", x, 0.5**0.5)), 1.0))
                )
            )
            made = k(*made)
        elif op == "uniform":
            made = self.uniform()
        elif op == "pow":
            base = k("minimum", k("add", k("abs", self.pick()), 0.5), 2.0)
            made = k("pow", base, self.draw(st.sampled_from((3.0, -1.5, 0.5, self.pick()))))
        elif op == "stepped":  # of a number of halves, so that no rounding decides
            halves = k("mul", self.compared(), 0.5)
            made = k(self.draw(st.sampled_from(("floor", "ceil", "sign"))), halves)
        elif op == "fma":
            made = k("fma", self.pick(), self.pick(), self.draw(st.sampled_from((self.pick(), -0.25))))
        elif op == "bounded_exp":
            made = k(self.draw(st.sampled_from(("exp", "exp2"))), k("minimum", self.pick(), 1.0))
        elif op == "bounded_log":
            inside = k("abs", self.pick())
            op = self.draw(st.sampled_from(("log", "log2", "log1p")))
            made = k(op, inside if op == "log1p" else k("add", inside, 1.0))
        elif op == "root":
            ops = ("sqrt", "reciprocal") if self.double else ("sqrt", "rsqrt", "reciprocal")
            made = k(self.draw(st.sampled_from(ops)), k("add", k("square", self.pick()), 1.0))
        elif op == "rounded":
            made = k("cast", self.pick(), dtype=self.draw(st.sampled_from(FLOATS)))
        elif op == "div":
            made = k("div", self.pick(), k("add", k("abs", self.pick()), 1.0))
        elif op == "where":
            made = k("where", self.condition(), self.pick(), self.draw(st.sampled_from((self.pick(), 0.5, 2))))
        elif op == "expm1":
            made = k(op, k("minimum", self.pick(), 1.0))
        elif op in ONE:
            made = k(op, self.pick())
        else:
            made = k(op, self.pick(), self.draw(st.sampled_from((self.pick(), 0.75, *self.exact))))
        if op in ("mul", "add", "sub", "fma", "pow", "moments", "bounded_exp"):
            made = self.small(made)
        self.floats.append(made)

    def near_1(self, value: Ref, count: int) -> Ref:
        """So near that a product of so many is between 1 / e and e, or, of one, between 0 and 2."""
        return self.k("add", self.k("mul", self.small(value), 1.0 / count), 1.0)

    def over_rows(self, value: Ref) -> Ref:
        """Of all rows of a point of the batch dims."""
        op = self.draw(st.sampled_from(OVER_ROWS))
        rows = math.prod(self.k.space[self.k.batch : -1])
        return self.k(op, self.near_1(value, rows) if op == "cprod" else value)

    def uniform(self) -> Ref:
        """A random number of each element of a part of a larger tensor, or of some of its dims."""
        k = self.k
        strides = tuple(n * 2 if self.draw(st.booleans()) else 0 for n in contiguous_map(k.space).strides)
        strides = (*strides[:-1], self.draw(st.sampled_from((0, 1, 1, 2))) if k.space[-1] > 1 else 0)
        first = self.draw(st.sampled_from((0, 3, 2**34 - 20, *self.seeds)))
        return k("uniform", self.draw(st.sampled_from(self.seeds)), first, attributes=(5, *strides))

    def integers(self) -> None:
        """Arithmetic whose result wraps in a dtype that was drawn; bits; quotients."""
        k, draw = self.k, self.draw
        op = draw(st.sampled_from(WHOLE if self.double else (*WHOLE, "floordiv", "remainder", "rsum")))
        one, other = (draw(st.sampled_from(self.whole)) for _ in range(2))
        right = draw(st.sampled_from((other, *LITERALS)))
        if op in ("neg", "abs", "square", "bitnot", "rsum"):
            made = k(op, one)
        elif op in ("shl", "shr"):
            made = k(op, one, draw(st.integers(0, 7)))
        elif op in ("floordiv", "remainder"):
            made = k(op, one, draw(st.sampled_from((1, 3, -3, -7, 100))))
        elif op == "where":
            made = k(op, self.condition(), one, right)
        else:
            made = k(op, one, right)
        self.whole.append(k("cast", made, dtype=draw(st.sampled_from((*NARROW, torch.int32, torch.int64)))))

    def condition(self) -> Ref:
        """A bool, of small integers, of large ones, of a float16 that may be infinite, or of two bools."""
        kinds = ("small", "small", "large", "half", "two", *(("kept",) if self.seeds and not self.double else ()))
        k, kind = self.k, self.draw(st.sampled_from(kinds))
        if kind == "large" and self.whole:
            left, right = (self.draw(st.sampled_from(self.whole)) for _ in range(2))
            made = k(self.draw(st.sampled_from(("eq", "lt", "ge"))), left, right)
        elif kind == "half" and self.loaded and not self.double:
            half = k("cast", k("mul", self.draw(st.sampled_from(self.loaded)), 5e4), dtype=torch.float16)
            made = k(self.draw(st.sampled_from(("eq", "gt"))), half, self.draw(st.sampled_from((float("inf"), 6e4))))
        elif kind == "kept":
            made = k(self.draw(st.sampled_from(("ge", "lt", "gt"))), self.uniform(), 0.3)
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
        if self.floats and self.draw(st.booleans()):
            made = k("and", made, k("not", k("isnan", self.pick())))
        self.exact.append(made)
        return made


def walked(draw: st.DrawFn, space: tuple[int, ...]) -> tuple[tuple[int, ...], AccessMap]:
    """A tensor of which the space is a part: its dims in some order, some of them longer, some walked by steps or
    backwards."""
    order = draw(st.permutations(range(len(space)))) if draw(st.booleans()) else range(len(space))
    shape, firsts, steps = list[int](), list[int](), list[int]()
    for dim in order:
        before, step, behind = draw(st.sampled_from((*PLACES, (space[dim], 1, 0))))
        length = (space[dim] - 1) * abs(step) + 1
        shape.append(before + length + behind)
        firsts.append(before + (length - 1 if step < 0 else 0))
        steps.append(step)
    own = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
    strides = {dim: own[at] * steps[at] for at, dim in enumerate(order)}
    offset = sum(first * stride for first, stride in zip(firsts, own, strict=True))
    return tuple(shape), AccessMap(offset, tuple(strides[dim] for dim in range(len(space))))
