"""Values of a kernel as sums of products, so that one formula is found in all the ways in which it may be written.

    %6 = add(%1, %5);  %7 = add(%6, %2)                    1·%1 + 1·%5 + 1·%2
    %21 = mul(mul(%17, -0.5), %19);  %22 = div(%21, 768)   -0.5/768 · %17 · (factors of %19)

Sums are flattened into terms and products into factors; neither is multiplied out. A rounding (a cast between floats)
is looked through: who computes a formula at once rounds less, never more.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from kernels_triton.fused.kernel import Kernel, Kind, Operand, Ref, Step

Coefficient = float


class Factor(NamedTuple):
    """A value, or one over it."""

    value: int
    inverse: bool = False


class Term(NamedTuple):
    coefficient: Coefficient
    factors: tuple[Factor, ...] = ()


class Values:
    """The values of one kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._terms: dict[int, tuple[Term, ...]] = {}

    @cached_property
    def ops(self) -> frozenset[str]:
        return frozenset(step.op for step in self.kernel.steps)

    def bare(self, value: int) -> int:
        """The value without its roundings, and without a 0 that is added to an integer."""
        while (step := self.kernel.step(value)) is not None:
            if step.op == "cast":
                source = step.operands[0]
            elif step.op == "add" and not self.floating(value) and 0 in step.operands:
                source = step.operands[1 - step.operands.index(0)]
            else:
                break
            if not isinstance(source, Ref) or self.floating(source.index) != self.floating(value):
                break
            if not self.floating(value) and step.op == "cast":
                break
            value = source.index
        return value

    def floating(self, value: int) -> bool:
        return self.kernel.classes[value] == "f"

    def step(self, value: int) -> Step | None:
        return self.kernel.step(self.bare(value))

    def terms(self, value: int) -> tuple[Term, ...]:
        """What is added to make a value."""
        value = self.bare(value)
        if value not in self._terms:
            self._terms[value] = self._summed(value)
        return self._terms[value]

    def _summed(self, value: int) -> tuple[Term, ...]:
        step = self.kernel.step(value)
        if step is not None and self.floating(value) and step.op in ("add", "sub"):
            first, second = (self._operand_terms(operand) for operand in step.operands)
            if step.op == "sub":
                second = tuple(Term(-c, factors) for c, factors in second)
            return (*first, *second)
        return (self.product(value),)

    def _operand_terms(self, operand: Operand) -> tuple[Term, ...]:
        return self.terms(operand.index) if isinstance(operand, Ref) else (Term(float(operand)),)

    def product(self, value: int) -> Term:
        """What is multiplied to make a value; a sum is one factor."""
        value = self.bare(value)
        step = self.kernel.step(value)
        if step is None or not self.floating(value):
            return Term(1.0, (Factor(value),))
        match step.op:
            case "mul":
                return _times(*(self._factors(operand) for operand in step.operands))
            case "square":
                return _times(*[self._factors(step.operands[0])] * 2)
            case "neg":
                return _times(Term(-1.0), self._factors(step.operands[0]))
            case "reciprocal":
                return self._one_over(step.operands[0])
            case "div":
                return _times(self._factors(step.operands[0]), self._one_over(step.operands[1]))
            case _:
                return Term(1.0, (Factor(value),))

    def _factors(self, operand: Operand) -> Term:
        return self.product(operand.index) if isinstance(operand, Ref) else Term(float(operand))

    def _one_over(self, operand: Operand) -> Term:
        if isinstance(operand, Ref):
            return Term(1.0, (Factor(self.bare(operand.index), True),))
        return Term(1.0 / float(operand) if operand else float("nan"))


def kind_of(kernel: Kernel, value: int) -> Kind:
    """What a value varies over, a flat kernel's being whole."""
    kind = kernel.kind(value)
    return "full" if kind == "col" and len(kernel.space) == 1 else kind


def _times(first: Term, second: Term) -> Term:
    return Term(first.coefficient * second.coefficient, (*first.factors, *second.factors))
