"""Small models of each family on the meta device, compiled at any sizes and number of layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import shardc
from shardc.plan.schema import Plan

HIDDEN, HEADS, VOCAB, POSITIONS = 32, 8, 64, 512
TOKENS = {"B": "input_ids.0", "S": "input_ids.1"}
EXPERTS = {
    "params": {
        "**.q_proj.weight": "tp, -",
        "**.k_proj.weight": "tp, -",
        "**.v_proj.weight": "tp, -",
        "**.experts.gate_up_proj": "-, 2*tp, -",
        "**.embed_tokens.weight": "tp, -",
        "lm_head.weight": "tp, -",
    },
    "inputs": {"input_ids": "dp, -", "labels": "dp, -"},
}
COMMON: Mapping[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": 64, "num_attention_heads": HEADS,
}  # fmt: skip
DECODER: Mapping[str, Any] = {**COMMON, "num_key_value_heads": HEADS, "vocab_size": VOCAB, "use_cache": False}


def gpt2(layers: int) -> torch.nn.Module:
    config = GPT2Config(n_layer=layers, n_embd=HIDDEN, n_head=HEADS, vocab_size=VOCAB, n_positions=POSITIONS,
                        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False,
                        bos_token_id=0, eos_token_id=0)  # fmt: skip
    return GPT2LMHeadModel(config)


def llama(layers: int) -> torch.nn.Module:
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **DECODER))


def mixtral(layers: int) -> torch.nn.Module:
    config = MixtralConfig(num_hidden_layers=layers, num_local_experts=4, num_experts_per_tok=2, **DECODER)
    config._experts_implementation = "eager"  # the form that takes float64; it is traced in the grouped one
    return MixtralForCausalLM(config)


def vit(layers: int) -> torch.nn.Module:
    return ViTForImageClassification(
        ViTConfig(num_hidden_layers=layers, image_size=16, patch_size=4, num_labels=8, **COMMON)
    )


FAMILIES: dict[str, tuple[Callable[[int], torch.nn.Module], Plan]] = {
    "gpt2": (gpt2, Plan.load("shardc:gpt2")),
    "gpt2_sp": (gpt2, Plan.load("shardc:gpt2_sp")),
    "llama": (llama, Plan.load("shardc:llama")),
    "llama_sp": (llama, Plan.load("shardc:llama_sp")),
    "vit": (vit, Plan.load("shardc:vit")),
    "mixtral": (mixtral, Plan.from_dict(EXPERTS)),
}


def compiled(family: str, layers: int, *, B: int = 8, S: int = 16, dp: int = 2, tp: int = 2) -> shardc.Program:
    """The program of a family at these sizes; its plan names B, and S where there is one."""
    build, plan = FAMILIES[family]
    with torch.device("meta"):
        model = build(layers)
        if family == "vit":
            batch = {"pixel_values": torch.empty(B, 3, 16, 16), "labels": torch.empty(B, dtype=torch.int64)}
        else:
            tokens = torch.empty(B, S, dtype=torch.int64)
            batch = {"input_ids": tokens, "labels": tokens}
    symbols = {"B": "pixel_values.0"} if family == "vit" else TOKENS
    return shardc.compile(model, batch, mesh=shardc.Mesh(dp=dp, tp=tp), plan=plan.merge(Plan.of(symbols=symbols)))
