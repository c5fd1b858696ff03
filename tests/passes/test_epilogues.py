"""What follows a collective, and what norms send back, fused: one kernel reads each of them, and reads it once.

row-parallel product  ->  all_reduce or reduce_scatter  ->  + bias + residual, norm: both written by one kernel
column-parallel dgrad ->  all_reduce or reduce_scatter  ->  norm backward: dx + residual's gradient, dw, db
"""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import fx
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import shardc
from kernels_triton.ir.kernel import Kernel
from kernels_triton.match.op import kernel_of
from shardc.ir.collectives import KINDS
from shardc.ir.graph import info, op_name, results, type_of
from shardc.ir.ops import collectives
from tests.models.zoo import PLANS

BATCH, SEQ, HIDDEN, LAYERS, TP = 8, 16, 40, 2, 2
SUMS = (collectives.all_reduce, collectives.reduce_scatter)
CASES = pytest.mark.parametrize("precision", [None, "bf16"])
MODELS = pytest.mark.parametrize("plan", ["gpt2", "gpt2_sp", "llama", "llama_sp"])


@cache
def compiled(plan: str, precision: str | None) -> shardc.Program:
    """A model of bfloat16, or one of float32 that computes in bfloat16."""
    with torch.device("meta"):
        if plan.startswith("gpt2"):
            config = GPT2Config(n_layer=LAYERS, n_embd=HIDDEN, n_head=4, vocab_size=96, n_positions=SEQ,
                                attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False,
                                bos_token_id=0, eos_token_id=0)  # fmt: skip
            model = GPT2LMHeadModel(config)
        else:
            shape = LlamaConfig(num_hidden_layers=LAYERS, hidden_size=HIDDEN, intermediate_size=64, vocab_size=96,
                                num_attention_heads=4, num_key_value_heads=2, use_cache=False)  # fmt: skip
            model = LlamaForCausalLM(shape)
        tokens = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    model = torch.nn.Module.to(model, torch.bfloat16 if precision is None else torch.float32)
    merged = shardc.Plan.load(PLANS / f"{plan}.yaml").merge(shardc.Plan.of(fuse=True, precision=precision))
    return shardc.compile(model, {"input_ids": tokens, "labels": tokens}, mesh=f"dp=2,tp={TP}", plan=merged)


def stream(plan: str) -> int:
    """Elements of the residual stream that a rank has."""
    return BATCH // 2 * SEQ // (TP if plan.endswith("_sp") else 1) * HIDDEN


def summed(program: shardc.Program, plan: str, phase: str) -> list[fx.Node]:
    """The sums over tp that yield the residual stream's next part, or a gradient of it; not those of parameters."""
    body = program.body
    gradients = {value for port, value in zip(body.outputs, body.output_values, strict=True) if port.role == "grad"}
    return [
        node
        for node in body.calls()
        if node.target in SUMS
        and (info(node).phase, node.args[2]) == (phase, ["tp"])
        and math.prod(type_of(node).local_shape(body.mesh)) == stream(plan)
        and node not in gradients
        and "emb" not in info(node).name  # rows of the embedding start the stream
    ]


def only_reader(node: fx.Node) -> tuple[fx.Node, Kernel]:
    """The one kernel that reads a value, through views."""
    readers: list[fx.Node] = []
    todo = [node]
    while todo:
        for user in todo.pop().users:
            if op_name(user.target) in ("view", "_unsafe_view", "t", "transpose.int"):
                todo.append(user)
            else:
                readers.append(user)
    names = [f"{info(r).name}: {op_name(r.target)}" for r in readers if r.op != "output"]
    assert len(readers) == 1, f"{info(node).name} is read by {names}"
    kernel = kernel_of(readers[0].target, readers[0].args)
    assert kernel is not None, names
    return readers[0], kernel


def ops(kernel: Kernel) -> list[str]:
    return [step.op for step in kernel.steps]


@CASES
@MODELS
@pytest.mark.sampled(8)
def test_one_kernel_after_each_forward_sum(plan: str, precision: str | None) -> None:
    program = compiled(plan, precision)
    found = summed(program, plan, "fwd")
    assert len(found) == 2 * LAYERS
    size = stream(plan)
    for node in found:
        call, kernel = only_reader(node)
        assert "rsum" in ops(kernel), "the norm is elsewhere"
        written = [made for made in kernel.outputs if math.prod(made.shape) == size]
        assert len(written) == 2, f"{info(call).name}: the stream and its norm"
        read = [given for at, given in enumerate(kernel.inputs) if kernel.kind(at) == "full"]
        assert len(read) <= 2, "the product and the residual, each once"


@pytest.mark.sampled(8)
@CASES
@MODELS
def test_one_kernel_for_each_norms_backward(plan: str, precision: str | None) -> None:
    program = compiled(plan, precision)
    found = summed(program, plan, "bwd")
    assert len(found) == 2 * LAYERS + 1
    size = stream(plan)
    for node in found:
        call, kernel = only_reader(node)
        names = ops(kernel)
        assert "rsum" in names, "dx is elsewhere"
        weights = [made for made in kernel.outputs if math.prod(made.shape) == HIDDEN]
        assert weights, f"{info(call).name}: dw is summed elsewhere"
        assert names.count("csum") >= len(weights)
        read = [given for at, given in enumerate(kernel.inputs) if kernel.kind(at) == "full"]
        assert len(read) <= 3, "x, dy and the residual's gradient, each once"
        written = [made for made in kernel.outputs if math.prod(made.shape) == size]
        assert len(written) >= 1


@pytest.mark.sampled(4)
@MODELS
def test_no_pointwise_call_is_left_on_the_stream(plan: str) -> None:
    """Between collectives and products, nothing but kernels has a tensor of the stream's size."""
    program = compiled(plan, None)
    left = [
        op_name(n.target)
        for n in program.body.calls()
        if kernel_of(n.target, n.args) is None and op_name(n.target) not in KINDS and info(n).phase != "opt"
        for v in results(n)
        if v is not None and math.prod(type_of(v).local_shape(program.mesh)) >= stream(plan)
        and type_of(v).dtype.is_floating_point and len(type_of(v).dims) == 3 and type_of(v).shape[-1] == HIDDEN
        and not type_of(v).partial  # gradients of one input are added before they are summed over ranks
    ]  # fmt: skip
    assert set(left) <= {"view", "shardc.linear", "shardc.linear_dgrad", "embedding", "expand", "split.Tensor"}, left
