"""Generated kernels on a GPU: the corpus against float64, twice bitwise the same, on plans of this GPU; prepared."""

import pytest
import torch
from test_functions import SMALLEST, ULPS, grid, judged
from test_functions import kernel as of_functions
from torch import Tensor

from kernels_triton.gate.corpus import CORPUS
from kernels_triton.generated import inplace_call
from kernels_triton.generated.launcher import launcher
from kernels_triton.generated.prepared_call import PreparedKernelCall
from kernels_triton.ir import reference
from kernels_triton.ir.kernel import Kernel
from kernels_triton.ir.text import text

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 4e-6}
SHAPES = ((1, 7), (19, 100), (300, 4096), (128, 12288), (7, 50304))


def drawn(kernel: Kernel) -> list[Tensor]:
    """Operands; scalars, statistics and weights are positive, as they are where they come from."""
    made: list[Tensor] = []
    for given in kernel.inputs:
        if given.dtype.is_floating_point:
            x = torch.randn(given.shape, device="cuda")
            made.append((x if len(given.shape) > 1 else x.abs() + 0.3).to(given.dtype))
        else:
            made.append(torch.randint(0, 1 << 40, given.shape, dtype=given.dtype, device="cuda"))
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CORPUS)
def test_corpus(name: str, dtype: torch.dtype) -> None:
    for rows, cols in SHAPES:
        kernel = CORPUS[name](rows, cols, dtype)
        torch.manual_seed(rows)
        inputs = drawn(kernel)
        found, again = launcher(kernel)(inputs), launcher(kernel)(inputs)
        exact = reference.run(kernel, [x.double() if x.is_floating_point() else x for x in inputs])
        rounds = 2 if any(step.op == "cast" for step in kernel.steps) else 1
        for mine, other, theirs in zip(found, again, exact, strict=True):
            assert torch.equal(mine, other), f"{name} {rows}x{cols} is not deterministic"
            limit = rounds * TOLERANCE[dtype if rounds == 2 else mine.dtype]
            error = (mine.double() - theirs).abs().amax() / theirs.abs().amax().clamp(min=1e-30)
            assert error < limit, f"{name} {rows}x{cols}: {error:.1e}"


@pytest.mark.parametrize("name", CORPUS)
def test_a_prepared_call_is_the_launchers(name: str) -> None:
    """Bit for bit: the first, a later one, one of operands that are not aligned, and with places for what it makes."""
    kernel = CORPUS[name](70, 1024, torch.bfloat16)
    inputs, device = drawn(kernel), torch.device("cuda", torch.cuda.current_device())
    expected, slots = launcher(kernel)(inputs), range(len(inputs))
    call = inplace_call.prepare(slots, text(kernel), {}, device)
    assert isinstance(call, PreparedKernelCall)
    for _ in range(3):
        found = call(inputs)
        assert call.ready is not None
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)
    odd = [torch.cat((x.new_ones(1), x.flatten()))[1:].view(x.shape) for x in inputs]
    here = [torch.empty_like(y) for y in expected]
    placed = inplace_call.prepare(
        slots, text(kernel), {at: lambda env, at=at: here[at] for at in range(len(here))}, device
    )
    scratch = torch.empty(1 << 24, dtype=torch.uint8, device="cuda")
    fixed = inplace_call.prepare(
        inputs, text(kernel), dict(enumerate(here)), device, lambda size: scratch[: max(size, 1)]
    )
    assert placed is not None
    assert fixed is not None
    for _ in range(3):
        scratch.fill_(255)
        for y in here:
            y.fill_(0)
        assert all(mine is told for mine, told in zip(fixed(()), here, strict=True))
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(here, expected, strict=True))
    for given in (inputs, inputs, odd):
        for y in here:
            y.fill_(0)
        results = placed(given)
        for mine, theirs, told in zip(results, expected, here, strict=True):
            assert mine is told
            assert torch.equal(mine, theirs)


def test_functions() -> None:
    """Over the whole range but denormal numbers, which a GPU's roots take for 0: within the interpreter's bounds twice
    over and a unit, for quotients and roots that are approximate."""
    x = grid()
    x = x[(x.abs() >= SMALLEST) | (x == 0) | x.isnan()]
    found = launcher(of_functions(ULPS, x.numel()))([x.cuda()])
    judged({name: 2 * most + 1 for name, most in ULPS.items()}, [y.cpu() for y in found], x)
