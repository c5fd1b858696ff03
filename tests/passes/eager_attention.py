# pyright: reportCallIssue=false
"""Models whose attention is written out: scores, scale, mask or bias, softmax, dropout, values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kernels_triton.ir.kernel import Kernel
from kernels_triton.match.op import kernel_of
from shardc.ir.graph import Graph

SEQ, WIDTH, HEADS, WORDS = 24, 64, 4, 96
Made = tuple[nn.Module, Any]


def _tokens() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, WORDS, (2, SEQ)), "labels": torch.randint(0, WORDS, (2, SEQ))}


def gpt2(dropout: float = 0.1) -> Made:
    """A causal mask that is added, of finfo.min."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_head=HEADS, n_embd=WIDTH, n_positions=SEQ, vocab_size=WORDS, use_cache=False,
                        attn_pdrop=dropout, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0,
                        attn_implementation="eager")  # fmt: skip
    return GPT2LMHeadModel(config).train(), _tokens()


def t5() -> Made:
    """Scores that are not scaled, with a learned bias of positions; softmax in float32."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(num_layers=1, num_heads=HEADS, d_model=WIDTH, d_kv=WIDTH // HEADS, d_ff=128, vocab_size=WORDS,
                      dropout_rate=0.1, decoder_start_token_id=0, use_cache=False,
                      attn_implementation="eager")  # fmt: skip
    return T5ForConditionalGeneration(config).train(), _tokens()


class Weighed(nn.Module):
    """`nn.MultiheadAttention` that also returns its weights; of a mask that says what not to see."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
        y, weights = self.attention(x, x, x, attn_mask=hidden, need_weights=True)
        return y.square().mean() + weights.square().mean()


class Filled(nn.Module):
    """Scores in float32, filled where `fill` is to be seen; softmax, cast, dropout."""

    def __init__(self, fill: float = -torch.inf, dropout: float = 0.0) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.fill, self.drop = fill, nn.Dropout(dropout)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (one(x).view(2, SEQ, HEADS, -1).transpose(1, 2) for one in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-1, -2)) * 0.25
        probs = scores.masked_fill(~seen[:, None], self.fill).float().softmax(-1).to(x.dtype)
        return (self.drop(probs) @ v).square().mean()


MODELS: dict[str, Callable[[], Made]] = {
    "gpt2": gpt2,
    "gpt2, no dropout": lambda: gpt2(0.0),
    "t5": t5,
    "need_weights": lambda: (Weighed().train(), torch.randn(2, SEQ, WIDTH)),
    "masked_fill": lambda: (Filled(-1e30, 0.1).train(), (torch.randn(2, SEQ, WIDTH), causal())),
}


def causal() -> Tensor:
    return torch.ones(2, SEQ, SEQ, dtype=torch.bool).tril()


def chains(graph: Graph) -> list[Kernel]:
    """The kernels that compute a softmax of scores, or its gradient."""
    kernels = [k for node in graph.calls() if (k := kernel_of(node.target, node.args)) is not None]
    return [k for k in kernels if "softmax" in k.name and k.cols == SEQ]
