"""A diffusion model's residual block on a GPU, its GroupNorms in kernels, against the same calls one by one.

Both are held against float32 on the same weights, as in `test_fusion`.
"""

from __future__ import annotations

import pytest
import torch

from kernels_triton.match.op import KERNELS
from shardc.ir.graph import op_name
from shardc.passes.fusion.fuse import fuse
from tests.gpu.test_fusion import FLOOR, SLACK, run
from tests.passes.test_fused_group_norm import Block, compiled

pytestmark = pytest.mark.gpu


def test_gradients_are_as_near_as_unfused_ones() -> None:
    torch.manual_seed(0)
    block = Block(8, 64)
    single, program = compiled(block), compiled(block, precision="bf16")
    exact = run(single.body, single)
    fused = fuse(program.body)
    assert any("group" in str(node.args[1]) for node in fused.calls() if node.target in KERNELS)
    assert "native_group_norm" not in [op_name(node.target) for node in fused.calls()]
    plain, ours = run(program.body, program), run(fused, program)
    largest = max(want.norm() for key, want in exact.items() if key.startswith("grad"))
    for key, want in exact.items():
        if key.startswith(("grad", "loss")):
            scale = max(want.norm(), 1e-3 * largest)
            off, ours_off = ((found[key] - want).norm() / scale for found in (plain, ours))
            assert ours_off <= max(SLACK * off, FLOOR), (key, float(off), float(ours_off))
    again = run(fused, program)
    assert all(torch.equal(ours[key], again[key]) for key in ours if "conv" not in key and "first" not in key)
