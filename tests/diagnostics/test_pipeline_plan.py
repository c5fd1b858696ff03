"""Every way to get a plan's `pipeline` wrong, and what we say about it, word for word."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import Mesh, Plan, ShardcError
from shardc.schedule.costs import Costs


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = layer(x)
        return x.square().mean()


def compiled(text: str, mesh: str = "pp=2, dp=2", rows: int = 8) -> Any:
    return shardc.compile(Net(), (torch.ones(rows, 4),), mesh=Mesh.parse(mesh), plan=Plan.parse(text, "net.yaml"))


BATCH = 'inputs:\n  x: "dp, -"'
PIPELINE = "pipeline:\n  microbatches: 2\n"
CASES: dict[str, Callable[[], object]] = {
    "value": lambda: Plan.parse("pipeline: 4", "net.yaml"),
    "no_microbatches": lambda: Plan.parse("pipeline: {schedule: gpipe}", "net.yaml"),
    "microbatches": lambda: Plan.parse("pipeline:\n  microbatches: 0", "net.yaml"),
    "microbatches_true": lambda: Plan.parse("pipeline:\n  microbatches: true", "net.yaml"),
    "virtual_text": lambda: Plan.parse(PIPELINE + "  virtual: two", "net.yaml"),
    "split_map": lambda: Plan.parse(PIPELINE + "  split: {a: 3}", "net.yaml"),
    "split_numbers": lambda: Plan.parse(PIPELINE + "  split: [3, 6]", "net.yaml"),
    "accumulate_true": lambda: Plan.parse("seed: 3\naccumulate: true", "net.yaml"),
    "key": lambda: Plan.parse(PIPELINE + "  virtaul: 2", "net.yaml"),
    "schedule": lambda: compiled(PIPELINE + "  schedule: zb-h2"),
    "memory": lambda: Plan.parse(PIPELINE + "  memory: lots", "net.yaml"),
    "axis": lambda: compiled(PIPELINE + "  axis: pipe"),
    "no_axis": lambda: compiled(PIPELINE, "dp=2"),
    "accumulate": lambda: compiled(PIPELINE + "accumulate: 4"),
    "placement": lambda: compiled(PIPELINE + 'params:\n  "h.0.0.weight": "pp, -"\ninputs:\n  x: "dp.pp, -"'),
    "storage_axes": lambda: compiled(PIPELINE + "storage: {zero: 1, axes: [dp, pp]}"),
    "storage_params": lambda: compiled(PIPELINE + 'storage:\n  params:\n    "h.0.0.weight": "pp"'),
    "stages": lambda: compiled(PIPELINE + "  stages: 3"),
    "virtual": lambda: compiled(PIPELINE + "  stages: 4\n  virtual: 1"),
    "split_and_axis": lambda: compiled(PIPELINE + "  split: [h.1, h.2]"),
    "stages_and_split": lambda: compiled(PIPELINE + "  stages: 4\n  split: [h.1]"),
    "schedule_and_virtual": lambda: compiled(PIPELINE + "  virtual: 2\n  schedule: 1f1b"),
    "too_many_stages": lambda: compiled(PIPELINE + "  stages: 16\n  schedule: bfs"),
    "split": lambda: compiled(PIPELINE + "  split: h.7"),
    "over_memory": lambda: compiled(PIPELINE + "  memory: 60 B"),
    "over_memory_auto": lambda: compiled(PIPELINE + "  schedule: auto\n  memory: 20 B"),
    "recompute_budget": lambda: compiled(
        PIPELINE + "  schedule: gpipe\nrecompute: {budget: 200 B}\nstrict: true", "pp=2"
    ),
    "batch": lambda: compiled(PIPELINE, rows=7),
    "no_pipeline": lambda: compiled("strict: true", "pp=4"),
    "zero_2": lambda: compiled(PIPELINE + "storage: {zero: 2, axes: dp}\nstrict: true\n" + BATCH),
    "zero_2_accumulate": lambda: compiled(
        "accumulate: 2\nstorage: {zero: 2, axes: dp}\nstrict: true\n" + BATCH, "dp=2"
    ),
    "idle_axis": lambda: compiled('strict: true\ninputs:\n  x: "dp, -"'),
    "no_timeline": lambda: compiled('inputs:\n  x: "dp, -"', "dp=2").timeline(),
    "timeline_costs": lambda: compiled(PIPELINE, "pp=2").timeline({"forward": 1.0}),
    "timeline_stages": lambda: compiled(PIPELINE, "pp=2").timeline(Costs.unit(3)),
    "timeline_png": lambda: compiled(PIPELINE, "pp=2").timeline().to_svg("timeline.png"),
    "timeline_folder": lambda: compiled(PIPELINE, "pp=2").timeline().to_svg("none/timeline.svg"),
    "trace_svg": lambda: compiled(PIPELINE, "pp=2").timeline().to_trace("timeline.svg"),
    "trace_folder": lambda: compiled(PIPELINE, "pp=2").timeline().to_trace(Path("none") / "timeline.json"),
    "no_rank": lambda: compiled('inputs:\n  x: "dp, -"', "dp=2").rank(2),
    "rank_text": lambda: compiled(PIPELINE, "pp=2").rank("a"),
}


@pytest.mark.parametrize("case", CASES)
def test_message(case: str, golden: Callable[[str, str], None]) -> None:
    with pytest.raises(ShardcError) as raised:
        CASES[case]()
    golden(f"pipeline_plan/{case}.txt", str(raised.value))


def test_what_zero_promises_of_gradients() -> None:
    """Stage 2 is for the gradients alone; 3 shards parameters whatever becomes of those, and so says it by the way."""
    for zero, severity in ((1, None), (2, "warning"), (3, "note")):
        text = f"storage: {{zero: {zero}, axes: dp}}\n{BATCH}\n"
        said = [d.severity for d in compiled(PIPELINE + text).diagnostics if d.code == "SC216"]
        assert said == ([severity] if severity else [])
        assert not [d for d in compiled(text, "dp=2").diagnostics if d.code == "SC216"]
