"""Strength reduction: the same kernel in fewer instructions than the eager formulas of the graph need.

    add(tanh(u), 1)           2 * sigmoid(2u)            no cancellation in the tail, and no polynomial near 0
    sub(1, square(tanh(u)))   4 * s * (1 - s)            s = sigmoid(2u), the same value
    add(erf(x / sqrt 2), 1)   2 * normal(x)              if every element that is read or written has 16 bits
    mul(mul(x, 0.5), ...)     powers of two move outward and are combined

So a GeLU is `x * sigmoid(2u)`, as its template writes it. Moving a product past a power of two between 1/16 and 16
changes no rounding. Only results that overflow, or are below 2^-122, may differ.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace

from kernels_triton.ir.kernel import Kernel, KernelStep, Operand, Ref, value_operands
from kernels_triton.ir.table import Class

POWERS = tuple(2.0**n for n in range(-4, 5))


def strength_reduce(kernel: Kernel) -> Kernel:
    """The rewritten kernel. A float64 kernel is returned unchanged: the constants here are not exact enough for it."""
    if kernel.is_float64:
        return kernel
    return StrengthReduction(kernel).run()


@dataclass
class StrengthReduction:
    """`replacements` maps each value of the old kernel to the operand that replaces it."""

    kernel: Kernel
    steps: list[KernelStep] = field(default_factory=list)
    classes: list[Class] = field(default_factory=list)
    replacements: dict[int, Operand] = field(default_factory=dict)
    step_refs: dict[KernelStep, Ref] = field(default_factory=dict)

    def run(self) -> Kernel:
        kernel, first = self.kernel, len(self.kernel.inputs)
        self.classes = list(kernel.classes[:first])
        self.replacements = {value_index: Ref(value_index) for value_index in range(first)}
        users = _users(kernel)
        tanhs = {v for v in users if _is_op(kernel, v, "tanh") and self._is_replaceable(v, users)}
        erfs = {v for v in users if _is_op(kernel, v, "erf") and _normal_argument(kernel, v, users) is not None}
        for value, step in enumerate(kernel.steps, first):
            inner = [v for v in value_operands(step) if v in tanhs]
            squared = [
                v
                for v in value_operands(step)
                if (square := _squared_operand(kernel, v)) is not None and square in tanhs
            ]
            if step.op == "add" and inner:
                self.replacements[value] = self.scale(self.logistic(inner[0]), 2.0)
            elif step.op == "sub" and squared:
                s = self.logistic(_squared_operand(kernel, squared[0]))
                self.replacements[value] = self.scale(self.product(s, self.float_step("sub", 1.0, s)), 4.0)
            elif step.op == "add" and (erf := next((v for v in value_operands(step) if v in erfs), None)) is not None:
                x = self.replacements[_normal_argument(kernel, erf, users)]  # type: ignore[index]
                self.replacements[value] = self.scale(self.float_step("normal", x), 2.0)
            else:
                self.replacements[value] = self.rewrite(value, step)
        return self._remove_dead()

    def rewrite(self, value: int, step: KernelStep) -> Operand:
        operands = tuple(self.replacements[o.index] if isinstance(o, Ref) else o for o in step.operands)
        if step.op == "mul" and self.kernel.classes[value] == "f":
            left, right = operands
            if isinstance(left, Ref) and isinstance(right, Ref):
                return self.product(left, right)
            factor, base = (left, right) if isinstance(right, Ref) else (right, left)
            if isinstance(base, Ref) and isinstance(factor, float) and self.classes[base.index] == "f":
                return self.scale(base, factor)
        return self.add_step(replace(step, operands=operands), self.kernel.classes[value])

    def add_step(self, step: KernelStep, of: Class) -> Ref:
        if step not in self.step_refs:
            self.steps.append(step)
            self.classes.append(of)
            self.step_refs[step] = Ref(len(self.classes) - 1)
        return self.step_refs[step]

    def float_step(self, op: str, *operands: Operand) -> Ref:
        return self.add_step(KernelStep(op, operands), "f")

    def scale(self, x: Operand, by: float) -> Operand:
        """x times a number."""
        assert isinstance(x, Ref)
        inner, factor = self._split_factor(x, by in POWERS)
        if factor * by == 1.0:
            return inner
        return self.float_step("mul", inner, factor * by)

    def product(self, left: Operand, right: Operand) -> Operand:
        assert isinstance(left, Ref)
        assert isinstance(right, Ref)
        (left, left_factor), (right, right_factor) = self._split_factor(left), self._split_factor(right)
        inner = self.float_step("mul", left, right)
        return self.scale(inner, left_factor * right_factor) if left_factor * right_factor != 1.0 else inner

    def _split_factor(self, x: Ref, anything: bool = False) -> tuple[Ref, float]:
        """(y, n) such that x is y times n, where n is a power of two; with `anything`, n may be any number."""
        step = self.steps[x.index - len(self.kernel.inputs)] if x.index >= len(self.kernel.inputs) else None
        if step is not None and step.op == "mul" and self.classes[x.index] == "f":
            y, number = step.operands
            is_known = isinstance(number, float) and (
                number in POWERS or (anything and 2.0**-60 < abs(number) < 2.0**60)
            )
            if isinstance(y, Ref) and isinstance(number, float) and is_known and self.classes[y.index] == "f":
                return y, number
        return x, 1.0

    def logistic(self, tanh: int | None) -> Ref:
        assert tanh is not None
        step = self.kernel.step(tanh)
        assert step is not None
        (u,) = value_operands(step)
        return self.float_step("sigmoid", self.scale(self.replacements[u], 2.0))

    def _is_replaceable(self, tanh: int, users: dict[int, list[int]]) -> bool:
        """Whether a tanh is used only in `1 + tanh` and `1 - tanh^2`."""
        kernel = self.kernel
        (u,) = value_operands(kernel.step(tanh))  # type: ignore[arg-type]
        if kernel.classes[u] != "f":
            return False
        for user in users[tanh]:
            if _operand_beside_one(kernel, user, "add") is not None:
                continue
            outer = users.get(user, [])
            if user < 0 or _squared_operand(kernel, user) is None or not outer:
                return False
            if not all(next_user >= 0 and _operand_beside_one(kernel, next_user, "sub") == user for next_user in outer):
                return False
        return True

    def _remove_dead(self) -> Kernel:
        kernel, first = self.kernel, len(self.kernel.inputs)
        alive, todo = (
            set[int](),
            [self._replaced_value(s.value.index) for output in kernel.outputs for s in output.stores],
        )
        while todo:
            value = todo.pop()
            if value >= first and value not in alive:
                alive.add(value)
                todo += value_operands(self.steps[value - first])
        new_refs = {v: Ref(v) for v in range(first)}
        new_refs |= {value: Ref(first + position) for position, value in enumerate(sorted(alive))}
        steps = tuple(
            replace(s, operands=tuple(new_refs[o.index] if isinstance(o, Ref) else o for o in s.operands))
            for s in (self.steps[value - first] for value in sorted(alive))
        )
        outputs = tuple(
            replace(m, stores=tuple(replace(s, value=new_refs[self._replaced_value(s.value.index)]) for s in m.stores))
            for m in kernel.outputs
        )
        return replace(kernel, steps=steps, outputs=outputs)

    def _replaced_value(self, value: int) -> int:
        operand = self.replacements[value]
        assert isinstance(operand, Ref)
        return operand.index


def _users(kernel: Kernel) -> dict[int, list[int]]:
    """For each value its users; -1 stands for an output that stores it."""
    users: dict[int, list[int]] = defaultdict(list)
    for value in range(len(kernel.varies)):
        for read in set(kernel.values_read(value)):
            users[read].append(value)
    for output in kernel.outputs:
        for store in output.stores:
            users[store.value.index].append(-1)
    return users


def _is_op(kernel: Kernel, value: int, op: str) -> bool:
    step = kernel.step(value) if value >= 0 else None
    return step is not None and step.op == op


def _squared_operand(kernel: Kernel, value: int) -> int | None:
    """t of square(t) or mul(t, t)."""
    step = kernel.step(value) if value >= 0 else None
    if step is None or step.op not in ("square", "mul"):
        return None
    read = {o.index if isinstance(o, Ref) else -1 for o in step.operands}
    return read.pop() if len(read) == 1 and -1 not in read else None


def _operand_beside_one(kernel: Kernel, value: int, op: str) -> int | None:
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


def _normal_argument(kernel: Kernel, erf: int, users: dict[int, list[int]]) -> int | None:
    """x of erf(x / sqrt 2), if erf is used only in `1 + erf` and 16 bits of accuracy are enough."""
    along = kernel.varies[erf]
    accesses = [(tensor.dtype, tensor.access_map) for tensor in kernel.inputs]
    accesses += [(output.dtype, store.access_map) for output in kernel.outputs for store in output.stores]
    dtypes = [dtype for dtype, access_map in accesses if tuple(s != 0 for s in access_map.strides) == along]
    floats = [dtype for dtype in dtypes if dtype.is_floating_point]
    if not floats or any(dtype.itemsize > 2 for dtype in floats):
        return None
    if not all(_operand_beside_one(kernel, user, "add") is not None for user in users[erf]):
        return None
    (inside,) = value_operands(kernel.step(erf))  # type: ignore[arg-type]
    step = kernel.step(inside)
    if step is None or step.op != "mul":
        return None
    for x, number in (step.operands, step.operands[::-1]):
        if isinstance(x, Ref) and isinstance(number, float) and abs(number - math.sqrt(0.5)) < 1e-7:
            return x.index if kernel.classes[x.index] == "f" else None
    return None
