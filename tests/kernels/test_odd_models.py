"""Every kernel that small models become, under the interpreter: as a GPU runs it, against the reference.

What a CPU runs of a fused graph is the reference, which writes every element whatever a kernel's masks say. So here the
source that was generated runs, over outputs full of NaN, between sentinels.
"""

from __future__ import annotations

import pytest
import torch
from closeness import relative
from interpreter import Interpreter
from odd_models import MODELS
from torch import Tensor

import shardc
from kernels_triton.ir import reference
from kernels_triton.ir.kernel import Kernel
from kernels_triton.ir.text import parse, text
from kernels_triton.match.match import Match, match_template
from kernels_triton.match.op import KERNELS, OPS
from shardc.ir.program import Program

POSITIVE = ("rstd", "squares", "variance")
COARSE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}


def kernels(program: Program) -> dict[str, Match | None]:
    """The text of each kernel in the program, and the template that it is, if it is run by one."""
    calls = [node for node in program.body.calls() if node.target in KERNELS]
    texts = {str(node.args[1]): node.target in OPS.values() for node in calls}
    return {line: match_template(parse(line)) if template else None for line, template in texts.items()}


def drawn(kernel: Kernel, match: Match | None) -> list[Tensor]:
    made: list[Tensor] = []
    for given in kernel.inputs:
        if given.dtype.is_floating_point:
            made.append(torch.randn(given.shape).to(given.dtype))
        elif given.dtype.itemsize > 2:
            made.append(torch.randint(0, max(kernel.cols, 2), given.shape).to(given.dtype))
        else:
            made.append(torch.randint(-(1 << 15), 1 << 15, given.shape).to(given.dtype))
    for name in POSITIVE:
        at = match.binding.get(name) if match else None
        if type(at) is int:
            made[at] = made[at].abs() + 0.5
    return made


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", MODELS)
def test_every_kernel_computes_what_it_says(interpreted: Interpreter, name: str) -> None:
    one = MODELS[name]
    program = shardc.compile(one.model(), {"x": one.x}, mesh=one.mesh, plan={**one.plan, "fuse": {"enabled": True}})
    torch.manual_seed(0)
    lines = kernels(program)
    assert lines
    for line, match in lines.items():
        kernel = parse(line)
        assert text(kernel) == line
        given = drawn(kernel, match)
        results = interpreted("template", line, *given) if match else interpreted("fused", line, None, None, *given)
        dtypes = {tensor.dtype for tensor in (*kernel.inputs, *kernel.outputs)}
        limit = max((COARSE[dtype] for dtype in dtypes if dtype in COARSE), default=1e-4)
        for mine, exact in zip(results, reference.run(kernel, given), strict=True):
            if not mine.dtype.is_floating_point:
                assert torch.equal(mine, exact), line
                continue
            assert torch.equal(mine.isnan(), exact.isnan()), line
            assert torch.equal(mine.isinf(), exact.isinf()), line
            finite = exact.isfinite()
            assert relative(mine[finite], exact[finite].double()) < limit if finite.any() else True, line
