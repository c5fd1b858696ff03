"""Kernels that are a template and something more: which are split, which are the generator's, and by what count."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardc
from kernels_triton.ir.kernel import Kernel
from kernels_triton.ir.text import parse
from kernels_triton.match.match import match_template
from kernels_triton.match.op import kernel_of
from kernels_triton.transform.independent_outputs import independent_outputs
from shardc.ir.graph import Graph, info
from shardc.passes.fusion.clustering.cluster import LONG_ROW
from shardc.passes.fusion.fuse import fuse
from tests.passes.test_fuse_templates import agree

ROWS, WIDTH = 6, 8


def kernels(graph: Graph, phase: str = "") -> list[Kernel]:
    """Those of a phase, or all."""
    every = [node for node in graph.calls() if not phase or info(node).phase == phase]
    return [kernel for node in every if (kernel := kernel_of(node.target, node.args)) is not None]


def ops(kernel: Kernel) -> set[str]:
    return {step.op for step in kernel.steps}


# ---------------------------------------------------------------------- a decoder's bias
class Decoder(nn.Module):
    """BERT's masked language model's last layer, or a classifier."""

    def __init__(self, classes: int, **loss: Any) -> None:
        super().__init__()
        self.head, self.loss = nn.Linear(WIDTH, classes), loss
        self.weights = nn.Buffer(torch.arange(classes) % 5 + 1.0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        told: dict[str, Any] = {**self.loss, "weight": self.weights} if "weight" in self.loss else self.loss
        return functional.cross_entropy(self.head(x), y, **told)


def decoded(classes: int, precision: str | None = None, **loss: Any) -> shardc.Program:
    torch.manual_seed(0)
    batch = {"x": torch.randn(ROWS, WIDTH), "y": torch.randint(0, classes, (ROWS,))}
    plan = {"fuse": True, **({} if precision is None else {"precision": precision})}
    return shardc.compile(Decoder(classes, **loss), batch, mesh="dp=1", plan=plan)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_long_rows_of_logits_with_a_bias_are_the_template(precision: str | None) -> None:
    """The sum over rows that is the bias's gradient is a kernel of its own: one for both cannot hold a row."""
    program = decoded(LONG_ROW + 232, precision)
    wide = [kernel for kernel in kernels(program.body) if kernel.cols > LONG_ROW and len(kernel.space) > 1]
    assert wide[0].name == "cross_entropy"
    assert all(ops(kernel) == {"csum"} for kernel in wide[1:])
    match = match_template(wide[0])
    assert match is not None
    assert isinstance(match.binding["bias"], int)
    agree(wide[0])
    assert program.verify().ok, str(program.verify())


def test_short_rows_of_logits_are_one_kernel_with_the_sum() -> None:
    program = decoded(1000)
    (wide,) = [kernel for kernel in kernels(program.body) if kernel.cols == 1000 and len(kernel.space) > 1]
    assert {"rmax", "csum"} <= ops(wide)
    assert program.verify().ok


BIASED = (
    "k[8|16](f32[8,16], i64[8]@0:1,0, f32[]@0:0,0, f32[16]@0:0,1, f32[16]@0:0,1){%5=add(%0, %3); %6=rmax(%5); "
    "%7=sub(%5, %6); %8=exp(%7); %9=rsum(%8); %10=iota{1}(); %11=eq(%10, %1); %12=where(%11, %7, 0.0); %13=rsum(%12); "
    "%14=ne(%1, -100); %15=where(%14, %2, 0.0); %16=div(%15, %9); %17=mul(%8, %16); %18=where(%11, %15, 0.0); "
    "%19=sub(%17, %18)}->f32[8,1]=%9@0:1,0, f32[8,1]=%13@0:1,0, f32[8,16]=%19"
)


def test_near_misses_of_a_biased_loss() -> None:
    def name(old: str = "", new: str = "") -> str | None:
        assert old in BIASED
        match = match_template(parse(BIASED.replace(old, new)))
        return None if match is None else match.template.name

    assert name() == "cross_entropy"
    assert name("sub(%5, %6)", "sub(%0, %6)") is None  # the maximum of others
    assert name("rmax(%5)", "rmax(%0)") is None
    assert name("add(%0, %3)", "mul(%0, %3)") is None
    assert name("add(%0, %3)", "sub(%0, %3)") is None
    assert name("f32[16]@0:0,1, f32[16]", "f32[8]@0:1,0, f32[16]") is None  # a number a row
    assert name("where(%11, %7, 0.0)", "where(%11, %5, 0.0)") is None  # not less the maximum
    assert name("=%19", "=%19, f32[8,16]=%5") is None  # the sum itself is wanted


@pytest.mark.sampled(3)
@pytest.mark.parametrize("loss", [{"label_smoothing": 0.1}, {"weight": True}, {"reduction": "sum"}], ids=str)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_other_losses_are_few_kernels_and_right(loss: dict[str, Any], precision: str | None) -> None:
    """With smoothing or a class's weight a row's gradient is another formula: the generator's, in three reads."""
    program = decoded(96, precision, **loss)
    wide = [kernel for kernel in kernels(program.body) if kernel.cols == 96 and len(kernel.inputs[0].shape) <= 2]
    assert "cross_entropy" not in [kernel.name for kernel in wide]
    full = [kernel for kernel in wide if kernel.bytes_moved >= ROWS * 96 * 2]
    assert len(full) <= 3
    assert program.verify().ok, str(program.verify())


# ---------------------------------------------------------------------- dropout
class Dropped(nn.Module):
    """`norm(residual + dropout(x W + b))`, and again."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm1, self.norm2, self.drop = nn.LayerNorm(16), nn.LayerNorm(16), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.a(x))
        x = x + self.drop(self.b(self.norm1(x)))
        return self.norm2(x).square().mean()


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2"])
def test_norms_with_dropout_are_one_kernel_each(mesh: str) -> None:
    """The generator's: a template before or after it would read the residual stream, or its gradient, once more.

    Forward holds the norm's row and the mask's; backward makes the mask again and sums three gradients in one pass.
    """
    torch.manual_seed(0)
    plan = {"inputs": {"x": "dp, -, -"}, "bucket": False} if mesh == "dp=2" else {}
    program = shardc.compile(Dropped(0.25), torch.randn(4, 6, 16), mesh=mesh, plan=plan)
    body, rows = fuse(program.body), 24 // (2 if mesh == "dp=2" else 1)
    size = rows * 16 * 4
    forward, backward = (
        [kernel for kernel in kernels(body, phase) if {"uniform", "rsum"} <= ops(kernel)] for phase in ("fwd", "bwd")
    )
    assert len(forward) >= 1
    assert len(backward) == 2
    # x and the residual are read, their sum and the norm are written.
    assert 4 * size <= max(kernel.bytes_moved for kernel in forward) < 5 * size
    for kernel in backward:  # the template, and the mask's gradient after it, would move at least a fifth more
        assert kernel.bytes_moved < 6 * size
    assert shardc.compile(Dropped(0.25), torch.randn(4, 6, 16), mesh=mesh, plan={**plan, "fuse": True}).verify().ok


def test_dropouts_mask_is_no_barrier() -> None:
    """Made where it is read, it takes no place in time: the same kernels as without, but for the mask in them."""
    torch.manual_seed(0)
    counts = []
    for p in (0.0, 0.25):
        body = fuse(shardc.compile(Dropped(p), torch.randn(4, 6, 16), mesh="dp=1").body)
        counts.append(len(kernels(body)))
    assert counts[1] <= counts[0]


# ---------------------------------------------------------------------- AdamW
def test_an_update_is_few_launches() -> None:
    """AdamW in place: parameters of a size share launches by the dozen."""
    layers = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64, bias=at % 2 == 0)) for at in range(16)]
    model = nn.Sequential(nn.Linear(1024, 64), *layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    body = shardc.compile(model, torch.randn(4, 1024), mesh="dp=1", plan={"precision": "bf16", "fuse": True},
                          optimizer=optimizer, loss=lambda y, _: y.square().mean()).body  # fmt: skip
    updates = kernels(body, "opt")
    small = sum(p.numel() == 64 for p in model.parameters())
    assert small == 41
    sizes = Counter(kernel.cols for kernel in updates if kernel.cols > 1)
    assert sizes == {64: 2, 4096: 1, 65536: 1}
    # Each element of a parameter and its moments is read and written once, and its gradient is read.
    elements = sum(p.numel() for p in model.parameters())
    moved = sum(kernel.bytes_moved for kernel in updates if kernel.cols > 1)
    assert moved <= elements * (4 * 7 + 2) * 1.01


def test_large_updates_fit_into_registers() -> None:
    """Fifteen parameters in one program would be 250 spills a thread: in one launch, each has programs of its own."""
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    body = shardc.compile(model, torch.randn(4, 512), mesh="dp=1", plan={"fuse": True}, optimizer=optimizer,
                          loss=lambda y, _: y.square().mean()).body  # fmt: skip
    large = [kernel for kernel in kernels(body, "opt") if kernel.cols > 1]
    assert [len(kernel.outputs) for kernel in large] == [3 * 8]
    assert [len(independent_outputs(kernel)) for kernel in large] == [8]


def test_a_float_of_integers_alone_is_exact() -> None:
    """One over a count of targets, in bfloat16: the kernel that counts them cannot know that it is held in float64."""
    program = decoded(20, "bf16")
    for kernel in kernels(program.body):
        if not any(given.dtype.is_floating_point for given in kernel.inputs):
            assert all(made.dtype not in (torch.bfloat16, torch.float16) for made in kernel.outputs)
    assert program.verify().equal, str(program.verify())
