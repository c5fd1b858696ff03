"""torch's own `nn.TransformerEncoder`: queries, keys and values in one packed weight, and a loss of one's own."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Tensor]


def reconstruction(output: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(output, batch["src"])


def encoder(batch: int = 8, seq: int = 16, layers: int = 2, width: int = 64) -> tuple[nn.Module, Batch, object]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=2 * width, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers), {"src": torch.randn(batch, seq, width)}, reconstruction
