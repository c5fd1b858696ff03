"""Each hostile module is evaluated as eager PyTorch evaluates it, or is refused; its modes are left alone."""

from __future__ import annotations

import warnings
from typing import Any
from zlib import crc32

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.frontend.model_outputs import output_tensors
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import type_of
from tests.hostile import test_hostile  # noqa: F401  (which enters the cases)
from tests.hostile.harness import CASES, LAYOUTS, Case

MESHES = ("dp2", "tp2", "dp2 tp2", "zero3", "pp2", "accumulate", "fuse")
STACKED = ("pp2", "accumulate")
NO_TENSOR = ("AGenerator", "APythonNumber", "Nothing")  # which training refuses by another code


def outcome(case: Case, layout: str) -> str:
    """ "right", "wrong: ..." or the code of an error; "right" too for one that eager PyTorch raises as well."""
    mesh, plan = LAYOUTS[layout]
    model = case.model()
    loss = None if case.loss is None else case.loss(model)
    modes = {name: module.training for name, module in model.named_modules()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = shardc.compile(model, case.batches()[0], mesh=mesh, plan=plan, loss=loss, mode="eval")
            trainer = program.launch()
        except ShardcError as refusal:
            return refusal.code if evaluated(case, case.batches()[0]) is not None else "right"
        assert {name: module.training for name, module in model.named_modules()} == modes
        if case.random or any(d.code == case.warned for d in program.diagnostics):
            return "right"
        for batch in case.batches():
            exact = evaluated(case, batch)
            assert exact is not None
            result = trainer.step(batch.clone())
            for name, output in result.outputs.items():
                value = output.full()
                if layout in STACKED and value.shape != exact[name].shape:
                    continue  # of single microbatches, which `verify` compares with eager ones
                if not near(value, exact[name], case.tolerance):
                    return f"wrong: {name}"
        report = program.verify()
        return "right" if report.ok else f"wrong: {report}"


def evaluated(case: Case, batch: Tensor) -> dict[str, Tensor] | None:
    """What eager PyTorch returns; None where it raises an error."""
    model = case.model().eval()
    with torch.no_grad():
        try:
            given = batch.clone()
            output = model(given)
            if case.loss is not None:  # which may write to what it is given
                case.loss(model)(output, given)
            return output_tensors(output)
        except Exception:
            return None


def near(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), tolerance, tolerance, equal_nan=True)


@pytest.mark.sampled(34)
@pytest.mark.parametrize("name", CASES)
def test_evaluates_as_eager(name: str) -> None:
    case = CASES[name]
    layout = MESHES[crc32(name.encode()) % len(MESHES)]
    assert outcome(case, layout) in ({"SC127"} if name in NO_TENSOR else {"right", case.code(layout)})


class Merges(nn.Module):
    """An adapter that is merged into the weight while it is evaluated, as LoRA's are: `train` is overridden."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.adapter = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.merged = False

    def train(self, mode: bool = True) -> Merges:
        if mode == self.merged:
            self.a.weight.data += self.adapter.weight.data * (-1 if mode else 1)
            self.merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if self.merged else self.a(x) + self.adapter(x)


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop = nn.Linear(6, 6), nn.Dropout(0.5).eval()

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("in forward")


def test_modes_are_put_back_by_modules_own_methods_and_after_errors() -> None:
    torch.manual_seed(0)
    model, x = Merges().double(), torch.randn(4, 6, dtype=torch.float64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    program = shardc.compile(model, x, mesh="dp=2", plan={"inputs": {"x": "dp"}}, mode="eval")
    assert model.training
    assert not model.merged
    assert all(torch.allclose(before[name], value) for name, value in model.state_dict().items())
    del program
    broken = Fails()
    with pytest.raises(ShardcError, match="SC104"):
        shardc.compile(broken, x, mesh="dp=2", mode="eval")
    assert [broken.training, broken.a.training, broken.drop.training] == [True, True, False]


class Aliases(nn.Module):
    """Outputs that are an input, a buffer, a parameter, and views of them."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.register_buffer("table", torch.arange(6.0))

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {
            "y": self.a(x), "x": x, "turned": x.mT, "table": self.table, "half": self.table[:3], "bias": self.a.bias
        }  # fmt: skip


@pytest.mark.parametrize("layout", ["dp2 tp2", "zero3", "fuse"])
def test_outputs_may_be_inputs_buffers_and_parameters(layout: str) -> None:
    mesh, plan = LAYOUTS[layout]
    model, x = Aliases().double(), torch.randn(4, 6, dtype=torch.float64)
    program = shardc.compile(model, x, mesh=mesh, plan=plan, mode="eval")
    assert program.verify().ok
    trainer = program.launch()
    result = trainer.step(x)
    with torch.no_grad():
        exact = model.eval()(x)
    for name, value in exact.items():
        assert near(result.outputs[name].full(), value, 1e-12), name
    result.outputs["table"].full().zero_()
    result.outputs["bias"].full().zero_()
    assert torch.equal(trainer.step(x).outputs["table"].full(), exact["table"])
    assert near(trainer.step(x).outputs["y"].full(), exact["y"], 1e-12)


@pytest.mark.parametrize("name", ["TiedWeights", "TiedWeightInside", "HookOfATiedParameter"])
def test_what_backward_alone_places_is_held_as_in_training(name: str) -> None:
    """Compiled by itself the evaluation would hold a parameter of these whole, of which training holds a shard."""
    mesh, plan = LAYOUTS["dp2 tp2"]
    case = CASES[name]
    model, (x, *_) = case.model(), case.batches()
    program = shardc.compile(model, x, mesh=mesh, plan=plan)
    evaluation = program.evaluation(x, "scalars")
    alone = shardc.compile(model, x, mesh=mesh, plan=plan, mode="eval")
    trained = shapes(program)
    assert shapes(evaluation).items() <= trained.items()
    assert not shapes(alone).items() <= trained.items()
    assert evaluation.verify().ok


def shapes(program: shardc.Program) -> dict[str, tuple[int, ...]]:
    """What a rank holds of each parameter and buffer."""
    pairs = zip(program.body.inputs, program.body.placeholders, strict=True)
    return {p.name: type_of(n).local_shape(program.body.mesh) for p, n in pairs if p.role in ("param", "buffer")}
