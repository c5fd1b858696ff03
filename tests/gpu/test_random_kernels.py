"""Random generated kernels on a GPU, of larger sizes than the interpreter has time for: against the reference, twice
bitwise the same, NaN in every output and sentinels around every buffer; prepared, and written over their inputs.
`make fuzz` draws many."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interpreter import Fenced
from random_kernel import LARGE, arguments, judge, kernels, places, schedules
from torch import Tensor

from kernels_triton.codegen.schedules import inplace_pairs, plan_grid
from kernels_triton.generated import inplace_call
from kernels_triton.generated.launcher import DeviceKernel, define_kernel, launcher
from kernels_triton.ir import reference
from kernels_triton.ir.kernel import Kernel
from kernels_triton.ir.text import text
from kernels_triton.launch import launch

pytestmark = pytest.mark.gpu
EXAMPLES = max(20, settings().max_examples // 50)
SMALL = 128  # rows and columns that any tiles suit


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_kernels(data: st.DataObject) -> None:
    kernel = data.draw(kernels(columns=LARGE, most=300) if data.draw(st.booleans()) else kernels())
    small = kernel.cols <= SMALL and kernel.rows <= SMALL
    style, schedule = data.draw(schedules(kernel)) if small else (None, None)
    given_ = [x.cuda() for x in arguments(kernel, data.draw(st.integers(0, 99)))]
    fenced = Fenced("cuda")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(launch, "empty", fenced.empty)
        inputs = [fenced.copy(f"%{at}", x) for at, x in enumerate(given_)]
        if style is None or schedule is None:
            found, again = launcher(kernel)(inputs), launcher(kernel)(inputs)
        else:
            ready = DeviceKernel(define_kernel(kernel, plan_grid(kernel, style, schedule, launch.device_of(inputs[0]))))
            found, again = (
                [fenced.empty(made.shape, made.dtype, inputs[0]) for made in kernel.outputs] for _ in range(2)
            )
            ready.run(inputs, found)
            ready.run(inputs, again)
    about = style, schedule, fenced.broken()
    judge(kernel, found, reference.run(kernel, given_), about)
    assert not fenced.broken(), about
    for one, other in zip(found, again, strict=True):
        assert torch.equal(one, other), about
    if style is None:
        is_prepared(kernel, inputs, found)
    if pairs := sorted(inplace_pairs(kernel)):
        is_written_over(kernel, inputs, *data.draw(places(kernel, pairs)))


def is_prepared(kernel: Kernel, inputs: list[Tensor], expected: list[Tensor]) -> None:
    """The first call, and the ones after it."""
    device = torch.device("cuda", torch.cuda.current_device())
    call = inplace_call.prepare(range(len(inputs)), text(kernel), {}, device)
    assert call is not None
    for _ in range(2):
        for mine, theirs in zip(call(inputs), expected, strict=True):
            assert torch.equal(mine, theirs), text(kernel)


def is_written_over(kernel: Kernel, inputs: list[Tensor], output: int, same: tuple[int, ...]) -> None:
    place = inputs[same[0]].clone()
    given_ = [place if at in same else x for at, x in enumerate(inputs)]
    expected = reference.run(kernel, given_)
    out = [place if at == output else launch.empty(y.shape, y.dtype, y) for at, y in enumerate(expected)]
    judge(kernel, launcher(kernel)(given_, out), expected, (output, same))


@pytest.mark.parametrize("space", [(2**31 + 5000,), (50_000, 50_001)], ids=["flat", "rows"])
def test_beyond_2_to_the_31_elements(space: tuple[int, ...]) -> None:
    """What lies there is read and written, and so is what a part far out is read from."""
    shape, (*rows, cols) = ",".join(map(str, space)), space
    x = torch.randint(-100, 100, space, dtype=torch.int8, device="cuda")
    lines = {f"far[{','.join(map(str, rows))}|{cols}](i8[{shape}]){{%1=neg(%0)}}->i8[{shape}]=%1": -x}
    part = f"part[|4096](i8[{shape}]@{x.numel() - 4096}:1){{%1=neg(%0)}}->i8[4096]=%1"
    lines[part] = -x.flatten()[-4096:]
    if rows:
        turned = f"turned[{cols}|{rows[0]}](i8[{shape}]@0:1,{cols}){{%1=neg(%0)}}->i8[{cols},{rows[0]}]=%1"
        lines[turned] = -x.T
    for line, expected in lines.items():
        (y,) = inplace_call.run([x], line)
        assert torch.equal(y, expected), line
