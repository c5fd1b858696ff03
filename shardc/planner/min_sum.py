"""The assignment of least cost to variables that share tables of costs: exact, by eliminating one after another.

    f(a, b) + g(b, c)   ->   min_a min_c:   h(b) = min_a f(a, b);   h(b) + g(b, c), ...

Nonserial dynamic programming (Bertele and Brioschi 1972), also known as bucket elimination (Dechter 1999): the time is
linear in the number of variables, and exponential in the width of the graph that the tables make. That of a model's
forward is small: a few values are alive at a time. A variable whose elimination would make a table of more than `MOST`
entries is fixed instead, to the choice that is least by the tables it is in. The result may then miss the optimum, and
says so.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

MOST = 2**23  # entries of a table
Variable = int


@dataclass(frozen=True)
class Table:
    """Costs of a few variables together, a dim each, in their order. Infinite: not allowed."""

    scope: tuple[Variable, ...]
    costs: Tensor


@dataclass(frozen=True)
class Assignment:
    choice: Mapping[Variable, int]
    cost: float
    exact: bool


def least(sizes: Mapping[Variable, int], tables: Sequence[Table]) -> Assignment:
    """The choice, from 0 to `sizes` of each variable, whose sum over all tables is least."""
    with _one_thread():
        return _least(sizes, tables)


@contextmanager
def _one_thread() -> Generator[None]:
    """Tables are small: to wake other threads takes longer than the work, 75 times as long where cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _least(sizes: Mapping[Variable, int], tables: Sequence[Table]) -> Assignment:
    pool = _Pool(tables)
    fixed: dict[Variable, int] = {}
    steps: list[tuple[Variable, tuple[Variable, ...], Tensor]] = []
    left = set(sizes)

    def width(v: Variable) -> int:
        return math.prod(sizes[u] for u in pool.neighbours(v)) * sizes[v]

    widths = {v: width(v) for v in left}
    order = [(w, v) for v, w in widths.items()]  # a heap, in which entries of other widths than `widths` are outdated
    heapq.heapify(order)
    while left:
        while order[0][1] not in left or widths[order[0][1]] != order[0][0]:
            heapq.heappop(order)
        variable = order[0][1]
        if widths[variable] > MOST:
            variable = max(left, key=lambda v: (len(pool.neighbours(v)), -v))
            lower = torch.zeros(sizes[variable], dtype=torch.float64)
            for table in pool.of(variable):
                axis = table.scope.index(variable)
                lower = lower + table.costs.movedim(axis, 0).reshape(sizes[variable], -1).amin(1)
            fixed[variable] = int(lower.argmin())
            changed = pool.neighbours(variable)
            for table in pool.take(variable):
                axis = table.scope.index(variable)
                scope = tuple(v for v in table.scope if v != variable)
                pool.add(Table(scope, table.costs.select(axis, fixed[variable])))
        else:
            changed = pool.neighbours(variable)
            scope, costs = _sum(pool.take(variable), variable, sizes)
            values, choice = costs.min(-1)
            steps.append((variable, scope, choice))
            pool.add(Table(scope, values))
        left.remove(variable)
        for v in changed:
            if (now := width(v)) != widths[v]:
                widths[v] = now
                heapq.heappush(order, (now, v))
    for variable, scope, choice in reversed(steps):
        fixed[variable] = int(choice[tuple(fixed[v] for v in scope)])
    cost = sum(float(t.costs[tuple(fixed[v] for v in t.scope)]) for t in tables)
    return Assignment(fixed, cost, exact=len(steps) == len(sizes))


class _Pool:
    """Tables by the variables in them."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._of: dict[Variable, dict[int, Table]] = {}
        self._count = 0
        for table in tables:
            self.add(table)

    def add(self, table: Table) -> None:
        self._count += 1
        for variable in table.scope:
            self._of.setdefault(variable, {})[self._count] = table

    def of(self, variable: Variable) -> list[Table]:
        return list(self._of.get(variable, {}).values())

    def take(self, variable: Variable) -> list[Table]:
        taken = self._of.pop(variable, {})
        for key, table in taken.items():
            for other in table.scope:
                if other != variable:
                    del self._of[other][key]
        return list(taken.values())

    def neighbours(self, variable: Variable) -> set[Variable]:
        return {v for table in self.of(variable) for v in table.scope} - {variable}


def _sum(
    tables: Sequence[Table], variable: Variable, sizes: Mapping[Variable, int]
) -> tuple[tuple[Variable, ...], Tensor]:
    """All tables of a variable in one, whose last dim is the variable."""
    others = tuple(sorted({v for t in tables for v in t.scope} - {variable}))
    scope = (*others, variable)
    total = torch.zeros([sizes[v] for v in scope], dtype=torch.float64)
    for table in tables:
        order = sorted(range(len(table.scope)), key=lambda i: scope.index(table.scope[i]))
        held = {table.scope[i] for i in order}
        shape = [sizes[v] if v in held else 1 for v in scope]
        total = total + table.costs.permute(order).reshape(shape)
    return others, total
