"""Every activation of torch.nn, fused: the constants that torch computes with, in float64 too."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import shardc
from shardc.ir.graph import op_name

NAMES = (
    ["CELU", "ELU", "GELU", "GLU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU", "LogSigmoid"]
    + ["Mish", "PReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softshrink", "Softsign", "Tanh"]
    + ["Tanhshrink"]
)
KINKS = torch.tensor([-6.0, -3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0, 6.0, 20.0])


class Activations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rows = [getattr(nn, name)() for name in NAMES]
        last = [nn.GELU("tanh"), nn.Threshold(0.1, 2.0), nn.Softmin(-1), nn.Softmax(-1), nn.LogSoftmax(-1)]
        self.each = nn.ModuleList([*rows, *last])
        self.shift = nn.Parameter(torch.zeros(len(self.each)))

    def forward(self, x: Tensor) -> Tensor:
        """Each has a gradient of its own size to send on: none is lost in the sum of another's."""
        parts = (act(x + self.shift[i]) for i, act in enumerate(self.each))
        return torch.stack([(y * y.detach().cos()).sum() for y in parts]).square().sum().sqrt()


def test_each_is_torchs_own_to_the_last_digits() -> None:
    torch.manual_seed(0)
    x = torch.cat([KINKS, torch.randn(54) * 3]).reshape(8, 8)
    program = shardc.compile(Activations(), x, mesh="dp=2", plan={"inputs": {"x": "dp"}, "fuse": True})
    assert "shardc.fused" in {op_name(call.target) for call in program.body.calls()}
    report = program.verify()
    assert report.ok, str(report)
    assert report.max_rel_error < 1e-13
    assert report.eager_error is not None
    assert report.eager_error < 1e-13
