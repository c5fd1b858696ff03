"""Closed forms of whole numbers that were seen at several sizes: sums of few monomials with rational coefficients.

    B = 8, 12, 20   S = 16, 24, 40   dp = 2, 2, 5      64, 144, 160   ->   B*S/dp

`fitted` looks for the form with the fewest terms and the smallest powers that gives every number exactly. A form has at
most `TERMS` terms, and there must be at least two numbers more than it has coefficients, so that no form fits by chance
that was not there. What has none is refused: nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import combinations, product
from typing import Any

import numpy as np

TERMS = 3
MOST = 2  # the highest power of an extent
SURPLUS = 2  # numbers beyond those that coefficients are solved from
Point = Mapping[str, int]
Powers = tuple[int, ...]


@dataclass(frozen=True)
class Expression:
    """A sum of monomials in `symbols`; a power is negative where an axis divides. Values are exact."""

    symbols: tuple[str, ...]
    terms: tuple[tuple[Powers, Fraction], ...] = ()

    @classmethod
    def of(cls, symbols: Sequence[str], terms: Mapping[Powers, Fraction]) -> Expression:
        return cls(tuple(symbols), tuple(sorted((p, c) for p, c in terms.items() if c)))

    @classmethod
    def constant(cls, symbols: Sequence[str], value: int) -> Expression:
        return cls.of(symbols, {(0,) * len(symbols): Fraction(value)})

    @cached_property
    def is_constant(self) -> bool:
        return not any(any(powers) for powers, _ in self.terms)

    def depends_on(self, symbol: str) -> bool:
        place = self.symbols.index(symbol)
        return any(powers[place] for powers, _ in self.terms)

    def at(self, point: Point) -> Fraction:
        values = [point[name] for name in self.symbols]
        return sum((c * _power(values, powers) for powers, c in self.terms), Fraction(0))

    def __add__(self, other: Expression) -> Expression:
        terms = dict(self.terms)
        for powers, c in other.terms:
            terms[powers] = terms.get(powers, Fraction(0)) + c
        return Expression.of(self.symbols, terms)

    def times(self, factor: int) -> Expression:
        return Expression.of(self.symbols, {powers: c * factor for powers, c in self.terms})

    def __sub__(self, other: Expression) -> Expression:
        return self + other.times(-1)

    def covers(self, other: Expression) -> bool:
        """Is it at least the other wherever symbols are positive? Told by coefficients: False may mean unknown."""
        return all(c >= 0 for _, c in (self - other).terms)

    def sympy(self) -> Any:
        import sympy

        names = [sympy.Symbol(name, integer=True, positive=True) for name in self.symbols]
        return sympy.Add(
            *(
                sympy.Rational(c.numerator, c.denominator)
                * sympy.Mul(*(name**power for name, power in zip(names, powers, strict=True)))
                for powers, c in self.terms
            )
        )

    def __str__(self) -> str:
        return str(self.sympy())


def _power(values: Sequence[int], powers: Powers) -> Fraction:
    above = below = 1
    for value, power in zip(values, powers, strict=True):
        if power > 0:
            above *= value**power
        elif power < 0:
            below *= value**-power
    return Fraction(above, below)


class Fitter:
    """Finds the expressions of numbers seen at these points, in extents and in axis sizes; it remembers them."""

    def __init__(self, points: Sequence[Point], extents: Sequence[str], axes: Sequence[str] = ()) -> None:
        self.points, self.symbols = tuple(points), (*extents, *axes)
        ranges = [*(range(MOST + 1) for _ in extents), *(range(-1, 2) for _ in axes)]
        powers = sorted(product(*ranges), key=lambda p: (sum(map(abs, p)), p))
        rows = [[point[name] for name in self.symbols] for point in self.points]
        self._monomials = powers
        self._values = [[_power(row, p) for row in rows] for p in powers]
        self._floats = np.array([[float(v) for v in column] for column in self._values])
        self._known: dict[tuple[int, ...], Expression | None] = {}

    def constant(self, value: int) -> Expression:
        return Expression.constant(self.symbols, value)

    def fitted(self, numbers: Sequence[int]) -> Expression | None:
        """The simplest expression that gives each number at its point; None if there is none."""
        key = tuple(numbers)
        if key not in self._known:
            self._known[key] = self._fitted(key)
        return self._known[key]

    def _fitted(self, numbers: tuple[int, ...]) -> Expression | None:
        if all(n == numbers[0] for n in numbers):
            return self.constant(numbers[0])
        most = min(TERMS, len(self.points) - SURPLUS)
        wanted = np.array([float(n) for n in numbers])
        for count in range(1, most + 1):
            places = _combinations(len(self._monomials), count)
            columns = self._floats[places]  # of each choice, its monomials at each point
            for choice in _near(columns, wanted):
                terms = self._solved(tuple(int(i) for i in places[choice]), numbers)
                if terms is not None:
                    return terms
        return None

    def _solved(self, places: tuple[int, ...], numbers: tuple[int, ...]) -> Expression | None:
        """The exact coefficients of these monomials, from the first points that tell; None if a number differs."""
        columns = [self._values[i] for i in places]
        coefficients = _exact(columns, numbers)
        if coefficients is None:
            return None
        for i, number in enumerate(numbers):
            if sum((c * column[i] for c, column in zip(coefficients, columns, strict=True)), Fraction(0)) != number:
                return None
        return Expression.of(self.symbols, {self._monomials[i]: c for i, c in zip(places, coefficients, strict=True)})


@lru_cache(maxsize=64)
def _combinations(count: int, taken: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(list(combinations(range(count), taken)), dtype=np.int64)


def _near(columns: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> list[int]:
    """The choices of monomials that give the numbers, to float precision, by least squares; simplest first."""
    scale = np.maximum(np.abs(wanted), 1.0)
    scaled = columns / scale  # each point counts alike
    target = wanted / scale
    gram = scaled @ scaled.transpose(0, 2, 1)
    right = scaled @ target
    # Normal equations lose digits: this is a filter, and what passes is solved exactly.
    norms = np.sqrt(np.maximum(np.einsum("nii->ni", gram), 1e-300))
    unit = gram / (norms[:, :, None] * norms[:, None, :])
    solution = (np.linalg.pinv(unit, rcond=1e-13, hermitian=True) @ (right / norms)[:, :, None])[:, :, 0] / norms
    residual = np.abs(np.einsum("nt,ntp->np", solution, scaled) - target).max(axis=1)
    return [int(i) for i in np.flatnonzero(residual < 1e-5)]


def _exact(columns: Sequence[Sequence[Fraction]], numbers: Sequence[int]) -> list[Fraction] | None:
    """Gauss's elimination over the points; None where the points do not tell all coefficients."""
    count = len(columns)
    rows = [[*(column[i] for column in columns), Fraction(n)] for i, n in enumerate(numbers)]
    for place in range(count):
        pivot = next((i for i in range(place, len(rows)) if rows[i][place]), None)
        if pivot is None:
            return None
        rows[place], rows[pivot] = rows[pivot], rows[place]
        lead = rows[place][place]
        rows[place] = [value / lead for value in rows[place]]
        for i, row in enumerate(rows):
            if i != place and row[place]:
                rows[i] = [a - row[place] * b for a, b in zip(row, rows[place], strict=True)]
    return [row[-1] for row in rows[:count]]
