"""What is chosen for each of many equal layers, and recorded with a program, where few of them were looked at."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.compiler.stacks import LAYERS, both

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}
EXPERTS = {"**.experts.gate_up_proj": "dp, -, -", "**.experts.down_proj": "dp, -, -"}
CASES: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    "context": (LlamaForCausalLM(LlamaConfig(**SIZES)), {"inputs": {"*": "dp, tp"}}),
    "dispatch": (
        MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)),
        {"params": EXPERTS, "inputs": {"*": "dp, -"}},
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_choices_are_those_of_all_layers(kind: str) -> None:
    model, plan = CASES[kind]
    tokens = torch.zeros(4, 16, dtype=torch.int64)
    taken, program = both(model, plan, batch={"input_ids": tokens, "labels": tokens})
    assert taken
    chosen: Any = program.plan.get(kind, ())  # type: ignore[call-overload]
    layers = [fqn.split(".")[2] for fqn, *_ in chosen]
    assert layers == [str(index) for index in range(LAYERS)]
