"""Kernels of real graphs on a GPU: a fused step against the same step call by call, in bfloat16.

Both are held against float32 on the same weights: a kernel keeps float32 between its operations where calls round to
bfloat16 each time, so it may be nearer, and is allowed to be `SLACK` times as far.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shardc
from kernels_triton.generated.op import FUSED
from shardc.ir.graph import Graph
from shardc.passes.fusion.fuse import fuse
from shardc.runtime.execute.body_code import BodyCode
from shardc.runtime.execute.instructions import rank_context
from tests.models.zoo import make

pytestmark = pytest.mark.gpu
SLACK, FLOOR = 1.5, 2e-2  # of the unfused error; and of a gradient's norm, a few of bfloat16's roundings of 1/256
MODELS = ("gpt2", "llama", "bert", "t5", "vit")


def run(body: Graph, program: shardc.Program) -> dict[str, Tensor]:
    """The outputs of one step of one rank on the GPU, by role and name."""
    device = torch.device("cuda", torch.cuda.current_device())
    executor = BodyCode(body, rank_context(program.mesh, 0, None), 0, device)  # type: ignore[arg-type]
    inputs = {name: value.to(device).contiguous() for name, value in program.inputs().items()}
    fed = {port.name: inputs[port.name].clone() for port in body.inputs}
    return {f"{port.role} {port.name}": value.double().cpu() for port, value in executor.run(fed, [fed]).items()}


def compiled(name: str, plan: dict[str, Any], optimizer: bool) -> shardc.Program:
    model, batch, loss = make(name)
    mine = torch.optim.AdamW(model.parameters(), lr=1e-3) if optimizer else None
    return shardc.compile(model, batch, mesh="dp=1", plan=plan, loss=loss, optimizer=mine)


def test_a_kernel_joins_parts_and_sums_them() -> None:
    """The gradients of query, key and value of one product, and of its bias, from 512 rows of three parts."""
    exact = run(compiled("gpt2", {}, False).body, compiled("gpt2", {}, False))
    program = compiled("gpt2", {"precision": "bf16", "fuse": True}, False)
    kernels = [str(node.args) for node in program.body.calls() if node.target is FUSED]
    assert any("cat_sum" in kernel for kernel in kernels)
    ours = run(program.body, program)
    plain = run(compiled("gpt2", {"precision": "bf16"}, False).body, compiled("gpt2", {"precision": "bf16"}, False))
    largest = max(want.norm() for key, want in exact.items() if key.startswith("grad"))
    for key in (key for key in exact if "c_attn.bias" in key):
        error, unfused = ((of[key] - exact[key]).norm() / largest for of in (ours, plain))
        assert error <= SLACK * unfused + FLOOR


@pytest.mark.parametrize(
    ("name", "exclude"),
    [*((name, []) for name in MODELS), *(("gpt2", [f"native_layer_norm{of}"]) for of in ("", "_backward"))],
)
def test_gradients_are_as_near_as_unfused_ones(name: str, exclude: list[str]) -> None:
    """Also where a norm is a kernel in one direction, and torch's call in the other: its statistics fit both."""
    exact = run(compiled(name, {}, False).body, compiled(name, {}, False))
    program = compiled(name, {"precision": "bf16"}, False)
    fused = compiled(name, {"precision": "bf16", "fuse": {"exclude": exclude}}, False).body if exclude else None
    fused = fused or fuse(program.body)
    assert any(node.target is FUSED for node in fused.calls())
    left = {"aten.native_layer_norm.default", "aten.native_layer_norm_backward.default"}
    assert len(left & {str(node.target) for node in fused.calls()}) == len(exclude)
    plain, ours = run(program.body, program), run(fused, program)
    largest = max(want.norm() for key, want in exact.items() if key.startswith("grad"))
    for key, want in exact.items():
        if not key.startswith(("grad", "loss")):
            continue
        scale = max(want.norm(), 1e-3 * largest)
        off, ours_off = ((found[key] - want).norm() / scale for found in (plain, ours))
        assert ours_off <= max(SLACK * off, FLOOR), (key, float(off), float(ours_off))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_an_update_in_float32_is_the_unfused_one(name: str) -> None:
    """AdamW in place, its step counts in float64: only the order of float32's roundings differs."""
    program = compiled(name, {}, True)
    plain, ours = run(program.body, program), run(fuse(program.body), program)
    for key, want in plain.items():
        assert torch.isfinite(ours[key]).all(), key
        if key.startswith("state"):
            assert (ours[key] - want).norm() <= 1e-3 * want.norm() + 1e-7, key
        if key.endswith(":step"):
            assert torch.equal(ours[key], want)


@pytest.mark.parametrize("name", MODELS)
def test_two_runs_are_bitwise_equal(name: str) -> None:
    program = compiled(name, {"precision": "bf16", "fuse": True}, False)
    first, second = (run(program.body, program) for _ in range(2))
    skipped = ("grad shared.weight", "embed", "wte", "wpe")  # torch's embedding gradient adds atomically
    for key, value in first.items():
        if not any(word in key for word in skipped):
            assert torch.equal(value, second[key]), key
