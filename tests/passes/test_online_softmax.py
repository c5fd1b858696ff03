"""Softmax over a sharded dim: one all-gather of its statistics, and the single device's values, NaN for NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc.compiler import driver
from shardc.cost.memory import memory
from shardc.explain.collective import bound_of, explain, options_of
from shardc.ir.collectives import Collective, collectives
from shardc.ir.graph import Graph, info, type_of
from shardc.ir.verify import violations
from shardc.passes.sharding.localize import Localize
from shardc.runtime.oracle.simulate import run_reference, simulate
from tests.models.zoo import PLANS, make

Loss = Callable[[Tensor, Tensor], Tensor]


class Logits(nn.Module):
    """Logits that are a parameter, so that their gradient is an output."""

    def __init__(self, x: Tensor, loss: Loss) -> None:
        super().__init__()
        self.x = nn.Parameter(x)
        self.loss = loss

    def forward(self, target: Tensor) -> Tensor:
        return self.loss(self.x, target)


def compiled(x: Tensor, target: Tensor, loss: Loss, mesh: str = "tp=2", split: str = "-, tp") -> shardc.Program:
    return shardc.compile(Logits(x, loss), target, mesh=mesh, plan={"params": {"x": split}})


def before(program: shardc.Program) -> Graph:
    """The body as it is without the pass."""
    return driver.distribute(program.reference, bound_of(program), options_of(program), Localize)


def over(graph: Graph, axis: str = "tp", phase: str = "fwd") -> list[Collective]:
    return [c for c in collectives(graph) if axis in c.axes and c.phase == phase]


def kinds(graph: Graph, axis: str = "tp", phase: str = "fwd") -> list[str]:
    return [f"{c.kind} {c.op}".strip() for c in over(graph, axis, phase)]


def same(program: shardc.Program) -> None:
    """Loss and gradient are the single device's, in float64, infinities and NaN included."""
    assert not violations(program.body)
    inputs = program.inputs()
    expected = run_reference(program.reference, inputs, dtype=torch.float64)
    found = simulate(program.body, inputs, dtype=torch.float64)
    for port, want in expected.items():
        torch.testing.assert_close(found[port], want, rtol=1e-12, atol=1e-13, equal_nan=True)


def cross_entropy(**options: Any) -> Loss:
    return lambda x, target: F.cross_entropy(x, target, **options)


def weighted(x: Tensor, target: Tensor) -> Tensor:
    rows = F.cross_entropy(x, target, reduction="none")
    return (rows * torch.linspace(0.5, 2.0, len(target))).sum()


def z_loss(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x, target) + 1e-2 * x.logsumexp(-1).square().mean()


def by_hand(x: Tensor, target: Tensor) -> Tensor:
    """A softmax in pieces, which backward reads as well."""
    e = (x - x.amax(-1, keepdim=True)).exp()
    return ((e / e.sum(-1, keepdim=True)).square() * torch.arange(1.0, x.shape[1] + 1)).sum() + 0.0 * target.sum()


REDUCES = ["all_reduce max", "all_reduce sum", "all_reduce sum"]
LOSSES: dict[str, tuple[Loss, list[str], list[str]]] = {
    "mean": (cross_entropy(), REDUCES, ["all_gather"]),
    "sum": (cross_entropy(reduction="sum"), REDUCES, ["all_gather"]),
    "rows": (weighted, REDUCES, ["all_gather"]),
    "ignored": (cross_entropy(ignore_index=3), REDUCES, ["all_gather"]),
    "class weights": (
        cross_entropy(weight=torch.linspace(1, 2, 10)),
        [*REDUCES, "all_reduce sum"],
        ["all_gather", "all_reduce sum"],
    ),
    "smooth": (cross_entropy(label_smoothing=0.1), [*REDUCES, "all_reduce sum"], ["all_gather", "all_reduce sum"]),
    "log_softmax, nll": (lambda x, t: F.nll_loss(x.log_softmax(-1), t), REDUCES, ["all_gather"]),
    "z-loss": (z_loss, [*REDUCES, "all_reduce sum"], ["all_gather"]),
    "by hand": (by_hand, REDUCES, ["all_gather", "all_reduce sum"]),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(  # class weights: one a class
    ("name", "columns"), [(name, n) for name in LOSSES for n in (10, 11) if (name, n) != ("class weights", 11)]
)
def test_a_loss_over_a_sharded_vocabulary_meets_once(name: str, columns: int) -> None:
    loss, reduced, gathered = LOSSES[name]
    torch.manual_seed(0)
    target = torch.randint(0, 10, (6,))
    target[2] = 3 if name == "ignored" else target[2]
    program = compiled(torch.randn(6, columns) * 4, target, loss)
    assert kinds(before(program)) == reduced
    assert kinds(program.body) == gathered
    assert kinds(program.body, phase="bwd") == kinds(before(program), phase="bwd")
    same(program)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("mesh", "split", "shape"),
    [
        ("tp=3", "-, tp", (5, 10)),  # 4 4 2
        ("tp=4", "-, tp", (3, 5)),  # 2 2 1 0: a rank of padding alone
        ("a=2,b=3", "-, a.b", (4, 12)),
        ("a=2,b=3", "-, a.b", (4, 10)),  # 5 5, cut into 2 2 1
        ("dp=2,tp=2", "dp, tp", (6, 9)),
        ("tp=2", "-, tp, -, -", (3, 7, 2, 3)),  # classes in the middle, as an image has them
    ],
    ids=str,
)
def test_uneven_shards_several_axes_and_batch_dims(mesh: str, split: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    target = torch.randint(0, shape[1], (shape[0], *shape[2:]))
    program = compiled(torch.randn(shape) * 3, target, cross_entropy(), mesh, split)
    axis = next(one.axes for one in collectives(program.body))
    assert [c.kind for c in collectives(program.body) if c.axes == axis and c.phase == "fwd"] == ["all_gather"]
    same(program)


EXTREMES = [0.0, 1.0, -1.0, 88.0, 1e4, -1e4, 1e30, -1e30, 3.4e38, -3.4e38, -math.inf, -math.inf, math.inf, math.nan]


@settings(max_examples=max(15, 2 * settings().max_examples // 3), deadline=None)
@given(data=st.data())
def test_any_numbers_in_any_shards(data: st.DataObject) -> None:
    """The single device's values: shards of -inf alone count for nothing, and what is NaN there is NaN here."""
    rows, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 9))
    numbers = st.sampled_from(EXTREMES[: data.draw(st.sampled_from([3, 8, 12, 14]))]) | st.floats(-20, 20, width=32)
    x = torch.tensor([[data.draw(numbers) for _ in range(columns)] for _ in range(rows)])
    target = torch.tensor([data.draw(st.sampled_from([*range(columns), -100])) for _ in range(rows)])
    loss = data.draw(st.sampled_from([cross_entropy(reduction="sum"), weighted, z_loss, by_hand]))
    program = compiled(x, target, loss, f"tp={data.draw(st.integers(2, 4))}")
    assert kinds(program.body)[0] == "all_gather"
    same(program)


def test_in_float32_nothing_overflows() -> None:
    """A shard of -inf alone, and maxima that are far apart."""
    x = torch.tensor([[1e4, 3.0, -math.inf, -math.inf], [-1e30, -2e30, 1e30, 1e30], [-math.inf, -math.inf, 5.0, 6.0]])
    target = torch.tensor([0, 2, 3])
    program = compiled(x, target, cross_entropy(reduction="sum"))
    found = {port.role: value for port, value in simulate(program.body, program.inputs()).items()}
    leaf = x.clone().requires_grad_()
    want = F.cross_entropy(leaf, target, reduction="sum")
    want.backward()
    torch.testing.assert_close(found["loss"], want.detach())
    torch.testing.assert_close(found["grad"], leaf.grad)


# ---------------------------------------------------------------------- models
@pytest.mark.sampled(4)
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=1,tp=4"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_models_loss(name: str, mesh: str) -> None:
    model, batch, loss = make(name, **({"kv_heads": 4} if name == "llama" else {}))
    program = shardc.compile(model, batch, mesh=mesh, plan=PLANS / f"{name}.yaml", loss=loss)

    def of_loss(graph: Graph) -> list[Collective]:
        return [c for c in over(graph) if "loss" in c.source]

    was, now = of_loss(before(program)), of_loss(program.body)
    assert [c.kind for c in was] == ["all_reduce"] * 3
    (gather,) = now
    ranks, top = program.mesh.size(("tp",)), was[0].payload_bytes
    assert (gather.kind, gather.payload_bytes) == ("all_gather", 3 * top * ranks)
    assert gather.bytes_per_rank == 3 * top * (ranks - 1)
    assert [c.bytes_per_rank for c in was] == [2 * top * (ranks - 1) // ranks] * 2 + [2 * 4 * (ranks - 1) // ranks]
    assert over(program.body, phase="bwd") == over(before(program), phase="bwd")
    report = program.verify()
    assert report.equal, str(report)


def test_the_gather_says_where_it_comes_from() -> None:
    model, batch, loss = make("gpt2")
    program = shardc.compile(model, batch, mesh="dp=2,tp=2", plan=PLANS / "gpt2.yaml", loss=loss)
    gather = next(c for c in program.collectives() if c.kind == "all_gather")
    assert gather.value == "amax.all_gather"
    assert gather.cause.startswith('transformer.wte.weight = "tp, -"')
    assert "loss_utils.py" in gather.source
    told = explain(program, "amax.all_gather", seconds=0)
    assert told.collective == gather
    assert told.trails[0].cause.startswith('transformer.wte.weight = "tp, -"')
    assert "what the max is taken of is split over tp" in told.inherent


def test_no_value_of_the_logits_size_is_made_more_than_before() -> None:
    program = compiled(torch.randn(64, 96), torch.randint(0, 96, (64,)), cross_entropy())

    def large(graph: Graph) -> int:
        views = (torch.ops.aten.view.default, torch.ops.aten.expand.default)
        sizes = [type_of(n).local_bytes(graph.mesh) for n in graph.calls() if n.target not in views]
        return sum(size >= 64 * 48 * 4 for size in sizes)

    assert large(program.body) == large(before(program))
    assert program.memory().peak <= memory(before(program)).peak + 64 * 4 * 32


# ---------------------------------------------------------------------- the rule
def meta(tokens: int, ranks: int, loss: Loss) -> shardc.Program:
    with torch.device("meta"):
        x, target = torch.empty(tokens, 128), torch.empty(tokens, dtype=torch.int64)
        model = Logits(x, loss)
    return shardc.compile(model, target, mesh=f"tp={ranks}", plan={"params": {"x": "-, tp"}})


@pytest.mark.parametrize(
    ("tokens", "ranks", "gathered"),
    [
        (2**14, 8, ["all_gather"]),
        (2**18, 2, ["all_gather"]),
        (2**17, 16, REDUCES),  # 2 numbers a token to 15 ranks are 15 MiB, two all-reduces 2
    ],
)
def test_a_group_so_large_that_gathering_costs_more(tokens: int, ranks: int, gathered: list[str]) -> None:
    assert kinds(meta(tokens, ranks, cross_entropy()).body) == gathered


def test_what_is_one_number_in_the_end_is_not_gathered_a_token_each() -> None:
    """Of one that would be all-reduced as 4 bytes: a link sends 10 MB in the time that a collective takes to begin."""
    assert kinds(meta(2**21, 2, cross_entropy()).body) == ["all_gather"]
    assert kinds(meta(2**22, 2, cross_entropy()).body) == ["all_gather", "all_reduce sum"]


def test_other_maxima_stay() -> None:
    def largest(x: Tensor, target: Tensor) -> Tensor:
        top = x.amax(-1, keepdim=True)
        return ((x - top) * 0.1).sum() + 0.0 * target.sum()

    program = compiled(torch.randn(4, 8), torch.zeros(4, dtype=torch.int64), largest)
    assert kinds(program.body) == kinds(before(program))
    assert "all_reduce max" in kinds(program.body)
    assert not any("all_gather" in info(n).name for n in program.body.calls())
