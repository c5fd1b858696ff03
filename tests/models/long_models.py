"""Families of models whose sequence lies over an axis: a small model of each, its batch, and how plans shard it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import shardc
from shardc import Program
from tests.decoder import DECODER
from tests.models.test_context import TP, model_of

ROWS = 4  # of a batch
SMALL: dict[str, Any] = {**DECODER, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 37}
VIT: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
# What the plan of each family shards over tp, and the module behind which its residual stream lies over cp and tp.
SHARDED: dict[str, tuple[dict[str, str], str]] = {
    "gpt2": (
        {"**.c_attn.weight": "-, 3*tp", "**.c_attn.bias": "3*tp", "**.attn.c_proj.weight": "tp, -"},
        "**.attn.c_proj",
    ),
    "bert": (
        {"**.query.*": "tp", "**.key.*": "tp", "**.value.*": "tp", "**.attention.output.dense.weight": "-, tp"},
        "**.attention.output.dense",
    ),
    "t5": (
        {
            "**.q.weight": "tp, -",
            "**.k.weight": "tp, -",
            "**.v.weight": "tp, -",
            "**.o.weight": "-, tp",
            "**.relative_attention_bias.weight": "-, tp",
        },
        "**.o",
    ),
}
FAMILIES = (
    *("llama", "llama_mqa", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss"),
    *("gpt2", "bert", "vit", "vit_50", "t5"),
)
# Length of the sequence: 17 over 2 ranks, 50 over 4. A ViT has as many patches and a class token.
LAYOUTS = {
    "cp2": ("cp=2", 17),
    "cp4": ("cp=4", 50),
    "dp2 cp2": ("dp=2, cp=2", 17),
    "cp2 tp2": ("cp=2, tp=2", 17),
    "cp2 tp2 sp": ("cp=2, tp=2", 17),
    "cp2 pp2": ("cp=2, pp=2", 17),
    "cp2 tp2 pp2": ("cp=2, tp=2, pp=2", 17),
    "out2 in2": ("out=2, in=2", 50),
}


@cache
def family(name: str) -> nn.Module:
    """A small model with two layers, one of each kind. Soft-capping of logits (Gemma 2) needs attention written out."""
    import transformers as hf

    torch.manual_seed(0)
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "head_dim": 4}
    match name:
        case "gemma2":
            capped: Any = {
                "attn_logit_softcapping": 2.0,
                "final_logit_softcapping": 3.0,
                "attn_implementation": "eager",
            }
            return hf.Gemma2ForCausalLM(hf.Gemma2Config(**SMALL, **kinds, **capped))
        case "gpt_oss":
            experts: Any = {"num_local_experts": 2, "num_experts_per_tok": 1}
            return hf.GptOssForCausalLM(hf.GptOssConfig(**SMALL, **kinds, **experts, rope_parameters=None))
        case "vit" | "vit_50":
            size = 16 if name == "vit" else 28
            return hf.ViTForImageClassification(hf.ViTConfig(**VIT, image_size=size, patch_size=4, num_labels=7))
    return model_of(name)


@dataclass(frozen=True)
class Laid:
    """How rows of a batch and its sequence lie: `dp` or `-`, and `cp` or `out.in`."""

    rows: str
    sequence: str


def batch_of(name: str, length: int, lies: Laid) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A batch, and the part of a plan that lays its sequence over ranks."""
    generator = torch.Generator().manual_seed(1)
    if name.startswith("vit"):
        size = 16 if name == "vit" else 28
        images = torch.randn(ROWS, 3, size, size, generator=generator)
        batch = {"pixel_values": images, "labels": torch.randint(0, 7, (ROWS,), generator=generator)}
        # Patches come first: what follows the embedding is a sequence of them, and of the class token.
        placed = {"activations": {"vit.embeddings": f"{lies.rows}, {lies.sequence}, -"}}
        return batch, {"inputs": {"pixel_values": lies.rows, "labels": lies.rows}, **placed}
    tokens = torch.randint(1, 37, (ROWS, length), generator=generator)
    labels = tokens[:, : length - 3].contiguous() if name == "t5" else tokens  # a decoder's sequence is another one
    placement = f"{lies.rows}, {lies.sequence}"
    return {"input_ids": tokens, "labels": labels}, {"inputs": {"input_ids": placement, "labels": placement}}


def long_program(name: str, layout: str, **said: Any) -> Program:
    """The family's step on a mesh of the layout, as a plan with more keys says."""
    mesh, length = LAYOUTS[layout]
    lies = Laid("dp" if "dp" in mesh else "-", "out.in" if "out" in mesh else "cp")
    batch, plan = batch_of(name, length, lies)
    params, stream = SHARDED.get(name, (TP, "**.o_proj"))
    if "tp" in mesh:
        plan["params"] = params
    if layout.endswith("sp"):
        plan["activations"] = {**plan.get("activations", {}), stream: "-, cp.tp, -"}
    if "pp" in mesh:
        plan["pipeline"] = {"axis": "pp", "microbatches": 2}
    return shardc.compile(family(name), batch, plan={"mesh": mesh, **plan, **said})
