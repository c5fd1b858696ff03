"""Factor notation: one line says what an op's dims have in common.

    b m k, b k n -> b m n        sum="k", linear="each"

Operands and results are lists of dims; a name is a *factor* of the op's iteration space. `(a b)` is a
dim made of two factors, major first; `...` stands for any leading dims, broadcast right-aligned; `1`
is a dim of size 1; another number, as in `(3 d)`, is a factor of that size that no axis may split.
A factor missing from a result must be named: `sum=`, `max=`, `min=` say how shards combine, `whole=`
that no axis may split it. From this everything else is derived: propagation in both directions,
legality, pending sums, local shapes, communication.

`sections` say that factors are sections of another one: `("n", 4, "p")` that `p` is `n` from its 4th element on. Both
are whole, unless the atom that `n` is has blocks that `p` is made of (see `ir.blocks`): an axis on `n` is then on `p`.

`following=(("t", "c"),)`: the axes on `t` are on `c` too, as where `c` has one element for each of so many of `t`, or
rows of `t` meet those of `c` in turns; each is one atom, and of blocks only where the op runs by block, or both are
whole.

Ragged dims (see `ir.types`) stand behind a semicolon; a rule that names none is of tensors without, or goes row by row:
`divided` gives the ragged dims of its operands to its results.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

Shape = tuple[int, ...]
Labels = tuple[tuple[str, ...], ...]  # one tensor: for each dim its factors, major first
Linear = Literal["joint"] | tuple[int, ...]
Aligned = tuple[tuple[str, str], ...]  # factors that are one where their atoms lie alike, as far as both go
Following = tuple[tuple[str, str], ...]  # (factor, one that the same axes cut, although it has fewer elements)
Sections = tuple[tuple[str, int, str], ...]  # (factor, start, the factor that is its section from there on)


class RuleError(Exception):
    """A rule is malformed, or does not fit the shapes that it was given."""


@dataclass(frozen=True)
class Notation:
    """A rule's text and what it says of its factors. Names in `sum`, `max`, `min`, `whole` are space-separated.

    `linear="joint"`: all operands may be pending sums together (add, cat, any unary linear op).
    `linear="each"`: one operand at a time (mm, mul); a tuple lists which.
    `counts`: of an op whose local call asks where a rank's share lies, the only factors along which it asks.
    `merged`: the results whose shards the local call puts together itself, so that nothing is pending of them.
    """

    text: str
    sum: str = ""
    max: str = ""
    min: str = ""
    whole: str = ""
    linear: Literal["joint", "each"] | tuple[int, ...] = ()
    sections: Sections = ()
    aligned: Aligned = ()
    counts: str | None = None
    merged: tuple[int, ...] = ()
    following: Following = ()


@dataclass(frozen=True, slots=True, eq=False)
class FactorRule:
    """A rule fitted to shapes. Size-1 dims have no factors, and factors of size 1 are gone.

    `fit` yields one object for the same notation and shapes, so rules compare by identity.
    """

    operands: tuple[Labels, ...]
    results: tuple[Labels, ...]
    sizes: dict[str, int]
    reduces: dict[str, str]  # factor -> "sum" | "max" | "min"
    whole: frozenset[str]
    linear: Linear = ()
    sections: Sections = ()
    aligned: Aligned = ()
    counts: frozenset[str] | None = None
    following: Following = ()
    by_block: bool = True  # does the op run on the blocks of an atom as on the atom?
    merged: tuple[int, ...] = ()

    def counted(self, factor: str) -> bool:
        """Does the op ask where in this factor a rank's share lies?"""
        return not self.by_block and (self.counts is None or factor in self.counts)

    def __str__(self) -> str:
        def tensor(labels: Labels) -> str:
            return " ".join("1" if not d else d[0] if len(d) == 1 else f"({' '.join(d)})" for d in labels) or "()"

        return f"{', '.join(map(tensor, self.operands))} -> {', '.join(map(tensor, self.results))}"


class Dims:
    """One tensor operand inside a rule function: prints as its dims, one factor each.

    `f"{x} -> {x.swap(0, 1)}"` is the rule of a transpose. `x[d]` is the name of dim d. `boolean`: as an index it picks
    the places where it is true. `in_blocks`: the dims that have an atom of blocks, so that sections of them are blocks;
    `made_in_blocks`: those of the call's first result.
    """

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        labels: Sequence[str] | None = None,
        *,
        boolean: bool = False,
        in_blocks: Sequence[int] = (),
        made_in_blocks: Sequence[int] = (),
    ):
        self.name = name
        self.in_blocks, self.made_in_blocks = in_blocks, made_in_blocks
        self.shape = tuple(shape)
        self.boolean = boolean
        self.labels = list(labels) if labels is not None else [f"{name}{i}" for i in range(len(self.shape))]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self, d: int) -> int:
        """`d` counted from the front."""
        return d % max(1, self.ndim)

    def __getitem__(self, d: int) -> str:
        return self.labels[d]

    def __str__(self) -> str:
        return " ".join(self.labels)

    def swap(self, a: int, b: int) -> Dims:
        order = list(range(self.ndim))
        order[a], order[b] = order[b], order[a]
        return self.permute(order)

    def permute(self, order: Sequence[int]) -> Dims:
        order = [self.dim(d) for d in order]
        return Dims(self.name, [self.shape[d] for d in order], [self.labels[d] for d in order])

    def replace(self, d: int, label: str | None) -> Dims:
        """Dim `d` under another label; None removes it."""
        d = self.dim(d)
        labels = [*self.labels[:d], *([label] if label is not None else []), *self.labels[d + 1 :]]
        return Dims(self.name, [0] * len(labels), labels)


def fit(notation: Notation, operands: Sequence[Shape], results: Sequence[Shape]) -> FactorRule:
    """The rule of one call. Raises RuleError when the shapes do not fit the notation."""
    return _fit(notation, tuple(map(tuple, operands)), tuple(map(tuple, results)))


def validate(notation: Notation) -> None:
    """Raise RuleError for what is wrong with a rule whatever the shapes."""
    left, right = _parse(notation.text)
    for term in (*left, *right):
        names = [n for dim in term for n in dim if not n.isdigit()]
        for name in names:
            if names.count(name) > 1:
                raise RuleError(f"{notation.text!r}: factor {name!r} twice in one tensor")
    factors = {n for term in (*left, *right) for dim in term for n in dim}
    annotated = [n for names in (notation.sum, notation.max, notation.min, notation.whole) for n in names.split()]
    for name in annotated:
        if name not in factors:
            raise RuleError(f"{notation.text!r}: factor {name!r} is not in the rule")
    operand_factors = {n for term in left for dim in term for n in dim if not n.isdigit()}
    for term in right:
        missing = operand_factors - {n for dim in term for n in dim} - set(annotated)
        if missing:
            raise RuleError(_missing(notation, missing))


def _missing(notation: Notation, names: Iterable[str]) -> str:
    return f"{notation.text!r}: {sorted(names)} missing from a result; name them in sum=, max=, min= or whole="


@lru_cache(maxsize=65536)
def _fit(notation: Notation, operands: tuple[Shape, ...], results: tuple[Shape, ...]) -> FactorRule:
    left, right = _parse(notation.text)
    if len(left) != len(operands) or len(right) != len(results):
        raise RuleError(
            f"{notation.text!r} has {len(left)} -> {len(right)} tensors, the call {len(operands)} -> {len(results)}"
        )
    sizes: dict[str, int] = {}
    spread = _ellipsis_sizes(left, operands) | _ellipsis_sizes(right, results)
    labelled = [
        _label(term, shape, sizes, spread, notation)
        for term, shape in zip((*left, *right), (*operands, *results), strict=True)
    ]
    _infer(labelled, (*operands, *results), sizes)
    solved = [_check(dims, shape, sizes, notation) for dims, shape in zip(labelled, (*operands, *results), strict=True)]
    sizes = {name: size for name, size in sizes.items() if size > 1}
    tensors = [tuple(tuple(f for f in dim if f in sizes) for dim in dims) for dims in solved]
    ins, outs = tuple(tensors[: len(left)]), tuple(tensors[len(left) :])
    spread_names = [name for name in sizes if name.startswith("~")]

    def names(text: str) -> list[str]:
        return [n for word in text.split() for n in (spread_names if word == "..." else [word]) if n in sizes]

    reduces = {n: kind for kind in ("sum", "max", "min") for n in names(getattr(notation, kind))}
    whole = frozenset(names(notation.whole)) | {n for n in sizes if n.isdigit()}
    linear: Linear = tuple(range(len(ins))) if notation.linear == "each" else notation.linear
    for labels in outs:
        present = {f for dim in labels for f in dim}
        missing = {f for tensor in ins for dim in tensor for f in dim} - present - set(reduces) - whole
        if missing:
            raise RuleError(_missing(notation, missing))
    counts = None if notation.counts is None else frozenset(names(notation.counts))
    options = (notation.sections, notation.aligned, counts, notation.following)
    return FactorRule(ins, outs, sizes, reduces, whole, linear, *options, merged=notation.merged)


@lru_cache(maxsize=65536)
def kept_together(rule: FactorRule) -> FactorRule:
    """The rule of an op that counts positions, so that it takes an atom of blocks as a whole."""
    return replace(rule, by_block=False)


@lru_cache(maxsize=4096)
def divided(rule: FactorRule, operands: tuple[Shape, ...], results: tuple[Shape, ...]) -> FactorRule:
    """The rule of a call that goes row by row, with the ragged dims of its tensors, of these sizes, as factors.

    Rows lie in an order of their own: dim 0 of a ragged operand has to be dim 0 of each result, and nothing else.
    Raises RuleError where it is not.
    """
    sizes = {ragged for ragged in (*operands, *results) if ragged}
    if len(sizes) != 1 or not all(results):
        raise RuleError(f"{rule}: its tensors are divided by {sorted(sizes)}, and {results.count(())} results are not")
    (ragged,) = sizes
    labels = tuple((f"^{i}",) if size > 1 else () for i, size in enumerate(ragged))
    rows = {ins[0] if ins else () for ins, of in zip(rule.operands, operands, strict=True) if of}
    rows |= {outs[0] if outs else () for outs in rule.results}
    if len(rows) != 1 or not (row := next(iter(rows))) or set(row) & (rule.whole | set(rule.reduces)):
        raise RuleError(f"{rule} does not go row by row")
    return FactorRule(
        tuple((*ins, *labels) if of else ins for ins, of in zip(rule.operands, operands, strict=True)),
        tuple((*outs, *labels) for outs in rule.results),
        rule.sizes | {f"^{i}": size for i, size in enumerate(ragged) if size > 1},
        rule.reduces,
        rule.whole,
        rule.linear,
        counts=frozenset(rule.sizes) - set(row),
        by_block=False,
    )


_NAME = r"(?:[A-Za-z_]\w*|\d+|\.\.\.)"
Term = tuple[tuple[str, ...], ...]  # one tensor in the text: its dims, each a tuple of names; ("...",) spreads


@lru_cache(maxsize=4096)
def _parse(text: str) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f"{text!r} has no '->'")

    def tensors(side: str) -> tuple[Term, ...]:
        if not side.strip():
            return ()
        return tuple(_parse_tensor(part, text) for part in side.split(","))

    return tensors(left), tensors(right)


def _parse_tensor(part: str, text: str) -> Term:
    dims: list[tuple[str, ...]] = []
    part = part.replace(";", " ")
    if not re.fullmatch(rf"\s*(?:(?:{_NAME}|\((?:\s*{_NAME}(?=[\s)]))*\s*\))(?:\s+|$))*", part):
        raise RuleError(f"{text!r}: cannot read {part.strip()!r}")
    for token in re.findall(r"\([^()]*\)|\S+", part):
        dims.append(tuple(token[1:-1].split()) if token.startswith("(") else (token,))
    if sum(d == ("...",) for d in dims) > 1 or any("..." in d and len(d) > 1 for d in dims):
        raise RuleError(f"{text!r}: at most one '...' a tensor, and not inside a dim")
    return tuple(d for d in dims if d != ("()",) and d != ())


def _ellipsis_sizes(terms: Sequence[Term], shapes: Sequence[Shape]) -> dict[str, int]:
    """Sizes of the `...` dims, named from the right: ~0 is the last of them. A size of 1 is broadcast, to 0 as well."""
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        if ("...",) in term:
            position = term.index(("...",))
            count = len(shape) - (len(term) - 1)
            for i in range(count):
                name = f"~{count - 1 - i}"
                if sizes.setdefault(name, 1) == 1:
                    sizes[name] = shape[position + i]
    return sizes


def _label(
    term: Term, shape: Shape, sizes: dict[str, int], spread: dict[str, int], notation: Notation
) -> list[tuple[str, ...]]:
    """Replace `...` by its names and record the sizes that single-factor dims tell."""
    if ("...",) in term:
        position, count = term.index(("...",)), len(shape) - (len(term) - 1)
        inner = tuple((f"~{count - 1 - i}",) if shape[position + i] != 1 else ("1",) for i in range(count))
        term = term[:position] + inner + term[position + 1 :]
        sizes.update(spread)
    if len(term) != len(shape):
        raise RuleError(f"{notation.text!r}: {len(term)} dims against shape {shape}")
    for dim, size in zip(term, shape, strict=True):
        for name in dim:
            if name.isdigit():
                sizes[name] = int(name)
        if len(dim) == 1 and sizes.setdefault(dim[0], size) != size:
            raise RuleError(f"{notation.text!r}: factor {dim[0]!r} is {sizes[dim[0]]} and {size}")
    return list(term)


def _infer(tensors: Sequence[list[tuple[str, ...]]], shapes: Sequence[Shape], sizes: dict[str, int]) -> None:
    """The one unknown factor of a compound dim, wherever there is one, until nothing more follows."""
    todo = [
        (dim, size) for dims, shape in zip(tensors, shapes, strict=True) for dim, size in zip(dims, shape, strict=True)
    ]
    progress = True
    while progress:
        progress = False
        for dim, size in todo:
            unknown = [n for n in dim if n not in sizes]
            product = math.prod(sizes[n] for n in dim if n in sizes)
            if len(unknown) == 1 and product and size % product == 0:
                sizes[unknown[0]] = size // product
                progress = True


def _check(
    dims: list[tuple[str, ...]], shape: Shape, sizes: dict[str, int], notation: Notation
) -> list[tuple[str, ...]]:
    """Every dim is the product of its factors."""
    for dim, size in zip(dims, shape, strict=True):
        if any(n not in sizes for n in dim):
            raise RuleError(f"{notation.text!r}: cannot factor {size} into {dim}")
        if math.prod(sizes[n] for n in dim) != size:
            raise RuleError(f"{notation.text!r}: {dim} is {math.prod(sizes[n] for n in dim)}, not {size}")
    return dims
