"""Hugging Face's ResNet, unmodified: bottleneck blocks, whose batch norms keep statistics from step to step."""

import torch
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification


def resnet(batch: int = 8, size: int = 32, blocks: int = 2, classes: int = 10) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=16, hidden_sizes=[32, 64], depths=[blocks, blocks], num_labels=classes)
    images = torch.randn(batch, 3, size, size)
    return ResNetForImageClassification(config), {"pixel_values": images, "labels": torch.randint(classes, (batch,))}
