"""Configurations that others published, as candidates of the planner.

Megatron-LM: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", table 1; 175B from
table 2. Sequences of 2048, a vocabulary of 51,200, A100s of 80 GB, activations recomputed. Llama 3: Grattafiori et al.
2024, "The Llama 3 Herd of Models", table 4: H100s of 80 GB, sequences of 8,192 and of 131,072.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from shardc.plan.hardware import hardware
from shardc.plan.schema import Plan
from shardc.planner.candidate import Candidate
from shardc.planner.small_program import Subject
from shardc.planner.space import Limits

SEQUENCE = 2048


class Published(NamedTuple):
    name: str
    heads: int
    hidden: int
    layers: int
    tp: int
    pp: int
    gpus: int
    batch: int


MEGATRON = (
    Published("1.7B", 24, 2304, 24, 1, 1, 32, 512),
    Published("18B", 48, 6144, 40, 8, 1, 256, 1024),
    Published("76B", 80, 10240, 60, 8, 4, 1024, 1792),
    Published("175B", 96, 12288, 96, 8, 12, 1536, 1536),
    Published("530B", 128, 20480, 105, 8, 35, 2520, 2520),
    Published("1T", 160, 25600, 128, 8, 64, 3072, 3072),
)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def subject(model: torch.nn.Module, length: int, name: str) -> Subject:
    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    kept = Plan.of(precision="bf16")
    return Subject(model, {"input_ids": ids, "labels": ids}, None, hardware(name), kept, adamw)


def megatron(p: Published) -> tuple[Subject, Limits]:
    config = GPT2Config(
        n_embd=p.hidden, n_head=p.heads, n_layer=p.layers, vocab_size=51200, n_positions=SEQUENCE, use_cache=False
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return subject(model, SEQUENCE, "a100-nvlink+ib"), Limits(p.gpus, 80e9, p.batch, SEQUENCE)


def is_published(c: Candidate, p: Published) -> bool:
    """Any candidate with the mesh, and its activations recomputed, as all of Megatron's were."""
    return (c.tp, c.pp, c.cp, c.ep, c.recompute) == (p.tp, p.pp, 1, 1, "full")


def llama_405b(length: int, gpus: int, batch: int) -> tuple[Subject, Limits]:
    config = LlamaConfig(
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=length,
        use_cache=False,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return subject(model, length, "h100-nvlink+ib"), Limits(gpus, 80e9, batch, length)
