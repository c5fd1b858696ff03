"""Hugging Face's Qwen3, unmodified: queries and keys are normalised head by head before they meet."""

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM


def qwen3(batch: int = 8, seq: int = 16, layers: int = 2, vocab: int = 256) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    config = Qwen3Config(
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        hidden_size=64,
        head_dim=16,
        intermediate_size=128,
        max_position_embeddings=max(seq, 64),
        vocab_size=vocab,
        use_cache=False,
    )
    tokens = torch.randint(vocab, (batch, seq))
    return Qwen3ForCausalLM(config), {"input_ids": tokens, "labels": tokens}
