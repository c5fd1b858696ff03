"""A sum over rows that nothing fuses with is a kernel of its own, as a bias's gradient is, where torch's is slower."""

from __future__ import annotations

import pytest
import torch

from kernels_triton.generated.op import FUSED
from shardc.ir.mesh import Mesh
from shardc.passes.fusion.fuse import fuse
from tests.handmade import Builder

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("rows", "columns", "becomes"), [(512, 512, True), (4, 65536, True), (64, 4096, False), (512, 16, False)], ids=str
)
def test_a_sum_alone(rows: int, columns: int, becomes: bool) -> None:
    b = Builder(Mesh())
    x = b.input("x", f"bf16[{rows}, {columns}]", "input")
    b.output("output", "y", b.call("y", f"bf16[{columns}]", aten.sum.dim_IntList, x, [0]))
    graph = fuse(b.graph())
    assert [call.target is FUSED for call in graph.calls()] == [becomes]
