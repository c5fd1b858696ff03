"""Softmax as graphs launch it, under the interpreter: masks of every shape, fully masked rows, rows that are looped
over."""

from __future__ import annotations

import pytest
import torch
from closeness import relative
from interpreter import Interpreter
from torch import Tensor

from kernels_triton.ir import reference
from kernels_triton.ir.text import parse
from kernels_triton.launch.row_schedule import Schedule

LOOSE = {"bf16": 1e-2, "f32": 2e-6}
LOWEST = "-3.3895313892515355e+38"  # finfo(bfloat16).min
SOFTMAX = "%{a}=rmax({z}); %{b}=sub({z}, %{a}); %{c}=exp(%{b}); %{d}=rsum(%{c}); %{e}=div(%{c}, %{d})"


def kernel(dtype: str, cols: int, scores: str, mask: str = "") -> str:
    """Softmax of what `scores` leaves as its last step, over [2, 3, 4] rows of x."""
    first = 1 + bool(mask) + scores.count("=")
    names = dict(zip("abcde", range(first, first + 5), strict=True))
    steps = f"{scores}; {SOFTMAX.format(z=f'%{first - 1}', **names)}"
    inputs = ", ".join(filter(None, (f"{dtype}[2,3,4,{cols}]", mask)))
    return f"k[2,3,4|{cols}]({inputs}){{{steps}}}->{dtype}[2,3,4,{cols}]=%{names['e']}"


MASKS = {  # of [batch 2, heads 3, queries 4, columns c], as it is read there
    "none": "",
    "of batch and columns": "{t}[2,{c}]@0:{c},0,0,1",
    "of queries and columns": "{t}[4,{c}]@0:0,0,{c},1",
    "of all but heads": "{t}[2,4,{c}]@0:{c4},0,{c},1",
    "of heads": "{t}[3,4,{c}]@0:0,{c4},{c},1",
    "of columns": "{t}[{c}]@0:0,0,0,1",
    "of everything": "{t}[2,3,4,{c}]",
}


def masked(kind: str, dtype: str, cols: int) -> str:
    return MASKS[kind].format(t=dtype, c=cols, c4=4 * cols)


def checked(interpreted: Interpreter, text: str, *inputs: Tensor, dtype: str = "f32", looped: int = 0) -> Tensor:
    (want,) = reference.run(parse(text), [x.double() if x.is_floating_point() else x for x in inputs])
    plan = ("loops", Schedule(looped, 0, 1, 4)) if looped else (None, None)
    (y,) = interpreted("fused", text, *plan, *inputs)
    assert torch.equal(y.isnan(), want.isnan())
    assert relative(y.nan_to_num(), want.nan_to_num()) < LOOSE[dtype]
    return y


FORMS = ("where(%1, %2, {f})", "where(%1, {f}, %2)", "where(%3, %2, {f})", "where(%3, {f}, %2)")


def drawn(line: str) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(one.shape).mul(3).to(one.dtype) for one in parse(line).inputs]


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_that_is_added(interpreted: Interpreter, mask: str, dtype: str) -> None:
    given = masked(mask, dtype, 40)
    scores = "%2=mul(%0, 0.125); %3=add(%2, %1)" if given else "%1=mul(%0, 0.125)"
    text = kernel(dtype, 40, scores, given)
    checked(interpreted, text, *drawn(text), dtype=dtype)


@pytest.mark.parametrize("fill", ["-inf", LOWEST, "-1e+30", "5.0"])
@pytest.mark.parametrize("form", FORMS)
def test_a_mask_that_fills(interpreted: Interpreter, form: str, fill: str) -> None:
    """A row of which nothing is left is NaN where it is filled with -inf, and even where with a number."""
    turned = "%3=not(%1); %4=" if "%3" in form else "%3="
    text = kernel("f32", 24, f"%2=mul(%0, 0.5); {turned}{form.format(f=fill)}", masked("of all but heads", "bool", 24))
    mask = torch.rand(2, 4, 24, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[0, 1], mask[1, 2] = True, False
    y = checked(interpreted, text, drawn(text)[0], mask)
    assert y.isnan().any() == (fill == "-inf")


@pytest.mark.parametrize("added", [-torch.inf, torch.finfo(torch.bfloat16).min])
@pytest.mark.parametrize("looped", [0, 128])
def test_rows_of_which_nothing_is_left(interpreted: Interpreter, added: float, looped: int) -> None:
    cols = 300 if looped else 24
    text = kernel("f32", cols, "%2=add(%0, %1)", masked("of all but heads", "f32", cols))
    mask = torch.zeros(2, 4, cols).masked_fill(torch.ones(4, cols, dtype=torch.bool).triu(1), added)
    mask[1, 3] = added
    x = drawn(text)[0]
    x[0, 0, 0, 1] = torch.inf
    y = checked(interpreted, text, x, mask, looped=looped)
    assert y[1, :, 3].isnan().all() == (added == -torch.inf)
    if added != -torch.inf:
        assert torch.allclose(y[1, :, 3], torch.full((3, cols), 1 / cols))


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("looped", [0, 128])
def test_backward(interpreted: Interpreter, dtype: str, looped: int) -> None:
    cols = 300 if looped else 40
    text = backward(dtype, cols)
    g, y = drawn(text)
    y = y.softmax(-1)
    y[3] = torch.nan
    checked(interpreted, text, g, y, dtype=dtype, looped=looped)


def backward(dtype: str, cols: int) -> str:
    steps = "%2=mul(%0, %1); %3=rsum(%2); %4=sub(%0, %3); %5=mul(%1, %4); %6=mul(%5, 0.25)"
    return f"k[24|{cols}]({dtype}[24,{cols}], f32[24,{cols}]){{{steps}}}->{dtype}[24,{cols}]=%6"
