"""How often a layer reduces under tensor parallelism, of models unlike GPT-2: never more than Megatron would.

Attention and an MLP that are added to the residual at once are reduced in one (Phi, GPT-NeoX, GPT-J), whatever biases
they add; what is computed from constants, as biases of ALiBi are, keeps no heads whole (BLOOM, MPT).
"""

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


def bloom() -> nn.Module:
    from transformers import BloomConfig, BloomForCausalLM

    dropout = dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0)
    sizes = {"hidden_size": 32, "n_layer": LAYERS, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    return BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, **sizes, **dropout))


def mpt() -> nn.Module:
    from transformers import MptConfig, MptForCausalLM

    sizes = {"d_model": 32, "n_layers": LAYERS, "n_heads": 4, "max_seq_len": 32, "expansion_ratio": 2}
    return MptForCausalLM(MptConfig(vocab_size=VOCABULARY, **sizes))


COLUMNS = ("q_proj", "k_proj", "v_proj", "query_key_value", "fc1", "fc_in", "dense_h_to_4h", "up_proj")
ROWS = ("dense", "out_proj", "fc2", "fc_out", "dense_4h_to_h", "down_proj")
# model -> the all-reduces of a layer, forward and backward: GPT-NeoX's attention and MLP have a norm of their own each
MODELS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "phi": (phi, 1, 1),
    "neox": (neox, 1, 2),
    "gptj": (gptj, 1, 1),
    "bloom": (bloom, 2, 2),
    "mpt": (mpt, 2, 2),
}


def placements(model: nn.Module) -> dict[str, str]:
    """Megatron's, of the layers."""
    of: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        module = name.split(".")[-2]
        if "lm_head" not in name and module in COLUMNS:
            of[name] = "tp, -" if parameter.dim() == 2 else "tp"
        elif module == "Wqkv":
            of[name] = "3*tp, -"
        elif module in ROWS and parameter.dim() == 2:
            of[name] = "-, tp"
    return of


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2, tp=2"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(20)
def test_a_layer_reduces_as_megatrons_would(name: str, mesh: str) -> None:
    make, forward, backward = MODELS[name]
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
    assert counts == [forward * LAYERS, backward * LAYERS]
    assert program.verify().ok
