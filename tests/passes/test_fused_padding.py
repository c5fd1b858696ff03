"""Padding that kernels clear themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.ir.graph import op_name
from shardc.ir.parse import parse
from shardc.passes.fusion.analysis.traffic import traffic
from shardc.passes.fusion.fuse import fuse
from shardc.passes.type_check import type_faults


class Uneven(nn.Module):
    """Seven columns of hidden features, summed over after a pointwise chain."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.gelu(self.up(x))
        return (self.down(h) + (h + 1).exp().sum(-1, keepdim=True)).square().mean()


def compiled(**plan: Any) -> shardc.Program:
    torch.manual_seed(0)
    return shardc.compile(Uneven(), torch.randn(4, 6), plan=plan)


def masks(program: shardc.Program) -> int:
    return sum(op_name(node.target) == "shardc.mask_pad" for node in program.body.calls())


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_no_kernel_of_its_own(ranks: int) -> None:
    """One rank may hold less than the others, and with eight of seven columns nothing."""
    plan = {"mesh": f"tp={ranks}", "params": {"up.weight": "tp, -"}}
    plain, fused = compiled(**plan), compiled(**plan, fuse=True)
    assert masks(plain) >= 2
    assert masks(fused) == 0
    assert traffic(fused.body).kernels < traffic(plain.body).kernels
    assert fused.verify().equal, str(fused.verify())


def test_what_two_axes_cut_keeps_its_call() -> None:
    plan = {"mesh": "a=2,b=3", "params": {"up.weight": "a.b, -"}}
    fused = compiled(**plan, fuse=True)
    assert masks(fused) > 0
    assert fused.verify().equal, str(fused.verify())


def test_one_may_ask_for_the_call() -> None:
    plain = compiled(mesh="tp=2", params={"up.weight": "tp, -"})
    body = fuse(plain.body, exclude=("shardc.mask_pad",))
    assert any(op_name(node.target) == "shardc.mask_pad" for node in body.calls())


KERNEL = "fused_rsub_lt[|6](i64[]@0:0){%1=sub(11, %0); %2=iota{0}(); %3=lt(%2, %1)}->bool[6]=%3"
MASK = """graph @step mesh(dp=2, ep=2) {
  %x = input "x" : f32[11@ep]
  %offset = shardc.axis_offset(axes=["AXIS"], strides=[6]) : i64[]
  %mask = shardc.fused([%offset], kernel="KERNEL") : bool[11@ep]
  %y = where.self(%mask, %x, %x) {~0: ep} : f32[11@ep]
  return output "y" = %y
}
""".replace("KERNEL", KERNEL)


def test_a_kernel_makes_the_mask_of_padding_of_a_ranks_place_alone() -> None:
    """It lies over the axes along which the place is counted, and over no other."""
    assert not type_faults(parse(MASK.replace("AXIS", "ep")))
    (fault,) = type_faults(parse(MASK.replace("AXIS", "dp")))
    assert "makes bool[11@ep] of what lies over" in fault.message
