"""Values of a kernel as sums of products, so that one formula matches every way of writing it.

    %6 = add(%1, %5);  %7 = add(%6, %2)                    1·%1 + 1·%5 + 1·%2
    %21 = mul(mul(%17, -0.5), %19);  %22 = div(%21, 768)   -0.5/768 · %17 · (factors of %19)

Sums are flattened into terms and products into factors. Products of sums are not expanded. Roundings (casts between
floats) are skipped: a template computes its whole formula with fewer roundings, never more.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from kernels_triton.ir.kernel import Kernel, KernelStep, Kind, Operand, Ref

Coefficient = float


class Factor(NamedTuple):
    """A value, or its reciprocal."""

    value: int
    inverse: bool = False


class ProductTerm(NamedTuple):
    coefficient: Coefficient
    factors: tuple[Factor, ...] = ()


class KernelValues:
    """The values of one kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._terms: dict[int, tuple[ProductTerm, ...]] = {}

    @cached_property
    def ops(self) -> frozenset[str]:
        return frozenset(step.op for step in self.kernel.steps)

    def without_casts(self, value: int) -> int:
        """The value before its roundings, and before a 0 is added to an integer."""
        while (step := self.kernel.step(value)) is not None:
            if step.op == "cast":
                source = step.operands[0]
            elif step.op == "add" and not self.is_float(value) and 0 in step.operands:
                source = step.operands[1 - step.operands.index(0)]
            else:
                break
            if not isinstance(source, Ref) or self.is_float(source.index) != self.is_float(value):
                break
            if not self.is_float(value) and step.op == "cast":
                break
            value = source.index
        return value

    def is_float(self, value: int) -> bool:
        return self.kernel.classes[value] == "f"

    def step(self, value: int) -> KernelStep | None:
        return self.kernel.step(self.without_casts(value))

    def terms(self, value: int) -> tuple[ProductTerm, ...]:
        """The terms whose sum is the value."""
        value = self.without_casts(value)
        if value not in self._terms:
            self._terms[value] = self._sum_terms(value)
        return self._terms[value]

    def _sum_terms(self, value: int) -> tuple[ProductTerm, ...]:
        step = self.kernel.step(value)
        if step is not None and self.is_float(value) and step.op in ("add", "sub"):
            first, second = (self._operand_terms(operand) for operand in step.operands)
            if step.op == "sub":
                second = tuple(ProductTerm(-c, factors) for c, factors in second)
            return (*first, *second)
        return (self.product(value),)

    def _operand_terms(self, operand: Operand) -> tuple[ProductTerm, ...]:
        return self.terms(operand.index) if isinstance(operand, Ref) else (ProductTerm(float(operand)),)

    def product(self, value: int) -> ProductTerm:
        """The factors whose product is the value; a sum counts as one factor."""
        value = self.without_casts(value)
        step = self.kernel.step(value)
        if step is None or not self.is_float(value):
            return ProductTerm(1.0, (Factor(value),))
        match step.op:
            case "mul":
                return _multiply(*(self._factors(operand) for operand in step.operands))
            case "square":
                return _multiply(*[self._factors(step.operands[0])] * 2)
            case "neg":
                return _multiply(ProductTerm(-1.0), self._factors(step.operands[0]))
            case "reciprocal":
                return self._reciprocal_factors(step.operands[0])
            case "div":
                return _multiply(self._factors(step.operands[0]), self._reciprocal_factors(step.operands[1]))
            case _:
                return ProductTerm(1.0, (Factor(value),))

    def _factors(self, operand: Operand) -> ProductTerm:
        return self.product(operand.index) if isinstance(operand, Ref) else ProductTerm(float(operand))

    def _reciprocal_factors(self, operand: Operand) -> ProductTerm:
        if isinstance(operand, Ref):
            return ProductTerm(1.0, (Factor(self.without_casts(operand.index), True),))
        return ProductTerm(1.0 / float(operand) if operand else float("nan"))


def kind_of(kernel: Kernel, value: int) -> Kind:
    """The dims that a value varies over. A value of a flat kernel is "full"."""
    kind = kernel.kind(value)
    return "full" if kind == "col" and len(kernel.space) == 1 else kind


def _multiply(first: ProductTerm, second: ProductTerm) -> ProductTerm:
    return ProductTerm(first.coefficient * second.coefficient, (*first.factors, *second.factors))
