"""Templates as graphs launch them, under the interpreter, against the kernel's text: operands that the plain ops
lack."""

from __future__ import annotations

import pytest
import torch
from closeness import relative
from interpreter import Interpreter
from torch import Tensor

from kernels_triton.gate.gate import job_of_launch, measure_job
from kernels_triton.ir import reference
from kernels_triton.ir.row_padding import padded_columns
from kernels_triton.ir.text import parse
from kernels_triton.launch import launch
from kernels_triton.match.match import match_template
from kernels_triton.match.source import recorded_launches

ROWS = 5
LOOSE = {"bf16": 2e-2, "f32": 2e-5}

FORWARD = "{t}[5,{c}], f32[{c}]@0:0,1, {t}[5,{c}], f32[{c}]@0:0,1, f32[{c}]@0:0,1"
TEMPLATES = {
    "add_layer_norm": (
        FORWARD,
        (
            "%5=add(%0, %1); %6=add(%5, %2); %7=rsum(%6); %8=div(%7, {c}.0); %9=sub(%6, %8); %10=square(%9); "
            "%11=rsum(%10); %12=div(%11, {c}.0); %13=add(%12, 1e-05); %14=rsqrt(%13); %15=mul(%9, %14); "
            "%16=mul(%15, %3); %17=add(%16, %4)"
        ),
        "{t}[5,{c}]=%6, {t}[5,{c}]=%17, {t}[5,1]=%8@0:1,0, {t}[5,1]=%14@0:1,0",
    ),
    "layer_norm": (
        FORWARD.replace(", {t}[5,{c}], f32", ", f32"),
        (
            "%4=add(%0, %1); %5=rsum(%4); %6=div(%5, {c}.0); %7=sub(%4, %6); %8=square(%7); %9=rsum(%8); "
            "%10=div(%9, {c}.0); %11=add(%10, 1e-05); %12=rsqrt(%11); %13=mul(%7, %12); %14=mul(%13, %2); "
            "%15=add(%14, %3)"
        ),
        "{t}[5,{c}]=%15",
    ),
    "layer_norm_backward": (
        "{t}[5,{c}], {t}[5,{c}], {t}[5,{c}], {t}[5]@0:1,0, {t}[5]@0:1,0, f32[{c}]@0:0,1, {t}[5,{c}]",
        (
            "%7=add(%0, %1); %8=sub(%2, %3); %9=mul(%8, %4); %10=mul(%7, %5); %11=rsum(%10); %12=div(%11, {c}.0); "
            "%13=sub(%10, %12); %14=mul(%10, %9); %15=rsum(%14); %16=div(%15, {c}.0); %17=mul(%9, %16); "
            "%18=sub(%13, %17); %19=mul(%18, %4); %20=mul(%7, %9); %21=csum(%20); %22=csum(%7); %23=add(%6, %19); "
            "%24=csum(%23)"
        ),
        "f32[{c}]=%22@0:0,1, f32[{c}]=%21@0:0,1, {t}[5,{c}]=%23, {t}[1,{c}]=%24@0:0,1",
    ),
    "cross_entropy": (
        "{t}[5,{c}], i64[5]@0:1,0, f32[]@0:0,0",
        (
            "%3=rmax(%0); %4=sub(%0, %3); %5=exp(%4); %6=rsum(%5); %7=iota{{1}}(); %8=eq(%7, %1); "
            "%9=where(%8, %4, 0.0); %10=rsum(%9); %11=div(1.0, %2); %12=ne(%1, -100); %13=where(%12, %11, 0.0); "
            "%14=div(%13, %6); %15=mul(%5, %14); %16=where(%8, %13, 0.0); %17=sub(%15, %16)"
        ),
        "f32[5,1]=%6@0:1,0, f32[5,1]=%10@0:1,0, {t}[5,{c}]=%17",
    ),
    "cross_entropy, uneven": (  # of rows that `align` has padded, into rows that are padded
        "{t}[5,{w}]@0:{w},1, i64[5]@0:1,0, f32[]@0:0,0",
        (
            "%3=rmax(%0); %4=sub(%0, %3); %5=exp(%4); %6=rsum(%5); %7=iota{{1}}(); %8=eq(%7, %1); "
            "%9=ne(%1, -100); %10=where(%9, %2, 0.0); %11=div(%10, %6); %12=mul(%5, %11); %13=where(%8, %10, 0.0); "
            "%14=sub(%12, %13)"
        ),
        "{t}[5,{w}]=%14@0:{w},1{z}",
    ),
    "cross_entropy, biased": (
        "{t}[5,{c}], i64[5]@0:1,0, f32[]@0:0,0, f32[{c}]@0:0,1",
        (
            "%4=cast.bf16(%3); %5=add(%0, %4); %6=rmax(%5); %7=sub(%5, %6); %8=exp(%7); %9=rsum(%8); %10=iota{{1}}(); "
            "%11=eq(%10, %1); %12=where(%11, %7, 0.0); %13=rsum(%12); %14=ne(%1, -100); %15=where(%14, %2, 0.0); "
            "%16=div(%15, %9); %17=mul(%8, %16); %18=where(%11, %15, 0.0); %19=sub(%17, %18)"
        ),
        "f32[5,1]=%9@0:1,0, f32[5,1]=%13@0:1,0, {t}[5,{c}]=%19",
    ),
}
GENERATED = {  # what has a template among the plain functions, and none in graphs
    "add_rms_norm": (
        "{t}[5,{c}], {t}[5,{c}], f32[{c}]@0:0,1",
        (
            "%3=add(%0, %1); %4=square(%3); %5=rsum(%4); %6=div(%5, {c}); %7=add(%6, 1e-06); %8=rsqrt(%7); "
            "%9=mul(%3, %8); %10=mul(%2, %9)"
        ),
        "{t}[5,{c}]=%3, f32[5]=%5@0:1,0, {t}[5,{c}]=%10",
    ),
    "squared_relu": (
        "f32[{c}]@0:0,1, {t}[5,{c}]",
        "%2=add(%1, %0); %3=maximum(%2, 0.0); %4=square(%3)",
        "{t}[5,{c}]=%4",
    ),
    "squared_relu_backward": (
        "f32[{c}]@0:0,1, {t}[5,{c}], {t}[5,{c}]",
        (
            "%3=add(%1, %0); %4=maximum(%3, 0.0); %5=mul(%2, %4); %6=add(%5, %5); %7=le(%4, 0); %8=where(%7, 0.0, %6); "
            "%9=csum(%8)"
        ),
        "{t}[5,{c}]=%8, f32[{c}]=%9@0:0,1",
    ),
    "bias_gelu_backward": (
        "{t}[5,{c}], {t}[5,{c}]",
        (
            "%2=mul(%0, 0.7071067811865476); %3=erf(%2); %4=add(1.0, %3); %5=mul(0.5, %4); %6=square(%0); "
            "%7=mul(-0.5, %6); %8=exp(%7); %9=mul(%8, 0.3989422804014327); %10=mul(%0, %9); %11=add(%5, %10); "
            "%12=mul(%1, %11); %13=csum(%12)"
        ),
        "{t}[5,{c}]=%12, f32[{c}]=%13@0:0,1",
    ),
    "gated": (
        "{t}[5,3,{c}]@0:{rows3},1, {t}[5,3,{c}]@{c}:{rows3},1",  # two of three parts of a packed product
        "%2=sigmoid(%0); %3=mul(%0, %2); %4=mul(%3, %1)",
        "{t}[5,{c}]=%4",
    ),
}
KERNELS = {**TEMPLATES, **GENERATED}


def line(name: str, dtype: str, cols: int) -> str:
    w, z = padded_columns(cols), "+0" if padded_columns(cols) > cols else ""
    inputs, steps, outputs = (part.format(t=dtype, c=cols, rows3=3 * cols, w=w, z=z) for part in KERNELS[name])
    return f"k[{ROWS}|{cols}]({inputs}){{{steps}}}->{outputs}"


def drawn(text: str) -> list[Tensor]:
    """Inputs of a kernel; what is divided by is positive."""
    kernel = parse(text)
    match = match_template(kernel)
    torch.manual_seed(0)
    inputs = [torch.randn(given.shape).to(given.dtype) for given in kernel.inputs]
    if match is None:
        return inputs
    if "target" in match.binding:
        inputs[1], inputs[2] = torch.tensor([0, 3, -100, 7, kernel.cols - 1]), torch.tensor(4.0)
    if isinstance(at := match.binding.get("rstd"), int):
        inputs[at] = inputs[at].abs() + 0.5
    return inputs


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("cols", [24, 70])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_launch_computes_the_text(interpreted: Interpreter, name: str, cols: int, dtype: str) -> None:
    text = line(name, dtype, cols)
    kernel = parse(text)
    match = match_template(kernel)
    assert match is not None
    assert match.template.name == name.partition(",")[0]
    inputs = drawn(text)
    exact = reference.run(kernel, [x.double() if x.is_floating_point() else x for x in inputs])
    for result, y, want in zip(match.results, interpreted("template", text, *inputs), exact, strict=True):
        assert y.shape == want.shape
        assert relative(y, want) < LOOSE[dtype], result


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("cols", [24, 70])
@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_kernel_computes_the_text(interpreted: Interpreter, name: str, cols: int, dtype: str) -> None:
    text = line(name, dtype, cols)
    kernel = parse(text)
    assert match_template(kernel) is None
    inputs = drawn(text)
    exact = reference.run(kernel, [x.double() for x in inputs])
    for y, want in zip(interpreted("fused", text, None, None, *inputs), exact, strict=True):
        assert y.shape == want.shape
        assert relative(y, want) < LOOSE[dtype]


def test_a_squared_relu_lets_nan_through_and_no_infinite_gradient(interpreted: Interpreter) -> None:
    """As torch's: what is not a number is none afterwards, and where nothing passes, nothing comes back."""
    x, w = torch.tensor([[-1.0, 2.0, float("nan")]] * ROWS), torch.zeros(3)
    dy = torch.tensor([[float("inf"), 3.0, 1.0]] * ROWS)
    (y,) = interpreted("fused", line("squared_relu", "f32", 3), None, None, w, x)
    dx, _ = interpreted("fused", line("squared_relu_backward", "f32", 3), None, None, w, x, dy)
    nan = float("nan")
    assert torch.equal(y.nan_to_num(7.0), torch.tensor([[0.0, 4.0, nan]] * ROWS).nan_to_num(7.0))
    assert torch.equal(dx.nan_to_num(7.0), torch.tensor([[0.0, 12.0, nan]] * ROWS).nan_to_num(7.0))


@pytest.mark.parametrize("name", ["add_layer_norm", "layer_norm_backward"])
def test_rows_that_registers_do_not_hold(interpreted: Interpreter, name: str) -> None:
    text = line(name, "f32", 300)
    inputs = drawn(text)
    exact = reference.run(parse(text), [x.double() for x in inputs])
    found_ = interpreted("template", text, *inputs, looped=128)
    assert all(relative(y, want) < LOOSE["f32"] for y, want in zip(found_, exact, strict=True))


@pytest.mark.parametrize("name", ["layer_norm_backward", "add_layer_norm"])
def test_long_rows_with_much_to_hold_are_the_generators(name: str) -> None:
    assert match_template(parse(line(name, "bf16", 8192))) is not None
    assert match_template(parse(line(name, "bf16", 8448))) is None
    plain = line("layer_norm", "bf16", 8448).replace("%4=add(%0, %1)", "%4=cast.f32(%0)")
    assert match_template(parse(plain)) is not None  # nothing that its schedule is not for


@pytest.mark.sampled(10)
@pytest.mark.skipif(not launch.HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize(
    ("name", "dtype", "cols"),
    [
        ("add_layer_norm", "bf16", 8192),
        ("layer_norm_backward", "bf16", 1024),
        ("layer_norm_backward", "f32", 8192),
        ("cross_entropy, uneven", "bf16", 50257),
        ("cross_entropy, uneven", "f32", 50257),
        ("cross_entropy, uneven", "bf16", 128255),
        ("cross_entropy, biased", "bf16", 32000),
        ("cross_entropy, biased", "bf16", 50304),
    ],
)
def test_no_spills(name: str, dtype: str, cols: int) -> None:
    kernel = parse(line(name, dtype, cols).replace("[5", "[8192"))
    for one in recorded_launches(kernel):
        assert not measure_job(job_of_launch(name.partition(",")[0], cols, one), 90)["problems"], one.name


@pytest.mark.parametrize("cols", [601, 603, 604])
def test_zeros_behind_a_row_are_those_of_the_result(interpreted: Interpreter, cols: int) -> None:
    """Rows of float32 end with 4 columns, those of their gradient in bfloat16 with 8."""
    wide = -(-cols // 8) * 8
    line = (
        f"cross_entropy[3|{cols}](f32[3,{cols}]@0:{cols},1, i64[3]@0:1,0, f32[]@0:0,0){{%3=rmax(%0); %4=sub(%0, %3); "
        "%5=exp(%4); %6=rsum(%5); %7=iota{1}(); %8=eq(%7, %1); %9=where(%8, %4, 0.0); %10=rsum(%9); %11=div(1.0, %2); "
        "%12=ne(%1, 3); %13=where(%12, %11, 0.0); %14=div(%13, %6); %15=mul(%5, %14); %16=where(%8, %13, 0.0); "
        "%17=sub(%15, %16); %18=cast.bf16(%17)}->f32[3,1]=%6@0:1,0, f32[3,1]=%10@0:1,0, "
        f"bf16[3,{wide}]=%18@0:{wide},1+0"
    )
    given = torch.randn(3, cols), torch.tensor([1, 3, cols - 1]), torch.tensor(2.0)
    (*_, exact) = reference.run(parse(line), given)
    for more in ({}, {"looped": 64}):
        (*_, made) = interpreted("template", line, *given, **more)
        assert relative(made[:, :cols], exact[:, :cols], torch.ones(())) < 4e-3
        assert not made[:, cols:].any()
