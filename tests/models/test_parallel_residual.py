"""Models that add attention and an MLP to the residual at once: what both leave pending is reduced in one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardc

LAYERS, VOCABULARY = 2, 64


def phi() -> nn.Module:
    from transformers import PhiConfig, PhiForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    return PhiForCausalLM(PhiConfig(vocab_size=VOCABULARY, **sizes, bos_token_id=0, eos_token_id=0))


def neox() -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=VOCABULARY, **sizes, bos_token_id=0, eos_token_id=0))


def gptj() -> nn.Module:
    from transformers import GPTJConfig, GPTJForCausalLM

    dropout = dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0)
    sizes = {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "rotary_dim": 4, "bos_token_id": 0, "eos_token_id": 0}
    return GPTJForCausalLM(GPTJConfig(vocab_size=VOCABULARY, **sizes, **dropout))


COLUMNS = ("q_proj", "k_proj", "v_proj", "query_key_value", "fc1", "fc_in", "dense_h_to_4h")
ROWS = ("dense", "out_proj", "fc2", "fc_out", "dense_4h_to_h")
# model -> the all-reduces of a layer backward: GPT-NeoX's attention and MLP have a norm of their input each
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {"phi": (phi, 1), "neox": (neox, 2), "gptj": (gptj, 1)}


def placements(model: nn.Module) -> dict[str, str]:
    """Megatron's, of the layers."""
    of: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        module = name.split(".")[-2]
        if "lm_head" not in name and module in COLUMNS:
            of[name] = "tp, -" if parameter.dim() == 2 else "tp"
        elif module in ROWS and parameter.dim() == 2:
            of[name] = "-, tp"
    return of


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2, tp=2"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(3)
def test_a_layer_is_reduced_once(name: str, mesh: str) -> None:
    make, backward = MODELS[name]
    torch.manual_seed(0)
    model = make().double()
    ids = torch.randint(VOCABULARY, (4, 16))
    batch = {"input_ids": ids, "labels": ids}
    plan: dict[str, Any] = {"params": placements(model)}
    if "dp" in mesh:
        plan["inputs"] = {"input_ids": "dp, -", "labels": "dp, -"}
    program = shardc.compile(model, batch, mesh=mesh, plan=plan)
    over_tp = [c for c in program.collectives() if c.axes == ("tp",)]
    assert {c.kind for c in over_tp} == {"all_reduce"}
    counts = [sum(c.phase == phase for c in over_tp) for phase in ("fwd", "bwd")]
    assert counts == [LAYERS, backward * LAYERS]
    assert program.verify().ok
