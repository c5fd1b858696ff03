"""Formulas, written as such, that are looked for in kernels.

    formula(x="full", pre="col?", eps="number")                   names of what is read; `?`: it need not be there
    h = x + pre                                                   a name for a part
    y = (h - rsum(h) / cols) * rsqrt(rsum(h * h) / cols + eps)    functions are ops of a kernel
    t = tanh(2 * h | h + h)                                       one or the other

`cols` is the number of columns, `column` the index of each. Sums and products match in any order (see `algebra`). An
operand that need not be there is then 0 in a sum, and 1 in a product.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from typing import Literal

from kernels_triton.fused.kernel import Operand, Ref
from kernels_triton.templates.algebra import Factor, Term, Values, kind_of

Kind = Literal["full", "row", "col", "scalar", "number", "mask", "flag"]
BROADCAST = {"mask": "f", "flag": "b"}  # what is read in whatever way varies along the columns, and its class
Bound = Mapping[str, int | float | None]  # an input of the kernel, or a number; None: it is not there


@dataclass(frozen=True)
class Name:
    """Something that is read."""

    name: str
    kind: Kind
    optional: bool


@dataclass(frozen=True)
class Column:
    pass


@dataclass(frozen=True)
class Call:
    op: str
    operands: tuple[Node, ...]


@dataclass(frozen=True)
class Over:
    """One over a part."""

    of: Node


@dataclass(frozen=True)
class Product:
    """`coefficient` times `cols` to the power `cols`, times the factors."""

    coefficient: float
    cols: int
    factors: tuple[Node, ...]

    @property
    def optional(self) -> bool:
        return bool(self.factors) and all(isinstance(f, Name) and f.optional for f in self.factors)


@dataclass(frozen=True)
class Sum:
    terms: tuple[Product, ...]


@dataclass(frozen=True)
class Either:
    of: tuple[Node, ...]


Node = Name | Column | Call | Over | Sum | Either
ONE = Product(1.0, 0, ())


def formulas(operands: Mapping[str, str], text: str) -> dict[str, Node]:
    """The named parts of a text."""
    known: dict[str, Node] = {
        name: Name(name, kind.removesuffix("?"), kind.endswith("?"))  # type: ignore[arg-type]
        for name, kind in operands.items()
    }
    made: dict[str, Node] = {}
    for line in ast.parse(text.strip().replace("\n    ", "\n")).body:
        assert isinstance(line, ast.Assign)
        assert isinstance(line.targets[0], ast.Name)
        made[line.targets[0].id] = _node(line.value, known | made)
    return made


def _node(of: ast.expr, known: Mapping[str, Node]) -> Node:
    match of:
        case ast.Name("column"):
            return Column()
        case ast.Name(name) if name in known:
            return known[name]
        case ast.UnaryOp(ast.Invert(), operand):
            return Call("not", (_node(operand, known),))
        case ast.Call(ast.Name(op), args):
            return Call(op, tuple(_node(arg, known) for arg in args))
        case ast.BinOp(left, ast.BitOr(), right):
            return Either((*_options(_node(left, known)), *_options(_node(right, known))))
        case _:
            return _settled(Sum(_terms(of, known)))


def _options(of: Node) -> tuple[Node, ...]:
    return of.of if isinstance(of, Either) else (of,)


def _settled(of: Sum) -> Node:
    """A sum of one factor is that factor."""
    first = of.terms[0]
    alone = len(of.terms) == 1 and first.factors and first == Product(1.0, 0, first.factors[:1])
    return first.factors[0] if alone and not isinstance(first.factors[0], Over) else of


def _terms(of: ast.expr, known: Mapping[str, Node]) -> tuple[Product, ...]:
    match of:
        case ast.BinOp(left, ast.Add(), right):
            return (*_terms(left, known), *_terms(right, known))
        case ast.BinOp(left, ast.Sub(), right):
            negative = (Product(-p.coefficient, p.cols, p.factors) for p in _terms(right, known))
            return (*_terms(left, known), *negative)
        case ast.Name(name) if isinstance(known.get(name), Sum):
            found = known[name]
            assert isinstance(found, Sum)
            return found.terms
        case _:
            return (_product(of, known),)


def _product(of: ast.expr, known: Mapping[str, Node]) -> Product:
    match of:
        case ast.Constant(value):
            return Product(float(value), 0, ())  # type: ignore[arg-type]
        case ast.Name("cols"):
            return Product(1.0, 1, ())
        case ast.UnaryOp(ast.USub(), operand):
            return _times(Product(-1.0, 0, ()), _product(operand, known))
        case ast.BinOp(left, ast.Mult(), right):
            return _times(_product(left, known), _product(right, known))
        case ast.BinOp(left, ast.Div(), right):
            under = _product(right, known)
            flipped = tuple(Over(f) for f in under.factors)
            return _times(_product(left, known), Product(1 / under.coefficient, -under.cols, flipped))
        case _:
            node = _node(of, known)
            # A part that is one product is its factors, as in the kernel.
            if isinstance(node, Sum) and len(node.terms) == 1:
                return node.terms[0]
            return Product(1.0, 0, (node,))


def _times(a: Product, b: Product) -> Product:
    return Product(a.coefficient * b.coefficient, a.cols + b.cols, (*a.factors, *b.factors))


class Search:
    """Looks for formulas in the values of one kernel. Each answer is what the formula's names stand for."""

    def __init__(self, values: Values) -> None:
        self.values, self.kernel = values, values.kernel

    def value(self, node: Node, value: int, bound: Bound) -> Iterator[Bound]:
        match node:
            case Name():
                yield from self._named(node, value, bound)
            case Column():
                step = self.values.step(value)
                if step is not None and step.op == "iota" and step.attributes == (len(self.kernel.space) - 1,):
                    yield bound
            case Call(op, operands):
                step = self.values.step(value)
                if step is not None and step.op == op and len(step.operands) == len(operands):
                    yield from self._operands(operands, step.operands, bound)
            case Either(of):
                for one in of:
                    yield from self.value(one, value, bound)
            case Sum(terms):
                yield from self._terms(_ordered_terms(terms), self.values.terms(value), bound)
            case Over():
                pass

    def _named(self, node: Name, value: int, bound: Bound) -> Iterator[Bound]:
        value = self.values.bare(value)
        if self.kernel.step(value) is not None or node.kind == "number":
            return
        if node.name in bound:
            if bound[node.name] == value:
                yield bound
        elif self._is(value, node.kind) and value not in _inputs(bound):
            yield {**bound, node.name: value}

    def _is(self, value: int, kind: Kind) -> bool:
        own = kind_of(self.kernel, value)
        if kind in BROADCAST:
            return own in ("full", "col") and self.kernel.classes[value] == BROADCAST[kind]
        return own == kind

    def _operands(self, nodes: Sequence[Node], operands: Sequence[Operand], bound: Bound) -> Iterator[Bound]:
        if not nodes:
            yield bound
            return
        for found in self._operand(nodes[0], operands[0], bound):
            yield from self._operands(nodes[1:], operands[1:], found)

    def _operand(self, node: Node, operand: Operand, bound: Bound) -> Iterator[Bound]:
        if isinstance(operand, Ref):
            yield from self.value(node, operand.index, bound)
        elif isinstance(node, Sum):
            yield from self._terms(node.terms, (Term(float(operand)),), bound)
        elif isinstance(node, Either):
            for one in node.of:
                yield from self._operand(one, operand, bound)
        elif isinstance(node, Name) and node.kind == "number":
            yield from self._number(node, float(operand), bound)

    def _number(self, node: Node, number: float, bound: Bound) -> Iterator[Bound]:
        assert isinstance(node, Name)
        if node.name not in bound:
            yield {**bound, node.name: number}
        elif bound[node.name] == number:
            yield bound

    def _terms(self, wanted: Sequence[Product], terms: Sequence[Term], bound: Bound) -> Iterator[Bound]:
        """Every term for one that is wanted, and all of these but the optional ones."""
        if len(terms) > len(wanted):
            return
        if not wanted:
            yield bound
            return
        first, rest = wanted[0], wanted[1:]
        for at, term in enumerate(terms):
            for found in self._product(first, term, bound):
                yield from self._terms(rest, (*terms[:at], *terms[at + 1 :]), found)
        if first.optional:
            names = [f.name for f in first.factors if isinstance(f, Name)]
            if all(bound.get(name) is None for name in names):
                yield from self._terms(rest, terms, {**bound, **dict.fromkeys(names)})

    def _product(self, wanted: Product, term: Term, bound: Bound) -> Iterator[Bound]:
        coefficient = wanted.coefficient * float(self.kernel.cols) ** wanted.cols
        factors = [f for f in wanted.factors if not _number(f)]
        if len(factors) < len(wanted.factors):  # `scale * x`: the number is whatever stands there
            (number,) = (f for f in wanted.factors if _number(f))
            for found in self._number(number, term.coefficient / coefficient, bound):
                yield from self._factors(sorted(factors, key=_vagueness), term.factors, found)
        elif isclose(coefficient, term.coefficient, rel_tol=1e-6):
            yield from self._factors(sorted(factors, key=_vagueness), term.factors, bound)

    def _factors(self, wanted: Sequence[Node], factors: Sequence[Factor], bound: Bound) -> Iterator[Bound]:
        if len(factors) > len(wanted):
            return
        if not wanted:
            yield bound
            return
        first, rest = wanted[0], wanted[1:]
        node, inverse = (first.of, True) if isinstance(first, Over) else (first, False)
        tried: set[Factor] = set()
        for at, factor in enumerate(factors):
            if factor.inverse == inverse and factor not in tried:
                tried.add(factor)
                for found in self.value(node, factor.value, bound):
                    yield from self._factors(rest, (*factors[:at], *factors[at + 1 :]), found)
        if isinstance(first, Name) and first.optional and bound.get(first.name) is None:
            yield from self._factors(rest, factors, {**bound, first.name: None})


def _ordered_terms(terms: tuple[Product, ...]) -> list[Product]:
    return sorted(terms, key=lambda term: (term.optional, min(map(_vagueness, term.factors), default=0)))


def _inputs(bound: Bound) -> set[int]:
    return {at for at in bound.values() if isinstance(at, int)}


def _number(node: Node) -> bool:
    return isinstance(node, Name) and node.kind == "number"


def _vagueness(node: Node) -> int:
    """What matches least comes first."""
    match node:
        case Call() | Over() | Column():
            return 0
        case Sum() | Either():
            return 1
        case Name(optional=optional):
            return 3 if optional else 2
