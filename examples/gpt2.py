"""Hugging Face's GPT-2, unmodified: fused QKV weights, stored [in, out], and an embedding tied to the output."""

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel


def gpt2(
    batch: int = 8,
    seq: int = 16,
    layers: int = 2,
    vocab: int = 256,
    heads: int = 4,
    width: int = 64,
    dropout: float = 0.0,
) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers,
        n_head=heads,
        n_embd=width,
        n_positions=max(seq, 64),
        vocab_size=vocab,
        attn_pdrop=dropout,
        embd_pdrop=dropout,
        resid_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    tokens = torch.randint(vocab, (batch, seq))
    return GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}
