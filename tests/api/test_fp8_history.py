"""Scales of 8-bit numbers by the steps before: what is remembered, on which ranks, through which steps, and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import shardc
from shardc.ir.graph import info, op_name, type_of
from shardc.ir.ops.scaled import COUNT_AMAX, PUSH_AMAX, QUANTIZE, SCALE
from shardc.runtime.oracle.simulate import simulate
from shardc.runtime.train.trainer import Trainer
from tests.api.test_fp8 import IDS, TP, Net
from tests.api.test_precision import compiled

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HISTORY = {"linear": {"history": 3}}
UP, DOWN, GRADIENT = "fp8:_to_copy", "fp8:up.linear.fp8", "fp8:gradient:d.head.linear_dgrad"


# ---------------------------------------------------------------------------------------------- what is remembered
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_an_interval_has_the_scale_of_its_elements(dtype: torch.dtype) -> None:
    """Over all exponents, and about the largest number of either format."""
    history = torch.full((2,), -0.5)
    for exponent in range(-125, 128):
        for mantissa in (1.0, 1.25, 1.7421875, 1.75, 1.7578125, 1.9921875):
            amax = torch.tensor(mantissa * 2.0**exponent).bfloat16()
            pushed = PUSH_AMAX(history, COUNT_AMAX(amax, dtype))
            assert float(pushed[1]) == -0.5
            assert pushed[0] >= amax.float()
            assert torch.equal(SCALE(pushed[0], dtype), SCALE(amax, dtype)), float(amax)


@pytest.mark.parametrize("amax", [0.0, float("nan"), float("inf")])
def test_what_has_no_scale_is_not_remembered(amax: float) -> None:
    history = torch.tensor([3.5, 1.0])
    assert torch.equal(PUSH_AMAX(history, COUNT_AMAX(torch.tensor(amax), E4M3)), history)


def test_of_microbatches_the_largest_is_remembered() -> None:
    history = torch.tensor([3.5, 1.0])
    counts = [COUNT_AMAX(torch.tensor(amax), E4M3) for amax in (0.5, 24.0, float("inf"), 3.0, 0.5)]
    assert PUSH_AMAX(history, torch.stack(counts).sum(0)).tolist() == [28.0, 3.5]


def test_what_is_larger_is_cut_and_what_is_none_stays_so() -> None:
    x = torch.tensor([1.0, 1e4, -1e4, float("inf"), -float("inf"), float("nan")])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q = QUANTIZE(x.to(dtype), torch.tensor(1.0), E4M3, True).float()
        assert q[:3].tolist() == [1.0, 448.0, -448.0]
        assert q[3:].isnan().all()


# ---------------------------------------------------------------------------------------------- steps
class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, 48, bias=False), nn.Linear(48, 32, bias=False), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.up(x))).square().mean()


PLAN = {"inputs": {"x": "dp"}, "params": {"up.weight": "tp", "down.weight": "-, tp"}}
MESHES: list[tuple[str, dict[str, Any]]] = [
    ("dp=1, tp=1", {}),
    ("dp=2, tp=2", {}),
    ("dp=3, tp=1", {}),
    ("dp=2, tp=2", {"accumulate": 2}),
    ("dp=2, tp=2", {"accumulate": 4, "storage": {"zero": 3, "axes": ["dp"]}, "recompute": "full"}),
    ("dp=2, tp=2", {"storage": {"zero": 1, "axes": ["dp"]}, "fuse": True, "bucket": True}),
    ("pp=2, dp=2", {"params": {}, "pipeline": {"microbatches": 4, "split": ["down"]}}),
    ("pp=2, dp=2", {"params": {}, "pipeline": {"microbatches": 4, "split": ["down"], "schedule": "zb-h1"}}),
]


def batch(size: float = 1.0) -> Tensor:
    """Rows of different sizes: each rank, and each microbatch, has a largest element of its own."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(3))
    return size * x * 2.0 ** torch.arange(8)[:, None] / 16


def chain(mesh: str = "dp=2, tp=2", precision: object = HISTORY, rate: float = 0.0, **more: Any) -> shardc.Program:
    torch.manual_seed(1)
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    plan = {**PLAN, "precision": precision, **more}
    return shardc.compile(model, batch(), mesh=mesh, plan=plan, optimizer=optimizer)


def histories(trainer: Trainer) -> dict[str, list[float]]:
    return {k: v.tolist() for k, v in trainer.state_dict(("state",)).items() if k.startswith("fp8:")}


def upper(x: Tensor) -> float:
    """The end of the interval of the largest element, in bfloat16."""
    mantissa, exponent = torch.frexp(x.bfloat16().float().abs().max())
    return float((0.875 if mantissa <= 0.875 else 1 - 2**-8) * 2.0**exponent)


@pytest.mark.parametrize(("mesh", "more"), MESHES, ids=str)
def test_histories_are_those_of_the_steps_before(mesh: str, more: dict[str, Any]) -> None:
    """By hand: of the whole batch, whatever rank and microbatch its rows are on."""
    trainer = chain(mesh, **more).launch()
    assert histories(trainer)[UP] == [-448.0] * 3
    assert {tuple(v) for k, v in histories(trainer).items() if "gradient" in k} == {(-0.5,) * 3}
    sizes = [1.0, 64.0, 0.5, 0.25, 0.25]
    seen: list[float] = []
    weight = trainer.state["up.weight"].bfloat16().float()
    for size in sizes:
        trainer.step(batch(size))
        seen = [upper(batch(size)), *seen][:3]
        of_up = histories(trainer)[UP]
        assert of_up == [*seen, *[-448.0] * (3 - len(seen))]
        if size != 64.0:  # where the first product's operand was not cut
            product = upper(batch(size).bfloat16().float() @ weight.t())
            assert product / 2 <= histories(trainer)[DOWN][0] <= 2 * product
    assert all(value > 0 for value in histories(trainer)[GRADIENT])


def test_all_meshes_remember_the_same() -> None:
    """To the bit: counts are of maxima over ranks, in pipelines too."""
    found: list[dict[str, list[float]]] = []
    for mesh, more in MESHES:
        if more.get("accumulate", 4) == 4:  # of as many microbatches, or of one
            trainer = chain(mesh, **more).launch()
            for size in (1.0, 64.0, 0.5):
                trainer.step(batch(size))
            found.append({k: v for k, v in histories(trainer).items() if "gradient" not in k})
    assert len(found) == 7
    assert all(one.keys() == found[0].keys() for one in found)
    assert all(one[UP] == found[0][UP] for one in found)


def test_a_scale_is_of_the_steps_before() -> None:
    """Not of the batch at hand: what is larger is cut, and nothing waits for its maximum."""
    program = chain()
    inputs = program.inputs()
    inputs[UP] = torch.tensor([2.0, 112.0, -448.0])
    inputs["x"] = batch(1024.0)
    scales: dict[str, float] = {}
    rounded: dict[str, Tensor] = {}

    def see(node: fx.Node, values: Any) -> None:
        if node.target is SCALE:
            scales[info(node).name] = float(values[0])
        if node.target is QUANTIZE:
            rounded[info(node).name] = values[0].float()

    simulate(program.body, inputs, observe=see)
    assert scales["_to_copy.scale"] == 0.25
    assert float(rounded["_to_copy.fp8"].abs().max()) == 448.0
    graph = program.body
    for node in graph.calls_of(QUANTIZE):
        delayed = bool(node.args[3:]) and node.args[3]
        before, todo = set[fx.Node](), [node.args[1]]
        while todo:
            v = todo.pop()
            if isinstance(v, fx.Node) and v not in before:
                before.add(v)
                todo += v.all_input_nodes
        assert delayed == any(info(v).name.startswith("fp8:") for v in before)
        assert not (delayed and any(op_name(v.target).startswith("all_reduce") for v in before))
        assert delayed == ("weight" not in info(node).name and "up._to_copy" not in info(node).name
                           and "down._to_copy" not in info(node).name)  # fmt: skip


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_step_that_is_skipped_is_not_remembered(value: float) -> None:
    trainer = chain(nonfinite="skip", rate=0.1).launch()
    trainer.step(batch())
    before = {k: v.clone() for k, v in trainer.state_dict(("param", "state")).items()}
    bad = batch(64.0)
    bad[5, 3] = value
    assert trainer.step(bad).skipped
    after = trainer.state_dict(("param", "state"))
    assert all(torch.equal(after[k], v) for k, v in before.items())
    assert not trainer.step(batch()).skipped


def test_a_step_whose_gradients_overflow_is_not_remembered() -> None:
    """Its activations are as finite as others."""
    precision = {"compute": "fp16", "loss_scale": 2.0**32, "linear": {"history": 3}}
    trainer = chain(precision=precision, rate=0.1).launch()
    before = histories(trainer)
    assert trainer.step(batch(64.0)).skipped
    assert histories(trainer) == before


def test_float16_guesses_with_the_scale_of_the_loss() -> None:
    trainer = chain(precision={"compute": "fp16", "loss_scale": 1024, "linear": {"history": 3}}).launch()
    assert histories(trainer)[GRADIENT] == [-512.0] * 3
    trainer.step(batch())
    assert histories(trainer)[GRADIENT][0] > 0


def test_histories_are_saved(tmp_path: Path) -> None:
    """Losses go on to the bit, on another mesh too as far as its histories."""
    trainer = chain(rate=0.1).launch()
    for size in (1.0, 64.0):
        trainer.step(batch(size))
    trainer.save(tmp_path / "saved")
    other, third = chain(rate=0.1).launch(), chain("dp=1, tp=1", rate=0.1).launch()
    other.load(tmp_path / "saved")
    third.load(tmp_path / "saved")
    assert histories(other) == histories(third) == histories(trainer)
    for size in (1.0, 0.5, 0.5):
        assert float(other.step(batch(size)).loss) == float(trainer.step(batch(size)).loss)
    assert histories(other) == histories(trainer)


# ---------------------------------------------------------------------------------------------- programs
@pytest.mark.parametrize(
    ("name", "mesh", "zero", "more"),
    [
        ("llama", "dp=2, tp=2", 1, {"fuse": True, "bucket": True}),
        ("gpt2", "dp=2, tp=2", 3, {"recompute": "full", "accumulate": 2}),
        ("gpt2", "dp=3, tp=2", 0, {}),
        ("llama", "dp=2, tp=2", 0, {"sp": True}),
    ],
)
def test_models_verify(name: str, mesh: str, zero: int, more: dict[str, Any]) -> None:
    program, _ = compiled(name, HISTORY, mesh, zero, **more)
    assert any(node.target is COUNT_AMAX for node in program.body.calls())
    report = program.verify()
    assert report, str(report)


def test_without_an_optimizer_scales_are_of_this_step() -> None:
    program = shardc.compile(Net(), IDS, mesh="dp=2, tp=2", plan={**TP, "precision": HISTORY})
    assert not [port for port in program.body.inputs if port.name.startswith("fp8:")]
    assert all(len(node.args) == 3 for node in program.body.calls_of(QUANTIZE))
    assert program.verify()


def test_evaluation_takes_the_trainers_parameters() -> None:
    trainer = chain(rate=0.1).launch()
    trainer.step(batch())
    before = histories(trainer)
    loss = trainer.evaluate([batch()]).loss
    assert loss is not None
    assert 0 < float(loss) < float("inf")
    assert histories(trainer) == before


def test_counts_are_of_few_bytes() -> None:
    program = chain()
    for node in program.body.calls_of(COUNT_AMAX):
        assert type_of(node).extents == (512,)
