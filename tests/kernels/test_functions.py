"""The functions of generated kernels over the whole range of float32, under the interpreter, against float64: every
binade of both signs with its denormal numbers, the largest, zeros, infinities and NaN. tests/gpu does it on a GPU."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from interpreter import Interpreter
from torch import Tensor

from kernels_triton.gate.corpus import Draft
from kernels_triton.ir.kernel import Kernel
from kernels_triton.ir.table import OPS
from kernels_triton.ir.text import text

# Units of the last place. `exp` rounds its exponent: a unit more for each 1 of |x|, here and in what is made of it.
ULPS = {
    **dict.fromkeys(("neg", "abs", "floor", "ceil", "trunc", "round", "sign", "sqrt", "reciprocal"), 0.6),
    **dict.fromkeys(("rsqrt", "exp2", "erf", "tanh", "atan", "sin", "cos"), 1.6),
    **dict.fromkeys(("log", "log2", "exp", "sigmoid"), 2.0),
    **dict.fromkeys(("log1p", "expm1"), 4.0),
    **dict.fromkeys(("erfc", "erfinv", "ndtri", "k0", "k1", "scaled_k0", "scaled_k1"), 8.0),
}
BY_SIZE = ("exp", "expm1", "sigmoid", "k0", "k1")
SMALLEST = 2.0**-126  # below, a quotient may be 0
SPECIAL = (0.0, 1.0, torch.inf, torch.finfo(torch.float32).max, 2.0**25 - 2, 2.0**25, 11.0, 1e15, 1e17, 1e20, 1e37)


def grid() -> Tensor:
    """4,000 points: 7 a binade, and more among the angles that positions have."""
    torch.manual_seed(0)
    sizes = torch.exp2(torch.linspace(-149, 127.9999, 1939, dtype=torch.float64)).float()
    x = torch.cat((sizes, torch.rand(50) * 1000, torch.tensor(SPECIAL)))
    return torch.cat((x, -x, torch.tensor([torch.nan])))


def kernel(names: Iterable[str], count: int) -> Kernel:
    """Of one input, an output a function."""
    k = Draft((count,))
    x = k.full(torch.float32)
    for name in names:
        k.out(k(name, x), torch.float32)
    return k.kernel("fused_functions")


def judged(ulps: Mapping[str, float], results: Sequence[Tensor], x: Tensor) -> None:
    for (name, allowed), found in zip(ulps.items(), results, strict=True):
        exact = OPS[name].torch(x.double())
        rounded = exact.float()
        assert torch.equal(found.isnan(), rounded.isnan()), name
        other = (found != rounded) & (found.isinf() | rounded.isinf()) & ~rounded.isnan()
        assert not other.any(), (name, x[other], found[other])
        signs = (rounded == 0) & (found == 0) & (rounded.signbit() != found.signbit())
        assert not signs.any(), (name, x[signs], "the sign of a zero")
        unit = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=SMALLEST))) - 23)
        error = torch.where(rounded.isfinite(), (found.double() - exact).abs(), 0.0) / unit
        error = torch.where((rounded.abs() < SMALLEST) & (found == 0), 0.0, error)
        most = allowed + x.double().abs().clamp(max=104.0) * (name in BY_SIZE)
        wrong = error > most
        assert not wrong.any(), (name, float(error.max()), x[wrong][:5], found[wrong][:5], rounded[wrong][:5])


def test_every_function(interpreted: Interpreter) -> None:
    x = grid()
    judged(ULPS, interpreted("fused", text(kernel(ULPS, x.numel())), None, None, x), x)


def test_scalars_turn_by_large_angles(interpreted: Interpreter) -> None:
    """A number that is one for all elements, and one of each row: whether any is large is asked of a tile."""
    k = Draft((3, 8))
    x, of_row, of_all = k.full(torch.float32), k.row(), k.scalar()
    k.out(k("add", k("add", x, k("sin", of_row)), k("cos", of_all)), torch.float32)
    given = (torch.zeros(3, 8), torch.tensor([1.0, 1e20, -3e38]), torch.tensor(1e17))
    (found,) = interpreted("fused", text(k.kernel("fused_angles")), None, None, *given)
    exact = given[1].double().sin()[:, None] + given[2].double().cos()
    torch.testing.assert_close(found.double(), exact.expand(3, 8), rtol=1e-6, atol=1e-6)
