"""The smallest model: two layers that reconstruct their input, with a loss of one's own."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Tensor]


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def reconstruction(output: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(output, batch["x"])


def mlp(batch: int = 8, width: int = 16, hidden: int = 64) -> tuple[nn.Module, Batch, object]:
    torch.manual_seed(0)
    return MLP(width, hidden), {"x": torch.randn(batch, width)}, reconstruction
