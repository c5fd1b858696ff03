"""Formulas of a pipeline's stages equal what compiling at the sizes says, exactly."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardc
from shardc import Plan, Program, ShardcError
from shardc.symbolic.stages import KINDS, StageCosts, StageFormulas

WIDTH = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = x + layer(x).relu() @ layer.weight
        return x.square().mean()


def compiled(rows: int, length: int, microbatches: int, schedule: str = "1f1b") -> Program:
    pipeline = {"axis": "pp", "microbatches": microbatches, "schedule": schedule}
    plan = Plan.of(mesh="pp=2, dp=2", inputs={"x": "dp"}, pipeline=pipeline, symbols={"B": "x.0", "S": "x.1"})
    with torch.device("meta"):
        return shardc.compile(Net(), {"x": torch.empty(rows, length, WIDTH)}, plan=plan)


def check(formulas: StageFormulas, points: list[tuple[int, int, int]], schedule: str) -> None:
    for rows, length, microbatches in points:
        costs = formulas.at(B=rows, S=length, M=microbatches)
        own = StageCosts.of(compiled(rows, length, microbatches, schedule).staged)
        for kind in KINDS:
            expected = {key: n for key, n in getattr(own, kind).items() if key in getattr(formulas, kind)}
            assert getattr(costs, kind) == expected, (kind, rows, length, microbatches)


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.long)])
def test_stages(schedule: str) -> None:
    formulas = compiled(16, 12, 4, schedule).stage_formulas()
    assert {key: str(form) for key, form in formulas.sent.items()} == {
        (0, 1, "fwd"): "16*B*S",
        (1, 0, "bwd"): "16*B*S",
    }
    assert formulas.bytes.keys() >= {(0, "bwd", ("dp",), "all_reduce"), (1, "bwd", ("dp",), "all_reduce")}
    assert formulas.flops.keys() == {(c, phase) for c in range(2) for phase in ("fwd", "bwd")}
    check(formulas, [(24, 20, 3), (40, 31, 5), (36, 9, 2)], schedule)
    assert "0 -> 1 fwd: 16*B*S" in str(formulas)
    for wrong, said in [
        ({"B": 18}, "does not divide|is not"),
        ({"M": 1}, "M=1 is not"),
        ({"L": 4}, "'L' is no symbol"),
    ]:
        with pytest.raises(ShardcError, match=said):
            formulas.at({"B": 24, "S": 20, "M": 4} | wrong)


def test_what_has_no_stages() -> None:
    with pytest.raises(ShardcError, match=r"program.stage_formulas\(\)"):
        compiled(16, 12, 4).symbolic()
    with pytest.raises(ShardcError, match="of one microbatch"):
        compiled(16, 12, 1).stage_formulas()
