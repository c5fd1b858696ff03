"""The loss over a vocabulary in shards, fused: one kernel reads the logits once, another writes their gradient."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import shardc
from kernels_triton.codegen.codegen import generate
from kernels_triton.codegen.schedules import choose_plan
from kernels_triton.ir.kernel import Kernel
from kernels_triton.launch.launch import H200
from kernels_triton.match.op import kernel_of
from shardc.ir.graph import info, op_name, results, type_of
from shardc.passes.fusion.analysis.traffic import node_bytes, traffic
from tests.models.zoo import PLANS

BATCH, SEQ, HIDDEN = 4, 24, 64


def gpt2(vocabulary: int, dtype: torch.dtype) -> torch.nn.Module:
    config = GPT2Config(n_layer=1, n_embd=HIDDEN, n_head=4, vocab_size=vocabulary, n_positions=SEQ,
                        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False,
                        bos_token_id=0, eos_token_id=0)  # fmt: skip
    return torch.nn.Module.to(GPT2LMHeadModel(config), dtype)


def llama(vocabulary: int, dtype: torch.dtype) -> torch.nn.Module:
    config = LlamaConfig(num_hidden_layers=1, hidden_size=HIDDEN, intermediate_size=128, vocab_size=vocabulary,
                         num_attention_heads=4, num_key_value_heads=2, use_cache=False)  # fmt: skip
    return torch.nn.Module.to(LlamaForCausalLM(config), dtype)


@cache
def compiled(model: str, vocabulary: int, ranks: int, dtype: torch.dtype, precision: str | None) -> shardc.Program:
    with torch.device("meta"):
        built = {"gpt2": gpt2, "llama": llama}[model](vocabulary, dtype)
        tokens = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    plan = shardc.Plan.load(PLANS / f"{model}.yaml").merge(shardc.Plan.of(fuse=True, precision=precision))
    return shardc.compile(built, {"input_ids": tokens, "labels": tokens}, mesh=f"dp=2,tp={ranks}", plan=plan)


CASES = pytest.mark.parametrize(
    ("model", "vocabulary", "ranks", "dtype", "precision"),
    [
        ("gpt2", 50304, 2, torch.bfloat16, None),
        ("gpt2", 50257, 2, torch.bfloat16, None),  # uneven
        ("gpt2", 50304, 4, torch.float32, "bf16"),
        ("llama", 32000, 2, torch.float32, "bf16"),
    ],
)


@pytest.mark.sampled(4)
@CASES
def test_logits_are_read_twice_and_written_once(
    model: str, vocabulary: int, ranks: int, dtype: torch.dtype, precision: str | None
) -> None:
    program = compiled(model, vocabulary, ranks, dtype, precision)
    body = program.body
    elements = BATCH // 2 * SEQ * -(-vocabulary // ranks)
    products = {"shardc.linear", "shardc.linear_dgrad", "shardc.linear_wgrad", "view"}
    large: list[tuple[str, int]] = []
    for node in body.calls():
        made = [value for value in results(node) if value is not None]
        near = [v for v in (*node.all_input_nodes, *made) if info(v).type is not None]
        of_logits = [v for v in near if type_of(v).local_bytes(body.mesh) // type_of(v).dtype.itemsize == elements]
        assert all(type_of(v).dtype == torch.bfloat16 for v in of_logits), info(node).name
        if of_logits and op_name(node.target) not in products:
            large.append((info(node).phase, node_bytes(body, node, made)))
    logits = elements * 2
    small = BATCH // 2 * SEQ * 64  # statistics, targets
    assert [phase for phase, _ in large] == ["fwd", "bwd"]
    assert logits <= large[0][1] <= logits + small
    assert 2 * logits <= large[1][1] <= 2 * logits + small


def statistics(program: shardc.Program) -> Kernel:
    """The kernel before the gather."""
    gather = next(n for n in program.body.calls() if info(n).name.endswith("amax.all_gather"))
    call = gather.args[0].args[0]  # type: ignore[union-attr]
    kernel = kernel_of(call.target, call.args)  # type: ignore[union-attr]
    assert kernel is not None
    return kernel


@pytest.mark.sampled(4)
@CASES
def test_on_a_gpu_the_statistics_are_one_pass(
    model: str, vocabulary: int, ranks: int, dtype: torch.dtype, precision: str | None
) -> None:
    """Rows that do not fit into registers are looped over once: the sum is rescaled as the maximum grows."""
    kernel = statistics(compiled(model, vocabulary, ranks, dtype, precision))
    source = generate(kernel, choose_plan(kernel, H200)).text
    assert len(re.findall(r"for start in tl\.range", source)) <= 1
    logits = next(i for i in range(len(kernel.inputs)) if kernel.kind(i) == "full")
    loads = re.findall(rf"tl\.load\(X{logits} ", source)
    assert len(loads) == choose_plan(kernel, H200).schedule.chunks or len(loads) == 1


def test_rows_that_fit_are_kept() -> None:
    kernel = statistics(compiled("llama", 8192, 2, torch.float32, "bf16"))
    plan = choose_plan(kernel, H200)
    assert plan.style == "rows"
    assert "for start" not in generate(kernel, plan).text


def test_a_few_kernels_are_left_of_the_loss() -> None:
    program = compiled("gpt2", 50304, 2, torch.bfloat16, None)
    between = [n for n in program.body.calls() if "loss" in info(n).source and kernel_of(n.target, n.args) is not None]
    assert len(between) <= 5, [info(n).name for n in between]
    calls = [op_name(n.target) for n in program.body.calls() if "loss" in info(n).source]
    assert not [op for op in calls if op.startswith(("amax", "sum"))]
    assert traffic(program.body).kernels < 60


def test_the_values_are_the_single_devices() -> None:
    torch.manual_seed(0)
    model = gpt2(331, torch.float32)
    tokens = torch.randint(0, 331, (BATCH, SEQ))
    plan = shardc.Plan.load(PLANS / "gpt2.yaml").merge(shardc.Plan.of(fuse=True))
    batch = {"input_ids": tokens, "labels": tokens.where(tokens % 5 != 0, -100)}
    for mesh in ("dp=2,tp=2", "dp=1,tp=4"):
        report = shardc.compile(model, batch, mesh=mesh, plan=plan).verify()
        assert report.equal, str(report)
