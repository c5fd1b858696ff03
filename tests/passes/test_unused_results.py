"""A call of which some results are read by nothing: its arguments are one rank's, and so are all of its types."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardc


class Takes(nn.Module):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.fc, self.sizes = nn.Linear(8, 12), sizes

    def forward(self, x: Tensor) -> Tensor:
        first, second, *_ = self.fc(x).split(self.sizes, -1)
        return first.mean() * second.square().mean()


@pytest.mark.parametrize("sizes", [[4, 4, 4], [6, 4, 2], [6, 6, 0]], ids=str)
@pytest.mark.parametrize("params", [{}, {"fc.weight": "tp, -"}], ids=["rows", "both"])
def test_the_program_is_read_back(sizes: list[int], params: dict[str, str]) -> None:
    plan = {"inputs": {"x": "dp"}, "params": params}
    program = shardc.compile(Takes(sizes).double(), {"x": torch.randn(4, 8).double()}, mesh="dp=2, tp=2", plan=plan)
    again = shardc.Program.from_json(program.to_json())
    assert again.text() == program.text()
    assert shardc.parse(program.text()).outputs
    assert again.verify().ok
