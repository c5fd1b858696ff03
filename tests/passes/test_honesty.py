"""No silent fallback: an accepted plan puts every annotated value where it says, and gathers nothing unasked.

A property over models of one interesting op each: every tensor that can be annotated, in every dim. Then the other
side: what a plan means to communicate is reported by nothing, so that strict lets it pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import shardc
from shardc import Mesh
from shardc.compiler import driver
from shardc.compiler.pass_pipeline import Options
from shardc.explain.provenance import trails
from shardc.frontend.ingest import rank_of
from shardc.frontend.trace import Traced, trace
from shardc.ir.collectives import collectives
from shardc.ir.diagnostic import Diagnostic, ShardcError
from shardc.ir.graph import Graph, type_of
from shardc.ir.placement import Placement
from shardc.passes.base import Pass
from shardc.passes.sharding.seed import Bound
from tests.models.zoo import PLANS, make

MESH = Mesh(tp=2)
INDEX = torch.tensor([0, 2, 5, 1, 3])


class Net(nn.Module):
    """Two linear layers with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor], module: nn.Module | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.module = module or nn.Identity()
        self.down = nn.Linear(8, 4)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.between(self.module(self.up(x)))))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.table(ids)) @ self.table.weight.T


class Pixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(torch.relu(self.norm(self.conv(x))))


X = torch.randn(2, 6, 4)
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "nothing": (lambda: Net(lambda x: x), X),
    "layer_norm": (lambda: Net(lambda x: x, nn.LayerNorm(8)), X),
    "conv1d": (lambda: Net(lambda x: x, nn.Conv1d(6, 6, 3, padding=1)), X),
    "softmax": (lambda: Net(lambda x: x.softmax(1)), X),
    "cumsum": (lambda: Net(lambda x: x.cumsum(-1)), X),
    "topk": (lambda: Net(lambda x: x.topk(4, 1).values), X),
    "sort": (lambda: Net(lambda x: x.sort(-1).values), X),
    "pad": (lambda: Net(lambda x: F.pad(x, (0, 0, 1, 1))), X),
    "roll": (lambda: Net(lambda x: x.roll(1, -1)), X),
    "flip": (lambda: Net(lambda x: x.flip(1)), X),
    "index": (lambda: Net(lambda x: x[:, INDEX]), X),
    "words": (Words, torch.randint(0, 6, (2, 6))),
    "pixels": (Pixels, torch.randn(2, 2, 4, 4)),
}


@dataclass(frozen=True)
class Target:
    """One dim of a tensor that a plan may name."""

    kind: str
    name: str
    dim: int
    ndim: int

    def bound(self) -> Bound:
        text = ", ".join("tp" if d == self.dim else "-" for d in range(self.ndim))
        return Bound(self.kind, self.name, Placement.parse(text))


def targets(traced: Traced) -> Iterator[Target]:
    named: list[tuple[str, str, fx.Node]] = [
        ("input" if i.role == "input" else "param", i.name, i.node)
        for i in traced.inputs
        if i.role in ("param", "buffer", "input")
    ]
    named += [("activation", name, node) for name, node in traced.modules.items()]
    named += [("output", o.name, o.node) for o in traced.outputs if o.role == "output"]
    for kind, name, node in named:
        ndim = rank_of(node)
        yield from (Target(kind, name, dim, ndim) for dim in range(ndim))


def value_of(body: Graph, target: Target) -> fx.Node:
    if target.kind == "activation":
        return body.activations[target.name]
    if target.kind == "output":
        ports = zip(body.outputs, body.output_values, strict=True)
        return next(v for p, v in ports if (p.role, p.name) == ("output", target.name))
    return body.input_nodes()[target.name]


def distributed(reference: Graph, target: Target, options: Options) -> Graph | None:
    """The body, or None where the dim is one that cannot be sharded; any other error is one of ours."""
    try:
        return driver.finish_body(driver.distribute(reference, [target.bound()], options), options)
    except ShardcError as refused:
        if refused.code != "SC207":
            raise
        return None


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", MODELS)
def test_an_accepted_plan_is_honoured(name: str) -> None:
    make, batch = MODELS[name]
    traced = trace(make(), batch, lambda output, _: output.square().mean(), with_outputs=True)
    reference = driver.single_device(traced, MESH, Options())
    accepted = 0
    for target in targets(traced):
        needed: list[str] = []

        def look(one: Pass, graph: Graph, _: float, needed: list[str] = needed) -> None:
            if one.name == "combine":
                moved = [c for c in collectives(graph) if c.kind in ("all_gather", "all_to_all", "permute")]
                needed += [t.needed for c in moved for t in trails(graph, graph.by_name(c.value))]

        body = distributed(reference, target, Options(verify=False, watch=look))
        if body is None or any(d.severity == "warning" for d in body.diagnostics):
            continue
        accepted += 1
        asked = type_of(value_of(body, target)).dims[target.dim]
        assert any("tp" in atom.axes for atom in asked), f"{target} is {type_of(value_of(body, target))}"
        # A value may still move where two dims of one op, both split by what was asked, meet.
        assert all("instead" in reason for reason in needed), f"{target}: {needed}"
    assert accepted >= 5


def warnings(program: shardc.Program) -> list[Diagnostic]:
    return [d for d in program.diagnostics if d.severity == "warning"]


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x.sort(-1).values,
        lambda x: x.cumsum(-1),
        lambda x: x.topk(8, -1).values,
        lambda x: x.roll(1, -1),
        lambda x: x.flip(-1),
    ],
    ids=["sort", "cumsum", "topk", "roll", "flip"],
)
def test_columns_that_are_gathered_for_an_op_are_reported(between: Callable[[Tensor], Tensor]) -> None:
    plan = {"params": {"up.weight": "tp, -", "up.bias": "tp"}}

    def compiled(strict: bool) -> shardc.Program:
        loss = lambda output, _: output.square().mean()  # noqa: E731
        return shardc.compile(Net(between), X, mesh="tp=2", plan=plan, loss=loss, strict=strict)

    program = compiled(strict=False)
    gathers = [c for c in program.collectives() if c.kind == "all_gather"]
    said = [d for d in warnings(program) if d.code == "SC203"]
    assert gathers
    assert said
    assert f"{gathers[0].bytes_per_rank} B a rank, forward" in said[0].message
    assert "test_honesty.py" in str(said[0].location)
    assert str(said[0].cause).startswith('up.weight = "tp, -"')
    with pytest.raises(ShardcError):
        compiled(strict=True)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["gpt2_sp", "llama_sp"])
@pytest.mark.parametrize("storage", [None, {"zero": 3, "axes": ["dp"]}])
def test_planned_gathers_pass_under_strict(name: str, storage: dict[str, object] | None) -> None:
    """Those of sequence parallelism, and of what ZeRO stores as shards."""
    model, batch, _ = make(name.removesuffix("_sp"))
    plan = shardc.Plan.load(PLANS / f"{name}.yaml")
    if storage is not None:
        plan = plan.merge(shardc.Plan.of(storage=storage))
    program = shardc.compile(model, batch, mesh="dp=2, tp=2", plan=plan, strict=True)
    assert "all_gather" in {c.kind for c in program.collectives()}
