"""Generated kernels under Triton's interpreter: the corpus and random kernels, on every plan, against float64."""

import math

import pytest
import torch
from closeness import relative
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interpreter import Interpreter
from random_kernel import KINDS, Kind, arguments, judge, kernels, places, schedules
from torch import Tensor

from kernels_triton.codegen.schedules import PlanStyle, choose_plan, inplace_pairs
from kernels_triton.gate.corpus import CORPUS, Draft
from kernels_triton.ir import reference
from kernels_triton.ir.kernel import Kernel
from kernels_triton.ir.text import text
from kernels_triton.launch.launch import H200
from kernels_triton.launch.row_schedule import Schedule

TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 8e-4, torch.float32: 2e-6}
EXAMPLES = max(3 if settings().max_examples < 20 else 6, settings().max_examples // 20)  # of each kind
PLANS: dict[PlanStyle, tuple[Schedule, ...]] = {
    "rows": (Schedule(32, 4, 8, 4, 2, 1), Schedule(128, 1, 4, 4)),
    "loops": (Schedule(64, 0, 8, 4, waves=1), Schedule(128, 0, 4, 4)),
    "walk": (Schedule(64, 1, 4, 4, 2, 1),),
    "tiles": (Schedule(64, 1, 8, 4),),
}


def drawn(kernel: Kernel) -> list[Tensor]:
    """Operands; scalars, statistics and weights are positive, as they are where they come from."""
    made: list[Tensor] = []
    for given_ in kernel.inputs:
        if given_.dtype.is_floating_point:
            x = torch.randn(given_.shape)
            made.append((x if len(given_.shape) > 1 else x.abs() + 0.3).to(given_.dtype))
        else:
            made.append(torch.randint(0, 1 << 40, given_.shape, dtype=given_.dtype))
    return made


def widened(tensors: list[Tensor]) -> list[Tensor]:
    return [x.double() if x.is_floating_point() else x for x in tensors]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", CORPUS)
def test_corpus(name: str, interpreted: Interpreter) -> None:
    for number, (dtype, rows, cols) in enumerate(
        ((torch.bfloat16, 19, 100), (torch.float32, 16, 128), (torch.float16, 1, 7))
    ):
        kernel = CORPUS[name](rows, cols, dtype)
        torch.manual_seed(number)
        given_ = drawn(kernel)
        expected = reference.run(kernel, widened(given_))
        style = choose_plan(kernel, H200).style
        styles: tuple[PlanStyle, ...] = ("rows", "loops") if style == "rows" else (style,)
        tried: list[tuple[PlanStyle | None, Schedule | None]] = [(None, None)]
        if number < 2:
            tried += [(each, PLANS[each][number % len(PLANS[each])]) for each in styles]
        for each, schedule in tried:
            if each == "rows" and schedule is not None and schedule.block * schedule.chunks < kernel.cols:
                continue
            found = interpreted("fused", text(kernel), each, schedule, *given_)
            rounds = 2 if any(step.op == "cast" for step in kernel.steps) else 1
            for mine, exact in zip(found, expected, strict=True):
                assert relative(mine, exact) < rounds * TOLERANCE[dtype if rounds == 2 else mine.dtype], (
                    each,
                    schedule,
                )


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_kernels(interpreted: Interpreter, kind: Kind, data: st.DataObject) -> None:
    kernel = data.draw(kernels(kind))
    style, schedule = data.draw(schedules(kernel))
    given_ = arguments(kernel, data.draw(st.integers(0, 99)))
    found = interpreted("fused", text(kernel), style, schedule, *given_)
    judge(kernel, found, reference.run(kernel, given_), (style, schedule))
    if pairs := sorted(inplace_pairs(kernel)):
        output, same = data.draw(places(kernel, pairs))
        given_ = [given_[same[0]] if at in same else x for at, x in enumerate(given_)]
        found = interpreted("fused", text(kernel), style, schedule, *given_, over=(output, same))
        judge(kernel, found, reference.run(kernel, given_), (style, schedule, output, same))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("first", [0, 1, 3, (1 << 33) - 100, (1 << 34) - 500, (1 << 34) - 501])
@pytest.mark.parametrize("stride", [80, 41])
def test_random_numbers_are_those_of_the_op_bit_for_bit(interpreted: Interpreter, stride: int, first: int) -> None:
    """A shard's: strides and offset of the whole tensor, past 2^34; as they are, and compared."""
    seed, offset = torch.tensor((7 << 33) + 5), torch.tensor(first)
    k = Draft((13, 40))
    x, seed_, given_ = k.full(torch.bfloat16), k.scalar(torch.int64), k.scalar(torch.int64)
    drawn_ = k("uniform", seed_, given_, attributes=(3, stride, 1))
    k.out(drawn_, torch.float32)
    for op in ("ge", "lt", "gt"):
        k.out(k("mul", k(op, drawn_, 0.1), x), torch.bfloat16)
    found = interpreted("fused", text(k.kernel("fused_drawn")), None, None, torch.ones(13, 40).bfloat16(), seed, offset)
    uniform = torch.ops.shardc.random_uniform(seed, 3, [13, 40], [stride, 1], offset)
    assert torch.equal(found[0], uniform)
    for mine, kept in zip(found[1:], (uniform >= 0.1, uniform < 0.1, uniform > 0.1), strict=True):
        assert torch.equal(mine != 0, kept)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32], ids=str)
def test_random_numbers_beside_a_tile_of_any_dtype(interpreted: Interpreter, dtype: torch.dtype) -> None:
    k = Draft((5, 36))
    x, seed = k.full(dtype), k.scalar(torch.int64)
    k.out(k("uniform", seed, 4, attributes=(3, 36, 1)), torch.float32)
    k.out(x, dtype)
    given_ = [torch.randint(-3, 3, (5, 36)).to(dtype), torch.tensor(99)]
    found = interpreted("fused", text(k.kernel("fused_beside")), None, None, *given_)
    assert torch.equal(found[0], torch.ops.shardc.random_uniform(given_[1], 3, [5, 36], [36, 1], torch.tensor(4)))
    assert torch.equal(found[1], given_[0])


@pytest.mark.parametrize("attributes", [(3, 2), (3, 1), (3, 0)])
def test_random_numbers_along_one_dim(interpreted: Interpreter, attributes: tuple[int, int]) -> None:
    """With strides, next to one another, and all the same; the first is a literal, and no tile was loaded."""
    seed = torch.tensor((7 << 33) + 5)
    for first in (4, 7):
        k = Draft((50,))
        shape = (50,) if attributes[1] else ()
        k.out(k("uniform", k.scalar(torch.int64), first, attributes=attributes), torch.float32, shape)
        (found,) = interpreted("fused", text(k.kernel("fused_uniform")), None, None, seed)
        expected = torch.ops.shardc.random_uniform(seed, 3, shape, attributes[1 : 1 + len(shape)], torch.tensor(first))
        assert torch.equal(found, expected)


def test_special_values(interpreted: Interpreter) -> None:
    """NaN passes through maximum and rmax; tanh, expm1 and log1p are exact near 0 and have their limits."""
    k = Draft((4, 8))
    x = k.full(torch.float32)
    f32 = torch.float32
    ops = ("tanh", "expm1", "log1p", "sign")
    for op in ops:
        k.out(k(op, x), f32)
    k.out(k("maximum", x, 0.0), f32)
    k.out_row(k("rmax", x))
    k.out_row(k("rmin", x))
    k.out(k("pow", k("abs", x), 1.5), f32)
    kernel = k.kernel("fused_special")
    x = torch.tensor([[1e-6, -1e-6, 3e-4, 0.6, 0.65, -0.7, 9.0, 60.0], [0.0, -0.0, 1.0, -1.0, 0.1, -0.1, 20.0, -0.99]])
    x = torch.cat([x, torch.full((1, 8), math.nan), torch.tensor([[math.inf, -math.inf, 1, 2, 3, 4, 5, 6.0]])])
    found = interpreted("fused", text(kernel), None, None, x)
    expected = reference.run(kernel, [x.double()])
    for mine, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=3e-6, atol=0, equal_nan=True)


def test_angles_of_late_positions(interpreted: Interpreter) -> None:
    """Exact to float32's last places at any position: the angle is reduced in more than float32."""
    k = Draft((64,))
    x = k.full(torch.float32)
    k.out(k("sin", x), torch.float32)
    k.out(k("cos", x), torch.float32)
    kernel = k.kernel("fused_angles")
    x = torch.cat([torch.linspace(-7, 7, 40), torch.randint(0, 1 << 20, (23,)) * 1.0, torch.tensor([1e9])])
    for mine, exact in zip(
        interpreted("fused", text(kernel), None, None, x), reference.run(kernel, [x.double()]), strict=True
    ):
        torch.testing.assert_close(mine.double(), exact, rtol=2e-7, atol=1e-7)


@pytest.mark.parametrize("style", ["rows", "loops"])
def test_softmax_of_extremes(interpreted: Interpreter, style: PlanStyle) -> None:
    """Its sum is rescaled as the maximum grows: rows that start with nothing, overflow, or have nothing at all."""
    k = Draft((6, 40))
    x = k.full(torch.float32)
    e = k("exp", k("sub", x, k("rmax", x)))
    total = k("rsum", e)
    k.out(k("div", e, total), torch.float32)
    k.out_row(total)
    kernel = k.kernel("fused_softmax")
    x = torch.randn(6, 40) * 100
    x[0], x[1], x[2, :33], x[3, 5], x[4, 7] = -math.inf, 3.0, -math.inf, math.inf, math.nan
    schedule = Schedule(64, 1, 4, 4) if style == "rows" else Schedule(16, 0, 4, 4)
    found = interpreted("fused", text(kernel), style, schedule, x)
    for mine, exact in zip(found, reference.run(kernel, [x.double()]), strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-7, equal_nan=True)


def test_integers_divide_as_in_torch(interpreted: Interpreter) -> None:
    k = Draft((30,))
    a, b = k.full(torch.int64), k.full(torch.int32)
    k.out(k("floordiv", a, b), torch.int64)
    k.out(k("remainder", a, b), torch.int64)
    k.out(k("sub", k("mul", a, b), 3), torch.int32)
    k.out(k("and", k("ge", a, 0), k("not", k("eq", b, 3))), torch.bool)
    kernel = k.kernel("fused_integers")
    a, b = torch.arange(-15, 15), torch.tensor([3, -3, 4, -5, 7]).repeat(6).int()
    for mine, exact in zip(
        interpreted("fused", text(kernel), None, None, a, b), reference.run(kernel, [a, b]), strict=True
    ):
        assert torch.equal(mine, exact)
