"""Random models, meshes, prompts and options: the tokens are those of the library, whatever is combined."""

import random
from typing import Any

import pytest
import torch
from torch import nn

import shardc
from examples.gpt2 import gpt2
from examples.llama import llama
from examples.t5 import t5
from tests.runtime.generating import ATTENTION, DP, GPT2, HEAD, MLP, T5, library, spread

MESHES = ["tp=2", "dp=2, tp=2", "dp=3", "tp=4", "dp=2, tp=3", "pp=2, tp=2", "pp=2, dp=2"]


def model_of(pick: random.Random) -> tuple[nn.Module, dict[str, Any], dict[str, str]]:
    layers, vocab = pick.choice([1, 2]), pick.choice([32, 37, 61])
    kind = pick.choice(["gpt2", "llama", "llama", "t5"])
    if kind == "gpt2":
        return *gpt2(batch=6, seq=6, layers=layers, vocab=vocab, heads=pick.choice([3, 4]) * 2, width=48), GPT2
    if kind == "t5":
        return *t5(batch=6, seq=6, layers=layers, vocab=vocab), T5
    heads, shared = pick.choice([(4, 1), (4, 2), (6, 3), (6, 6)])
    return *llama(6, 6, layers, vocab, heads, shared, width=48), ATTENTION | MLP | HEAD


def options_of(pick: random.Random, vocab: int) -> dict[str, Any]:
    options: dict[str, Any] = {"max_new_tokens": pick.randint(1, 9)}
    options["eos_token_id"] = pick.sample(range(vocab), pick.choice([0, 0, 1, 4, 12]))
    options |= pick.choice([{}, {}, {"repetition_penalty": 2.0}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 3}])
    return options | ({"suppress_tokens": pick.sample(range(vocab), 5)} if pick.random() < 0.2 else {})


@pytest.mark.long  # what is drawn has tests of its own in `test_generate.py` and `test_generate_options.py`
@pytest.mark.sampled(48)
@pytest.mark.parametrize("number", range(48))
def test_tokens_are_those_of_the_library(number: int) -> None:
    pick = random.Random(number)
    model, batch, params = model_of(pick)
    spread(model)
    mesh = pick.choice(MESHES)
    plan: dict[str, Any] = {"inputs": DP if "dp" in mesh else {}, "params": params if "tp" in mesh else {}}
    plan |= {"pipeline": {"microbatches": pick.choice([1, 2])}} if "pp" in mesh else {}
    plan |= {"storage": {"zero": 3, "axes": ["dp"]}} if "dp" in mesh and pick.random() < 0.3 else {}
    plan |= {"fuse": True, "bucket": True} if pick.random() < 0.2 else {}
    trainer = shardc.compile(model, batch, mesh=mesh, plan=plan, mode=pick.choice(["train", "eval"])).launch()
    vocab = int(model.config.vocab_size)  # type: ignore[union-attr,arg-type]
    for _ in range(2):
        prompts = [[pick.randrange(1, vocab) for _ in range(pick.randint(1, 9))] for _ in range(pick.randint(1, 5))]
        options = options_of(pick, vocab)
        exact = library(model, prompts, **options)
        result = trainer.generate(prompts, pad_token_id=0, **options)
        assert torch.equal(result.sequences, exact), (mesh, plan, prompts, options)
