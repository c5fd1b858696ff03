"""Hugging Face's T5, unmodified: encoder and decoder share one embedding and one table of relative positions each."""

import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration


def t5(batch: int = 8, seq: int = 16, layers: int = 2, vocab: int = 256) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    config = T5Config(
        num_layers=layers,
        num_heads=4,
        d_model=64,
        d_kv=16,
        d_ff=128,
        vocab_size=vocab,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    tokens = torch.randint(2, vocab, (batch, seq))
    return T5ForConditionalGeneration(config), {"input_ids": tokens, "labels": tokens[:, : seq // 2].contiguous()}
