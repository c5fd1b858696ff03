"""Templates in real graphs on a GPU: bfloat16 training graphs with templates against the same ones call by call.

Both are held against float32 on the same weights. A template keeps float32 between its operations where calls round to
bfloat16 each time, so it may be nearer, and may be `SLACK` times as far; below `FLOOR` of a gradient's norm, a few of
bfloat16's roundings of 1/256, it does not matter.
"""

from __future__ import annotations

import math

import pytest
import torch

from kernels_triton.generated.launcher import launcher as generated
from kernels_triton.ir import reference
from kernels_triton.ir.kernel import Kernel
from kernels_triton.ir.text import parse
from kernels_triton.match.launcher import launcher
from kernels_triton.match.match import match_template
from kernels_triton.match.op import OPS, kernel_of
from shardc.passes.fusion.fuse import fuse
from tests.gpu.test_fusion import FLOOR, SLACK, compiled, run

pytestmark = pytest.mark.gpu
MODELS = ("gpt2", "llama", "bert", "t5", "vit")
APART = 3e-2  # of a result's norm: bfloat16's roundings, of which generated kernel and template have different ones


def templates(name: str, precision: str = "bf16") -> list[Kernel]:
    """The distinct kernels of a model's graph that templates compute."""
    body = fuse(compiled(name, {"precision": precision} if precision else {}, False).body)
    kernels = (kernel_of(node.target, node.args) for node in body.calls() if node.target in OPS.values())
    return list(dict.fromkeys(kernel for kernel in kernels if kernel is not None))


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_as_near_as_unfused_ones(name: str) -> None:
    single = compiled(name, {}, False)
    exact = run(single.body, single)
    program = compiled(name, {"precision": "bf16"}, False)
    fused = fuse(program.body)
    assert sum(node.target in OPS.values() for node in fused.calls()) >= 8
    plain, ours = run(program.body, program), run(fused, program)
    largest = max(want.norm() for key, want in exact.items() if key.startswith("grad"))
    for key, want in exact.items():
        if key.startswith(("grad", "loss")):
            scale = max(want.norm(), 1e-3 * largest)
            off, ours_off = ((found_[key] - want).norm() / scale for found_ in (plain, ours))
            assert ours_off <= max(SLACK * off, FLOOR), (key, float(off), float(ours_off))


@pytest.mark.parametrize("precision", ["bf16", ""])
@pytest.mark.parametrize("name", MODELS)
def test_each_template_is_the_generated_kernel(name: str, precision: str) -> None:
    torch.manual_seed(0)
    for kernel in templates(name, precision):
        check(kernel, APART if precision else 1e-4)


LOSS = (
    "cross_entropy[64|{c}]({t}[64,{c}], i64[64]@0:1,0, f32[]@0:0,0, f32[{c}]@0:0,1){{%4=add(%0, %3); %5=rmax(%4); "
    "%6=sub(%4, %5); %7=exp(%6); %8=rsum(%7); %9=iota{{1}}(); %10=eq(%9, %1); %11=where(%10, %6, 0.0); %12=rsum(%11); "
    "%13=ne(%1, -100); %14=where(%13, %2, 0.0); %15=div(%14, %8); %16=mul(%7, %15); %17=where(%10, %14, 0.0); "
    "%18=sub(%16, %17)}}->f32[64,1]=%8@0:1,0, f32[64,1]=%12@0:1,0, {t}[64,{c}]=%18"
)
ALONE = {
    "loss with a bias": LOSS.replace("{c}", "30522"),
    "longer loss with a bias": LOSS.replace("{c}", "50304"),
    "squared_relu": (
        "squared_relu[512|1000](f32[1000]@0:0,1, {t}[512,1000]){{%2=add(%1, %0); %3=maximum(%2, 0.0); %4=square(%3)}}->"
        "{t}[512,1000]=%4"
    ),
    "squared_relu_backward": (
        "squared_relu_backward[512|1000](f32[1000]@0:0,1, {t}[512,1000], {t}[512,1000]){{%3=add(%1, %0); "
        "%4=maximum(%3, 0.0); %5=mul(%4, 2.0); %6=mul(%2, %5); %7=le(%4, 0.0); %8=where(%7, 0.0, %6); %9=csum(%8)}}->"
        "{t}[512,1000]=%8, f32[1000]=%9@0:0,1"
    ),
}


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("name", ALONE)
def test_templates_that_no_model_above_has(name: str, dtype: str) -> None:
    torch.manual_seed(0)
    check(parse(ALONE[name].format(t=dtype)), APART if dtype == "bf16" else 1e-4)


def check(kernel: Kernel, apart: float) -> None:
    """First through Triton's launcher, then as remembered, on other tensors: both against the text in float64."""
    match = match_template(kernel)
    assert match is not None
    run_template, repeats = launcher(kernel), set[int]()
    for _ in range(3):
        inputs = [torch.randn(given.shape, device="cuda").to(given.dtype) for given in kernel.inputs]
        if isinstance(at := match.binding.get("target"), int):
            inputs[at] = torch.randint(0, match.cols, inputs[at].shape, device="cuda")
        if isinstance(at := match.binding.get("rstd"), int):
            inputs[at] = inputs[at].abs() + 0.5
        exact = reference.run(kernel, [x.double() if x.is_floating_point() else x for x in inputs])
        ours, theirs = run_template(inputs), generated(kernel)(inputs)
        repeats.add(len(run_template.ready))
        for result, y, other, want in zip(match.results, ours, theirs, exact, strict=True):
            off, other_off = ((one.double() - want).norm() / want.norm() for one in (y, other))
            assert off <= max(apart, SLACK * other_off), (kernel.name, result, float(off), float(other_off))
        for y, again in zip(ours, run_template(inputs), strict=True):
            assert torch.equal(y, again), (kernel.name, "two runs differ")
    assert repeats == {1}, f"{kernel.name} is not remembered"


def test_operands_that_lie_in_one_another_are_told_apart() -> None:
    """Remembered from a call in which two operands were one tensor, another call would read the wrong one."""
    kernel = next(one for one in templates("llama") if one.name == "gated")
    x, y = (torch.randn(kernel.inputs[0].shape, device="cuda", dtype=kernel.inputs[0].dtype) for _ in range(2))
    run_template = type(launcher(kernel))(kernel, launcher(kernel).match)
    same, other = run_template([x, x]), run_template([x, y])
    again = run_template([x, y])
    assert not torch.equal(same[0], other[0])
    assert torch.equal(other[0], again[0])
    exact = reference.run(kernel, [x.double(), y.double()])
    assert (other[0].double() - exact[0]).norm() <= APART * exact[0].norm()


def test_tensors_that_are_not_aligned() -> None:
    kernel = next(one for one in templates("llama") if one.name == "gated")
    shape = kernel.inputs[0].shape
    size = math.prod(shape)
    run_template = launcher(kernel)
    run_template([torch.randn(shape, device="cuda").bfloat16() for _ in range(2)])
    off = [torch.randn(size + 1, device="cuda").bfloat16()[1:].view(shape) for _ in range(2)]
    exact = reference.run(kernel, [x.double() for x in off])
    assert (run_template(off)[0].double() - exact[0]).norm() <= APART * exact[0].norm()
