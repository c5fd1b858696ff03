"""Cross-entropy under the interpreter: loss and gradient against float64, for a whole and a sharded vocabulary."""

import re
from itertools import pairwise

import pytest
import torch
from closeness import relative
from far_logits import SCALE, far_out, held, in_graphs
from far_logits import given as operands
from hypothesis import given
from hypothesis import strategies as st
from interpreter import Interpreter
from test_row_schedule import FEW, rows
from torch import Tensor
from torch.nn import functional

from kernels_triton import ops
from kernels_triton.gate.gate import CompileJob, compile_job, job_of_launch
from kernels_triton.ir import reference as fused
from kernels_triton.ir.text import parse
from kernels_triton.launch import launch
from kernels_triton.launch.row_schedule import Schedule
from kernels_triton.library import reference

PLANS = {  # how rows are kept: as sizes ask for, in part, and in more pairs than registers have room for singly
    "kept": None,
    "streamed": ("cross_entropy", Schedule(64, 2, 1, warps=1, stages=2, waves=1)),
    "again": ("cross_entropy", Schedule(64, 5, 1, warps=1, waves=1, registers=16)),
}
LOOSE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-6}


def targets(x: Tensor) -> Tensor:
    target = torch.randint(0, x.shape[1], (x.shape[0],), generator=torch.Generator().manual_seed(x.shape[1]))
    target[::3] = -100
    return target


def exactly(x: Tensor, target: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    leaf = x.double().requires_grad_()
    loss = functional.cross_entropy(leaf, target, reduction="none", ignore_index=-100)
    (grad,) = torch.autograd.grad(loss.sum() * scale, leaf)
    return loss.detach(), grad


def in_wide_rows(x: Tensor) -> Tensor:
    """Rows that begin with 16 bytes; who reads what lies between them and uses it gets NaN."""
    wide = torch.full((x.shape[0], -(-x.shape[1] // 8) * 8), torch.nan, dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


@FEW
@given(x=rows(9000), in_place=st.booleans(), wide=st.booleans())
def test_whole(interpreted: Interpreter, x: Tensor, in_place: bool, wide: bool) -> None:
    target, scale = targets(x), torch.tensor(0.5)
    x = in_wide_rows(x) if wide else x
    (loss, lse, grad), after = interpreted("cross_entropy", x, target, scale, -100, in_place, changed=True)
    exact, exact_grad = exactly(x, target, 0.5)
    assert relative(loss, exact, exact.clamp(min=1.0)) < 1e-6
    exact_lse = x.double().logsumexp(-1)
    assert relative(lse, exact_lse, exact_lse.abs().clamp(min=1.0)) < 1e-6
    assert relative(grad, exact_grad, torch.tensor(0.5)) < LOOSE[x.dtype]
    assert torch.equal(after[0], grad if in_place else x)


@FEW
@given(x=rows(9001), wide=st.booleans(), shard=st.booleans())
def test_padded(interpreted: Interpreter, x: Tensor, wide: bool, shard: bool) -> None:
    """The same gradient in rows of whole 16 bytes, zeros between them, also where it is NaN."""
    target = targets(x)
    target[-1] = x.shape[1]
    op, args = "cross_entropy", (in_wide_rows(x) if wide else x, target, torch.tensor(0.5))
    if shard:
        stats = interpreted("cross_entropy_stats", *args[:2]).unsqueeze(0)
        op, args = "cross_entropy_finish", (*args[:2], stats, x.shape[1], 0, args[2])
    *_, plain = interpreted(op, *args)
    *_, whole = interpreted("in_wide_rows", op, *args)
    assert whole.shape[1] % (16 // x.element_size()) == 0
    assert torch.equal(whole[:, : x.shape[1]].nan_to_num(7.0), plain.nan_to_num(7.0))
    assert not whole[:, x.shape[1] :].any()


@FEW
@given(x=rows(2100), cuts=st.lists(st.integers(0, 2100), max_size=3))
def test_shards_of_the_vocabulary(interpreted: Interpreter, x: Tensor, cuts: list[int]) -> None:
    """Stats of each shard, gathered; each shard then has its part of the gradient and the whole loss."""
    target = targets(x)
    edges = sorted({0, x.shape[1], *(cut % x.shape[1] for cut in cuts)})
    parts = [(start, x[:, start:end]) for start, end in pairwise(edges)]
    stats = torch.stack([interpreted("cross_entropy_stats", part, target, start) for start, part in parts])
    exact, exact_grad = exactly(x, target, 1.0)
    for start, part in parts:
        loss, _, grad = interpreted("cross_entropy_finish", part, target, stats, x.shape[1], start)
        assert relative(loss, exact, exact.clamp(min=1.0)) < 1e-6
        mine = exact_grad[:, start : start + part.shape[1]]
        assert relative(grad, mine, torch.tensor(1.0)) < LOOSE[x.dtype]


@pytest.mark.parametrize("op", ["cross_entropy", "sharded"])
def test_a_target_that_is_no_class_is_loud(interpreted: Interpreter, op: str) -> None:
    x, target = torch.randn(4, 10), torch.tensor([3, 10, -1, -100])
    if op == "cross_entropy":
        loss, _, grad = interpreted(op, x, target)
    else:
        stats = interpreted("cross_entropy_stats", x, target)
        loss, _, grad = interpreted("cross_entropy_finish", x, target, stats.unsqueeze(0), 10)
    assert loss.isnan().tolist() == [False, True, True, False]
    assert grad.isnan().all(-1).tolist() == [False, True, True, False]
    assert loss[3] == 0.0
    assert not grad[3].any()


@pytest.mark.parametrize("cols", [10, 9000])
def test_an_ignored_row_has_no_gradient_whatever_its_logits(interpreted: Interpreter, cols: int) -> None:
    x = torch.randn(4, cols)
    x[0, 3], x[1, 5], x[2, cols - 1], x[3] = torch.nan, torch.inf, torch.nan, -torch.inf
    target = torch.tensor([-100, -100, 1, -100])
    *_, grad = interpreted("cross_entropy", x, target)
    assert not grad[[0, 1, 3]].any()
    assert grad[2].isnan().all()
    *_, whole = interpreted("in_wide_rows", "cross_entropy", x.bfloat16(), target)
    assert not whole[[0, 1, 3]].any()
    assert not whole[:, cols:].any()
    if cols == 10:
        *_, again = interpreted("in_wide_rows", "cross_entropy", x.bfloat16(), target, schedule=PLANS["again"])
        assert torch.equal(again.nan_to_num(7.0), whole.nan_to_num(7.0))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("how", "dtype"),
    [
        *((how, torch.float32) for how in ("kept", "streamed", "shards", "reference", "graph", "graph, biased")),
        *((how, torch.bfloat16) for how in ("streamed", "again", "graph")),
    ],
    ids=str,
)
def test_logits_far_from_zero(interpreted: Interpreter, how: str, dtype: torch.dtype) -> None:
    x, target = far_out(dtype, 300)
    scale, part = torch.tensor(SCALE), x[:, :130]
    if "graph" in how:
        text, inputs = in_graphs(dtype, *x.shape, "biased" in how), operands(x, target, "biased" in how)
        for total, picked, grad in (interpreted("template", text, *inputs), fused.run(parse(text), inputs)):
            held(x, target, (total.log() - picked).squeeze(1), grad)
        return
    if how == "shards":
        stats = [interpreted("cross_entropy_stats", *of) for of in ((part, target, 0), (x[:, 130:], target, 130))]
        gathered = torch.stack(stats), 300
        loss, _, left = interpreted("cross_entropy_finish", part, target, *gathered, 0, scale)
        again, _, right = interpreted("cross_entropy_finish", x[:, 130:], target, *gathered, 130, scale)
        assert torch.equal(loss.nan_to_num(7.0), again.nan_to_num(7.0))
        grad = torch.cat((left, right), 1)
    elif how == "reference":
        loss, _, grad = reference.cross_entropy(x, target, scale)
    else:
        loss, lse, grad = interpreted("cross_entropy", x, target, scale, schedule=PLANS[how])
        torch.testing.assert_close(lse.double(), x.double().logsumexp(-1), rtol=2e-7, atol=1e-6)
    held(x, target, loss, grad)


@pytest.mark.sampled(2)
@pytest.mark.skipif(not launch.HAS_TRITON, reason="Triton compiles it")
@pytest.mark.parametrize("shards", [2, 5])
def test_every_thread_has_the_same_sum_over_shards(shards: int) -> None:
    """A product added unrounded to what another thread rounded is another number in each of the two: gradients would
    depend on which thread has a column. No fused multiplication takes what comes from another thread."""
    recorded: list[CompileJob] = []
    logits = torch.empty(64, 227, dtype=torch.bfloat16, device="meta")
    target = torch.empty(64, dtype=torch.int64, device="meta")
    stats = torch.empty(shards, 64, 3, device="meta")
    with launch.recording(lambda one: recorded.append(job_of_launch("cross_entropy_finish", 227, one))):
        ops.cross_entropy_finish(logits, target, stats, 1000)
    (source,) = recorded
    text = compile_job(source, 90).asm["ptx"]
    exchanged = set(re.findall(r"shfl\.sync\.bfly\.b32\s+(%\w+),", text))
    assert exchanged
    fused = {one for line in re.findall(r"fma\.rn\.f32\s+(.*);", text) for one in line.split(", ")[1:]}
    assert exchanged.isdisjoint(fused)
