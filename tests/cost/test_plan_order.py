"""What `python -m benchmarks.plan_order` says of its measurements: ranks, correlations, and ten plans."""

from __future__ import annotations

import pytest

from benchmarks.plan_order import order_of, plans, rank_correlation, ranks_of


def test_ranks() -> None:
    assert ranks_of([3.0, 1.0, 2.0]) == [3, 1, 2]
    assert ranks_of([5.0, 1.0, 5.0, 5.0]) == [3, 1, 3, 3], "equal ones share the mean of 2, 3 and 4"


@pytest.mark.parametrize(
    ("b", "expected"),
    [
        ([10, 20, 30, 40], 1.0),
        ([40, 30, 20, 10], -1.0),
        ([1, 2, 4, 3], 0.8),  # 1 - 6 * 2 / (4 * 15)
        ([1, 2, 2, 4], 0.9**0.5),
    ],
)
def test_spearman(b: list[float], expected: float) -> None:
    assert rank_correlation([1, 2, 3, 4], b) == pytest.approx(expected)


def test_order() -> None:
    lines = [
        {"plan": "a", "predicted_ms": 1.0, "measured_ms": 2.0, "ratio": 0.5, "rounds": [2.0, 3.0]},
        {"plan": "b", "predicted_ms": 2.0, "measured_ms": 4.0, "ratio": 0.5, "rounds": [4.0, 1.0]},
    ]
    found = order_of(lines)
    assert found["rank_correlation"] == pytest.approx(1.0)
    assert found["of_rounds"] == {"least": -1.0, "median": 0.0, "rounds": 2}
    assert found["measured"] == ["a", "b"]


@pytest.mark.parametrize(("measured", "differ", "right"), [([100, 104, 120], 2, 2), ([120, 104, 100], 2, 0)])
def test_pairs_that_take_the_same_time_have_no_order(measured: list[float], differ: int, right: int) -> None:
    lines = [
        {"plan": "", "predicted_ms": float(i), "measured_ms": ms, "ratio": 1.0, "rounds": [ms]}
        for i, ms in enumerate(measured)
    ]
    assert order_of(lines)["pairs"] == {"differ": differ, "right": right}


@pytest.mark.parametrize("world", [2, 4, 8])
def test_there_are_ten_plans(world: int) -> None:
    found = plans(world)
    assert len(found) == 10
    assert len({(mesh, repr(plan)) for mesh, plan in found.values()}) == 10
