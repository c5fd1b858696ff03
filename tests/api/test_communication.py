"""Communication is exactly Megatron-LM's: counts and bytes against closed formulas, for 2 and for 32 layers.

Only the column weights, the vocabulary and the batch are annotated (and for sequence parallelism one residual
activation). With A = batch/dp * seq * hidden * itemsize, the formulas are those of docs/guides/communication.md.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import shardc
from shardc.ir.graph import type_of

PLANS = Path(__file__).parent.parent.parent / "configs" / "plans"
BATCH, SEQ, HIDDEN, VOCAB, HEADS = 8, 16, 32, 96, 4
DP, TP, ITEM = 2, 2, 4
MESH = shardc.Mesh(dp=DP, tp=TP)
A = BATCH // DP * SEQ * HIDDEN * ITEM  # one activation of the residual stream, per data-parallel rank
TOKENS = BATCH // DP * SEQ * ITEM  # one number a token
SCALAR = ITEM
STATISTICS = 3 * TOKENS * TP  # of the softmax of the logits: each rank's maximum, sum and target's logit


def gpt2(layers: int) -> torch.nn.Module:
    config = GPT2Config(n_layer=layers, n_embd=HIDDEN, n_head=HEADS, vocab_size=VOCAB, n_positions=SEQ,
                        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False,
                        bos_token_id=0, eos_token_id=0)  # fmt: skip
    return GPT2LMHeadModel(config)


def llama(layers: int) -> torch.nn.Module:
    config = LlamaConfig(num_hidden_layers=layers, hidden_size=HIDDEN, intermediate_size=64, vocab_size=VOCAB,
                         num_attention_heads=HEADS, num_key_value_heads=2, use_cache=False)  # fmt: skip
    return LlamaForCausalLM(config)


MODELS = {"gpt2": gpt2, "llama": llama}


def compiled(model: str, plan: str, layers: int) -> shardc.Program:
    with torch.device("meta"):
        built = MODELS[model](layers)
        tokens = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    written = shardc.Plan.load(PLANS / f"{plan}.yaml").merge(shardc.Plan.of(bucket=False))
    return shardc.compile(built, {"input_ids": tokens, "labels": tokens}, mesh=MESH, plan=written)


def tally(program: shardc.Program, phase: str, axis: str) -> Counter[tuple[str, int]]:
    """How often each (kind, payload bytes) occurs among the collectives of one axis alone."""
    return Counter((c.kind, c.payload_bytes) for c in program.collectives() if c.phase == phase and c.axes == (axis,))


@pytest.mark.parametrize("layers", [2, 32])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.sampled(4)
def test_tensor_parallel(model: str, layers: int) -> None:
    program = compiled(model, model, layers)
    # 2 a layer, and the embedding's rows; for the cross-entropy one gather.
    assert tally(program, "fwd", "tp") == {("all_reduce", A): 2 * layers + 1, ("all_gather", STATISTICS): 1}
    # 2 a layer, and the output projection's input; the cross-entropy needs none.
    assert tally(program, "bwd", "tp") == {("all_reduce", A): 2 * layers + 1}
    others = [c for c in program.collectives() if c.kind != "all_reduce"]
    assert len(others) == 1, "nothing else is gathered, nothing moved"
    assert not [d for d in program.diagnostics if d.severity == "warning"]


@pytest.mark.parametrize("layers", [2, 32])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.sampled(4)
def test_sequence_parallel(model: str, layers: int) -> None:
    program = compiled(model, f"{model}_sp", layers)
    pairs = 2 * layers + 1
    assert tally(program, "fwd", "tp") == {
        ("reduce_scatter", A): pairs,
        ("all_gather", A): pairs,
        ("all_gather", STATISTICS): 1,
    }
    # Gradients are gathered where activations were scattered, and activations gathered again for weight gradients.
    wanted = {("reduce_scatter", A): pairs, ("all_gather", A): 2 * pairs}
    if model == "gpt2":
        wanted[("all_reduce", SEQ * HIDDEN * ITEM)] = 1  # wpe: each rank looks up its positions only
    assert tally(program, "bwd", "tp") == wanted
    assert "all_to_all" not in {c.kind for c in program.collectives()}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("plan", ["gpt2", "gpt2_sp", "llama", "llama_sp"])
def test_one_data_parallel_reduction_a_parameter(plan: str) -> None:
    """One, also of a tied parameter, of the bytes that the rank stores; and two scalars, the loss and the count."""
    program = compiled(plan.removesuffix("_sp"), plan, 2)
    reduced = [c for c in program.collectives() if "dp" in c.axes]
    assert Counter(c.payload_bytes for c in reduced if c.phase == "fwd") == {SCALAR: 2}
    parameters = [
        type_of(node).local_bytes(program.mesh)
        for port, node in zip(program.body.inputs, program.body.placeholders, strict=True)
        if port.role == "param"
    ]
    sequence_sharded = ["wpe"] if plan == "gpt2_sp" else []  # reduced over the batch before its rows are looked up
    backward = Counter(c.payload_bytes for c in reduced if c.phase == "bwd")
    if sequence_sharded:
        full = SEQ * HIDDEN * ITEM
        assert backward == Counter(parameters) - Counter([full]) + Counter([full // TP])
    else:
        assert backward == Counter(parameters)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", MODELS)
def test_logits_are_never_gathered(model: str) -> None:
    """No value of the program has a whole vocabulary dim of activations."""
    program = compiled(model, model, 2)
    for node in program.body.values():
        type = type_of(node)
        if type.shape[-1:] == (VOCAB,) and type.numel() > VOCAB and node.op != "placeholder":
            assert type.local_shape(program.mesh)[-1] == VOCAB // TP, f"{node} is {type}"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", ["gpt2", "llama_sp"])
def test_bytes_sent_equal_the_ring_formula(plan: str) -> None:
    """Per axis in total: 2(k-1)/k of an all-reduce's payload, (k-1)/k of a gather's or scatter's."""
    layers = 2
    program = compiled(plan.removesuffix("_sp"), plan, layers)
    sent = sum(c.bytes_per_rank for c in program.collectives() if c.axes == ("tp",))
    small = STATISTICS * (TP - 1) / TP
    times = {"gpt2": 2 * 2, "llama_sp": 5}[plan]  # an all-reduce counts twice what a gather or a scatter does
    want = times * (2 * layers + 1) * A * (TP - 1) / TP
    assert sent == want + small
