"""Elimination finds what enumeration finds."""

import itertools
import math
import random

import pytest
import torch

from shardc.planner import min_sum
from shardc.planner.min_sum import Table, least


def random_problem(seed: int, variables: int = 6) -> tuple[dict[int, int], list[Table]]:
    draw = random.Random(seed)
    sizes = {v: draw.randint(1, 3) for v in range(variables)}
    tables = [Table((v,), _costs(draw, [sizes[v]])) for v in sizes]
    for _ in range(8):
        scope = tuple(draw.sample(range(variables), draw.choice([2, 2, 3])))
        tables.append(Table(scope, _costs(draw, [sizes[v] for v in scope])))
    return sizes, tables


def _costs(draw: random.Random, shape: list[int]) -> torch.Tensor:
    count = math.prod(shape)
    values = [math.inf if draw.random() < 0.1 else float(draw.randint(0, 50)) for _ in range(count)]
    return torch.tensor(values, dtype=torch.float64).reshape(shape)


def by_enumeration(sizes: dict[int, int], tables: list[Table]) -> float:
    every = itertools.product(*(range(n) for n in sizes.values()))
    return min(sum(float(t.costs[tuple(point[v] for v in t.scope)]) for t in tables) for point in every)


@pytest.mark.parametrize("seed", range(30))
def test_it_is_the_least_of_all(seed: int) -> None:
    sizes, tables = random_problem(seed)
    found = least(sizes, tables)
    assert found.exact
    assert found.cost == by_enumeration(sizes, tables)


def test_a_wide_problem_is_solved_but_not_called_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(min_sum, "MOST", 4)
    draw = random.Random(1)
    tables = [
        Table((a, b), torch.tensor([[draw.random() for _ in range(3)] for _ in range(3)], dtype=torch.float64))
        for a, b in itertools.combinations(range(5), 2)
    ]
    found = least(dict.fromkeys(range(5), 3), tables)
    assert not found.exact
    assert found.cost >= by_enumeration(dict.fromkeys(range(5), 3), tables)


def test_a_long_chain_takes_the_cheap_way() -> None:
    step = torch.tensor([[0.0, 5.0], [5.0, 1.0]], dtype=torch.float64)
    first = Table((0,), torch.tensor([math.inf, 0.0], dtype=torch.float64))
    found = least(dict.fromkeys(range(100), 2), [first, *(Table((i, i + 1), step) for i in range(99))])
    assert found.cost == 5.0
    assert [found.choice[i] for i in (0, 1, 99)] == [1, 0, 0]
