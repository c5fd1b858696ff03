"""`trainer.evaluate` and `predict`: on the trainer's own tensors, beside its steps, without a trace of it in them.

Longer than 400 lines: what an evaluation may leave behind is asked of the same trainers.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import type_of
from shardc.partition.staged_program import StagedProgram
from shardc.runtime.execute.batch import leaves_of
from shardc.runtime.train.trainer import Trainer

SEED = 3


class Net(nn.Module):
    """Dropout, a batch norm whose statistics move, and a scalar output."""

    def __init__(self, drop: float = 0.3) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.a, self.norm = nn.Linear(6, 12), nn.BatchNorm1d(12)
        self.drop, self.b = nn.Dropout(drop), nn.Linear(12, 4)
        self.double()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.drop(self.norm(self.a(x)).relu())
        return {"y": self.b(h), "active": (h > 0).double().mean()}


def loss(found: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return (found["y"] - batch["x"][:, :4]).square().mean()


def batch(rows: int = 8, seed: int = 0) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))}


DP, TP = {"x": "dp, -"}, {"a.weight": "tp, -", "b.weight": "-, tp"}
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2 tp2": ("dp=2, tp=2", {"inputs": DP, "params": TP}),
    "zero 1": ("dp=2", {"inputs": DP, "storage": {"zero": 1, "axes": ["dp"]}, "clip_grad_norm": 1.0}),
    "zero 3": ("dp=2, tp=2", {"inputs": DP, "params": TP, "storage": {"zero": 3, "axes": ["dp"]}}),
    "pp2 tp2": ("pp=2, tp=2", {"params": TP, "pipeline": {"microbatches": 2}}),
    "pp2 interleaved": ("pp=2", {"pipeline": {"microbatches": 2, "stages": 4, "schedule": "interleaved"}}),
    "accumulate": ("dp=2", {"inputs": DP, "accumulate": 2, "recompute": "full"}),
    "fuse": ("dp=2, tp=2", {"inputs": DP, "params": TP, "fuse": True, "bucket": True}),
}


class Deep(Net):
    """The same with two more layers, so that four stages have something each."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ModuleList([nn.Linear(12, 12), nn.Linear(12, 12)]).double()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.drop(self.norm(self.a(x)).relu())
        for layer in self.more:
            h = layer(h).tanh()
        return {"y": self.b(h), "active": (h > 0).double().mean()}


def trainer_of(name: str, model: nn.Module | None = None) -> tuple[nn.Module, Trainer]:
    model = model or (Deep() if "interleaved" in name else Net())
    mesh, plan = PLANS[name]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    program = shardc.compile(model, batch(), mesh=mesh, plan=plan, loss=loss, optimizer=optimizer)
    return model, program.launch()


def exact(model: nn.Module, trainer: Trainer, batches: list[dict[str, Tensor]]) -> tuple[float, float]:
    """The eager model's mean loss and scalar, on the trainer's weights, weighted by rows."""
    twin = type(model)()
    twin.load_state_dict(trainer.state_dict())
    twin.eval()
    with torch.no_grad():
        outputs = [twin(**given) for given in batches]
    rows = torch.tensor([len(given["x"]) for given in batches], dtype=torch.float64)
    losses = torch.stack([loss(found, given) for found, given in zip(outputs, batches, strict=True)])
    scalars = torch.stack([found["active"] for found in outputs])
    return float((losses * rows).sum() / rows.sum()), float((scalars * rows).sum() / rows.sum())


class Weighed(nn.Module):
    """Its first input is shared by all rows."""

    def forward(self, weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return (x @ weights - y).square().mean()


@pytest.mark.parametrize("inputs", [{}, {"x": "dp, -", "y": "dp"}])
def test_rows_are_those_of_most_tensors_where_no_plan_says_so(inputs: dict[str, str]) -> None:
    draw = torch.Generator().manual_seed(0)
    given = [
        {"weights": torch.ones(6), "x": torch.randn(n, 6, generator=draw), "y": torch.randn(n, generator=draw)}
        for n in (8, 8, 2)
    ]
    trainer = shardc.compile(Weighed(), given[0], mesh="dp=2", plan={"inputs": inputs}, mode="eval").launch()
    losses = torch.tensor([float(Weighed()(**each)) for each in given], dtype=torch.float64)
    rows = torch.tensor([8, 8, 2], dtype=torch.float64)
    assert trainer.evaluate(given).loss == pytest.approx(float((losses * rows).sum() / rows.sum()), rel=1e-6)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", PLANS)
def test_means_are_those_of_the_eager_model_on_the_present_weights(name: str) -> None:
    model, trainer = trainer_of(name)
    given = [batch(seed=k) for k in range(3)]
    for k in range(2):
        evaluated = trainer.evaluate(given)
        mean, active = exact(model, trainer, given)
        assert evaluated.loss == pytest.approx(mean, rel=1e-12, abs=1e-12)
        assert evaluated.scalars == pytest.approx({"active": active}, rel=1e-12)
        assert (evaluated.batches, evaluated.items) == (3, 24)
        y = trainer.predict(given[0]).outputs["y"].full()
        twin = type(model)()
        twin.load_state_dict(trainer.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(y, twin.eval()(**given[0])["y"], rtol=1e-12, atol=1e-12)
        trainer.step(batch(seed=10 + k))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", PLANS)
def test_training_is_bitwise_what_it_is_without_evaluation(name: str) -> None:
    """Losses, parameters, buffers, moments; and torch's and our own random numbers."""
    histories: list[list[Any]] = []
    for evaluates in (False, True):
        _, trainer = trainer_of(name)
        torch.manual_seed(5)
        losses: list[float] = []
        for k in range(3):
            losses.append(float(trainer.step(batch(seed=k)).loss))
            if evaluates:
                trainer.evaluate([batch(seed=7), batch(seed=8)])
                trainer.predict(batch(seed=9))
        histories.append([losses, trainer.state_dict(("param", "buffer", "state")), torch.rand(4), trainer.steps])
    without, beside = histories
    assert without[0] == beside[0]
    assert without[3] == beside[3] == 3
    assert torch.equal(without[2], beside[2])
    assert without[1].keys() == beside[1].keys()
    assert all(torch.equal(without[1][key], beside[1][key]) for key in without[1])


class Counts(Net):
    """A buffer that forward changes in every mode, and reads."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__(0.0)
        self.register_buffer("calls", torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        outputs = super().forward(x)
        return outputs | {"y": outputs["y"] * self.calls}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["dp2 tp2", "accumulate", "pp2 tp2"])
def test_what_forward_does_to_buffers_is_not_kept(name: str) -> None:
    _, trainer = trainer_of(name, Counts())
    microbatches = trainer.body.microbatches
    trainer.step(batch())
    for _ in range(2):
        y = trainer.predict(batch()).outputs["y"].full()
        assert float(trainer.state_dict()["calls"]) == microbatches
    twin = Counts()
    twin.load_state_dict(trainer.state_dict())
    twin.eval()
    with torch.no_grad():
        parts = [twin(x)["y"] for x in batch()["x"].chunk(microbatches)]
    torch.testing.assert_close(y, torch.cat(parts), rtol=1e-12, atol=1e-12)
    assert trainer.evaluate([batch(), batch()]).loss == trainer.evaluate([batch()]).loss


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PLANS)
def test_an_evaluation_holds_tensors_as_training_does(name: str) -> None:
    """Whatever forward alone would prefer: what is shared is neither moved nor gathered between steps."""
    (mesh, plan), model = PLANS[name], Deep() if "interleaved" in name else Net()
    adam = torch.optim.AdamW(model.parameters())
    program = shardc.compile(model, batch(), mesh=mesh, plan=plan, loss=loss, optimizer=adam)
    beside = program.evaluation(batch(), "scalars")
    trained, evaluated = held(program.staged), held(beside.staged)
    assert {key: trained[key] for key in evaluated} == evaluated
    for c in program.staged.coordinate_range:
        assert beside.staged.held(c) <= program.staged.held(c)


def held(staged: StagedProgram) -> dict[str, tuple[int, ...]]:
    pairs = zip(staged.body.inputs, staged.body.placeholders, strict=True)
    nodes = {p.name: n for p, n in pairs if p.role in ("param", "buffer")}
    return {name: type_of(node).local_shape(staged.body.mesh) for name, node in nodes.items()}


def test_a_loss_counts_by_tokens_where_the_plan_does() -> None:
    class Labelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(16, 16)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.table(x).flatten(0, 1), labels.flatten())

    torch.manual_seed(0)
    model = Labelled().double()
    given = [{"x": torch.randint(16, (4, 5)), "labels": torch.randint(16, (4, 5))} for _ in range(3)]
    given[1]["labels"][:, 1:] = -100
    given[2]["labels"][:] = -100
    for more in ({}, {"accumulate": 2}):
        plan = {"inputs": {"*": "dp, -"}, "loss": {"tokens": "labels"}, **more}
        trainer = shardc.compile(model, given[0], mesh="dp=2", plan=plan).launch()
        whole = {key: torch.cat([one[key] for one in given]) for key in given[0]}
        assert trainer.evaluate(given).loss == pytest.approx(float(model(**whole).detach()), rel=1e-12)
        assert trainer.evaluate(given[2:]).loss == 0.0


def test_what_a_plan_says_of_what_needs_labels_is_left_out_without_them() -> None:
    class Judged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.judge = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            y = self.body(x)
            if labels is None:
                return {"y": y}
            error = (y - labels).square()
            return {"loss": error.mean() + self.judge(error).mean(), "worst": error.max(), "y": y}

    torch.manual_seed(0)
    model = Judged().double()
    given = {"x": torch.randn(4, 4).double(), "labels": torch.randn(4, 4).double()}
    plan = {"inputs": {"*": "dp, -"}, "activations": {"judge": "dp, -"}, "outputs": {"worst": "", "y": "dp, -"}}
    trainer = shardc.compile(model, given, mesh="dp=2", plan=plan).launch()
    assert trainer.predict(given).scalars["worst"] == model(**given)["worst"]
    outputs = trainer.predict({"x": given["x"]}).outputs
    assert list(outputs) == ["y"]
    torch.testing.assert_close(outputs["y"].full(), model(given["x"])["y"].detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("by_name", [True, False])
def test_a_batch_without_what_the_loss_reads(by_name: bool) -> None:
    key: Any = "labels" if by_name else 1

    def squares(y: Tensor, batch: Any) -> Tensor:
        return (y - batch[key]).square().mean()

    x, labels = torch.randn(4, 6), torch.randn(4, 2)
    given: Any = {"input": x, "labels": labels} if by_name else (x, labels)
    short: Any = {"input": x} if by_name else (x,)
    model = nn.Linear(6, 2)
    trainer = shardc.compile(model, given, mesh="dp=2", loss=squares).launch()
    compile = {
        "train": lambda: shardc.compile(model, short, mesh="dp=2", loss=squares),
        "evaluate": lambda: trainer.evaluate([short]),
    }
    for name, act in compile.items():
        with pytest.raises(ShardcError) as raised:
            act()
        (wrong,) = raised.value.diagnostics
        what = "'labels'" if by_name else "entry 1 or a later one"
        assert (wrong.code, wrong.message) == ("SC103", f"the loss reads {what} of the batch, which is not there")
        assert wrong.hint is not None
        assert wrong.hint.startswith("the batch has input: give what the loss reads")
        assert ("trainer.predict(batch)" in wrong.hint) == (name == "evaluate")
        assert wrong.location is not None
        assert Path(wrong.location.partition(":")[0]).name == "test_evaluate.py"
        assert wrong.source_text == "return (y - batch[key]).square().mean()"
    torch.testing.assert_close(trainer.predict(short).outputs["output"].full(), model(x).detach())


def test_a_loss_that_fails_of_something_else_says_that() -> None:
    def broken(y: Tensor, batch: Any) -> Tensor:
        return y.sum() * {"a": 1.0}["input"] * batch["input"].sum()

    with pytest.raises(ShardcError, match="KeyError: 'input'") as raised:
        shardc.compile(nn.Linear(6, 2), {"input": torch.randn(4, 6)}, mesh="dp=2", loss=broken)
    assert raised.value.code == "SC104"


def test_batches_of_other_shapes_compile_once_each_and_few_are_kept() -> None:
    _, trainer = trainer_of("dp2 tp2")
    compiled: list[int] = []
    inner = trainer._evaluator._compile
    assert inner is not None

    def counting(given: Any, kept: Any) -> Any:
        compiled.append(len(dict(leaves_of(given))["x"]))
        return inner(given, kept)

    trainer._evaluator._compile = counting
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for rows in (8, 4, 8, 4, 6, 2, 8):
            trainer.evaluate([batch(rows)])
        assert compiled == [8, 4, 6, 2]
        shown = [str(w.message) for w in said if "each form of batch" in str(w.message)]
        assert len(shown) == 3  # once a form
        assert "here is x [4, 6] after x [8, 6]; the 4 used last are kept" in shown[0]
        trainer.evaluate([batch(10)])  # the fifth: that of 4 rows is the one used least recently
        trainer.evaluate([batch(8), batch(10)])
        assert compiled == [8, 4, 6, 2, 10]
        trainer.evaluate([batch(4)])
        assert compiled[-1] == 4
        assert len([w for w in said if "more than 4 forms" in str(w.message)]) == 1


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["dp2 tp2", "zero 3", "accumulate", "pp2 tp2", "pp2 interleaved"])
def test_a_last_batch_may_be_short_and_odd(name: str) -> None:
    """As many microbatches as divide it, and shards that are padded."""
    model, trainer = trainer_of(name)
    given = [batch(8), batch(5, seed=1), batch(2, seed=2), batch(1, seed=3)]
    evaluated = trainer.evaluate(given)
    mean, active = exact(model, trainer, given)
    assert evaluated.loss == pytest.approx(mean, rel=1e-12)
    assert evaluated.scalars["active"] == pytest.approx(active, rel=1e-12)
    assert trainer.predict(given[1]).outputs["y"].full().shape == (5, 4)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("storage", [{}, *({"storage": {"zero": z, "axes": ["dp"]}} for z in (1, 2, 3))])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_evaluates_with_the_copies_that_it_trains_with(precision: str, storage: Any) -> None:
    model, x = Net(0.0).float(), batch()["x"].float()
    model.norm.eval()  # so that a step of training computes what an evaluation does
    adam = torch.optim.AdamW(model.parameters(), 1e-2)
    plan = {"inputs": DP, "params": TP, "precision": precision, **storage}
    program = shardc.compile(model, {"x": x}, mesh="dp=2, tp=2", plan=plan, loss=loss, optimizer=adam)
    trainer = program.launch()
    beside = program.evaluation({"x": x}, "scalars")
    assert held(program.staged).items() >= held(beside.staged).items()
    for _ in range(2):
        evaluated = trainer.evaluate([{"x": x}]).loss
        assert evaluated == pytest.approx(float(trainer.step({"x": x}).loss), rel=1e-6)
    assert {t.dtype for name, t in trainer.state.items() if name.endswith("weight")} == {torch.float32}


def test_metrics_of_training_have_the_scalars_of_the_outputs() -> None:
    model = Net(0.0)
    plan = {"inputs": DP, "outputs": {"active": "-"}, "accumulate": 2}
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    trainer = shardc.compile(model, batch(), mesh="dp=2", plan=plan, loss=loss, optimizer=optimizer).launch()
    (metrics,) = trainer.train([batch()], 1, progress=False)
    with torch.no_grad():
        halves = [Net(0.0)(x)["active"] for x in batch()["x"].chunk(2)]
    assert metrics.scalars == pytest.approx({"active": float(sum(halves) / 2)}, rel=1e-12)
    assert "active 0." in str(metrics)


def test_modes_and_values_of_the_model_do_not_matter() -> None:
    """`model.eval()` around the call changes nothing, as in eager PyTorch; nor do modules that keep modes of theirs."""
    model = Net()
    model.norm.eval()
    _, trainer = trainer_of("dp2 tp2", model)
    first = trainer.evaluate([batch()])
    assert [model.training, model.norm.training] == [True, False]
    model.eval()
    assert trainer.evaluate([batch()]).loss == first.loss
    model.train()
    model.norm.eval()
    trainer.step(batch())


def test_iterators_steps_and_nothing() -> None:
    _, trainer = trainer_of("zero 1")

    def endless() -> Iterator[dict[str, Tensor]]:
        while True:
            yield batch()

    assert trainer.evaluate(endless(), steps=2).batches == 2
    for wrong, code in (([], "SC546"), (batch(), "SC553"), (batch()["x"], "SC553"), (3, "SC553")):
        with pytest.raises(ShardcError, match=code):
            trainer.evaluate(wrong)  # type: ignore[arg-type]
    for steps in (0, -1, True, 1.5):
        with pytest.raises(ShardcError, match="SC553"):
            trainer.evaluate([batch()], steps=steps)  # type: ignore[arg-type]


def test_a_program_from_a_file_has_no_model_to_evaluate(tmp_path: Path) -> None:
    model = Net()
    shardc.compile(model, batch(), mesh="dp=2", plan={"inputs": DP}, loss=loss).save(tmp_path / "step.json")
    trainer = shardc.Program.load(tmp_path / "step.json").launch(state=model.state_dict())
    with pytest.raises(ShardcError, match="SC546"):
        trainer.evaluate([batch()])


def test_an_evaluation_on_loaded_weights_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    _, trainer = trainer_of("zero 3")
    before = trainer.evaluate([batch()]).loss
    trainer.save(tmp_path / "saved").wait()
    trainer.step(batch())
    assert trainer.evaluate([batch()]).loss != before
    trainer.load(tmp_path / "saved")
    assert trainer.evaluate([batch()]).loss == before


class Shifted(nn.Module):
    """Its first argument has no rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.a = nn.Linear(4, 4).double()

    def forward(self, by: Tensor, x: Tensor) -> dict[str, Tensor]:
        y = self.a(x + by)
        return {"loss": y.square().mean(), "size": y.abs().mean()}


@pytest.mark.parametrize("named", [True, False])
def test_rows_are_those_of_the_input_whose_rows_are_sharded(named: bool) -> None:
    """Unequal batches count by them, and not by the dim 0 of what happens to come first."""
    model, by = Shifted(), torch.randn(4, dtype=torch.float64)
    given = [torch.randn(rows, 4, dtype=torch.float64) for rows in (8, 2)]
    pairs: list[Any] = [{"by": by, "x": x} if named else (by, x) for x in given]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = {"inputs": {"x": "dp"}}
    trainer = shardc.compile(model, pairs[0], mesh="dp=2", plan=plan, optimizer=optimizer).launch()
    y = torch.cat([model.a(x + by) for x in given]).detach()
    found = trainer.evaluate(pairs)
    assert found.loss == pytest.approx(float(y.square().mean()), rel=1e-12)
    assert found.scalars["size"] == pytest.approx(float(y.abs().mean()), rel=1e-12)
