"""Layers whose sequence lies over the axis that divides each of their experts: tokens are gathered, and not experts."""

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

import shardc
from shardc import Plan


def mixtral(intermediate: int) -> torch.nn.Module:
    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=intermediate,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        num_local_experts=4,
        vocab_size=64,
        max_position_embeddings=16,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config).double()


def plan(mesh: str, data: str, experts: str) -> Plan:
    attention = {f"**.{name}_proj.weight": "tp, -" for name in "qkv"} | {"**.o_proj.weight": "-, tp"}
    inside = {"**.experts.gate_up_proj": f"{experts}, 2*tp, -", "**.experts.down_proj": f"{experts}, -, tp"}
    batch = dict.fromkeys(("input_ids", "labels"), f"{data}, -")
    layers = {"model.layers.*": f"{data}, tp, -"}
    return Plan.from_dict({"mesh": mesh, "params": attention | inside, "inputs": batch, "activations": layers})


@pytest.mark.parametrize(
    ("mesh", "data", "experts"),
    [("tp=2", "-", "-"), ("ep=2, tp=2", "ep", "ep"), pytest.param("dp=2, tp=2", "dp", "-", marks=pytest.mark.long)],
)
def test_tokens_are_gathered(mesh: str, data: str, experts: str) -> None:
    ids = torch.randint(64, (4, 8))
    program = shardc.compile(mixtral(512), {"input_ids": ids, "labels": ids}, plan=plan(mesh, data, experts))
    assert program.verify().ok
    assert not [d for d in program.diagnostics if d.code == "SC209"]


def test_small_experts_are_gathered() -> None:
    """Where it is the other way round, tokens stay where they are."""
    ids = torch.randint(64, (8, 16))
    program = shardc.compile(mixtral(4), {"input_ids": ids, "labels": ids}, plan=plan("tp=2", "-", "-"))
    assert program.verify().ok
    assert any(d.code == "SC209" and "experts" in str(d) for d in program.diagnostics)
