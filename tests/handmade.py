"""Small graphs written by hand, for tests of what comes after the compiler.

`mlp` is one step of `sum(relu(x @ w1) @ w2)` in Megatron's layout, loss and gradients included; `sharded=False` is the
same without placements and collectives, as the compiler's reference is. A buffer counts the steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardc.ir.graph import Graph, Phase, Port, Role, ValueInfo, set_info
from shardc.ir.mesh import Mesh
from shardc.ir.ops import collectives, local  # noqa: F401 (registers the ops)
from shardc.ir.types import TensorType

aten = torch.ops.aten
MESH = Mesh(dp=2, tp=2)


class Builder:
    """Nodes in order; types are written as they print."""

    def __init__(self, mesh: Mesh, sharded: bool = True) -> None:
        self.mesh, self.sharded = mesh, sharded
        self.fx = fx.Graph()
        self.inputs: list[Port] = []
        self.outputs: list[tuple[Port, fx.Node]] = []

    def type(self, text: str) -> TensorType:
        type = TensorType.parse(text)
        return type if self.sharded else type.replicated()

    def local(self, text: str) -> list[int]:
        return list(self.type(text).local_shape(self.mesh))

    def input(self, name: str, type: str, role: Role = "param") -> fx.Node:
        node = self.fx.placeholder(name)
        set_info(node, ValueInfo(name, self.type(type)))
        self.inputs.append(Port(role, name))
        return node

    def call(
        self, name: str, type: str | None, target: Any, *args: Any, phase: Phase = "fwd", **kwargs: Any
    ) -> fx.Node:
        node = self.fx.call_function(target, args, kwargs)
        set_info(
            node, ValueInfo(name, self.type(type) if type else None, source=f"mlp.py:{len(self.fx.nodes)}", phase=phase)
        )
        return node

    def all_reduce(self, name: str, x: fx.Node, type: str, *axes: str) -> fx.Node:
        if not self.sharded:
            return x
        return self.call(name, type, torch.ops.shardc.all_reduce.default, x, "sum", list(axes))

    def output(self, role: Role, name: str, node: fx.Node) -> None:
        self.outputs.append((Port(role, name), node))

    def graph(self) -> Graph:
        self.fx.output(tuple(node for _, node in self.outputs))
        return Graph(self.fx, self.mesh, self.inputs, [port for port, _ in self.outputs])


def mlp(sharded: bool = True, mesh: Mesh = MESH, batch: int = 4, width: int = 12, dtype: str = "f32") -> Graph:
    b = Builder(mesh if sharded else Mesh(), sharded)
    x_type, h_type = f"{dtype}[{batch}@dp, 8]", f"{dtype}[{batch}@dp, {width}@tp]"
    x = b.input("x", x_type, "input")
    w1 = b.input("w1", f"{dtype}[8, {width}@tp]")
    w2 = b.input("w2", f"{dtype}[{width}@tp, 8]")
    steps = b.input("steps", "i64[]", "buffer")
    h = b.call("fc.mm", h_type, aten.mm.default, x, w1)
    a = b.call("act", h_type, aten.relu.default, h)
    y = b.call("proj.mm", f"{x_type} |sum tp", aten.mm.default, a, w2)
    y = b.all_reduce("proj.all_reduce", y, x_type, "tp")
    squared = b.call("square", x_type, aten.mul.Tensor, y, y)
    loss = b.call("loss.sum", f"{dtype}[] |sum dp", aten.sum.default, squared)
    loss = b.all_reduce("loss.all_reduce", loss, f"{dtype}[]", "dp")
    g = b.call("d.y", x_type, aten.mul.Tensor, y, 2.0, phase="bwd")
    w2t = b.call("w2.t", f"{dtype}[8, {width}@tp]", aten.t.default, w2)
    ga = b.call("d.a", h_type, aten.mm.default, g, w2t, phase="bwd")
    at = b.call("a.t", f"{dtype}[{width}@tp, {batch}@dp]", aten.t.default, a, phase="bwd")
    gw2 = b.call("d.w2", f"{dtype}[{width}@tp, 8] |sum dp", aten.mm.default, at, g, phase="bwd")
    gw2 = b.all_reduce("d.w2.all_reduce", gw2, f"{dtype}[{width}@tp, 8]", "dp")
    gh = b.call("d.h", h_type, aten.threshold_backward.default, ga, h, 0, phase="bwd")
    xt = b.call("x.t", f"{dtype}[8, {batch}@dp]", aten.t.default, x, phase="bwd")
    gw1 = b.call("d.w1", f"{dtype}[8, {width}@tp] |sum dp", aten.mm.default, xt, gh, phase="bwd")
    gw1 = b.all_reduce("d.w1.all_reduce", gw1, f"{dtype}[8, {width}@tp]", "dp")
    count = b.call("steps.add", "i64[]", aten.add.Tensor, steps, 1)
    b.output("loss", "loss", loss)
    b.output("grad", "w1", gw1)
    b.output("grad", "w2", gw2)
    b.output("buffer", "steps", count)
    return b.graph()


def mlp_inputs(batch: int = 4, width: int = 12, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    weights = {"w1": normal(8, width), "w2": normal(width, 8)}
    return {"x": normal(batch, 8), **weights, "steps": torch.tensor(0)}
