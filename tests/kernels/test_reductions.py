"""Sums over any dims, softmax along any dim and ops that tell places apart: one kernel each, as eager torch computes.

A sum over some of the dims has the others as batch dims, unless it is one of columns in memory; whoever has few rows a
point sums them in one program, without a second kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels_triton.codegen.schedules import choose_plan
from kernels_triton.generated.launcher import define_kernel
from kernels_triton.ir import reference
from kernels_triton.ir.text import parse, text
from kernels_triton.launch.launch import H200
from kernels_triton.match.op import kernel_of as kernel_of_call
from shardc.ir.graph import info, operands, results
from shardc.passes.fusion.fuse import fuse
from tests.kernels.interpreter import Interpreter
from tests.kernels.traced import graph_of, kernel_of

aten = torch.ops.aten
BF, F32 = torch.bfloat16, torch.float32
INF = float("inf")


def channels(g: Tensor, y: Tensor, x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What batch norm's backward sums, with the gradient through a relu, and what follows from a sum."""
    g = torch.where(y <= 0, 0.0, g)
    total = torch.sum(g.float(), (0, 2, 3))
    return g, total / 7.0, torch.sum(g.float() * (x.float() - mean.view(1, -1, 1, 1)), (0, 2, 3))


def safe(x: Tensor) -> Tensor:
    return torch._safe_softmax(torch.where(x > 0.7, x, -INF) * 2.0, -1)


def wide(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape)


def narrow(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape).to(BF)


def nans(*shape: int) -> Callable[[], Tensor]:
    """One number in fifty is none; two in each row are the largest."""

    def make() -> Tensor:
        x = torch.randn(shape)
        x[..., 3], x[..., 1] = 7.0, 7.0
        return torch.where(torch.rand(shape) < 0.02, float("nan"), x)

    return make


def few(*shape: int) -> Callable[[], Tensor]:
    """Nothing but zeros in most rows, and none in the first."""

    def make() -> Tensor:
        x = torch.zeros(shape)
        x[0], x[-1, 2] = 1.0, -2.0
        return x

    return make


IMAGE = (4, 6, 3, 5)
Case = tuple[Callable[..., Any], tuple[Callable[[], Tensor], ...], str]
CASES: dict[str, Case] = {
    "channels": (channels, (narrow(*IMAGE), narrow(*IMAGE), narrow(*IMAGE), wide(6)), "[6;4|15]"),
    "channels last in memory": (
        lambda x: torch.sum(x.permute(0, 3, 1, 2), (0, 2, 3)) * 2.0,
        (wide(4, 3, 5, 6),),
        "[60|6]",
    ),
    "pooled": (lambda x: (torch.sum(x.float(), (1,)) / 70).to(BF), (narrow(3, 70, 16),), "[3;70|16]"),
    "pooled to images": (lambda x: torch.sum(x * 0.5, (2, 3)), (wide(*IMAGE),), "[24|15]"),
    "every other dim": (lambda x: torch.sum(x * x, (1, 3)), (wide(2, 3, 4, 5, 6),), "[2,4;3,5|6]"),
    "experts": (lambda x, w: torch.sum(x * w.unsqueeze(2), (1,)), (wide(40, 2, 8), wide(40, 2)), "[40;2|8]"),
    "softmax along channels": (lambda x: torch.softmax(x, 1), (narrow(2, 6, 3, 5),), "[2,15|6]"),
    "its gradient": (
        lambda g, y: aten._softmax_backward_data(g, y, 1, F32),
        (wide(2, 6, 15), wide(2, 6, 15)),
        "[2,15|6]",
    ),
    "safe softmax": (safe, (wide(12, 8),), "[12|8]"),
    "glu": (lambda x: functional.glu(x, 1), (wide(3, 8, 5),), "[3|20]"),
    "its gradient, too": (lambda g, x: aten.glu_backward(g, x, 1), (wide(3, 4, 5), wide(3, 8, 5)), "[3|20]"),
    "above": (lambda x: torch.triu(x * 2.0, 1), (wide(2, 4, 6),), "[2,4|6]"),
    "above, of bools": (lambda x: torch.triu(x > 0, 1), (wide(5, 6),), "[5|6]"),
    "above, of bytes": (lambda x: torch.triu((x > 0).to(torch.int8), 2) + 100, (wide(5, 6),), "[5|6]"),
    "below": (lambda x: torch.tril(x, -1) + 1.0, (narrow(5, 5),), "[5|5]"),
    "largest of channels": (
        lambda x: (torch.amax(x * 2, (0, 2, 3)), torch.amin(x, (0, 2, 3))),
        (nans(*IMAGE),),
        "[6;4|15]",
    ),
    "largest of all": (lambda x: (torch.max(x * 2.0), torch.min(x)), (wide(40, 300),), "[3|4000]"),
    "largest in the middle": (lambda x: torch.amax(x.abs(), 1), (nans(3, 70, 16),), "[3;70|16]"),
    "products": (lambda x: (torch.prod(x * 1.5, 1), torch.prod(x * 1.25, 0)), (wide(6, 5),), "[6|5]"),
    "any in the middle": (lambda x: (torch.any(x > 1, 1), torch.all(x < 2, 1)), (wide(3, 40, 16),), "[3;40|16]"),
    "any of a row": (lambda x: (torch.any(x * 2, 1, True), torch.all(x.bool(), 1)), (few(12, 40),), "[12|40]"),
    "all of all": (lambda x: (torch.all(x * 2), torch.any(x)), (few(7, 11),), "[|77]"),
    "where it is largest": (lambda x: (*torch.max(x * 2, -1), torch.argmin(x, -1, True)), (nans(9, 37),), "[9|37]"),
    "where of all": (lambda x: torch.argmax(x * 2.0), (wide(9, 37),), "[1|333]"),
    "least and largest": (lambda x: torch.aminmax(x * 2.0, dim=0), (nans(9, 37),), "[9|37]"),
    "repeated": (lambda x: x.repeat(2, 3, 1) * 2.0, (wide(4, 5),), "[6|20]"),
}


@pytest.mark.parametrize("name", CASES)
def test_one_kernel(name: str, interpreted: Interpreter) -> None:
    function, inputs, space = CASES[name]
    torch.manual_seed(0)
    given = [make() for make in inputs]
    kernel, reads = kernel_of(function, given)
    line = text(kernel)
    assert line[line.index("[") : line.index("(")] == space
    assert parse(line) == kernel
    exact = function(*[x.double() for x in given])
    for found in (reference.run(kernel, reads), interpreted("fused", line, None, None, *reads)):
        for mine, theirs in zip(found, exact if isinstance(exact, tuple) else (exact,), strict=True):
            close = 1e-2 if mine.dtype == BF else 2e-5
            torch.testing.assert_close(mine.double(), theirs.double(), rtol=close, atol=close, equal_nan=True)


# ---------------------------------------------------------------------- extremes of integers
def integers(dtype: torch.dtype, *shape: int) -> Tensor:
    """Of all sizes; in some rows the largest or the least that there are, beside what differs from it in one bit."""
    if dtype == torch.bool:
        return torch.rand(shape) < 0.2
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    x = torch.randint(least, most, shape, dtype=torch.int64) >> torch.randint(0, 60, shape[:-1]).unsqueeze(-1)
    x = x.clamp(least, most)
    x[0, ..., 1], x[0, ..., 2], x[1, ..., 3], x[1, ..., 4] = most - 1, most, least + 1, least
    x[2, ..., :], x[2, ..., 0], x[2, ..., 5] = most // 2, most // 2 + 1, most // 2 - 1
    return x.to(dtype)


def extremes(*dims: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    return lambda x: (*torch.aminmax(x, dim=dims[0]),) if len(dims) == 1 else (torch.amax(x, dims),)


INTEGERS: dict[str, tuple[Callable[[Tensor], tuple[Tensor, ...]], tuple[int, ...]]] = {
    "rows": (extremes(-1), (5, 300)),
    "rows of two dims": (extremes(1, 2), (3, 7, 9)),
    "largest of all": (lambda x: (torch.max(x),), (4, 333)),
    "least of all": (lambda x: (torch.min(x),), (4, 333)),
    "rows as long as they may be": (extremes(-1), (3, 8192)),
}
NARROW: dict[str, tuple[Callable[[Tensor], tuple[Tensor, ...]], tuple[int, ...]]] = {
    "columns": (extremes(0), (70, 40)),
    "the middle": (extremes(1), (3, 50, 8)),
}
EXTREMES = [
    *((name, dtype) for name in INTEGERS for dtype in (torch.int32, torch.int64)),
    *((name, dtype) for name in INTEGERS | NARROW for dtype in (torch.int16, torch.uint8, torch.bool)),
]


@pytest.mark.parametrize(("name", "dtype"), EXTREMES, ids=str)
def test_extremes_of_integers_are_exact(name: str, dtype: torch.dtype, interpreted: Interpreter) -> None:
    """Beyond 2^24, which is where float32 ends, and beyond 2^53, where float64 does."""
    function, shape = (INTEGERS | NARROW)[name]
    torch.manual_seed(0)
    x = integers(dtype, *shape)
    kernel, reads = kernel_of(function, (x,))
    exact = function(x)
    for found in (reference.run(kernel, reads), interpreted("fused", text(kernel), None, None, *reads)):
        for mine, theirs in zip(found, exact, strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine.flatten(), theirs.flatten())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("dim", "shape"), [(0, (70, 40)), (1, (3, 50, 8)), (1, (2, 8193))], ids=str)
def test_extremes_that_stay_calls(dim: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of wide integers over other dims than rows, which would be read once a piece, and of longer rows."""
    graph = fuse(graph_of(lambda x: torch.amax(x, dim), (torch.zeros(shape, dtype=dtype),)))
    assert [str(node.target) for node in graph.calls()] == ["aten.amax.default"]


def test_a_row_that_is_masked_throughout_has_no_weights() -> None:
    x = torch.tensor([[-INF, -INF, -INF], [0.0, 1.0, -INF]])
    kernel, reads = kernel_of(lambda x: torch._safe_softmax(x * 1.0, -1), [x])
    (y,) = reference.run(kernel, reads)
    assert torch.equal(y[0], torch.zeros(3))
    torch.testing.assert_close(y[1], torch.softmax(x[1], 0))


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """As batch norm has them: the mean, and then the mean of what is squared about it."""
    wide, n = x.float(), x.numel() // x.shape[1]
    centre = torch.sum(wide, (0, 2, 3), True) / n
    off = wide - centre
    return centre, torch.sum(off * off, (0, 2, 3), True) / n


@pytest.mark.parametrize("size", [(4, 6, 3, 5), (1, 2, 7, 7)])
def test_moments_of_channels_read_once(size: tuple[int, ...], interpreted: Interpreter) -> None:
    """Where the mean is 1,000 deviations, a part's mean has lost 6e-5; squares less the mean's would lose 6 %."""
    torch.manual_seed(0)
    x = (torch.randn(size) + 1000.0).float()
    graph = fuse(graph_of(moments, (x,)))
    calls = [(node, k) for node in graph.calls() if (k := kernel_of_call(node.target, node.args)) is not None]
    assert sum(math.prod(given.shape) == x.numel() for _, kernel in calls for given in kernel.inputs) == 1
    values: dict[str, Tensor] = {"x0": x}
    for node, kernel in calls:
        given = [values[info(one).name] for one in operands(node)]
        made = interpreted("fused", text(kernel), None, None, *given)
        for one, plain in zip(made, reference.run(kernel, given), strict=True):
            torch.testing.assert_close(one, plain, rtol=1e-5, atol=1e-6)
        values |= {info(value).name: one for value, one in zip(results(node), made, strict=True) if value is not None}
    for mine, exact in zip(graph.output_values, moments_in_double(x), strict=True):
        torch.testing.assert_close(values[info(mine).name].double(), exact, rtol=6e-5, atol=0.0)


def test_a_sum_that_comes_later_is_no_moment() -> None:
    def about(x: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
        off = x - centre
        return torch.sum(off * off, (0, 2, 3), True), torch.sum(x, (0, 2, 3), True)

    x, centre = torch.randn(4, 6, 3, 5), torch.randn(1, 6, 1, 1)
    kernel, reads = kernel_of(about, (x, centre))
    for mine, exact in zip(reference.run(kernel, reads), about(x.double(), centre.double()), strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5)


def moments_in_double(x: Tensor) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(x.double(), (0, 2, 3), correction=0, keepdim=True)
    return mean, variance


@pytest.mark.parametrize(("shape", "launches"), [((64, 64, 4096), 2), ((4096, 64, 64), 1)])
def test_few_programs_share_sums_and_one_has_its_own(shape: tuple[int, int, int], launches: int) -> None:
    kernel, _ = kernel_of(lambda x: torch.sum(x * x, (1,)), [torch.empty(shape, dtype=BF, device="meta")])
    plan = choose_plan(kernel, H200)
    assert plan.batches == shape[0]
    assert 1 + bool(define_kernel(kernel, plan).finish) == launches
    assert plan.sums_in_one_program == (launches == 1)
