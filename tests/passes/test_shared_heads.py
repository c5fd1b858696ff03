"""Fewer kv-heads than ranks: the ranks that share a head hold copies of it, and communication stays Megatron-LM's.

One head (multi-query attention) over two and four ranks, two over four; with attention as one op and as matmuls.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardc
from shardc.ir.graph import type_of

PLANS = Path(__file__).parents[2] / "configs" / "plans"
LAYERS = 2
CASES = [(1, 2, "sdpa"), (1, 4, "sdpa"), (2, 4, "sdpa"), (1, 2, "eager"), (2, 4, "eager")]


def compiled(plan: str, heads: int, tp: int, attention: str) -> shardc.Program:
    options: dict[str, Any] = {"attn_implementation": attention}
    config = LlamaConfig(num_hidden_layers=LAYERS, hidden_size=32, intermediate_size=64, vocab_size=96,
                         num_attention_heads=4, num_key_value_heads=heads, use_cache=False, **options)  # fmt: skip
    torch.manual_seed(0)
    tokens = torch.randint(0, 96, (4, 16))
    batch = {"input_ids": tokens, "labels": tokens}
    mesh = shardc.Mesh(dp=1, tp=tp)
    written = shardc.Plan.load(PLANS / f"{plan}.yaml").merge(shardc.Plan.of(bucket=False))
    return shardc.compile(LlamaForCausalLM(config), batch, mesh=mesh, plan=written, strict=True)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("heads", "tp", "attention"), CASES)
def test_tensor_parallel(heads: int, tp: int, attention: str) -> None:
    program = compiled("llama", heads, tp, attention)
    report = program.verify()
    assert report.ok, str(report)
    k = type_of(program.body.input_nodes()["model.layers.0.self_attn.k_proj.weight"])
    assert k.local_shape(program.mesh) == (8, 32), "one head a rank"
    found = Counter((c.phase, c.kind, "wgrad" in c.value) for c in program.collectives())
    assert found == {
        ("fwd", "all_reduce", False): 2 * LAYERS + 1,  # the embedding's rows
        ("fwd", "all_gather", False): 1,  # the loss's statistics
        ("bwd", "all_reduce", False): 2 * LAYERS + 1,  # the output projection's input
        ("bwd", "all_reduce", True): 2 * LAYERS,  # the gradients of the copied keys and values
    }
    copied = [d for d in program.diagnostics if d.code == "SC209"]
    assert [(d.severity, d.tensor, d.also) for d in copied] == [
        ("note", f"model.layers.0.self_attn.{x}_proj.weight", f"model.layers.1.self_attn.{x}_proj.weight") for x in "kv"
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("heads", "tp", "attention"), CASES[:3])
def test_sequence_parallel(heads: int, tp: int, attention: str) -> None:
    """The gathered input of attention serves keys and values too: they are neither split by sequence nor moved."""
    program = compiled("llama_sp", heads, tp, attention)
    report = program.verify()
    assert report.ok, str(report)
    pairs = 2 * LAYERS + 1
    scatters = 2 if ":" in "".join(program.mesh.names) else 1  # over tp:0 and over tp:1
    found = Counter((c.phase, c.kind) for c in program.collectives() if c.kind != "all_reduce")
    assert found == {
        ("fwd", "all_gather"): pairs + 1,  # the loss's statistics
        ("fwd", "reduce_scatter"): scatters * pairs,
        ("bwd", "all_gather"): 2 * pairs,
        ("bwd", "reduce_scatter"): scatters * pairs,
    }
    assert sum("wgrad" in c.value for c in program.collectives()) == 2 * LAYERS
