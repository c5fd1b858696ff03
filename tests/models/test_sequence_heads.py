"""Heads that read a few rows of a sequence that ranks have parts of: the last token that is no padding, as the
transformers library's classifiers do; positions that are masked; the token of the greatest number, as CLIP's.

Loss and every gradient are those of eager PyTorch, and what the head sends is rows, not the sequence.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2ForSequenceClassification, LlamaConfig, LlamaForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutput

import shardc
from shardc.ir.text import print_graph
from shardc.passes.type_check import type_faults
from tests.models.eagerly import eager, gap

VOCAB, WIDTH, LABELS, SAMPLES = 64, 16, 3, 4
LAYOUTS = [("cp=2", 16, "auto"), ("cp=4", 50, "zigzag"), ("dp=2, cp=2", 17, "auto"), ("cp=2, tp=2", 17, "none")]


class Positions(nn.Module):
    """Logits of a few positions of each sample, and of the token of the greatest number; labels are one a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mix = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.score = nn.Linear(2 * WIDTH, LABELS)

    def forward(self, input_ids: Tensor, labels: Tensor) -> SequenceClassifierOutput:
        x = self.tokens(input_ids)
        x = torch.tanh(self.mix(x + F.scaled_dot_product_attention(x, x, x, is_causal=True)))
        masked = torch.stack([labels, labels + 3, 2 * labels], 1)
        some = x.gather(1, masked[..., None].expand(-1, -1, 2 * WIDTH)).mean(1)
        last = x[torch.arange(x.shape[0]), input_ids.argmax(-1)]
        chosen = x[:, torch.tensor([1, -1, 1])].sum(1)
        return SequenceClassifierOutput(loss=F.cross_entropy(self.score(some * last + chosen), labels))


def gpt2() -> nn.Module:
    sizes: dict[str, Any] = {"n_positions": VOCAB, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "num_labels": LABELS}
    tokens: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    off: dict[str, Any] = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "use_cache": False}
    return GPT2ForSequenceClassification(GPT2Config(**tokens, **sizes, **off))


def llama() -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    tokens: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 0, "num_labels": LABELS}
    return LlamaForSequenceClassification(LlamaConfig(**tokens, **sizes, **heads))


HEADS: dict[str, Any] = {"gpt2": gpt2, "llama": llama, "positions": Positions}
SPLIT = {"gpt2": "**.mlp.c_fc.weight", "llama": "**.mlp.up_proj.weight", "positions": "mix.weight"}


def program_of(name: str, mesh: str, length: int, balance: str) -> tuple[nn.Module, shardc.Program]:
    torch.manual_seed(0)
    model = HEADS[name]()
    ids, labels = torch.randint(1, VOCAB, (SAMPLES, length)), torch.randint(0, LABELS, (SAMPLES,))
    for sample, padding in enumerate((0, 3, 7, length - 1)):
        ids[sample, length - padding :] = 0
    samples = "dp" if "dp" in mesh else "-"
    plan: dict[str, Any] = {
        "inputs": {"input_ids": f"{samples}, cp", "labels": samples},
        "context": {"balance": balance},
        "params": {SPLIT[name]: "tp, -" if name != "gpt2" else "-, tp"} if "tp" in mesh else {},
    }
    return model, shardc.compile(model, {"input_ids": ids, "labels": labels}, mesh=mesh, plan=plan)


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("mesh", "length", "balance"), LAYOUTS)
@pytest.mark.parametrize("name", HEADS)
def test_heads_equal_eager(name: str, mesh: str, length: int, balance: str) -> None:
    model, program = program_of(name, mesh, length, balance)
    assert gap(program, eager(model, program.sample)) < 1e-12
    assert not type_faults(program.body)
    assert ("~cp" in print_graph(program.body)) == (balance != "none")
    assert not [
        d for d in program.diagnostics if d.code == "SC203" and "needs whole" in d.message and "sdpa" not in d.message
    ]


@pytest.mark.parametrize("length", [16, 64])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_classifier_sends_the_logits_of_one_token(name: str, length: int) -> None:
    """And, to find it, a value and a place of each run: in zigzag two a rank."""
    _, program = program_of(name, "cp=2", length, "zigzag")
    (logits,) = [c for c in program.collectives() if c.value == "gather.all_reduce"]
    assert logits.bytes_per_rank == SAMPLES * LABELS * 4
    found = [c for c in program.collectives() if c.value.startswith("argmax")]
    assert sum(c.bytes_per_rank for c in found) == 2 * SAMPLES * (4 + 8)
    assert "of one of each rank" in str(program.explain(found[0].value))
    assert not [
        c for c in program.collectives() if c.value.startswith(("d.gather", "d.score")) and "wgrad" not in c.value
    ]
