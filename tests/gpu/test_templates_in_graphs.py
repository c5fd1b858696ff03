"""Templates in real graphs on a GPU: bfloat16 training graphs with templates against the same ones call by call.

Both are held against float32 on the same weights. A template keeps float32 between its operations where calls round to
bfloat16 each time, so it may be nearer, and may be `SLACK` times as far; below `FLOOR` of a gradient's norm, a few of
bfloat16's roundings of 1/256, it does not matter.
"""

from __future__ import annotations

import pytest
import torch

from kernels_triton.generated.launcher import launcher as generated
from kernels_triton.ir import reference
from kernels_triton.ir.kernel import Kernel
from kernels_triton.ir.text import parse
from kernels_triton.match.launcher import launcher
from kernels_triton.match.match import match_template
from kernels_triton.match.op import OPS, kernel_of
from tests.gpu.test_fusion import FLOOR, SLACK, compiled, run

pytestmark = pytest.mark.gpu
MODELS = ("gpt2", "llama", "bert", "t5", "vit")
APART = 3e-2  # of a result's norm: bfloat16's roundings, of which generated kernel and template have different ones


def templates(name: str, precision: str = "bf16") -> list[Kernel]:
    """The distinct kernels of a model's graph that templates compute."""
    body = compiled(name, {"fuse": True, **({"precision": precision} if precision else {})}, False).body
    kernels = (kernel_of(node.target, node.args) for node in body.calls() if node.target in OPS.values())
    return list(dict.fromkeys(kernel for kernel in kernels if kernel is not None))


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_as_near_as_unfused_ones(name: str) -> None:
    single = compiled(name, {}, False)
    exact = run(single.body, single)
    program = compiled(name, {"precision": "bf16"}, False)
    fused = compiled(name, {"precision": "bf16", "fuse": True}, False).body
    assert any(node.target in OPS.values() for node in fused.calls())
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


def added_norm() -> tuple[Kernel, list[int]]:
    """A norm after a sum, and which of its inputs are [rows, cols]."""
    kernel = next(one for one in templates("gpt2") if one.name == "add_layer_norm")
    binding = launcher(kernel).match.binding
    return kernel, [int(binding[name] or 0) for name in ("x", "residual")]


def drawn(kernel: Kernel) -> list[torch.Tensor]:
    return [torch.randn(given.shape, device="cuda").to(given.dtype) for given in kernel.inputs]


def test_operands_that_lie_in_one_another_are_told_apart() -> None:
    """Remembered from a call in which two operands were one tensor, another call would read the wrong one."""
    kernel, (first, second) = added_norm()
    other = drawn(kernel)
    same = [other[first] if at == second else x for at, x in enumerate(other)]
    run_template = type(launcher(kernel))(kernel, launcher(kernel).match)
    results = [run_template(inputs)[-1] for inputs in (same, other, other)]
    assert not torch.equal(results[0], results[1])
    assert torch.equal(results[1], results[2])
    exact = reference.run(kernel, [x.double() for x in other])[-1]
    assert (results[1].double() - exact).norm() <= APART * exact.norm()


def test_tensors_that_are_not_aligned() -> None:
    kernel, _ = added_norm()
    run_template, inputs = launcher(kernel), drawn(kernel)
    run_template(inputs)
    off: list[torch.Tensor] = []
    for x in inputs:
        wider = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")
        off.append(wider[1:].view(x.shape).copy_(x))
    exact = reference.run(kernel, [x.double() for x in off])
    for y, want in zip(run_template(off), exact, strict=True):
        assert (y.double() - want).norm() <= APART * want.norm()
