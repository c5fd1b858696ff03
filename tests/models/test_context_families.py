"""Every family of models, its sequence over an axis, with every strategy and layout: loss and each gradient are those
of eager PyTorch, to 1e-12 in float64."""

from __future__ import annotations

import pytest

from tests.models.long_models import FAMILIES, LAYOUTS, long_program

BOUND = 1e-12
STRATEGIES = ("all_gather", "ring", "all_to_all")
CASES = [(layout, way) for layout in LAYOUTS for way in (STRATEGIES if "out" not in layout else ("hierarchical",))]


@pytest.mark.sampled(352)
@pytest.mark.parametrize("balance", ["none", "zigzag"])
@pytest.mark.parametrize(("layout", "strategy"), CASES)
@pytest.mark.parametrize("name", FAMILIES)
def test_equals_eager(name: str, layout: str, strategy: str, balance: str) -> None:
    program = long_program(name, layout, context={"attention": strategy, "balance": balance})
    report = program.verify()
    assert report.ok, str(report)
    assert max(max(row.error, row.eager_error or 0.0) for row in report.rows) < BOUND
    assert {row.role for row in report.rows} >= {"loss", "grad"}
    assert all(row.eager_error is not None for row in report.rows)
    assert program.prove().ok
