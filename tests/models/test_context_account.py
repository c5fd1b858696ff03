"""What a rank computes, sends and holds where a sequence lies over an axis, counted in programs that are not run."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc import Program
from shardc.cost.flops import flops
from shardc.cost.memory import Category, MemoryReport, memory
from shardc.ir.graph import type_of

ATTENTION = ("shardc.sdpa", "shardc.sdpa_bwd", "shardc.sdpa_rows", "shardc.sdpa_rows_bwd")
WAYS = ("all_gather", "ring", "all_to_all")
SMALL: dict[str, Any] = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 8}


def decoder(name: str, length: int) -> nn.Module:
    """Without memory for its weights. Activations are most of what its step holds."""
    import transformers as hf

    sizes = {**SMALL, "intermediate_size": 64, "max_position_embeddings": length, "use_cache": False}
    with torch.device("meta"):
        match name:
            case "llama":
                return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_key_value_heads=8))
            case "llama_gqa":
                return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_key_value_heads=4))
            case "gemma3":
                kinds = ["sliding_attention", "full_attention"] * 2
                config = hf.Gemma3TextConfig(**sizes, head_dim=4, sliding_window=16, layer_types=kinds)
                return hf.Gemma3ForCausalLM(config)
            case "gpt2":
                drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
                config = hf.GPT2Config(vocab_size=32, n_positions=length, n_embd=32, n_layer=4, n_head=8, **drop)
                return hf.GPT2LMHeadModel(config)
            case "bert":
                drop = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
                return hf.BertForMaskedLM(hf.BertConfig(**SMALL, intermediate_size=64, **drop))
    raise AssertionError(name)


@cache
def counted(
    name: str, ranks: int, way: str, length: int = 256, balance: str = "auto", recompute: Any = "none"
) -> Program:
    batch = {name: torch.zeros(1, length, dtype=torch.long, device="meta") for name in ("input_ids", "labels")}
    inputs = dict.fromkeys(batch, "-, cp")
    context = {"attention": way, "balance": balance}
    mode = {"mode": "full", "collectives": True} if recompute == "told" else recompute
    plan = {"mesh": f"cp={ranks}", "inputs": inputs, "context": context, "recompute": mode}
    return shardc.compile(decoder(name, length), batch, plan=plan)


def of_rank(program: Program, rank: int) -> int:
    done = flops(program.body, program.mesh.coordinate(rank))
    return sum(done.of_op(op) for op in ATTENTION)


@pytest.mark.sampled(18)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "llama_gqa", "gpt2"])
def test_zigzag_makes_causal_work_equal(name: str, way: str) -> None:
    alone = of_rank(counted(name, 1, "auto"), 0)
    each = [of_rank(counted(name, 4, way), rank) for rank in range(4)]
    assert max(each) * 4 <= 1.01 * sum(each)
    assert alone >= 3.9 * max(each)


@pytest.mark.sampled(30)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "llama_gqa", "gemma3", "gpt2", "bert"])
def test_what_a_rank_holds_falls_with_the_ranks(name: str, way: str, ranks: int) -> None:
    """Activations, and at the peak all but weights and their gradients. Beyond its share a rank has what a strategy
    brings to one layer: gathered, the others' part of K and V and of their gradients; in a ring, two chunks of K and
    V, and one of gradients that has arrived."""
    alone, shared = (memory(counted(name, n, way if n > 1 else "auto").body) for n in (1, ranks))
    assert shared.row("activations").most * ranks == pytest.approx(alone.row("activations").most, rel=0.01)
    keys = 2 * 256 * 4 * 4 * {"llama_gqa": 4, "gemma3": 4}.get(name, 8)  # K and V of a layer: rows, width, bytes, heads
    brought = {"all_gather": 2 * keys * (ranks - 1) // ranks, "ring": 3 * keys // ranks, "all_to_all": 0}[way]
    assert held(shared) <= 1.05 * held(alone) / ranks + brought
    if way == "all_gather":
        assert shared.row("communication").most == keys  # of one layer at a time


HELD: tuple[Category, ...] = ("activations", "communication", "in flight", "temporaries")


def held(report: MemoryReport) -> int:
    return sum(report.row(category).live for category in HELD)


class InChunks(nn.Module):
    """Two layers with a mask that positions make: causal, and within a chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        seen = ((place[:, None] // 24 == place // 24) & (place[:, None] >= place))[None, None] | (place % 48 == 0)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in qkv(x).chunk(3, -1))
            x = x + out(F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2))
        return x.square().mean()


@pytest.mark.parametrize("way", ["all_gather", "ring"])
@pytest.mark.parametrize("balance", ["none", "zigzag"])
def test_a_mask_of_positions_is_made_for_own_rows_alone(way: str, balance: str) -> None:
    x = torch.randn(2, 128, 32, dtype=torch.float64)
    context = {"attention": way, "balance": balance}
    plan = {"mesh": "cp=4", "inputs": {"x": "-, cp, -"}, "context": context}
    program = shardc.compile(InChunks().double(), x, plan=plan)
    masks = [type_of(v) for v in program.body.values() if type_of(v).dtype == torch.bool and type_of(v).ndim > 1]
    assert any(t.shape[-2:] == (128, 128) for t in masks)
    assert max(t.local_bytes(program.mesh) for t in masks) == 128 * 128 // 4
    report = program.verify()
    assert report.ok, str(report)
    assert max(max(row.error, row.eager_error or 0.0) for row in report.rows) < 1e-12


@pytest.mark.parametrize(("recompute", "runs"), [("none", 1), ("selective", 1), ("full", 1), ("told", 2)])
def test_keys_go_round_again_only_where_the_plan_says_so(recompute: str, runs: int) -> None:
    program = counted("llama", 4, "ring", 64, recompute=recompute)
    sent = Counter[str]()
    for moved in program.collectives():
        if "attn" in moved.fqn and moved.kind == "permute":
            sent[moved.phase] += moved.bytes_per_step
    assert sent["bwd"] == (runs + 1) * sent["fwd"]  # keys, as often, and their gradients


@pytest.mark.sampled(8)
@pytest.mark.parametrize("recompute", ["full", "none", "selective", "told"])
def test_keys_are_gathered_once_in_backward(recompute: str) -> None:
    program = counted("llama", 4, "all_gather", 64, recompute=recompute)
    gathers = Counter(c.phase for c in program.collectives() if "attn" in c.fqn and c.kind == "all_gather")
    assert gathers["fwd"] == gathers["bwd"] == 2 * SMALL["num_hidden_layers"]
