"""Explanations are checked against the compiler: a change that is advised is compiled, and the collective is gone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import Mesh, P, ShardcError
from shardc.compiler.pass_pipeline import Options
from shardc.explain import what_if
from shardc.explain.collective import Explanation, bound_of, explain
from shardc.explain.what_if import compiled, measure
from shardc.ir.diagnostic import Diagnostic


class Pair(nn.Module):
    """Two layers, whose weights can be placed to fit or not."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64, bias=False)
        self.down = nn.Linear(64, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).pow(2).sum()


class Fused(nn.Module):
    """Attention with one matrix for q, k and v, whose third is split off as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48, bias=False)
        self.out = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split(16, dim=-1)
        return self.out(q * k + v).pow(2).sum()


def compile_pair(**params: Any) -> shardc.Program:
    plan = {"params": params, "inputs": {"x": P("dp")}, "bucket": False}
    return shardc.compile(Pair(), {"x": torch.randn(8, 16)}, mesh=Mesh(dp=2, tp=2), plan=plan)


@pytest.fixture(scope="module")
def megatron() -> shardc.Program:
    """Column, then row: what is left is a sum over tp, and gradients over dp."""
    return compile_pair(**{"up.weight": P("tp"), "down.weight": P(None, "tp")})


@pytest.fixture(scope="module")
def mismatched() -> shardc.Program:
    """Both weights by their outputs: the hidden layer is gathered in between."""
    return compile_pair(**{"up.weight": P("tp"), "down.weight": P("tp")})


def kinds(program: shardc.Program, kind: str) -> list[int]:
    return [i for i, c in enumerate(program.collectives()) if c.kind == kind]


def test_a_removable_gather_gets_advice_that_works(mismatched: shardc.Program) -> None:
    first = kinds(mismatched, "all_gather")[0]
    found = explain(mismatched, first)
    best = found.cheapest
    assert not found.inherent
    assert best is not None
    assert best.sent < 0
    # The advice is compiled here once more, and what it promises is what comes out.
    cost = compiled(mismatched.reference, best.plan, Options(), measure)
    assert found.collective.value not in {c.value for c in cost.collectives}
    before = sum(c.bytes_per_rank for c in mismatched.collectives())
    assert cost.sent == before + best.sent
    assert cost.parameter_bytes == mismatched.parameter_bytes()[0] + best.parameter_bytes


def test_advice_names_a_line_of_the_plan_that_one_can_write(mismatched: shardc.Program) -> None:
    found = explain(mismatched, kinds(mismatched, "all_gather")[0])
    assert 'write down.weight = "-, tp" instead of "tp"' in str(found)
    again = compile_pair(**{"up.weight": P("tp"), "down.weight": P(None, "tp")})
    assert not kinds(again, "all_gather")
    assert found.cheapest is not None
    saved = sum(c.bytes_per_rank for c in again.collectives()) - sum(c.bytes_per_rank for c in mismatched.collectives())
    assert found.cheapest.sent == saved


def test_why_a_gather_exists(mismatched: shardc.Program) -> None:
    (trail,) = explain(mismatched, kinds(mismatched, "all_gather")[0], seconds=0).trails
    assert trail.axis == "tp"
    assert trail.cause.startswith('up.weight = "tp"')
    assert 'down.weight = "tp"' in trail.needed  # what claims the axis instead
    assert trail.steps[0].value == "up.linear"


def test_a_row_parallel_sum_is_inherent(megatron: shardc.Program) -> None:
    found = explain(megatron, "down.linear.all_reduce")
    assert "split over tp" in found.inherent
    (trail,) = found.trails
    assert "splits dim 1" in trail.why
    assert "%down.weight" in trail.why
    assert found.changes, "leaving the annotations out removes it"
    assert not any(change.saves for change in found.changes)


def test_a_gradient_reduction_is_inherent(megatron: shardc.Program) -> None:
    gradients = [c.value for c in megatron.collectives() if c.phase == "bwd" and c.axes == ("dp",)]
    assert len(gradients) == 2
    for name in gradients:
        found = explain(megatron, name)
        assert "the terms of the gradient are split over dp" in found.inherent
        assert found.cheapest is None
        assert 'x = "dp"' in found.trails[0].cause
        (change,) = [c for c in found.changes if c.text == 'leave out x = "dp"']
        assert change.work == pytest.approx(1, abs=0.05)  # twice as much


class Pictures(nn.Module):
    """A convolution, of which an output reads few of the input's places, and a layer beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.words = nn.Conv2d(3, 8, 4, stride=4), nn.Linear(32, 64)

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        return self.conv(images).square().mean() + self.words(words).square().mean()


def test_work_is_what_a_rank_computes() -> None:
    """A convolution's work is not the product of all places of its input and of its output: beside that, giving up the
    batch of anything else would look like no work."""
    batch = {"images": torch.randn(8, 3, 16, 16), "words": torch.randn(8, 32)}
    plan = {"inputs": {"images": "dp", "words": "dp"}, "bucket": False}
    program = shardc.compile(Pictures(), batch, mesh=Mesh(dp=2), plan=plan)
    cost = compiled(program.reference, bound_of(program), Options(), measure)
    assert cost.work == program.flops().total
    (gradient,) = [c.value for c in program.collectives() if "words.linear_wgrad" in c.value]
    (change,) = [c for c in explain(program, gradient).changes if c.text == 'leave out words = "dp"']
    fewer = shardc.compile(Pictures(), batch, mesh=Mesh(dp=2), plan={"inputs": {"images": "dp"}, "bucket": False})
    assert change.work == pytest.approx(fewer.flops().total / cost.work - 1)
    assert change.gives_up


def test_a_fused_weight_leaves_only_its_inherent_sum() -> None:
    """Blocks keep q, k and v aligned: no gather is left, and nothing better can be written."""
    model = Fused()
    plan = {"params": {"qkv.weight": P((3, "tp"))}, "inputs": {"x": P("dp")}}
    program = shardc.compile(model, {"x": torch.randn(8, 16)}, mesh=Mesh(dp=2, tp=2), plan=plan)
    tp = [i for i, c in enumerate(program.collectives()) if c.axes == ("tp",)]
    assert len(tp) == 1  # the row-parallel sum
    assert explain(program, tp[0]).inherent


def test_a_loaded_program_explains_itself_the_same(mismatched: shardc.Program, tmp_path: Path) -> None:
    mismatched.save(tmp_path / "p.json")
    loaded = shardc.Program.load(tmp_path / "p.json")
    at = kinds(mismatched, "all_gather")[0]
    assert str(explain(loaded, at)) == str(explain(mismatched, at))


def test_names_and_numbers_agree(megatron: shardc.Program) -> None:
    for i, c in enumerate(megatron.collectives()):
        for value in (i, str(i), c.value, f"%{c.value}"):
            assert explain(megatron, value, seconds=0).collective == c


def test_every_collective_of_a_plan_has_a_cause(mismatched: shardc.Program) -> None:
    for i in range(len(mismatched.collectives())):
        found = explain(mismatched, i, seconds=0)
        assert found.trails
        for trail in found.trails:
            assert trail.cause, f"{found.collective.value} comes from no annotation"
            assert trail.roots


def test_a_candidate_that_breaks_the_compiler_is_reported(
    mismatched: shardc.Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two candidates fail of an assertion of ours, and one of another bug; a refusal is nothing to report."""
    at = kinds(mismatched, "all_gather")[0]
    before = explain(mismatched, at)
    assert not before.failed
    whole, calls = what_if.distribute, iter(range(100))
    wrong = {
        1: AssertionError("assign broke the graph:\nV1 relu"),
        2: KeyError("tp"),
        3: ShardcError(Diagnostic("SC207", "an axis cannot go there")),
    }

    def distribute(*args: Any) -> Any:
        if (n := next(calls)) in wrong:
            raise wrong[n]
        return whole(*args)

    monkeypatch.setattr(what_if, "distribute", distribute)
    found = explain(mismatched, at)
    assert found.tried == before.tried
    assert len(found.failed) == 2
    said = "2 of them failed to compile: a bug in shardc, please report: AssertionError: assign broke the graph: ("
    assert said in str(found)
    assert "V1 relu" not in str(found)
    assert "KeyError: 'tp'" in found.failed[1]


def test_storage_is_explained() -> None:
    """The parameters' gathers are there again when the program's own plan is compiled anew."""
    plan = {"params": {"up.weight": P("tp")}, "inputs": {"x": P("dp")}, "storage": {"zero": 3, "axes": ["dp"]}}
    program = shardc.compile(Pair(), {"x": torch.randn(8, 16)}, mesh=Mesh(dp=2, tp=2), plan=plan)
    gathers = [i for i, c in enumerate(program.collectives()) if c.kind == "all_gather" and c.axes == ("dp",)]
    assert gathers
    for i in gathers:
        found = explain(program, i, seconds=0)
        assert found.collective.cause == found.trails[0].cause == "storage over dp"
        assert "storage keeps parts over dp" in found.inherent


def test_what_is_no_collective_is_refused(megatron: shardc.Program) -> None:
    with pytest.raises(ShardcError, match=r"SC106(.|\n)*did you mean 'down.linear.all_reduce'"):
        explain(megatron, "down.linear.allreduce")
    with pytest.raises(ShardcError, match="SC106"):
        explain(megatron, 99)


def test_text(mismatched: shardc.Program, golden: Any) -> None:
    found: Explanation = explain(mismatched, kinds(mismatched, "all_gather")[0])
    root = Path(__file__).parent.parent.parent
    golden("gather.txt", str(found).replace(f"{root}/", "").replace(f"{Path(__file__).name}:", "test_explain.py:"))
    assert bound_of(mismatched)
