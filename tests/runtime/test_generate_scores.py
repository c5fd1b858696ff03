"""Scores that are no numbers: rows of padding make none, and a token is never chosen by one."""

from typing import Any

import pytest
import torch
from torch import nn

import shardc
from examples.gpt2 import gpt2
from shardc.ir.diagnostic import ShardcError
from tests.runtime.generating import library, spread

PROMPT = [[5, 6, 7, 9, 11, 3, 8, 9, 10, 30]]  # compiled for 16 tokens


def eager(kind: str, dtype: torch.dtype) -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
        "intermediate_size": 64, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 8,
    }  # fmt: skip
    own = {"sliding_window": 6} if kind == "Gemma2" else {}
    config = getattr(transformers, f"{kind}Config")(**sizes, **own, attn_implementation="eager")
    torch.manual_seed(0)
    model = spread(getattr(transformers, f"{kind}ForCausalLM")(config)).to(dtype)
    return model.eval()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["Llama", "Gemma2"])
def test_padding_to_a_compiled_length_changes_no_token(kind: str, dtype: torch.dtype) -> None:
    model = eager(kind, dtype)
    tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens}
    trainer = shardc.compile(model, batch, mesh="dp=1", plan={}, mode="eval").launch()
    exact = library(model, PROMPT, max_new_tokens=5, eos_token_id=[])
    assert torch.equal(trainer.generate(PROMPT, 5, eos_token_id=[]).sequences, exact)
    assert 0 not in exact[0, 10:], "which is what NaN was read as"
    # The library's own rows of padding are NaN in float64: a row beside a longer one is as it is alone.
    both = trainer.generate([*PROMPT, [33, 4]], 5, eos_token_id=[]).tokens
    assert both[0] == exact[0, 10:].tolist()
    if dtype == torch.float64:
        assert both[1] == library(model, [[33, 4]], max_new_tokens=5, eos_token_id=[])[0, 2:].tolist()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh", ["dp=1", "tp=2"])
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.5}, {"do_sample": True}], ids=" ".join)
def test_scores_that_are_nan_choose_no_token(mesh: str, options: dict[str, Any]) -> None:
    model, batch = gpt2(layers=1, batch=4, seq=8, vocab=32, width=16)
    plan = {"params": {"**.wte.weight": "tp, -"}} if mesh == "tp=2" else {}
    with torch.no_grad():
        model.transformer.wte.weight[20] = float("nan")  # one score of all is NaN
    trainer = shardc.compile(model, batch, mesh=mesh, plan=plan, mode="eval").launch()
    with pytest.raises(ShardcError, match="new token 0 of prompt 0 are NaN") as caught:
        trainer.generate([[5, 6, 7], [8]], 3, **options)
    assert caught.value.code == "SC509"
    read = trainer.generate([[5, 6, 7], [8]], 3, remove_invalid_values=True, **options)
    assert all(0 <= token < 32 for row in read.tokens for token in row)
