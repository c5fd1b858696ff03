"""The registry lists every op. Each op matches its reference and its signature; CPU tensors run the reference."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels_triton import ops
from kernels_triton.launch.launch import runs_on_triton
from kernels_triton.library import reference
from kernels_triton.ops.registry import TEMPLATES, TemplateOp

SIZES = {"rows": 6, "cols": 20, "batch": 2, "heads": 3, "dim": 16, "half": 4, "channels": 64, "groups": 32, "space": 5}


def test_every_op_is_listed() -> None:
    assert sorted(TEMPLATES) == sorted(ops.__all__) == sorted(reference.__all__)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=lambda t: t.name)
def test_twins(template: TemplateOp) -> None:
    """An op and its reference are called alike, and the signature names the op's parameters."""
    mine, theirs = (inspect.signature(f).parameters for f in (template.op, template.reference))
    assert [(p.name, p.default) for p in mine.values()] == [(p.name, p.default) for p in theirs.values()]
    assert [o.name for o in template.operands] == [name for name in mine if name in {o.name for o in template.operands}]


SHAPE = r"(?:(?:,| and) \w+)*:? \[[^\]]*\]"  # of one operand or of several: `mean and rstd, float32 [...]`


@pytest.mark.parametrize("which", ["op", "reference"])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=lambda t: t.name)
def test_docstrings(template: TemplateOp, which: str) -> None:
    """Each says the shape of every tensor, and what is raised; an op's, what each other argument is for too."""
    function = getattr(template, which)
    text = " ".join((function.__doc__ or "").split())
    assert ("Raises SC530" if which == "op" else "Raises ") in text
    for parameter in inspect.signature(function).parameters.values():
        name = parameter.name
        if parameter.annotation in ("Tensor", "Tensor | None"):
            assert re.search(rf"\b{name}\b{SHAPE}", text), f"the shape of {name}"
        assert which == "reference" or re.search(rf"\b{name}\b", text), f"nothing of {name}"


def test_references_can_be_differentiated_twice() -> None:
    """As plain torch can; gradients of gradients too, of what takes derivatives by itself."""
    dy, gate, up = (torch.randn(2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(reference.gated_backward, (dy, gate, up))
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(reference.bias_gelu_backward, (dy, gate, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=lambda t: t.name)
def test_results_are_as_listed(template: TemplateOp, dtype: torch.dtype) -> None:
    for given in template.calls:
        call = template.call(given, SIZES, dtype, "cpu")
        assert not runs_on_triton(next(iter(call.values())))
        results = template.op(**call)
        results = () if results is None else results if isinstance(results, tuple) else (results,)
        expected = template.results_of_call(given)
        for operand, result in zip(expected, results, strict=True):
            if result is None:
                assert operand.optional
                continue
            assert isinstance(result, Tensor)
            assert result.shape == operand.shape(SIZES), operand.name
            kind = operand.dtype(dtype)
            # References keep statistics in the dtype that they compute in.
            assert result.dtype == kind or (kind, result.dtype) == (torch.float32, torch.float64)
            assert not result.isnan().any()


def test_without_triton() -> None:
    """What a Mac has: importing works, and ops compute by their references."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from kernels_triton import ops; import kernels_triton.ops.registry\n"
        "from kernels_triton.launch import launch\n"
        "assert not launch.HAS_TRITON\n"
        "print(ops.softmax(torch.zeros(2, 4)).sum().item())"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
    assert done.stdout == "2.0\n", done.stderr
