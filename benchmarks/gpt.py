"""The models of the training benchmark: Hugging Face's GPT-2, unmodified, and a plain GPT of 1.3 billion parameters.

All runs, ours and the peers', build a shape's model with these functions, and give it the same tokens.
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

GPT2_PLAN = {"**.wte.weight": "tp, -", "**.attn.c_attn.weight": "-, 3*tp", "**.mlp.c_fc.weight": "-, tp"}
GPT_PLAN = {"wte.weight": "tp, -", "**.qkv.weight": "3*tp, -", "**.up.weight": "tp, -"}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.ln_1(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """What the `gpt-1.3b` figures of other frameworks were taken with: no dropout, the embedding tied to the output."""

    def __init__(self, vocab: int, width: int, heads: int, layers: int, seq: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(seq, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.wte.weight
        for name, p in self.named_parameters():
            if p.ndim > 1 and not p.is_meta:
                nn.init.normal_(
                    p, std=0.02 / (2 * layers) ** 0.5 if name.endswith(("out.weight", "down.weight")) else 0.02
                )

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@dataclass(frozen=True)
class Shape:
    """A model and how much of it a GPU is given: `batch` sequences of `seq` tokens."""

    name: str
    layers: int
    width: int
    heads: int
    seq: int
    vocab: int
    batch: int
    hugging_face: bool = False

    def model(self, dtype: torch.dtype) -> nn.Module:
        """On the default device; the same weights whenever the generator is seeded the same."""
        return self._model().to(dtype)

    def _model(self) -> nn.Module:
        if not self.hugging_face:
            return GPT(self.vocab, self.width, self.heads, self.layers, self.seq)
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            n_layer=self.layers,
            n_embd=self.width,
            n_head=self.heads,
            n_positions=self.seq,
            vocab_size=self.vocab,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
        model = GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"  # else each call looks for it and logs, at which a compiled graph would end
        return model

    @property
    def blocks(self) -> str:
        """The list of layers, by name."""
        return "transformer.h" if self.hugging_face else "blocks"

    @property
    def tensor_parallel(self) -> Mapping[str, str]:
        return GPT2_PLAN if self.hugging_face else GPT_PLAN

    def batches(self, steps: int, sequences: int, device: torch.device) -> list[dict[str, Tensor]]:
        """Random stretches of Python's own documentation, its bytes as tokens: the same in every run."""
        text = "\n".join(pydoc_data.topics.topics.values()).encode()
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().clamp(max=self.vocab - 1)
        generator = torch.Generator().manual_seed(0)
        starts = torch.randint(len(data) - self.seq - 1, (steps, sequences), generator=generator)
        tokens = data[starts.unsqueeze(-1) + torch.arange(self.seq + 1)].to(device)
        inputs = tokens[..., :-1].contiguous()
        # Hugging Face's model shifts labels itself.
        labels = inputs if self.hugging_face else tokens[..., 1:].contiguous()
        return [{"input_ids": x, "labels": y} for x, y in zip(inputs, labels, strict=True)]

    def flops(self, sequences: int) -> float:
        """Of one training step, forward and twice that for backward; causal attention counts as half.

        3 * tokens * (2 * (12 layers width^2 + vocab width) + 2 layers seq width)
        """
        products = 12 * self.layers * self.width**2 + self.vocab * self.width
        return 3.0 * sequences * self.seq * (2 * products + 2 * self.layers * self.seq * self.width)


SHAPES = {
    one.name: one
    for one in (
        Shape("gpt2", layers=12, width=768, heads=12, seq=1024, vocab=50257, batch=16, hugging_face=True),
        Shape("gpt-1.3b", layers=24, width=2048, heads=16, seq=2048, vocab=50304, batch=4),
    )
}
TINY = {
    "gpt2": Shape("gpt2", layers=2, width=64, heads=4, seq=32, vocab=257, batch=2, hugging_face=True),
    "gpt-1.3b": Shape("gpt-1.3b", layers=2, width=64, heads=4, seq=32, vocab=256, batch=2),
}


def loss_of(output: Any) -> Tensor:
    """What a model returned: the loss, or an output that has it."""
    return output if isinstance(output, Tensor) else output.loss
