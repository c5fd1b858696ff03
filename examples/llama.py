"""Hugging Face's Llama, unmodified: grouped-query attention with half as many key-value heads, rotary positions."""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM


def llama(
    batch: int = 8, seq: int = 16, layers: int = 2, vocab: int = 256, heads: int = 4, kv_heads: int = 2, width: int = 64
) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        hidden_size=width,
        intermediate_size=128,
        max_position_embeddings=max(seq, 64),
        vocab_size=vocab,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    tokens = torch.randint(vocab, (batch, seq))
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}
