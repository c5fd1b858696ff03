"""Attention written out, as `transformers` has it under `attn_implementation="eager"`, on a GPU in bfloat16.

Scale, mask, softmax, cast and dropout are one kernel forward and one backward; both are held against float32 on the
same weights and the same dropout, and may be `SLACK` times as far from it as the calls one by one are.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import shardc
from kernels_triton.generated.launcher import launcher
from kernels_triton.ir.kernel import Input
from kernels_triton.ir.reference import run as reference
from shardc.passes.fusion.fuse import fuse
from tests.gpu.test_fusion import FLOOR, SLACK, run
from tests.passes.eager_attention import MODELS, chains

pytestmark = pytest.mark.gpu
ROUNDINGS = 2e-2  # of a result's norm, in bfloat16


def compiled(name: str, precision: str) -> shardc.Program:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    return shardc.compile(model, batch, mesh="dp=1", plan={"precision": precision} if precision else {})


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_as_near_as_unfused_ones(name: str) -> None:
    single, program = compiled(name, ""), compiled(name, "bf16")
    fused = fuse(program.body)
    exact, plain, ours = run(single.body, single), run(program.body, program), run(fused, program)
    largest = max(want.norm() for key, want in exact.items() if key.startswith("grad"))
    for key, want in exact.items():
        if key.startswith(("grad", "loss")):
            scale = max(want.norm(), 1e-3 * largest)
            off, ours_off = ((found[key] - want).norm() / scale for found in (plain, ours))
            assert ours_off <= max(SLACK * off, FLOOR), (key, float(off), float(ours_off))


@pytest.mark.parametrize("name", MODELS)
def test_each_kernel_is_its_text(name: str) -> None:
    """In float64, on scores of any size and any mask: what is NaN in the text is NaN."""
    torch.manual_seed(0)
    for kernel in chains(fuse(compiled(name, "bf16").body, templates=())):
        inputs = [drawn(one) for one in kernel.inputs]
        exact = reference(kernel, [x.double() if x.is_floating_point() else x for x in inputs])
        for y, want in zip(launcher(kernel)(inputs), exact, strict=True):
            assert torch.equal(y.isnan(), want.isnan()), kernel.name
            assert (y.double() - want).nan_to_num().norm() <= ROUNDINGS * want.nan_to_num().norm(), kernel.name


def drawn(given: Input) -> Tensor:
    if given.dtype.is_floating_point:
        return torch.randn(given.shape, device="cuda").mul(4).to(given.dtype)
    if given.dtype == torch.bool:
        return torch.rand(given.shape, device="cuda") < 0.5
    return torch.tensor(12345, device="cuda").expand(given.shape)
