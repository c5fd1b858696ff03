"""Softmax as graphs launch it, under the interpreter: masks of every shape, and fully masked rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from closeness import relative
from interpreter import Interpreter
from torch import Tensor

from kernels_triton.gate.gate import job_of_launch, measure_job
from kernels_triton.ir import reference
from kernels_triton.ir.text import parse
from kernels_triton.match.match import match_template
from kernels_triton.match.source import recorded_launches

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
    options: dict[str, Any] = {"looped": looped} if looped else {}
    (y,) = interpreted("template", text, *inputs, **options)
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
    match = match_template(parse(text))
    assert match is not None
    assert match.template.name == "softmax"
    checked(interpreted, text, *drawn(text), dtype=dtype)


@pytest.mark.parametrize("fill", ["-inf", LOWEST, "-1e+30", "5.0"])
@pytest.mark.parametrize("form", FORMS)
def test_a_mask_that_fills(interpreted: Interpreter, form: str, fill: str) -> None:
    """A row of which nothing is left is NaN where it is filled with -inf, and even where with a number."""
    turned = "%3=not(%1); %4=" if "%3" in form else "%3="
    text = kernel("f32", 24, f"%2=mul(%0, 0.5); {turned}{form.format(f=fill)}", masked("of all but heads", "bool", 24))
    mask = torch.rand(2, 4, 24, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[0, 1], mask[1, 2] = True, False
    assert match_template(parse(text)) is not None
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
    match = match_template(parse(text))
    assert match is not None
    assert match.template.name == "softmax_backward"
    g, y = drawn(text)
    y = y.softmax(-1)
    y[3] = torch.nan
    checked(interpreted, text, g, y, dtype=dtype, looped=looped)


def backward(dtype: str, cols: int, step: str = "%4=sub(%0, %3)") -> str:
    steps = f"%2=mul(%0, %1); %3=rsum(%2); {step}; %5=mul(%1, %4); %6=mul(%5, 0.25)"
    return f"k[24|{cols}]({dtype}[24,{cols}], f32[24,{cols}]){{{steps}}}->{dtype}[24,{cols}]=%6"


def name_of(text: str) -> str | None:
    match = match_template(parse(text))
    return None if match is None else match.template.name


def test_near_misses() -> None:
    mask = masked("of queries and columns", "f32", 24)
    plain = kernel("f32", 24, "%2=mul(%0, 0.5); %3=add(%2, %1)", mask)
    assert name_of(plain) == "softmax"
    assert name_of(plain.replace("exp(", "exp2(")) is None
    assert name_of(plain.replace("div(", "mul(")) is None
    assert name_of(plain.replace("rmax(%3)", "rmax(%2)")) is None  # of scores without the mask
    assert name_of(plain.replace("sub(%3", "sub(%2")) is None
    assert name_of(plain.replace("rsum(%6)", "rsum(%5)")) is None
    assert name_of(plain.replace(mask, mask.replace("f32", "bool"))) is None  # True adds 1, and fills nothing
    assert name_of(plain.replace(mask, "f32[24,4]@0:0,0,1,4")) is None  # columns of the mask are apart
    assert name_of(plain + ", f32[2,3,4]=%4@0:12,4,1,0") is None  # somebody else reads the maxima
    filled = kernel("f32", 24, "%2=mul(%0, 0.5); %3=where(%1, %2, -inf)", masked("of heads", "bool", 24))
    assert name_of(filled) == "softmax"
    assert name_of(filled.replace("-inf", "%0")) is None
    assert name_of(filled.replace("sub(%3", "sub(%2")) is None
    assert name_of(backward("f32", 40)) == "softmax_backward"
    assert name_of(backward("f32", 40, "%4=add(%0, %3)")) is None
    assert name_of(backward("f32", 40, "%4=sub(%1, %3)")) is None
    assert name_of(backward("f32", 40).replace("rsum(%2)", "rsum(%0)")) is None


@pytest.mark.parametrize("cols", [1024, 12288, 40000])
def test_what_is_launched_compiles_without_spills(cols: int) -> None:
    mask = f"bool[2,4,{cols}]@0:{4 * cols},0,{cols},1"
    one = parse(kernel("bf16", cols, "%2=mul(%0, 0.5); %3=where(%1, %2, -inf)", mask))
    for launched in recorded_launches(one):
        assert not measure_job(job_of_launch("softmax", cols, launched), 90)["problems"]
