"""Models, plans and prompts for tests of generation, and what the library's own `generate` makes of them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import shardc
from examples.gpt2 import gpt2
from examples.llama import llama
from examples.qwen3 import qwen3
from examples.t5 import t5
from shardc.runtime.train.trainer import Trainer

DP = {"input_ids": "dp, -", "labels": "dp, -"}
ATTENTION = {"**.q_proj.weight": "tp, -", "**.k_proj.weight": "tp, -", "**.v_proj.weight": "tp, -"}
MLP = {"**.gate_proj.weight": "tp, -", "**.up_proj.weight": "tp, -"}
HEAD = {"**.embed_tokens.weight": "tp, -", "lm_head.weight": "tp, -"}
GPT2 = {"**.wte.weight": "tp, -", "**.attn.c_attn.weight": "-, 3*tp", "**.mlp.c_fc.weight": "-, tp"}
T5 = {"shared.weight": "tp, -"} | dict.fromkeys(("**.q.weight", "**.k.weight", "**.v.weight", "**.wi.weight"), "tp, -")


def mixtral(layers: int = 1) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=layers, intermediate_size=32,
        vocab_size=96, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    tokens = torch.randint(96, (4, 8))
    return MixtralForCausalLM(config), {"input_ids": tokens, "labels": tokens}


Made = tuple[nn.Module, dict[str, Tensor]]
# Of one layer, but for Llama and T5: what a step does for a layer's cache it does for another's.
MODELS: dict[str, tuple[Callable[[], Made], dict[str, str]]] = {
    "gpt2": (lambda: gpt2(batch=4, seq=8, layers=1, vocab=96, width=32), GPT2),
    "llama": (lambda: llama(batch=4, seq=8, vocab=96, width=32), ATTENTION | MLP | HEAD),
    "qwen3": (lambda: qwen3(batch=4, seq=8, layers=1, vocab=96), ATTENTION | MLP | HEAD),
    "mixtral": (mixtral, ATTENTION | HEAD | {"**.experts.gate_up_proj": "-, 2*tp, -"}),
    "t5": (lambda: t5(batch=4, seq=8, vocab=96), T5),
}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_k": 20, "seed": 5, "pad_token_id": 0}
# More prompts than rows, and the most tokens that are to follow each.
MORE = [[(7 * i + 5 * j * j + 3) % 96 for j in range(n)] for i, n in enumerate([5, 2, 11, 3, 9, 1, 4, 7])]
LIMITS = [6, 13, 3, 9, 1, 12, 2, 8]
PROMPTS = [[17, 5, 60, 42, 9], [33, 2], [71, 8, 8, 25, 90, 3, 11], [50, 4, 19]]


def spread(model: nn.Module) -> nn.Module:
    """Weights so large that greedy tokens are not one and the same."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model


def made(name: str) -> tuple[nn.Module, dict[str, Tensor], dict[str, str]]:
    make, params = MODELS[name]
    model, batch = make()
    return spread(model), batch, params


def launched(name: str, mesh: str) -> tuple[nn.Module, Trainer]:
    """A model, and a trainer of its evaluation on a mesh that may have a dp and a tp axis."""
    model, batch, params = made(name)
    plan: dict[str, Any] = {"params": params if "tp" in mesh else {}, "inputs": DP if "dp" in mesh else {}}
    return model, shardc.compile(model, batch, mesh=mesh, plan=plan, mode="eval").launch()


def library(model: Any, prompts: Sequence[Sequence[int]] = PROMPTS, pad: int = 0, **options: Any) -> Tensor:
    """What `model.generate` returns for the prompts, padded as the model wants them."""
    width, left = max(map(len, prompts)), not model.config.is_encoder_decoder
    rows: list[list[int]] = []
    mask: list[list[int]] = []
    for prompt in prompts:
        padding = [pad] * (width - len(prompt))
        rows.append(padding + list(prompt) if left else list(prompt) + padding)
        real, none = [1] * len(prompt), [0] * len(padding)
        mask.append(none + real if left else real + none)
    training = model.training
    model.eval()
    try:
        options = {"use_cache": True, "pad_token_id": pad} | options
        return model.generate(torch.tensor(rows), attention_mask=torch.tensor(mask), **options)
    finally:
        model.train(training)


def alone(model: nn.Module, prompt: Sequence[int], limit: int | None, **options: Any) -> list[int]:
    """The new tokens of one prompt, by the library."""
    row = library(model, [prompt], max_new_tokens=limit, **options)
    return row[0, len(prompt) :].tolist()
