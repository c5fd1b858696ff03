"""A user's names are no provenance: a model whose modules are called as passes call what they make, and its twin.

The two compile to the same programs but for names, and both train as eager PyTorch does.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.ir.graph import Graph, info, op_name, operands
from shardc.partition.rank_costs import graphs_by_name
from shardc.partition.stage_recompute import recomputed_calls

HOSTILE = {
    "layers": "r",
    "up": "d",
    "down": "grad",
    "norm": "all_gather",
    "scale": "x_1",
    "mid": "bucket",
    "head": "kept",
}
PLAIN = {name: name for name in HOSTILE}
WIDTH = 8


class Layer(nn.Module):
    def __init__(self, names: dict[str, str]) -> None:
        super().__init__()
        self.names = names
        self.add_module(names["norm"], nn.LayerNorm(WIDTH))
        self.add_module(names["up"], nn.Linear(WIDTH, 2 * WIDTH))
        self.add_module(names["down"], nn.Linear(2 * WIDTH, WIDTH))
        self.register_parameter(names["scale"], nn.Parameter(torch.full((WIDTH,), 0.5)))

    def forward(self, x: Tensor) -> Tensor:
        norm, up, down, scale = (getattr(self, self.names[name]) for name in ("norm", "up", "down", "scale"))
        return x + down(torch.tanh(up(norm(x)))) * scale


class Model(nn.Module):
    """A weight of the model itself has the name of one of `layers`: `weight`, and `r.weight`."""

    def __init__(self, names: dict[str, str]) -> None:
        super().__init__()
        self.names = names
        layers = nn.ModuleList([Layer(names), Layer(names)])
        layers.register_parameter("weight", nn.Parameter(torch.full((WIDTH,), 0.25)))
        self.add_module(names["layers"], layers)
        self.weight = nn.Parameter(torch.full((WIDTH,), 2.0))
        self.add_module(names["mid"], nn.Linear(WIDTH, WIDTH))
        self.add_module(names["head"], nn.Linear(WIDTH, 4))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        layers, mid, head = (getattr(self, self.names[name]) for name in ("layers", "mid", "head"))
        x = torch.sigmoid(x * self.weight)
        x = layers[1](layers[0](x) * torch.tanh(layers.weight))
        return nn.functional.cross_entropy(head(torch.relu(mid(x))), labels)


ZERO3 = {"storage": {"zero": 3, "axes": ["dp"]}}
PIPELINE = {"pipeline": {"axis": "pp", "schedule": "1f1b", "microbatches": 2}}
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero3-bucket": ("dp=2", {**ZERO3, "bucket": True}),
    "recompute": ("dp=2", {"recompute": "full", "bucket": True}),
    "pipeline-zero3": ("pp=2, dp=2", {**PIPELINE, **ZERO3}),
    "pipeline-recompute": ("pp=2, dp=2", {**PIPELINE, "recompute": "selective", "fuse": True}),
}


@cache
def compiled(plan: str, hostile: bool) -> shardc.Program:
    mesh, more = PLANS[plan]
    torch.manual_seed(0)
    model = Model(HOSTILE if hostile else PLAIN)
    batch = {"x": torch.randn(8, WIDTH), "labels": torch.arange(8) % 4}
    asked = {**more, "inputs": {"x": "dp, -", "labels": "dp"}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return shardc.compile(model, batch, mesh=mesh, plan=asked, optimizer=optimizer)


def shape(graph: Graph) -> list[tuple[Any, ...]]:
    """A graph without its names: each value by its number."""
    number = {node: i for i, node in enumerate(graph.fx.nodes)}
    return [
        (
            op_name(node.target),
            *(number[v] for v in operands(node)),
            str(info(node).type),
            info(node).is_recomputed,
        )
        for node in graph.fx.nodes
        if node.op == "call_function"
    ]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("plan", PLANS)
def test_only_names_differ(plan: str) -> None:
    hostile, plain = (graphs_by_name(compiled(plan, which).staged) for which in (True, False))
    assert hostile.keys() == plain.keys()
    for name, graph in hostile.items():
        assert shape(graph) == shape(plain[name]), name
    lists = [compiled(plan, which).staged.lists for which in (True, False)]
    assert [[type(i) for i in rank] for rank in lists[0].ranks] == [[type(i) for i in rank] for rank in lists[1].ranks]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", ["recompute", "pipeline-zero3"])
def test_it_trains_as_eager_does(plan: str) -> None:
    assert compiled(plan, True).verify()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", ["zero3-bucket", "pipeline-zero3"])
def test_a_gather_of_a_module_called_r_is_not_recomputed(plan: str) -> None:
    graphs = graphs_by_name(compiled(plan, True).staged).values()
    named = [node for graph in graphs for node in graph.calls() if info(node).name.startswith("r.")]
    assert named
    assert not [node for node in named if info(node).is_recomputed]


class Stack(nn.Module):
    def __init__(self, names: dict[str, str]) -> None:
        super().__init__()
        self.layers_name = names["layers"]
        self.add_module(self.layers_name, nn.ModuleList([Layer(names), Layer(names)]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in getattr(self, self.layers_name):
            x = layer(x)
        return (x - y).pow(2).mean()


def test_gathers_of_sequence_parallelism_are_not_recomputed() -> None:
    """Backward gathers again what forward gathered. In a module `r` both names begin with `r.`."""
    found: list[list[tuple[Any, ...]]] = []
    for names in (HOSTILE, PLAIN):
        torch.manual_seed(0)
        layers, up, down = names["layers"], names["up"], names["down"]
        params = {f"{layers}.*.{up}.weight": "tp, -", f"{layers}.*.{down}.weight": "-, tp"}
        plan = {**PIPELINE, "params": params, "inputs": {"x": "-, tp, -", "y": "-, tp, -"}}
        batch = {"x": torch.randn(4, 4, WIDTH), "y": torch.randn(4, 4, WIDTH)}
        body = shardc.compile(Stack(names), batch, mesh="pp=2, tp=2", plan=plan).body
        again = [n for n in body.calls() if info(n).phase == "bwd" and info(n).name.startswith(f"{layers}.")]
        assert {op_name(node.target) for node in again} == {"shardc.all_gather"}
        assert recomputed_calls(body.calls()) == {}
        found.append(shape(body))
    assert found[0] == found[1]


def test_recomputed_calls_of_a_module_called_r() -> None:
    body = compiled("recompute", True).body
    again = [node for node in body.calls() if info(node).is_recomputed]
    assert again
    for node in again:
        origin = info(node).origin
        assert origin is not None
        assert info(node).phase == "bwd"
        assert info(node).name == f"r.{origin.of}"
