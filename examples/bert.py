"""Hugging Face's BERT, unmodified: an encoder that sees padding through its attention mask, trained on masked words."""

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM


def bert(batch: int = 8, seq: int = 16, layers: int = 2, vocab: int = 256) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=layers,
        num_attention_heads=4,
        hidden_size=64,
        intermediate_size=128,
        max_position_embeddings=max(seq, 64),
        vocab_size=vocab,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    tokens = torch.randint(1, vocab, (batch, seq))
    mask = torch.arange(seq) < torch.randint(seq // 2, seq + 1, (batch, 1))
    labels = tokens.masked_fill(torch.rand(batch, seq) < 0.7, -100)
    return BertForMaskedLM(config), {"input_ids": tokens * mask, "attention_mask": mask.long(), "labels": labels}
