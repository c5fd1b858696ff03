"""The layouts of a body that fusion rewrote, found from those of the body, are those that asking again finds."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import shardc
from shardc.ir.graph import Graph, info, set_info
from shardc.ir.mesh import Mesh
from shardc.ir.storages import Operand, extended, layouts
from shardc.passes.fusion.fuse import _rewritten  # pyright: ignore[reportPrivateUsage]
from tests.handmade import Builder

aten = torch.ops.aten


class Norms(nn.Module):
    """Softmaxes of a transposed product and of a plain one, a batch norm and a group norm, and what reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.convolution, self.batch, self.group = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.weight).transpose(1, 2)
        y = (functional.softmax(y, -1).neg() @ self.weight).softmax(-1)
        z = self.batch(self.convolution(y.reshape(-1, 2, 8, 8)))
        return (functional.silu(self.group(z)).sum() + y.square().sum()).square()


def described(graph: Graph, operands: dict[fx.Node, Operand]) -> dict[str, str]:
    return {info(value).name: str(operands[value]) for value in graph.values()}


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_rewritten_body(precision: str | None) -> None:
    body = shardc.compile(Norms(), (torch.randn(4, 8, 8),), mesh="dp=1", plan={"precision": precision}).body
    graph, operands = _rewritten(body, (), layouts(body).operands)
    assert graph is not body
    assert described(graph, operands) == described(graph, layouts(graph).operands)


def test_readers_of_what_lies_otherwise() -> None:
    """A copy in the usual order replaces a value that lies transposed: calls that read it lie as it does."""
    b = Builder(Mesh())
    x = b.input("x", "f32[4, 8]", "input")
    t = b.call("t", "f32[8, 4]", aten.t.default, x)
    y = b.call("y", "f32[8, 4]", aten.neg.default, t)
    z = b.call("z", "f32[8, 4]", aten.exp.default, y)
    b.output("output", "z", b.call("w", "f32[8, 4]", aten.tanh.default, z))
    graph = b.graph()
    known = layouts(graph).operands
    node = graph.by_name("y")
    with graph.fx.inserting_before(node):
        copied = graph.call(
            aten.clone.default, (graph.by_name("t"),), {"memory_format": torch.contiguous_format}, like=node,
            type=info(node).type, name="copied",
        )  # fmt: skip
    node.replace_input_with(graph.by_name("t"), copied)
    found = extended(graph, known)
    assert {info(v).name: found[v].strides for v in graph.values()} == {
        "x": (8, 1),
        "t": (1, 8),
        **dict.fromkeys(("copied", "y", "z", "w"), (4, 1)),
    }
    assert known[node].strides == (1, 8)
    assert described(graph, found) == described(graph, layouts(graph).operands)


def test_a_call_of_several_results() -> None:
    """The results of a new call, which replace those of another, have layouts of their own."""
    b = Builder(Mesh())
    x = b.input("x", "f32[4, 8]", "input")
    b.output("output", "y", b.call("y", "f32[4, 1]", aten.amax.default, x, [1], True))
    graph = b.graph()
    known, node = layouts(graph).operands, graph.by_name("y")
    with graph.fx.inserting_before(node):
        call = graph.call(aten.max.dim, (graph.by_name("x"), 1, True), like=node, type=None,
                          results=(info(node).type, info(node).type), name="both")  # fmt: skip
        top = graph.fx.call_function(operator.getitem, (call, 0))
    set_info(top, info(node))
    node.replace_all_uses_with(top)
    graph.fx.erase_node(node)
    assert extended(graph, known)[top].strides == (1, 1)
    assert graph.calls_of(aten.max.dim) == [call]
    assert graph.calls_of(aten.amax.default) == []
