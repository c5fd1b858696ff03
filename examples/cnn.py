"""A plain convolutional classifier: its batch norms have buffers that every step updates."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class CNN(nn.Module):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, 2 * channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(2 * channels)
        self.head = nn.Linear(2 * channels, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(images))), 2)
        x = F.relu(self.norm2(self.conv2(x)))
        return F.cross_entropy(self.head(x.mean(dim=(2, 3))), labels)


def cnn(batch: int = 8, size: int = 8, channels: int = 8, classes: int = 10) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    images = torch.randn(batch, 3, size, size)
    return CNN(channels, classes), {"images": images, "labels": torch.randint(classes, (batch,))}
