"""Formulas as text, and the search for them in kernels.

    formula(x="full", pre="col?", eps="number")                   names of operands; `?`: the operand is optional
    h = x + pre                                                   a name for a part
    y = (h - rsum(h) / cols) * rsqrt(rsum(h * h) / cols + eps)    functions are ops of a kernel
    t = tanh(2 * h | h + h)                                       alternatives

`cols` is the number of columns, `column` the column index. Sums and products match in any order (see `algebra`). An
optional operand that is absent counts as 0 in a sum, and as 1 in a product.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from typing import Literal

from kernels_triton.ir.kernel import Operand, Ref
from kernels_triton.match.algebra import Factor, KernelValues, ProductTerm, kind_of

OperandKind = Literal["full", "row", "col", "scalar", "number"]
Binding = Mapping[str, int | float | None]  # an input of the kernel, or a number; None: absent


@dataclass(frozen=True)
class NamePattern:
    """An operand."""

    name: str
    kind: OperandKind
    optional: bool


@dataclass(frozen=True)
class ColumnPattern:
    pass


@dataclass(frozen=True)
class OpPattern:
    op: str
    operands: tuple[Pattern, ...]


@dataclass(frozen=True)
class ReciprocalPattern:
    """The reciprocal of a part."""

    of: Pattern


@dataclass(frozen=True)
class ProductPattern:
    """`coefficient` times `cols` to the power `cols`, times the factors."""

    coefficient: float
    cols: int
    factors: tuple[Pattern, ...]

    @property
    def optional(self) -> bool:
        return bool(self.factors) and all(isinstance(f, NamePattern) and f.optional for f in self.factors)


@dataclass(frozen=True)
class SumPattern:
    terms: tuple[ProductPattern, ...]


@dataclass(frozen=True)
class EitherPattern:
    of: tuple[Pattern, ...]


Pattern = NamePattern | ColumnPattern | OpPattern | ReciprocalPattern | SumPattern | EitherPattern
ONE = ProductPattern(1.0, 0, ())


def formulas(operands: Mapping[str, str], text: str) -> dict[str, Pattern]:
    """The named parts of a text."""
    patterns: dict[str, Pattern] = {
        name: NamePattern(name, kind.removesuffix("?"), kind.endswith("?"))  # type: ignore[arg-type]
        for name, kind in operands.items()
    }
    parts: dict[str, Pattern] = {}
    for line in ast.parse(text.strip().replace("\n    ", "\n")).body:
        assert isinstance(line, ast.Assign)
        assert isinstance(line.targets[0], ast.Name)
        parts[line.targets[0].id] = _parse_pattern(line.value, patterns | parts)
    return parts


def _parse_pattern(of: ast.expr, patterns: Mapping[str, Pattern]) -> Pattern:
    match of:
        case ast.Name("column"):
            return ColumnPattern()
        case ast.Name(name) if name in patterns:
            return patterns[name]
        case ast.Call(ast.Name(op), args):
            return OpPattern(op, tuple(_parse_pattern(arg, patterns) for arg in args))
        case ast.BinOp(left, ast.BitOr(), right):
            return EitherPattern(
                (*_alternatives(_parse_pattern(left, patterns)), *_alternatives(_parse_pattern(right, patterns)))
            )
        case _:
            return _unwrap_single_factor(SumPattern(_parse_terms(of, patterns)))


def _alternatives(of: Pattern) -> tuple[Pattern, ...]:
    return of.of if isinstance(of, EitherPattern) else (of,)


def _unwrap_single_factor(of: SumPattern) -> Pattern:
    """A sum with a single factor is that factor."""
    first = of.terms[0]
    alone = len(of.terms) == 1 and first.factors and first == ProductPattern(1.0, 0, first.factors[:1])
    return first.factors[0] if alone and not isinstance(first.factors[0], ReciprocalPattern) else of


def _parse_terms(of: ast.expr, patterns: Mapping[str, Pattern]) -> tuple[ProductPattern, ...]:
    match of:
        case ast.BinOp(left, ast.Add(), right):
            return (*_parse_terms(left, patterns), *_parse_terms(right, patterns))
        case ast.BinOp(left, ast.Sub(), right):
            negative = (ProductPattern(-p.coefficient, p.cols, p.factors) for p in _parse_terms(right, patterns))
            return (*_parse_terms(left, patterns), *negative)
        case ast.Name(name) if isinstance(patterns.get(name), SumPattern):
            part = patterns[name]
            assert isinstance(part, SumPattern)
            return part.terms
        case _:
            return (_parse_product(of, patterns),)


def _parse_product(of: ast.expr, patterns: Mapping[str, Pattern]) -> ProductPattern:
    match of:
        case ast.Constant(value):
            return ProductPattern(float(value), 0, ())  # type: ignore[arg-type]
        case ast.Name("cols"):
            return ProductPattern(1.0, 1, ())
        case ast.UnaryOp(ast.USub(), operand):
            return _multiply(ProductPattern(-1.0, 0, ()), _parse_product(operand, patterns))
        case ast.BinOp(left, ast.Mult(), right):
            return _multiply(_parse_product(left, patterns), _parse_product(right, patterns))
        case ast.BinOp(left, ast.Div(), right):
            divisor = _parse_product(right, patterns)
            flipped = tuple(ReciprocalPattern(f) for f in divisor.factors)
            return _multiply(
                _parse_product(left, patterns), ProductPattern(1 / divisor.coefficient, -divisor.cols, flipped)
            )
        case _:
            node = _parse_pattern(of, patterns)
            # A part that is a single product is replaced by its factors, as in the kernel.
            if isinstance(node, SumPattern) and len(node.terms) == 1:
                return node.terms[0]
            return ProductPattern(1.0, 0, (node,))


def _multiply(a: ProductPattern, b: ProductPattern) -> ProductPattern:
    return ProductPattern(a.coefficient * b.coefficient, a.cols + b.cols, (*a.factors, *b.factors))


class PatternSearch:
    """Searches for formulas in the values of one kernel. Each answer binds the formula's names."""

    def __init__(self, values: KernelValues) -> None:
        self.values, self.kernel = values, values.kernel

    def match_value(self, node: Pattern, value: int, binding: Binding) -> Iterator[Binding]:
        match node:
            case NamePattern():
                yield from self._match_name(node, value, binding)
            case ColumnPattern():
                step = self.values.step(value)
                if step is not None and step.op == "iota" and step.attributes == (len(self.kernel.space) - 1,):
                    yield binding
            case OpPattern(op, operands):
                step = self.values.step(value)
                if step is not None and step.op == op and len(step.operands) == len(operands):
                    yield from self._match_operands(operands, step.operands, binding)
            case EitherPattern(of):
                for alternative in of:
                    yield from self.match_value(alternative, value, binding)
            case SumPattern(terms):
                yield from self._match_terms(_most_specific_first(terms), self.values.terms(value), binding)
            case ReciprocalPattern():
                pass

    def _match_name(self, node: NamePattern, value: int, binding: Binding) -> Iterator[Binding]:
        value = self.values.without_casts(value)
        if self.kernel.step(value) is not None or node.kind == "number":
            return
        if node.name in binding:
            if binding[node.name] == value:
                yield binding
        elif kind_of(self.kernel, value) == node.kind and value not in _bound_inputs(binding):
            yield {**binding, node.name: value}

    def _match_operands(
        self, nodes: Sequence[Pattern], operands: Sequence[Operand], binding: Binding
    ) -> Iterator[Binding]:
        if not nodes:
            yield binding
            return
        for extended in self._match_operand(nodes[0], operands[0], binding):
            yield from self._match_operands(nodes[1:], operands[1:], extended)

    def _match_operand(self, node: Pattern, operand: Operand, binding: Binding) -> Iterator[Binding]:
        if isinstance(operand, Ref):
            yield from self.match_value(node, operand.index, binding)
        elif isinstance(node, SumPattern):
            yield from self._match_terms(node.terms, (ProductTerm(float(operand)),), binding)
        elif isinstance(node, EitherPattern):
            for alternative in node.of:
                yield from self._match_operand(alternative, operand, binding)
        elif isinstance(node, NamePattern) and node.kind == "number":
            yield from self._match_number(node, float(operand), binding)

    def _match_number(self, node: Pattern, number: float, binding: Binding) -> Iterator[Binding]:
        assert isinstance(node, NamePattern)
        if node.name not in binding:
            yield {**binding, node.name: number}
        elif binding[node.name] == number:
            yield binding

    def _match_terms(
        self, wanted: Sequence[ProductPattern], terms: Sequence[ProductTerm], binding: Binding
    ) -> Iterator[Binding]:
        """Assigns every term to a wanted one. All wanted terms must be assigned, except optional ones."""
        if len(terms) > len(wanted):
            return
        if not wanted:
            yield binding
            return
        first, rest = wanted[0], wanted[1:]
        for position, term in enumerate(terms):
            for extended in self._match_product(first, term, binding):
                yield from self._match_terms(rest, (*terms[:position], *terms[position + 1 :]), extended)
        if first.optional:
            names = [f.name for f in first.factors if isinstance(f, NamePattern)]
            if all(binding.get(name) is None for name in names):
                yield from self._match_terms(rest, terms, {**binding, **dict.fromkeys(names)})

    def _match_product(self, wanted: ProductPattern, term: ProductTerm, binding: Binding) -> Iterator[Binding]:
        coefficient = wanted.coefficient * float(self.kernel.cols) ** wanted.cols
        factors = [f for f in wanted.factors if not _is_number(f)]
        if len(factors) < len(wanted.factors):  # `scale * x`: the number binds to the coefficient
            (number,) = (f for f in wanted.factors if _is_number(f))
            for extended in self._match_number(number, term.coefficient / coefficient, binding):
                yield from self._match_factors(sorted(factors, key=_vagueness), term.factors, extended)
        elif isclose(coefficient, term.coefficient, rel_tol=1e-6):
            yield from self._match_factors(sorted(factors, key=_vagueness), term.factors, binding)

    def _match_factors(
        self, wanted: Sequence[Pattern], factors: Sequence[Factor], binding: Binding
    ) -> Iterator[Binding]:
        if len(factors) > len(wanted):
            return
        if not wanted:
            yield binding
            return
        first, rest = wanted[0], wanted[1:]
        node, inverse = (first.of, True) if isinstance(first, ReciprocalPattern) else (first, False)
        tried: set[Factor] = set()
        for position, factor in enumerate(factors):
            if factor.inverse == inverse and factor not in tried:
                tried.add(factor)
                for extended in self.match_value(node, factor.value, binding):
                    yield from self._match_factors(rest, (*factors[:position], *factors[position + 1 :]), extended)
        if isinstance(first, NamePattern) and first.optional and binding.get(first.name) is None:
            yield from self._match_factors(rest, factors, {**binding, first.name: None})


def _most_specific_first(terms: tuple[ProductPattern, ...]) -> list[ProductPattern]:
    return sorted(terms, key=lambda term: (term.optional, min(map(_vagueness, term.factors), default=0)))


def _bound_inputs(binding: Binding) -> set[int]:
    return {operand for operand in binding.values() if isinstance(operand, int)}


def _is_number(node: Pattern) -> bool:
    return isinstance(node, NamePattern) and node.kind == "number"


def _vagueness(node: Pattern) -> int:
    """A sort key: the most specific patterns come first."""
    match node:
        case OpPattern() | ReciprocalPattern() | ColumnPattern():
            return 0
        case SumPattern() | EitherPattern():
            return 1
        case NamePattern(optional=optional):
            return 3 if optional else 2
