"""The models of the story: one of a user's own, and a Llama of `transformers`; their data, and how each is placed.

Nothing here knows of shardc but the plans.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCABULARY, SEQ, ROWS = 61, 12, 8
Sample = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(functional.silu(self.up(self.norm_2(x))))


class OwnModel(nn.Module):
    """A small language model as a user writes one: learned positions, a fused projection, a tied head."""

    def __init__(self, width: int = 24, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Parameter(0.02 * torch.randn(SEQ, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.tokens(input_ids) + self.places[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.tokens.weight.T
        if labels is None:
            return {"logits": logits}
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        accuracy = (logits[:, :-1].argmax(-1) == labels[:, 1:]).double().mean()
        return {"loss": loss, "accuracy": accuracy, "logits": logits}


def own_model() -> nn.Module:
    torch.manual_seed(0)
    return OwnModel()


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Texts(Dataset[Sample]):
    """Rows that count up from a token by a step, with a little noise: there is something to learn."""

    def __init__(self, rows: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        first = torch.randint(3, VOCABULARY, (rows, 1), generator=generator)
        step = torch.randint(1, 4, (rows, 1), generator=generator)
        noise = torch.rand(rows, SEQ, generator=generator) < 0.05
        counted = 3 + (first + step * torch.arange(SEQ)) % (VOCABULARY - 3)
        self.rows = torch.where(noise, torch.full_like(counted, 3), counted)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def loader(ranks: int = 1, rank: int = 0) -> DataLoader[Sample]:
    """Batches of ROWS rows over all ranks together: the same rows, whatever the number of ranks."""
    texts = Texts(10 * ROWS, seed=1)
    sampler = DistributedSampler(texts, ranks, rank, shuffle=True, seed=3)
    return DataLoader(texts, batch_size=ROWS // ranks, sampler=sampler)


def held_out() -> list[Sample]:
    rows = Texts(2 * ROWS, seed=2).rows
    return [{"input_ids": half, "labels": half} for half in rows.chunk(2)]


TP_LLAMA = {
    "**.embed_tokens.weight": "tp, -",
    **{f"**.{name}_proj.weight": "tp, -" for name in ("q", "k", "v", "gate", "up")},
    "lm_head.weight": "tp, -",
}
TP_OWN = {"tokens.weight": "tp, -", "blocks.*.qkv.weight": "3*tp, -", "blocks.*.up.weight": "tp, -"}
OVER_DP = {"input_ids": "dp, -", "labels": "dp, -"}
ZERO_3 = {"storage": {"zero": 3, "axes": ["dp"]}}


@dataclass(frozen=True)
class Subject:
    """A model, and the two meshes that it is trained on, one after the other. `plan` is of both, but for the last."""

    make: Callable[[], nn.Module]
    meshes: tuple[str, str]
    plan: dict[str, Any]
    then: dict[str, Any]  # of the second mesh
    per_rank: bool = False


SUBJECTS = {
    "own": Subject(
        own_model,
        ("dp=2, tp=2", "pp=2, tp=2"),
        {"params": TP_OWN, "outputs": {"accuracy": ""}, "clip_grad_norm": 1.0},
        {"pipeline": {"microbatches": 2}},
    ),
    "llama": Subject(
        llama,
        ("dp=2, tp=2", "dp=4, tp=1"),
        {"params": TP_LLAMA, "inputs": OVER_DP, "data": "per_rank", "clip_grad_norm": 1.0},
        ZERO_3,
        per_rank=True,
    ),
}
