"""The compile gate, sampled: real kernels pass it on two architectures, and it refuses what it is there to refuse."""

import pytest
import torch

from kernels_triton import gate
from kernels_triton.launch import HAS_TRITON, Launch, recording
from kernels_triton.registry import TEMPLATES

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed: nothing can be compiled here")
SAMPLE = ("layer_norm", "layer_norm_backward", "softmax", "gated_backward", "cross_entropy", "bias_dropout_residual")


@pytest.mark.parametrize("arch", [90, 80])
@pytest.mark.parametrize("name", SAMPLE)
def test_kernels_pass(name: str, arch: int) -> None:
    template = TEMPLATES[name]
    for source in gate.recorded(template, 4096, torch.bfloat16, template.variants[-1], arch):
        assert gate.measure(source, arch)["problems"] == []


@pytest.mark.parametrize("name", ["add_layer_norm", "layer_norm_backward", "swiglu_backward", "adamw", "dropout_add"])
def test_generated_kernels_pass(name: str) -> None:
    for source in gate.generated(name, 4096, torch.bfloat16, 90 if name != "layer_norm_backward" else 80):
        assert gate.measure(source, 90)["problems"] == []


def test_one_row_compiles() -> None:
    """A count of 1 is a constant to Triton, and has no methods of a tensor."""
    sizes = {**gate.SIZES, "rows": 1, "cols": 512}
    found: list[gate.Source] = []
    with recording(lambda one: found.append(gate.source_of("layer_norm_backward", 512, one))):
        template = TEMPLATES["layer_norm_backward"]
        template.op(*template.arguments(sizes, torch.bfloat16, "meta"))
    assert found
    for source in found:
        gate.compiled(source, 90)


def test_rows_that_are_not_aligned_are_refused() -> None:
    """A stride of 1001 elements: nothing can be loaded 16 bytes at a time."""
    source = gate.recorded(TEMPLATES["squared_relu"], 1001, torch.bfloat16, {})[0]
    assert any("128" in problem for problem in gate.measure(source, 90)["problems"])


def test_spills_are_refused() -> None:
    line = {"spills": 3, "stack": 8, "accesses": {"128": 4}, "kernel": "norm.norm_forward", "constants": {}}
    line |= {"arch": 80, "shared": 170_000, "stack": 24}
    refused = ["3 local-memory accesses, 24 bytes of stack", "170000 bytes of shared memory, of 166912"]
    assert gate.problems(line) == refused
    # A scalar put aside: sm_80's compiler does so for occupancy; for sm_90 there is no excuse.
    scalar = {**line, "stack": 8, "shared": 0}
    assert gate.problems(scalar) == []
    assert gate.problems({**scalar, "arch": 90}) == ["3 local-memory accesses, 8 bytes of stack"]


def test_every_template_launches_on_meta_tensors() -> None:
    for template in TEMPLATES.values():
        launches: list[Launch] = []
        with recording(launches.append):
            template.op(
                *template.arguments({**gate.SIZES, "cols": 256}, torch.bfloat16, "meta"), **template.variants[0]
            )
        assert launches, template.name
        assert all(min(one.grid) >= 1 for one in launches)
