"""What `verify` compares: all that eager training has after two steps; and that it leaves everything as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import Program
from shardc.runtime.oracle.eager_witness import EagerTraining
from shardc.runtime.oracle.lifted import Lifted, copied
from shardc.runtime.oracle.report import Report
from shardc.runtime.oracle.verification import other_rows
from tests.trained import MESH, PLAN

X = torch.arange(32.0).reshape(8, 4).sin()


class Model(nn.Module):
    """A weight, a running buffer, and one that only eager PyTorch changes if `silent`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x)).square().sum() + self.fc.weight.square().sum()


def compiled(optimizer: type[torch.optim.Optimizer] | None = torch.optim.AdamW, **options: Any) -> Program:
    model = Model()
    given = None if optimizer is None else optimizer(model.parameters(), lr=1e-3)  # pyright: ignore[reportCallIssue]
    return shardc.compile(model, X, mesh=MESH, plan={**PLAN, **options}, optimizer=given)


def rows(report: Report, role: str) -> dict[str, Any]:
    return {row.name: row for row in report.rows if row.role == role}


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_everything_that_an_optimizer_reads_and_writes(optimizer: type[torch.optim.Optimizer]) -> None:
    program = compiled(optimizer, clip_grad_norm=0.5)
    report = program.verify()
    assert report.ok, str(report)
    names = {name for name, _ in Model().named_parameters()}
    assert set(rows(report, "grad")) == set(rows(report, "param")) == names
    assert {"norm.running_mean", "norm.num_batches_tracked"} <= set(rows(report, "buffer"))
    states = {name for name, _, _ in (row.partition(":") for row in rows(report, "state"))}
    assert states == (set() if optimizer is torch.optim.SGD else names)
    assert rows(report, "output")["grad_norm"].eager_error < 1e-12
    for role in ("loss", "grad", "param", "state", "buffer"):
        assert all(row.eager_error is not None and row.eager_error < 1e-9 for row in rows(report, role).values()), role


def test_a_pipeline_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    program = shardc.compile(
        model, X, mesh="pp=2, dp=2", plan={"inputs": {"input": "dp"}, "pipeline": {"microbatches": 2}},
        optimizer=optimizer, loss=lambda out, _: out.square().mean(),
    )  # fmt: skip
    report = program.verify()
    assert report.ok, str(report)
    assert {row.role for row in report.rows} >= {"loss", "grad", "param", "state"}
    assert all(row.eager_error is not None for row in report.rows if row.role in ("grad", "param", "state"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("role", ["grad", "param", "state", "buffer", "output"])
def test_each_of_them_is_compared_with_eager_pytorch(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = EagerTraining.step
    calls: list[int] = []

    def second_is_off(self: EagerTraining, *args: Any) -> dict[tuple[str, str], Tensor]:
        found = step(self, *args)
        calls.append(1)
        off = 1 + 1e-3 * (len(calls) == 2)
        return {key: value * off if key[0] == role else value for key, value in found.items()}

    monkeypatch.setattr(EagerTraining, "step", second_is_off)
    report = compiled(clip_grad_norm=1e3).verify()
    assert len(calls) == 2
    assert report.equal
    assert not report.ok


def test_a_buffer_that_only_eager_pytorch_changes() -> None:
    program = compiled(None)
    reference = program.reference.copy()
    keep = [(p, n) for p, n in zip(reference.outputs, reference.output_values, strict=True) if p.role != "buffer"]
    reference.outputs = tuple(port for port, _ in keep)
    reference.output_node.args = (tuple(node for _, node in keep),)
    report = replace(program, reference=reference).verify()
    assert not report.ok
    assert {name for name, row in rows(report, "buffer").items() if row.eager_error == float("inf")} == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.seen, self.kept = nn.Linear(4, 4), torch.zeros(4), [torch.zeros(4)]
        self.register_buffer("count", torch.zeros(()))
        self.count: Tensor
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        x.mul_(2)
        return self.fc(x).square().sum() * (self.count + 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_nothing_of_the_callers_is_changed(dtype: torch.dtype) -> None:
    model, x = Writes().to(dtype), X.to(dtype)
    heard: list[int] = []
    model.fc.weight.register_hook(lambda g: g * 2)
    tied = model.fc.weight[:1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.fc.weight.grad = torch.ones_like(model.fc.weight)
    program = shardc.compile(model, x.clone(), mesh=MESH, plan=PLAN, optimizer=optimizer)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    tensors, given, random = list(model.parameters()), x.clone(), torch.get_rng_state()
    report = program.verify(x)
    assert report.ok, str(report)
    assert report.eager_error is not None
    assert report.eager_error < 1e-9
    assert torch.equal(x, given)
    assert all(torch.equal(t, before[name]) and t.dtype == dtype for name, t in model.state_dict().items() if t.dim())
    assert all(a is b for a, b in zip(tensors, model.parameters(), strict=True))
    assert tied.data_ptr() == model.fc.weight.data_ptr()
    assert torch.equal(model.fc.weight.grad, torch.ones_like(model.fc.weight))
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), random)
    assert not heard
    program.launch()  # verify has changed nothing that a launch would warn of


@pytest.mark.filterwarnings("ignore:values were written")
def test_hooks_are_the_witness_own() -> None:
    """The model is asked itself: a copy has no hooks on parameters. One that came after compile is a difference."""
    model = Model()
    program = shardc.compile(model, X, mesh=MESH, plan=PLAN)
    assert program.verify().ok
    handle = model.fc.weight.register_hook(lambda g: g * 1.5)
    assert not replace(program, compiled=None).verify().ok
    handle.remove()
    assert program.verify().ok


def test_other_rows() -> None:
    batch = {
        "x": torch.arange(8.0).reshape(4, 2),
        "y": torch.tensor([0, 1, 2, 3]),
        "at": torch.arange(7),
        "n": 3,
    }
    other = other_rows(batch)
    assert other["y"].tolist() == [0, 1, 2, 2]
    assert other["x"][:, 0].tolist() == [0.0, 2.0, 4.0, 4.0]
    assert other["at"] is batch["at"]
    assert other["n"] == 3


def test_copies_share_memory_where_tensors_do() -> None:
    whole = torch.arange(6.0)
    views = [whole[1:4], whole[2:6].view(2, 2), torch.arange(3)]
    first, second, third = copied(views, torch.float64)
    assert torch.equal(first, views[0].double())
    assert torch.equal(second, views[1].double())
    assert third.dtype == torch.int64
    first.add_(10)
    assert second[0, 0] == 12
    assert whole[2] == 2


def test_lifted_tensors_are_put_back_after_an_error() -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    try:
        with Lifted([weight, weight], torch.float64):
            assert weight.dtype == torch.float64
            assert weight.grad is None
            weight.data.add_(1)
            weight.requires_grad_(False)
            raise KeyError
    except KeyError:
        pass
    assert weight.dtype == torch.float32
    assert weight.tolist() == [1, 1, 1]
    assert weight.requires_grad
    assert weight.grad is not None


class DyingUnits(nn.Module):
    """After one step all of its units are negative, and a second step changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.05, 1.0, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu((x * self.w).sum(-1)).square().mean()


def test_a_step_without_an_update_forgives_the_rounding_of_the_step_before() -> None:
    model, x = DyingUnits(), torch.rand(4, 64, generator=torch.Generator().manual_seed(0)) + 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = shardc.compile(model, x, mesh="tp=2", plan={"params": {"w": "tp"}}, optimizer=optimizer).verify()
    assert report.ok, str(report)
