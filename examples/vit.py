"""Hugging Face's vision transformer, unmodified: patches by convolution, and a class token in front of them."""

import torch
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification


def vit(batch: int = 8, size: int = 32, layers: int = 2, classes: int = 10) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    config = ViTConfig(
        num_hidden_layers=layers,
        num_attention_heads=4,
        hidden_size=64,
        intermediate_size=128,
        image_size=size,
        patch_size=8,
        num_labels=classes,
    )
    images = torch.randn(batch, 3, size, size)
    return ViTForImageClassification(config), {"pixel_values": images, "labels": torch.randint(classes, (batch,))}
