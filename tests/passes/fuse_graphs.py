"""Graphs of any size for the fusion pass: layers of a product, pointwise chains that branch and join, and a norm."""

from __future__ import annotations

import torch

from shardc.ir.graph import Graph
from shardc.ir.mesh import Mesh
from tests.handmade import Builder

aten = torch.ops.aten
POINT = (aten.tanh.default, aten.exp.default, aten.neg.default, aten.sigmoid.default)


def chains(calls: int, seed: int = 0) -> Graph:
    """So many calls, some 50 of them between one product and the next."""
    b, made = Builder(Mesh()), 0
    draw = torch.Generator().manual_seed(seed)

    def number(most: int) -> int:
        return int(torch.randint(most, (), generator=draw))

    def name() -> str:
        nonlocal made
        made += 1
        return f"v{made}"

    wide = "f32[32, 64]"
    x, w = b.input("x", wide, "input"), b.input("w", "f32[64, 64]")
    bias = b.input("b", "f32[64]")
    while made < calls:
        x = b.call(name(), wide, aten.mm.default, x, w)
        near = [b.call(name(), wide, aten.add.Tensor, x, bias)]
        for _ in range(48):
            one = near[max(0, len(near) - 1 - number(6))]
            if number(3):
                other = near[max(0, len(near) - 1 - number(6))]
                near.append(b.call(name(), wide, aten.add.Tensor, one, other))
            elif number(8):
                near.append(b.call(name(), wide, POINT[number(len(POINT))], one))
            else:
                mean = b.call(name(), "f32[32, 1]", aten.sum.dim_IntList, one, [1], True)
                near.append(b.call(name(), wide, aten.mul.Tensor, one, mean))
        x = near[-1]
    b.output("output", "x", x)
    return b.graph()
