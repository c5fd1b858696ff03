"""The same kernel in fewer instructions: what a graph spells out as eager torch computes it, a GPU does in less.

    add(tanh(u), 1)           2 * sigmoid(2u)            no cancellation in the tail, and no polynomial near 0
    sub(1, square(tanh(u)))   4 * s * (1 - s)            s = sigmoid(2u), the same one
    add(erf(x / sqrt 2), 1)   2 * normal(x)              where every element that is read or written has 16 bits
    mul(mul(x, 0.5), ...)     powers of two move outward and meet

So a GeLU is `x * sigmoid(2u)`, as its template writes it. A product moves past a power of two between 1/16 and 16
without rounding otherwise; only what overflows, or is below 2^-122, may differ.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace

from kernels_triton.fused.kernel import Kernel, Operand, Ref, Step, reads
from kernels_triton.fused.table import Class

POWERS = tuple(2.0**n for n in range(-4, 5))


def shorter(kernel: Kernel) -> Kernel:
    """The kernel, rewritten; one in float64, which no table of constants is exact enough for, as it is."""
    if kernel.double:
        return kernel
    return Rewriting(kernel).run()


@dataclass
class Rewriting:
    """`now` says which operand of the new steps stands for a value of the old ones."""

    kernel: Kernel
    steps: list[Step] = field(default_factory=list)
    classes: list[Class] = field(default_factory=list)
    now: dict[int, Operand] = field(default_factory=dict)
    made: dict[Step, Ref] = field(default_factory=dict)

    def run(self) -> Kernel:
        kernel, first = self.kernel, len(self.kernel.inputs)
        self.classes = list(kernel.classes[:first])
        self.now = {at: Ref(at) for at in range(first)}
        users = _users(kernel)
        tanhs = {v for v in users if _is(kernel, v, "tanh") and self._replaced(v, users)}
        erfs = {v for v in users if _is(kernel, v, "erf") and _normal_of(kernel, v, users) is not None}
        for value, step in enumerate(kernel.steps, first):
            inner = [v for v in reads(step) if v in tanhs]
            squared = [v for v in reads(step) if (square := _squared(kernel, v)) is not None and square in tanhs]
            if step.op == "add" and inner:
                self.now[value] = self.scaled(self.logistic(inner[0]), 2.0)
            elif step.op == "sub" and squared:
                s = self.logistic(_squared(kernel, squared[0]))
                self.now[value] = self.scaled(self.product(s, self.make("sub", 1.0, s)), 4.0)
            elif step.op == "add" and (erf := next((v for v in reads(step) if v in erfs), None)) is not None:
                x = self.now[_normal_of(kernel, erf, users)]  # type: ignore[index]
                self.now[value] = self.scaled(self.make("normal", x), 2.0)
            else:
                self.now[value] = self.kept(value, step)
        return self._without_dead()

    def kept(self, value: int, step: Step) -> Operand:
        operands = tuple(self.now[o.index] if isinstance(o, Ref) else o for o in step.operands)
        if step.op == "mul" and self.kernel.classes[value] == "f":
            left, right = operands
            if isinstance(left, Ref) and isinstance(right, Ref):
                return self.product(left, right)
            by, of = (left, right) if isinstance(right, Ref) else (right, left)
            if isinstance(of, Ref) and isinstance(by, float) and self.classes[of.index] == "f":
                return self.scaled(of, by)
        return self.add(replace(step, operands=operands), self.kernel.classes[value])

    def add(self, step: Step, of: Class) -> Ref:
        if step not in self.made:
            self.steps.append(step)
            self.classes.append(of)
            self.made[step] = Ref(len(self.classes) - 1)
        return self.made[step]

    def make(self, op: str, *operands: Operand) -> Ref:
        return self.add(Step(op, operands), "f")

    def scaled(self, x: Operand, by: float) -> Operand:
        """x times a number."""
        assert isinstance(x, Ref)
        inner, factor = self._taken_apart(x, by in POWERS)
        if factor * by == 1.0:
            return inner
        return self.make("mul", inner, factor * by)

    def product(self, left: Operand, right: Operand) -> Operand:
        assert isinstance(left, Ref)
        assert isinstance(right, Ref)
        (left, one), (right, two) = self._taken_apart(left), self._taken_apart(right)
        inner = self.make("mul", left, right)
        return self.scaled(inner, one * two) if one * two != 1.0 else inner

    def _taken_apart(self, x: Ref, anything: bool = False) -> tuple[Ref, float]:
        """(y, n) where x is y times a power of two n, or with `anything` any number."""
        step = self.steps[x.index - len(self.kernel.inputs)] if x.index >= len(self.kernel.inputs) else None
        if step is not None and step.op == "mul" and self.classes[x.index] == "f":
            y, by = step.operands
            known = isinstance(by, float) and (by in POWERS or (anything and 2.0**-60 < abs(by) < 2.0**60))
            if isinstance(y, Ref) and isinstance(by, float) and known and self.classes[y.index] == "f":
                return y, by
        return x, 1.0

    def logistic(self, tanh: int | None) -> Ref:
        assert tanh is not None
        step = self.kernel.step(tanh)
        assert step is not None
        (u,) = reads(step)
        return self.make("sigmoid", self.scaled(self.now[u], 2.0))

    def _replaced(self, tanh: int, users: dict[int, list[int]]) -> bool:
        """Is a tanh used for nothing but `1 + tanh` and `1 - tanh^2`?"""
        kernel = self.kernel
        (u,) = reads(kernel.step(tanh))  # type: ignore[arg-type]
        if kernel.classes[u] != "f":
            return False
        for user in users[tanh]:
            if _with_one(kernel, user, "add") is not None:
                continue
            outer = users.get(user, [])
            if user < 0 or _squared(kernel, user) is None or not outer:
                return False
            if not all(at >= 0 and _with_one(kernel, at, "sub") == user for at in outer):
                return False
        return True

    def _without_dead(self) -> Kernel:
        kernel, first = self.kernel, len(self.kernel.inputs)
        alive, todo = set[int](), [self._stored(s.value.index) for made in kernel.outputs for s in made.stores]
        while todo:
            value = todo.pop()
            if value >= first and value not in alive:
                alive.add(value)
                todo += reads(self.steps[value - first])
        place = {v: Ref(v) for v in range(first)}
        place |= {value: Ref(first + at) for at, value in enumerate(sorted(alive))}
        steps = tuple(
            replace(s, operands=tuple(place[o.index] if isinstance(o, Ref) else o for o in s.operands))
            for s in (self.steps[value - first] for value in sorted(alive))
        )
        outputs = tuple(
            replace(m, stores=tuple(replace(s, value=place[self._stored(s.value.index)]) for s in m.stores))
            for m in kernel.outputs
        )
        return replace(kernel, steps=steps, outputs=outputs)

    def _stored(self, value: int) -> int:
        now = self.now[value]
        assert isinstance(now, Ref)
        return now.index


def _users(kernel: Kernel) -> dict[int, list[int]]:
    """Of each value its users; -1 for an output that stores it."""
    found: dict[int, list[int]] = defaultdict(list)
    for value in range(len(kernel.varies)):
        for read in set(kernel.values_read(value)):
            found[read].append(value)
    for made in kernel.outputs:
        for store in made.stores:
            found[store.value.index].append(-1)
    return found


def _is(kernel: Kernel, value: int, op: str) -> bool:
    step = kernel.step(value) if value >= 0 else None
    return step is not None and step.op == op


def _squared(kernel: Kernel, value: int) -> int | None:
    """t of square(t) or mul(t, t)."""
    step = kernel.step(value) if value >= 0 else None
    if step is None or step.op not in ("square", "mul"):
        return None
    read = {o.index if isinstance(o, Ref) else -1 for o in step.operands}
    return read.pop() if len(read) == 1 and -1 not in read else None


def _with_one(kernel: Kernel, value: int, op: str) -> int | None:
    """x of `1 + x` and `x + 1`, or of `1 - x`."""
    step = kernel.step(value) if value >= 0 else None
    if step is None or step.op != op:
        return None
    left, right = step.operands
    if isinstance(right, Ref) and not isinstance(left, Ref):
        return right.index if float(left) == 1.0 else None
    if op == "add" and isinstance(left, Ref) and not isinstance(right, Ref):
        return left.index if float(right) == 1.0 else None
    return None


def _normal_of(kernel: Kernel, erf: int, users: dict[int, list[int]]) -> int | None:
    """x of erf(x / sqrt 2), where it is used for nothing but `1 + erf` and 16 bits are enough."""
    along = kernel.varies[erf]
    walks = [(given.dtype, given.walk) for given in kernel.inputs]
    walks += [(made.dtype, store.walk) for made in kernel.outputs for store in made.stores]
    every = [dtype for dtype, walk in walks if tuple(s != 0 for s in walk.strides) == along]
    floats = [dtype for dtype in every if dtype.is_floating_point]
    if not floats or any(dtype.itemsize > 2 for dtype in floats):
        return None
    if not all(_with_one(kernel, user, "add") is not None for user in users[erf]):
        return None
    (inside,) = reads(kernel.step(erf))  # type: ignore[arg-type]
    step = kernel.step(inside)
    if step is None or step.op != "mul":
        return None
    for x, by in (step.operands, step.operands[::-1]):
        if isinstance(x, Ref) and isinstance(by, float) and abs(by - math.sqrt(0.5)) < 1e-7:
            return x.index if kernel.classes[x.index] == "f" else None
    return None
