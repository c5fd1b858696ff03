"""Steps on batches of several shapes: eager PyTorch's losses, parameters and moments; what is kept, what refused."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc.compiler.pass_pipeline import Store
from shardc.ir.diagnostic import ShardcError
from shardc.ir.mesh import Mesh
from shardc.ir.types import TensorType
from shardc.partition.same_state import layout
from shardc.runtime.train import shapes
from shardc.runtime.train.trainer import Trainer

VOCAB, WIDTH, HEADS = 11, 8, 2


class Block(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))


class Causal(nn.Module):
    """A language model of two blocks with a table of positions, and tied weights."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(12, WIDTH)
        self.h = nn.ModuleList([Block(drop), Block(drop)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.wte.weight
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch(rows: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(VOCAB, (rows, length), generator=generator) for name in ("ids", "labels")}


DP = {"ids": "dp, -", "labels": "dp, -"}
TP = {"h.*.qkv.weight": "3*tp, -", "h.*.out.weight": "-, tp", "wte.weight": "tp, -"}
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2": ("dp=2", {"inputs": DP}),
    "dp2 tp2": ("dp=2, tp=2", {"inputs": DP, "params": TP, "clip_grad_norm": 1.0}),
    "dp4": ("dp=4", {"inputs": DP, "storage": {"zero": 1, "axes": ["dp"]}}),
    "zero 1": ("dp=2", {"inputs": DP, "storage": {"zero": 1, "axes": ["dp"]}}),
    "zero 2": ("dp=2", {"inputs": DP, "storage": {"zero": 2, "axes": ["dp"]}, "recompute": "full"}),
    "zero 3": ("dp=2, tp=2", {"inputs": DP, "params": TP, "storage": {"zero": 3, "axes": ["dp"]}}),
    "zero 3 dp4": ("dp=4", {"inputs": DP, "storage": {"zero": 3, "axes": ["dp"]}}),
    "accumulate": ("dp=2", {"inputs": DP, "accumulate": 2, "loss": {"tokens": "labels"}}),
    "pp2 tp2": ("pp=2, tp=2", {"params": TP, "pipeline": {"microbatches": 4}}),
    "pp2 dp2 zero 1": (
        "pp=2, dp=2",
        {"inputs": DP, "pipeline": {"microbatches": 2, "schedule": "zb-h1"}, "storage": {"zero": 1, "axes": ["dp"]}},
    ),
    "pp2 auto": ("pp=2", {"pipeline": {"microbatches": 2, "schedule": "auto", "stages": 2}}),
    "pp2 interleaved": ("pp=2", {"pipeline": {"microbatches": 2, "stages": 4, "schedule": "interleaved"}}),
    "fuse": ("dp=2, tp=2", {"inputs": DP, "params": TP, "fuse": True, "bucket": True}),
}
FEW = [(8, 6), (5, 4), (8, 6), (2, 9)]  # rows and lengths: short, odd, longer, and the first again


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4)


def compiled(name: str, drop: float = 0.0) -> shardc.Program:
    mesh, plan = PLANS[name]
    model = Causal(drop)
    return shardc.compile(model, batch(*FEW[0]), mesh=mesh, plan=plan, optimizer=adam(model))


def small() -> shardc.Program:
    model = nn.Linear(4, 4)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    plan = {"inputs": {"input": "dp, -"}}
    return shardc.compile(
        model, torch.ones(8, 4), mesh="dp=2", plan=plan, loss=lambda y, _: y.square().mean(), optimizer=sgd
    )


def quietly(trainer: Trainer, given: dict[str, Tensor]) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(trainer.step(given).loss)


def eager(clip: float | None) -> tuple[list[float], nn.Module, torch.optim.Optimizer]:
    model = Causal()
    optimizer = adam(model)
    losses: list[float] = []
    for k, shape in enumerate(FEW):
        optimizer.zero_grad()
        loss = model(**batch(*shape, seed=k))
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model, optimizer


def parts(*names: str) -> list[Any]:
    """These plans, and the others as long tests."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.long) for name in PLANS]


@pytest.mark.parametrize("name", parts("zero 3"))
def test_steps_on_several_shapes_are_those_of_plain_training(name: str) -> None:
    trainer = compiled(name).launch()
    losses, model, optimizer = eager(PLANS[name][1].get("clip_grad_norm"))
    for k, shape in enumerate(FEW):
        assert quietly(trainer, batch(*shape, seed=k)) == pytest.approx(losses[k], rel=1e-12, abs=1e-12)
    values = trainer.state_dict()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(values[key], value, rtol=1e-10, atol=1e-12)
    moments = trainer.state_dict(("state",))
    for key, p in model.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq", "step"):
            expected = optimizer.state[p][moment]
            torch.testing.assert_close(moments[f"{key}:{moment}"].to(expected), expected, rtol=1e-10, atol=1e-12)
    assert set(moments) == {
        f"{key}:{m}" for key, _ in model.named_parameters() for m in ("exp_avg", "exp_avg_sq", "step")
    }


@pytest.mark.parametrize("name", parts("zero 2"))
def test_steps_of_the_first_shape_are_bitwise_what_they_are_without_others(name: str) -> None:
    plain, trainer = compiled(name).launch(), compiled(name).launch()
    for each in (plain, trainer):
        each.step(batch(8, 6))
    before = {name: t.clone() for name, t in trainer.state.items()}
    quietly(trainer, batch(*FEW[1]))
    trainer.state, trainer.steps = before, 1
    assert float(plain.step(batch(8, 6, 1)).loss) == quietly(trainer, batch(8, 6, 1))
    assert all(torch.equal(value, trainer.state[name]) for name, value in plain.state.items())


@pytest.mark.parametrize("name", parts("pp2 tp2"))
def test_dropout_is_that_of_one_device(name: str) -> None:
    """Masks go by an element's place in the whole batch, whatever the shape and the layout."""
    trainer, model = compiled(name, 0.4).launch(), Causal(0.4)
    plan = {"accumulate": trainer.body.microbatches, "clip_grad_norm": PLANS[name][1].get("clip_grad_norm")}
    plan = {key: value for key, value in plan.items() if value is not None}
    alone = shardc.compile(model, batch(8, 6), mesh="dp=1", plan=plan, optimizer=adam(model)).launch()
    for k, shape in enumerate(FEW[:2]):
        given = batch(*shape, seed=k)
        assert quietly(trainer, given) == pytest.approx(quietly(alone, given), rel=1e-12)


@pytest.mark.parametrize("name", parts("dp4"))
def test_other_programs_hold_the_state_as_the_first_does(name: str) -> None:
    first = compiled(name)
    for shape in FEW[1:3]:
        other = first.training(batch(*shape))  # which refuses what is held otherwise
        report = other.verify()
        assert report.ok, report
        kept = [(p.role, p.name) for p in first.body.inputs if p.role in ("param", "buffer", "state")]
        assert [(p.role, p.name) for p in other.body.inputs if p.role in ("param", "buffer", "state")] == kept


def test_state_that_would_lie_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were storage not forced to be the first program's, it would be an error, and no wrong number."""
    program = compiled("zero 3")
    monkeypatch.setattr(Store, "like", lambda self, body, more=(): Store())
    with pytest.raises(ShardcError, match=r"SC547(.|\n)*for this batch '.+' would be held as f64"):
        program.training(batch(5, 6))


def test_layouts_are_told_apart_by_what_ranks_hold() -> None:
    whole, split = Mesh(dp=4, tp=2), Mesh(dp=4, tp=2).split("dp", (2, 2))
    same = [
        ("f32[8@dp]", whole),
        ("f32[8@dp:0.dp:1]", split),
        ("f32[(4@dp 2)]", whole),
        ("f32[(2@dp:0 4@dp:1)]", split),
    ]
    assert len({layout(TensorType.parse(text), mesh) for text, mesh in same}) == 1
    other = [("f32[8@tp]", whole), ("f32[8@dp:0]", split), ("f32[8@dp:1.dp:0]", split), ("f32[(2 4@dp)]", whole)]
    other += [("f32[(6@dp 2)]", whole), ("f32[12@dp]", whole), ("f32[8]", whole), ("f32[(4@dp:0 2@dp:1)]", split)]
    assert len({layout(TensorType.parse(text), mesh) for text, mesh in (*other, same[0])}) == len(other) + 1


def test_programs_are_compiled_once_and_the_last_used_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "PROGRAMS", 2)
    trainer = small().launch()
    seen: list[int] = []
    inner = trainer._programs._compile
    assert inner is not None

    def counting(given: Tensor, updates: bool) -> Any:
        seen.append(len(given))
        return inner(given, updates)

    trainer._programs._compile = counting
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for rows in (8, 4, 8, 4, 2, 4, 8):
            trainer.step(torch.ones(rows, 4))
        assert seen == [4, 2]
        shown = [str(w.message) for w in said if "for each shape of batch" in str(w.message)]
        assert len(shown) == 2  # once a shape
        assert "here is input [4, 4] after input [8, 4]; the 2 used last are kept" in shown[0]
        assert "here is input [2, 4] after input [8, 4]; input [4, 4]; the 2" in shown[1]
        assert not [w for w in said if "more than 2" in str(w.message)]
        trainer.step(torch.ones(3, 4))  # that of 2 rows is used least recently
        trainer.step(torch.ones(4, 4))
        assert seen == [4, 2, 3]
        trainer.step(torch.ones(2, 4))
        trainer.step(torch.ones(8, 4))  # the first is always kept
        assert seen[3:] == [2]
        trainer.step(torch.ones(5, 4))
        assert len([w for w in said if "more than 2 forms" in str(w.message)]) == 1
        shown = [str(w.message) for w in said if "for each shape of batch" in str(w.message)]
        assert len(shown) == 3  # with the first that was one too many; no more are named from then on


def test_what_is_unlike_the_sample_in_more_than_its_sizes_is_refused() -> None:
    trainer = compiled("dp2").launch()
    ids = batch(8, 6)["ids"]
    for wrong in (
        {"ids": ids.float(), "labels": ids},
        {"ids": ids[0], "labels": ids[0]},
        {"ids": ids[:0], "labels": ids[:0]},
        {"ids": ids},
        {"ids": ids, "labels": ids, "more": ids},
        {"ids": ids.to("meta"), "labels": ids},
    ):
        with pytest.raises(ShardcError, match=r"SC50[14]"):
            trainer.step(wrong)
    with pytest.raises(ShardcError, match="SC104"):  # what eager PyTorch raises too
        trainer.step({"ids": ids, "labels": ids[:3]})
    assert trainer.steps == 0
    trainer.step(batch(8, 6))


def test_a_program_from_a_file_has_one_shape(tmp_path: Path) -> None:
    model = Causal()
    shardc.compile(model, batch(8, 6), mesh="dp=2", plan={"inputs": DP, "accumulate": 2}).save(tmp_path / "step.json")
    trainer = shardc.Program.load(tmp_path / "step.json").launch(state=model.state_dict())
    trainer.step(batch(8, 6))
    with pytest.raises(ShardcError, match="SC547"):
        trainer.step(batch(6, 6))


def test_gradients_descent_and_checkpoints_are_of_the_last_shape(tmp_path: Path) -> None:
    mesh, plan = PLANS["zero 3"]
    model = Causal()
    trainer = shardc.compile(model, batch(8, 6), mesh=mesh, plan=plan).launch()
    twin = Causal()
    for k, shape in enumerate(FEW[:2]):
        twin.zero_grad()
        twin(**batch(*shape, seed=k)).backward()
        quietly(trainer, batch(*shape, seed=k))
        grads = trainer.gather_grads()
        for name, p in twin.named_parameters():
            torch.testing.assert_close(grads[name], p.grad, rtol=1e-10, atol=1e-12)
        trainer.sgd(0.1)
        with torch.no_grad():
            for p in twin.parameters():
                p -= 0.1 * p.grad  # type: ignore[operator]
    trainer.save(tmp_path / "run").wait()
    resumed = shardc.compile(Causal(), batch(5, 4), mesh="dp=4", plan={"inputs": DP}).launch()
    resumed.load(tmp_path / "run")
    given = batch(7, 6)
    assert quietly(resumed, given) == pytest.approx(float(twin(**given).detach()), rel=1e-12)
    assert trainer.evaluate([given]).loss == pytest.approx(float(twin(**given).detach()), rel=1e-12)


@pytest.mark.parametrize("name", [pytest.param("dp4", marks=pytest.mark.long), "zero 3 dp4"])
def test_an_evaluation_of_fewer_rows_than_ranks_splits_their_axis(name: str) -> None:
    trainer = compiled(name).launch()
    given = batch(2, 6)
    with torch.no_grad():
        assert trainer.evaluate([given]).loss == pytest.approx(float(Causal()(**given)), rel=1e-12)


def test_a_program_for_evaluation_takes_other_shapes_and_says_so() -> None:
    model = Causal()
    plan = {"inputs": DP, "accumulate": 2}
    program = shardc.compile(model, batch(8, 6), mesh="dp=2", plan=plan, mode="eval")
    head = "# batch: ids i64[8, 6], labels i64[8, 6] in 2 microbatches; other sizes have a program each"
    assert program.text().splitlines()[0] == head
    with torch.no_grad():
        expected = float(model(**batch(5, 4)))
    assert quietly(program.launch(), batch(5, 4)) == pytest.approx(expected, rel=1e-12)
