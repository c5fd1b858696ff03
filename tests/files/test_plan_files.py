"""Plans that somebody altered: each is refused with a code, or means something, which compiles and is right."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

import shardc
from shardc import Plan, ShardcError
from tests.files.mutations import ODD, mutated, mutated_text, nothing_done

pytestmark = pytest.mark.audited
WRITTEN = [path.read_text() for path in sorted((Path(__file__).parents[2] / "configs/plans").glob("*.yaml"))]
FITTING = [
    """
mesh: dp=2,tp=2
params: {"blocks.*.up.weight": "tp, -", "blocks.*.down.weight": "-, tp", "**.bias": "-"}
inputs: {x: "dp, -"}
activations: {blocks.0: "dp, -"}
storage: {zero: 3, axes: [dp], regather: true}
recompute: {mode: selective, collectives: false}
bucket: true
hardware: {like: h200, bucket_bytes: 1 MiB, network_bytes_per_second: 2.5e+10, accelerators_per_node: 2}
budget: {tp: 1 GiB, total: 2 GiB}
seed: 3
""",
    """
mesh: pp=2,dp=2
inputs: {x: dp}
pipeline: {axis: pp, schedule: 1f1b, microbatches: 4, split: [blocks.1], memory: 1 GiB}
clip_grad_norm: {norm: 1.0, returned: true}
storage: {zero: 1, axes: [dp]}
""",
    """
mesh: {dp: 2}
inputs: {x: dp}
accumulate: 2
fuse: {enabled: true, exclude: [tanh]}
precision: {compute: bf16, master: fp32, reduce: fp32, keep: [head]}
nonfinite: skip
recompute: {budget: 1 MiB}
align: false
strict: false
loss: mean
""",
    """
mesh: {pp: 2}
pipeline: {schedule: zb-h1, virtual: 1, microbatches: 2, stages: 2}
precision: {compute: fp16, loss_scale: 1024, growth_interval: 10}
""",
]
VALUES = (
    *ODD, "dp", "tp, -", "-, tp", "dp, tp", "pp", "(dp tp), -", "3*tp, -", "2", "1f1b", "zb-v", "greedy", "auto",
    "full", "1 KiB", "999 GiB", "tp=2", "dp=4", 1, 2, 3, 8, 65536, 1e-3, "fp16", "raise", "**",
    "blocks.*", {"mesh": "dp=2"},
)  # fmt: skip
SECONDS = 60  # of one plan on a busy machine


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


@contextmanager
def bounded(what: str) -> Generator[None]:
    """Fails where a plan keeps the compiler busy without an end."""

    def over(*_: object) -> None:
        raise TimeoutError(what)

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def right(plan: Plan) -> str:
    """The code with which a plan is refused that could be read, or `right`."""
    torch.manual_seed(0)
    model, x = Net(), torch.randn(8, 4)
    try:
        program = shardc.compile(model, x, plan=plan)
        report = program.verify(x)
    except ShardcError as refused:
        return refused.code
    assert report.ok, str(report)
    return "right"


def outcome(text: str, results: dict[str, str]) -> str:
    with nothing_done():
        try:
            plan = Plan.parse(text, "plan.yaml")
            assert Plan.parse(plan.dump()).dump() == plan.dump()
        except ShardcError as refused:
            return refused.code
    if plan.dump() not in results:
        with nothing_done(reads=False):
            results[plan.dump()] = right(plan)
    return results[plan.dump()]


@cache
def warm() -> None:
    """The first compile of a process imports what torch loads late; some of its modules make a folder for caches."""
    for plan in FITTING:
        assert right(Plan.parse(plan)) == "right"


def fuzzed(count: int, seed: int, plans: list[str]) -> Counter[str]:
    warm()
    draw, outcomes, results = random.Random(seed), Counter[str](), dict[str, str]()
    for _ in range(count):
        text = draw.choice(plans)
        if draw.random() < 0.7:
            data: Any = yaml.safe_load(text)
            for _ in range(draw.choice((1, 1, 1, 2))):
                data = mutated(data, draw, VALUES)
            text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
        else:
            text = mutated_text(text, draw)
        with bounded(text):
            try:
                outcomes[outcome(text, results)] += 1
            except Exception as failure:
                failure.add_note(text)
                raise
    return outcomes


def test_altered_plans_are_refused_or_right() -> None:
    assert fuzzed(12, 1, WRITTEN)["SC208"] > 2
    outcomes = fuzzed(12, 2, FITTING)
    assert outcomes["SC208"] > 2
    assert outcomes["right"] > 1


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
def test_ten_thousand_altered_plans(part: int) -> None:
    outcomes = fuzzed(500, 100 + part, [*WRITTEN, *FITTING])
    assert outcomes["SC208"] > 100
    assert outcomes["right"] > 10
