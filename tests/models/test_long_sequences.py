"""Sequences that an axis divides, plain and in zigzag: loss and every gradient as eager PyTorch has them.

What is shifted along the sequence fetches few rows of other ranks, and nothing else.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc.ir.text import print_graph
from tests.models.zoo import make

VOCAB = 24
BALANCES = ("zigzag", "none")


class Decoder(nn.Module):
    """Learned positions, attention written out with a mask of constants, and labels shifted as transformers does."""

    def __init__(self, width: int = 8, heads: int = 2, most: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, width), nn.Embedding(most, width)
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.head, self.heads, self.dropout = nn.Linear(width, VOCAB, bias=False), heads, dropout

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        future = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
        return ((q @ k.mT) / 2).masked_fill(future, float("-inf")).softmax(-1) @ v

    def hidden(self, ids: Tensor) -> Tensor:
        x = F.dropout(self.tokens(ids) + self.places(torch.arange(ids.shape[1])), self.dropout)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        return x + F.dropout(self.out(self.attend(q, k, v).transpose(1, 2).flatten(2)), self.dropout)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.hidden(ids))
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        return F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=-100)


class Causal(Decoder):
    """The same with torch's attention, and logits and labels cut short, as older models do."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.hidden(ids))
        weights = torch.linspace(0.5, 2.0, VOCAB, dtype=logits.dtype)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), weights, ignore_index=3)


class Shifts(nn.Module):
    """Rows of floating-point values shifted both ways, in a circle, by several, and cut to unequal lengths."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.tokens, self.mix, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, width), nn.Linear(width, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        x = x + torch.tanh(self.mix(F.pad(x, (0, 0, 1, -1))))
        x = x + torch.roll(x, 1, 1) * 0.5 + torch.roll(x, (-3,), (1,))
        y = torch.tanh(x[:, :-2] * x[:, 2:])
        z = F.pad(y, (0, 0, 2, 0)) + x + F.pad(x, (0, 0, 0, 3), value=1.5)[:, 3:]
        logits = self.head(z)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=3)


MODELS: dict[str, type[nn.Module]] = {"decoder": Decoder, "causal": Causal, "shifts": Shifts}


def compiled(model: nn.Module, length: int, mesh: str, balance: str = "auto", **plan: Any) -> shardc.Program:
    torch.manual_seed(0)
    ids = torch.randint(0, VOCAB, (4, length))
    placed = "dp, cp" if "dp" in mesh else "-, cp"
    plan = {"inputs": {"ids": placed, "labels": placed}, "context": {"balance": balance}, **plan}
    return shardc.compile(model, {"ids": ids, "labels": ids.clone()}, mesh=mesh, plan=plan)


def moved(program: shardc.Program) -> Counter[str]:
    return Counter(c.kind for c in program.collectives() if c.kind != "all_reduce")


def in_zigzag(program: shardc.Program) -> bool:
    return "~cp@cp" in print_graph(program.body)


@pytest.mark.sampled(28)
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("length", [16, 17, 50])
@pytest.mark.parametrize("mesh", ["cp=2", "cp=4", "dp=2, cp=2"])
@pytest.mark.parametrize("name", MODELS)
def test_equals_eager(name: str, mesh: str, length: int, balance: str) -> None:
    torch.manual_seed(0)
    program = compiled(MODELS[name]().double(), length, mesh, balance)
    assert in_zigzag(program) == (balance == "zigzag")
    assert program.verify().ok
    if name == "shifts":
        assert set(moved(program)) == {"permute"}, "rows of neighbours, and no gather"


PLANS: dict[str, dict[str, Any]] = {
    "fuse": {"fuse": True},
    "accumulate": {"accumulate": 2},
    "recompute": {"recompute": "full"},
    "zero 3": {"storage": {"zero": 3, "axes": ["dp", "cp"]}},
    "mixed": {"precision": "bf16"},
    "bucket": {"bucket": True},
    "all of them": {"fuse": True, "accumulate": 2, "recompute": "full", "bucket": True, "precision": "bf16"},
}


@pytest.mark.sampled(24)
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_with_other_plans(name: str, plan: str, balance: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    program = compiled(
        model if "precision" in PLANS[plan] else model.double(), 17, "dp=2, cp=2", balance, **PLANS[plan]
    )
    assert program.verify().ok


@pytest.mark.sampled(8)
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("length", [16, 17])
@pytest.mark.parametrize("name", ["decoder", "causal"])
def test_with_tensor_and_sequence_parallelism(name: str, length: int, balance: str) -> None:
    """The residual stream lies over cp and then tp; of the two, cp alone is in zigzag."""
    torch.manual_seed(0)
    params = {"qkv.weight": "3*tp, -", "qkv.bias": "3*tp", "out.weight": "-, tp", "head.weight": "tp, -"}
    plan = {"params": params, "activations": {"norm": "-, cp.tp"}}
    program = compiled(MODELS[name]().double(), length, "cp=2, tp=2", balance, **plan)
    assert ("~cp@cp.tp" in print_graph(program.body)) == (balance == "zigzag")
    assert program.verify().ok


def test_zigzag_is_chosen_where_attention_is_causal() -> None:
    torch.manual_seed(0)
    assert in_zigzag(compiled(Causal().double(), 16, "cp=2"))
    assert not in_zigzag(compiled(Shifts().double(), 16, "cp=2"))
    assert not in_zigzag(compiled(Causal().double(), 3, "cp=2")), "too short"


def test_zigzag_of_a_short_sequence_is_refused_aloud() -> None:
    torch.manual_seed(0)
    program = compiled(Shifts().double(), 7, "cp=4", "zigzag")
    (found,) = [d for d in program.diagnostics if d.code == "SC203"]
    assert "7 rows are too few for 8 chunks" in found.message
    assert program.verify().ok


@pytest.mark.parametrize("balance", BALANCES)
def test_dropout_draws_the_same_for_every_layout(balance: str) -> None:
    torch.manual_seed(0)
    assert compiled(Causal(dropout=0.3).double(), 17, "cp=4", balance).verify().ok


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("balance", "boundaries"), [("none", 1), ("zigzag", 2)])
@pytest.mark.parametrize("name", ["decoder", "causal"])
def test_a_shift_of_labels_sends_one_row_a_boundary(name: str, balance: str, boundaries: int) -> None:
    torch.manual_seed(0)
    program = compiled(MODELS[name]().double(), 32, "cp=4", balance)
    rows = [c for c in program.collectives() if c.kind == "permute" and c.phase == "fwd"]
    assert [c.bytes_per_step for c in rows] == [4 * 8] * boundaries, "a label of each of 4 sequences"
    assert not [c for c in program.collectives() if c.kind == "permute" and c.phase == "bwd"]


HF: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "llama": ({"seq": 17}, {"input_ids": "dp, cp", "labels": "dp, cp"}),
    "gpt2": ({"seq": 17}, {"input_ids": "dp, cp", "labels": "dp, cp"}),
    "bert": ({"seq": 17}, {"input_ids": "dp, cp"}),
}


@pytest.mark.sampled(18)
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("mesh", ["dp=1, cp=2", "dp=1, cp=4", "dp=2, cp=2"])
@pytest.mark.parametrize("name", HF)
def test_models_of_transformers(name: str, mesh: str, balance: str) -> None:
    arguments, inputs = HF[name]
    model, batch, loss = make(name, batch=4, layers=1, **arguments)
    plan = {"inputs": inputs, "context": {"balance": balance}}
    program = shardc.compile(model.double(), batch, loss=loss, mesh=mesh, plan=plan)
    assert program.verify().ok


@pytest.mark.sampled(4)
@pytest.mark.parametrize("balance", BALANCES)
def test_stages_of_a_pipeline(balance: str) -> None:
    model, batch, loss = make("llama", batch=4, seq=17, layers=2)
    inputs = {"input_ids": "-, cp", "labels": "-, cp"}
    plan = {"inputs": inputs, "context": {"balance": balance}, "pipeline": {"axis": "pp", "microbatches": 2}}
    program = shardc.compile(model.double(), batch, loss=loss, mesh="cp=2, pp=2", plan=plan)
    assert program.verify().ok
