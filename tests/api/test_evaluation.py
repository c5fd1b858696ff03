"""Programs for evaluation: equal to eager `model.eval()` under every plan, readable, saved, and refused where they ask
for a backward."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from examples.gpt2 import gpt2
from examples.llama import llama
from examples.resnet import resnet
from shardc.ir.diagnostic import ShardcError
from shardc.ir.program import _canonical, _checksum
from shardc.ir.text import print_graph
from shardc.schedule.instructions import COMPUTE, Forward

ROWS = 8


@dataclass
class Found:
    """What `Net` returns: names of fields are those of outputs."""

    y: Tensor
    spread: Tensor
    right: Tensor


class Net(nn.Module):
    """Dropout, a batch norm, and scalars among the outputs: a float, and a whole number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.5))
        self.hidden = nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.5), nn.BatchNorm1d(12))
        self.head = nn.Linear(12, 6)
        self.double()
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.running_mean.normal_()  # type: ignore[union-attr]
                module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Found:
        h = self.hidden(self.inner(x))
        y = self.head(h)
        return Found(y, h.square().mean(), (y.argmax(-1) == 0).sum())


X = torch.randn(ROWS, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
DP, TP = {"x": "dp, -"}, {"inner.0.weight": "tp, -", "head.weight": "tp, -"}
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2 tp2": ("dp=2, tp=2", {"inputs": DP, "params": TP}),
    "zero 3": ("dp=4", {"inputs": DP, "storage": {"zero": 3, "axes": ["dp"]}}),
    "zero 3 tp2": ("dp=2, tp=2", {"inputs": DP, "params": TP, "storage": {"zero": 3, "axes": ["dp"]}}),
    "pp2 tp2": ("pp=2, tp=2", {"params": TP, "pipeline": {"microbatches": 4, "split": ["hidden"]}}),
    "pp2 dp2 zero 3": (
        "pp=2, dp=2",
        {
            "inputs": DP,
            "pipeline": {"microbatches": 2, "split": ["hidden"]},
            "storage": {"zero": 3, "axes": ["dp"]},
        },
    ),
    "accumulate": ("dp=2", {"inputs": DP, "accumulate": 4}),
    "fuse": ("dp=2, tp=2", {"inputs": DP, "params": TP, "fuse": True, "bucket": True}),
    "recompute": ("dp=2", {"inputs": DP, "recompute": "full", "clip_grad_norm": 1.0, "nonfinite": "skip"}),
}


def eager(model: nn.Module, *batch: Any, **more: Any) -> Any:
    model.eval()
    with torch.no_grad():
        return model(*batch, **more)


def near(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    assert a.shape == b.shape, f"{list(a.shape)}, not {list(b.shape)}"
    assert float((a.double() - b.double()).abs().max()) <= tolerance * max(1.0, float(b.double().abs().max()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PLANS)
def test_outputs_are_those_of_the_eager_model_in_float64(name: str) -> None:
    mesh, plan = PLANS[name]
    model = Net()
    program = shardc.compile(model, X, mesh=mesh, plan=plan, mode="eval")
    assert all(module.training for module in model.modules())
    result = program.launch().step(X)
    exact = eager(Net(), X)
    near(result.outputs["y"].full(), exact.y)
    near(result.scalars["spread"], exact.spread)
    microbatches = program.body.microbatches
    near(result.scalars["right"], exact.right.double() / microbatches)
    assert result.outputs["spread"].full().shape == ((microbatches,) if microbatches > 1 else ())
    assert result.buffers == result.grads == result.updates == {}
    report = program.verify(order=5)
    assert report.ok, report
    assert report.eager_error is not None
    assert report.eager_error <= 1e-12
    assert {row.name for row in report.rows} == {"y", "spread", "right"}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", PLANS)
def test_text_and_file_round_trip(name: str, tmp_path: Path) -> None:
    mesh, plan = PLANS[name]
    program = shardc.compile(Net(), X, mesh=mesh, plan=plan, mode="eval", loss=lambda found, _: found.y.square().mean())
    body = shardc.parse(print_graph(program.body))
    assert print_graph(body, comments=False) == print_graph(program.body, comments=False)
    assert body.is_forward_only
    program.save(tmp_path / "eval.json")
    read = shardc.Program.load(tmp_path / "eval.json")
    assert (read.text(), read.mode, read.plan) == (program.text(), "eval", program.plan)
    state = Net().state_dict()
    assert read.verify(X, params=state).ok
    near(read.launch(state=state).step(X).loss, eager(Net(), X).y.square().mean())
    assert read.prove().ok
    assert str(read.memory()) == str(program.memory())
    assert {phase for phase, _, _ in read.flops().counts} == {"fwd"}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "auto", "greedy"])
def test_a_pipeline_runs_forwards_alone(schedule: str) -> None:
    model, batch = gpt2(layers=4, width=16, vocab=32, seq=4)
    plan = {"pipeline": {"microbatches": 4, "schedule": schedule}}
    program = shardc.compile(model, batch, mesh="pp=2", plan=plan, mode="eval")
    work = [i for listed in program.staged.lists.ranks for i in listed if isinstance(i, COMPUTE)]
    assert {type(i) for i in work} == {Forward}
    assert len(work) == 4 * len(program.staged.stages)
    assert program.prove().ok
    assert program.verify().ok
    assert program.timeline().peak_live <= (1.0, 1.0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("make", "mesh", "plan"), [
    (gpt2, "dp=2, tp=2", "configs/plans/gpt2.yaml"),
    (llama, "dp=2, tp=2", "configs/plans/llama.yaml"),
    (resnet, "dp=2", {"inputs": {"*": "dp"}}),
])  # fmt: skip
def test_models_of_hugging_face_without_labels(make: Callable[[], Any], mesh: str, plan: Any) -> None:
    model, batch = make()
    batch = {name: value for name, value in batch.items() if name != "labels"}
    if isinstance(plan, str):
        plan = shardc.Plan.load(plan)
        plan = plan.model_copy(update={"inputs": {n: a for n, a in plan.inputs.items() if n != "labels"}})
    program = shardc.compile(model, batch, mesh=mesh, plan=plan, mode="eval")
    result = program.launch().step(batch)
    exact = eager(model, **batch)
    near(result.outputs["logits"].full(), exact.logits, 1e-5)
    with pytest.raises(ShardcError, match="SC545"):
        _ = result.loss
    assert program.verify().ok


def test_a_loss_is_that_of_training_where_there_is_one() -> None:
    model, batch = gpt2(layers=1, width=16, vocab=32, seq=4)
    plan = {"inputs": {"input_ids": "dp, -"}, "accumulate": 2, "loss": {"tokens": "labels", "shift": 1}}
    batch["labels"] = batch["labels"].clone()
    batch["labels"][:3] = -100
    wrong = code_of(
        lambda: shardc.compile(
            model, batch, mesh="dp=2", plan=plan | {"loss": {"tokens": "label", "shift": 1}}, mode="eval"
        )
    )
    assert wrong.code == "SC202"
    program = shardc.compile(model.double(), batch, mesh="dp=2", plan=plan, mode="eval")
    result = program.launch().step(batch)
    near(result.loss, eager(model, **batch).loss, 1e-6)  # transformers computes the loss in float32
    assert list(result.outputs) == ["logits"]
    assert result.outputs["logits"].full().shape == (8, 4, 32)


class Sized(nn.Module):
    """Outputs whose dim 0 is a microbatch's, but has no rows of the batch; and one of rows in which it is another."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2, 8, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x @ self.table.mT
        return self.table * y.mean(), y[:, :, None].expand(-1, -1, 3).flatten(0, 1), y


@pytest.mark.parametrize("plan", [{"accumulate": 4, "inputs": DP}, {"accumulate": 4}])
def test_rows_are_joined_and_nothing_else_is(plan: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Sized()
    program = shardc.compile(model, X, mesh="dp=2", plan=plan, mode="eval")
    outputs = program.launch().step(X).outputs
    table, flat, y = eager(model, X)
    assert outputs["0"].full().shape == (4, 2, 8)
    near(outputs["0"].full().mean(0), table)
    # As many rows as a microbatch has twice or more may be in any order: an entry a microbatch.
    near(outputs["1"].full().flatten(0, 1), flat)
    near(outputs["2"].full(), y)
    near(program.simulate(X).outputs["2"].full(), y)
    read = shardc.Program.from_json(program.to_json())
    near(read.launch(state=model.state_dict()).step(X).outputs["2"].full(), y)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precision_computes_with_copies_and_scales_nothing(precision: str) -> None:
    model = Net().float()
    x = X.float()
    loss = lambda found, _: found.y.square().mean()  # noqa: E731
    program = shardc.compile(
        model, x, mesh="dp=2, tp=2", plan={"inputs": DP, "params": TP, "precision": precision}, mode="eval", loss=loss
    )
    assert "loss:scale" not in {port.name for port in program.body.inputs}
    assert program.verify().ok
    result = program.launch().step(x)
    near(result.loss, eager(model, x).y.square().mean(), 2e-2)
    assert result.loss.dtype == torch.float32


def test_a_model_of_frozen_or_no_parameters_is_evaluated() -> None:
    frozen = Net().requires_grad_(False)
    assert shardc.compile(frozen, X, mesh="dp=2", plan={"inputs": DP}, mode="eval").verify().ok
    program = shardc.compile(nn.Softmax(-1), X, mesh="dp=2", plan={"inputs": {"input": "dp"}}, mode="eval")
    near(program.launch().step(X).outputs["output"].full(), X.softmax(-1))


# ---------------------------------------------------------------------- what is refused, and what is without effect
def code_of(act: Callable[[], object]) -> ShardcError:
    with pytest.raises(ShardcError) as caught:
        act()
    return caught.value


def test_what_asks_for_a_backward_is_refused() -> None:
    model = Net()
    adam = torch.optim.AdamW(model.parameters())
    wrong = code_of(lambda: shardc.compile(model, X, mesh="dp=2", optimizer=adam, mode="eval"))
    assert wrong.code == "SC218"
    trainer = shardc.compile(model, X, mesh="dp=2", plan={"inputs": DP}, mode="eval").launch()
    for act in (lambda: trainer.train([X], 1), lambda: trainer.sgd(0.1), trainer.gather_grads):
        wrong = code_of(act)
        assert wrong.code == "SC218"
        assert wrong.diagnostics[0].hint
    wrong = code_of(lambda: shardc.compile(model, X, mesh="dp=2", mode="evaluate"))  # type: ignore[arg-type]
    assert wrong.code == "SC553"
    assert "did you mean 'eval'?" in str(wrong)


def test_a_plan_of_training_is_noted_not_refused() -> None:
    mesh, plan = PLANS["recompute"]
    program = shardc.compile(Net(), X, mesh=mesh, plan=plan, mode="eval", strict=True)
    (note,) = [d for d in program.diagnostics if d.code == "SC218"]
    assert note.severity == "note"
    assert "'clip_grad_norm' and 'nonfinite' and 'recompute'" in note.message


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> str:
        return "nothing"


def test_a_model_that_returns_no_tensor_is_refused() -> None:
    wrong = code_of(lambda: shardc.compile(Nothing(), X, mesh="dp=2", mode="eval"))
    assert wrong.code == "SC127"


def test_outputs_of_the_plan_are_checked() -> None:
    def compiled(**outputs: str) -> shardc.Program:
        return shardc.compile(Net(), X, mesh="dp=2", plan={"inputs": DP, "outputs": outputs}, mode="eval")

    for scalar in ("", "-"):
        assert compiled(y="dp, -", spread=scalar).verify().ok
    wrong = code_of(lambda: compiled(spread="dp"))
    assert wrong.code == "SC205"
    assert 'write "" or "-"' in str(wrong)
    assert code_of(lambda: compiled(z="dp")).code == "SC202"
    result = compiled().launch().step(X)
    wrong = code_of(lambda: result.outputs["why"])
    assert wrong.code == "SC545"


def test_a_file_that_lies_about_its_mode_is_refused(tmp_path: Path) -> None:
    program = shardc.compile(Net(), X, mesh="dp=2", plan={"inputs": DP}, mode="eval")
    data = json.loads(program.to_json())
    del data["content"]["plan"]["mode"]
    data["sha256"] = _checksum(_canonical(data["content"]))
    wrong = code_of(lambda: shardc.Program.from_json(json.dumps(data)))
    assert wrong.code == "SC402"
    assert "'mode' is 'train'" in str(wrong)
