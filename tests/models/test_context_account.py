"""What a rank computes, sends and holds where a sequence lies over an axis, counted in programs that are not run."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import shardc
from shardc import Program
from shardc.cost.flops import flops
from shardc.cost.memory import memory

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


@pytest.mark.sampled(9)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "llama_gqa", "gpt2"])
def test_zigzag_makes_causal_work_equal(name: str, way: str) -> None:
    alone = of_rank(counted(name, 1, "auto"), 0)
    each = [of_rank(counted(name, 4, way), rank) for rank in range(4)]
    assert max(each) * 4 <= 1.01 * sum(each)
    assert alone >= 3.9 * max(each)


@pytest.mark.sampled(15)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "llama_gqa", "gemma3", "gpt2", "bert"])
def test_what_a_rank_holds_falls_with_the_ranks(name: str, way: str, ranks: int) -> None:
    """Activations, and at the peak all but weights. Where keys are gathered, those of a layer are there at once. Where
    heads are divided, a window that is a mask is whole on each rank."""
    alone, shared = (memory(counted(name, n, way if n > 1 else "auto").body) for n in (1, ranks))
    window = 0.02 * ranks if (name, way) == ("gemma3", "all_to_all") else 0.0
    assert shared.row("activations").most * ranks == pytest.approx(alone.row("activations").most, rel=0.05 + window)
    held, holds = (report.peak - report.row("parameters").stored for report in (alone, shared))
    assert holds * ranks <= held * (1.15 if way == "all_gather" else 1.05 + window)


@pytest.mark.parametrize(("recompute", "runs"), [("none", 1), ("selective", 1), ("full", 1), ("told", 2)])
def test_keys_go_round_again_only_where_the_plan_says_so(recompute: str, runs: int) -> None:
    program = counted("llama", 4, "ring", 64, recompute=recompute)
    sent = Counter[str]()
    for moved in program.collectives():
        if "attn" in moved.fqn and moved.kind == "permute":
            sent[moved.phase] += moved.bytes_per_step
    assert sent["bwd"] == (runs + 1) * sent["fwd"]  # keys, as often, and their gradients


@pytest.mark.sampled(4)
@pytest.mark.parametrize("recompute", ["full", "none", "selective", "told"])
def test_keys_are_gathered_once_in_backward(recompute: str) -> None:
    program = counted("llama", 4, "all_gather", 64, recompute=recompute)
    gathers = Counter(c.phase for c in program.collectives() if "attn" in c.fqn and c.kind == "all_gather")
    assert gathers["fwd"] == gathers["bwd"] == 2 * SMALL["num_hidden_layers"]
