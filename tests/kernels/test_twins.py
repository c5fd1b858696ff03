"""Templates and their twins at the ends of what they take: 16-bit states, infinite gradients, numbers far from zero,
scales and betas of 0. Twins round once, at the end; where eager torch has a number, so have both."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from closeness import ulps
from interpreter import Interpreter
from test_cross_entropy import PLANS
from test_every_kernel import SIZES
from torch import Tensor
from torch.nn import functional

from kernels_triton import ops
from kernels_triton.gate.gate import CompileJob, compile_job, job_of_launch
from kernels_triton.launch import launch
from kernels_triton.launch.row_schedule import Schedule, trying
from kernels_triton.library import reference
from kernels_triton.ops.registry import TEMPLATES
from shardc import ShardcError

INF, NAN = math.inf, math.nan
NONE = Schedule(1)
HALVES = (torch.bfloat16, torch.float16)
EAGER = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "relu2": lambda x: functional.relu(x).square(),
}


def doubled(given: dict[str, Any]) -> dict[str, Any]:
    return {k: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in given.items()}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_twin_rounds_once(name: str, dtype: torch.dtype) -> None:
    """16-bit results are float64's, rounded: but for those that float32 has on the other side of a tie, one unit off.
    Where terms cancel, units are those of a 4096th of the largest."""
    template = TEMPLATES[name]
    for variant in template.calls:
        torch.manual_seed(0)
        given = template.call(variant, {**SIZES, "rows": 20}, dtype, "cpu")
        exactly = doubled(given)
        if name.startswith("add_"):  # the norm is one of the sum as it is kept, in 16 bits
            total = (given["x"].float() + given["residual"].float()).to(dtype)
            exactly |= {"x": total.double(), "residual": torch.zeros_like(exactly["residual"])}
        found, exact = template.reference(**given), template.reference(**exactly)
        if found is None:  # in place
            found, exact = tuple(given.values()), tuple(exactly.values())
        found, exact = ((r,) if isinstance(r, Tensor) else r for r in (found, exact))
        checked = 0
        for mine, right in zip(found, exact, strict=True):
            if not isinstance(mine, Tensor) or mine.dtype != dtype:
                continue
            right = right.double()
            checked += 1
            assert ulps(mine, right, float(right.abs().max()) / 4096) <= 1.0, variant
            assert int((mine != right.to(dtype)).sum()) <= max(3, mine.numel() // 50), variant
        assert checked or name == "cross_entropy_stats" or "total" in variant  # whose results are float32


@pytest.mark.parametrize("act", EAGER)
def test_activations_are_torchs(act: str) -> None:
    x = torch.linspace(-30, 30, 4001, dtype=torch.float64, requires_grad=True)
    y = EAGER[act](x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(reference.bias_gelu(x.detach(), None, act), y.detach(), rtol=1e-14, atol=1e-14)
    mine, _ = reference.bias_gelu_backward(torch.ones_like(slope), x.detach(), None, act)
    torch.testing.assert_close(mine, slope, rtol=1e-14, atol=2e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_slopes_of_large_numbers(interpreted: Interpreter, dtype: torch.dtype) -> None:
    x = torch.tensor([[1e13, -1e13, 1e19, -1e19, 3e38, -3e38]]).to(dtype)
    for act in ("gelu", "gelu_tanh", "silu"):
        given = (torch.ones_like(x), x, None, act)
        for dx, _ in (interpreted("bias_gelu_backward", *given), reference.bias_gelu_backward(*given)):
            assert dx.tolist() == [[1.0, 0.0] * 3], act


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_a_tail_has_the_digits_of_its_dtype(dtype: torch.dtype) -> None:
    """Of a twin, also where float32's `1 + erf` and `1 + tanh` have none."""
    x, one = -torch.linspace(1, 9, 81).to(dtype)[None], torch.ones(1, 81)
    for act in ("gelu", "gelu_tanh"):
        for twin in (reference.bias_gelu, lambda x, b, act: reference.bias_gelu_backward(one.to(x), x, b, act)[0]):
            # An exponent of 40 is rounded by 2 units, as many as what it is the exponent of has then 40.
            assert ulps(twin(x, None, act), twin(x.double(), None, act)) <= (1.0 if dtype in HALVES else 400.0), act


X = [2e38, 2e38, 1e-20, -1.0, 0.0, -0.0, NAN, 3.0, -INF]
DY = [1e-30, 0.0, 3.0, INF, INF, -INF, 1.0, -INF, INF]


@pytest.mark.parametrize("name", ["squared_relu_backward", "bias_gelu_backward", "gated_backward"])
def test_a_squared_relus_gradient_is_eager_torchs(interpreted: Interpreter, name: str) -> None:
    """Of float64, where 2 * x is finite: no infinite gradient passes what is not positive, and large x make no NaN."""
    x, dy = torch.tensor([X]), torch.tensor([DY])
    leaf = x.double().requires_grad_()
    (exact,) = torch.autograd.grad(EAGER["relu2"](leaf), leaf, dy.double())
    operands = {"bias_gelu_backward": (None, "relu2"), "gated_backward": (torch.ones_like(x), "relu2")}
    more = operands.get(name, ())
    for found in (interpreted(name, dy, x, *more), getattr(reference, name)(dy, x, *more)):
        dx = found if isinstance(found, Tensor) else found[0]
        torch.testing.assert_close(dx.double(), exact, rtol=1e-6, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("how", ["kept", "streamed", "shards", "reference"])
def test_a_scale_of_0_makes_a_gradient_of_0(interpreted: Interpreter, how: str) -> None:
    x, target, scale = torch.randn(4, 300), torch.tensor([1, 2, 3, 300]), torch.tensor(0.0)
    x[0, 3], x[1, 5], x[2] = NAN, INF, -INF
    if how == "shards":
        stats = interpreted("cross_entropy_stats", x, target).unsqueeze(0)
        *_, grad = interpreted("cross_entropy_finish", x, target, stats, 300, 0, scale)
    elif how == "reference":
        *_, grad = reference.cross_entropy(x, target, scale)
    else:
        *_, grad = interpreted("cross_entropy", x, target, scale, schedule=PLANS[how])
    assert not grad[:3].any()
    assert grad[3].isnan().all()  # no such class


@pytest.mark.parametrize("step", [1, 7])
@pytest.mark.parametrize("betas", [(0.0, 0.95), (0.9, 0.0), (0.0, 0.0)])
def test_betas_of_0(interpreted: Interpreter, betas: tuple[float, float], step: int) -> None:
    """As torch.optim.AdamW takes them: its moment is the gradient, or its square."""
    torch.manual_seed(0)
    param, grad, first = (torch.randn(70) for _ in range(3))
    second = torch.rand(70)
    lr, when = torch.tensor(1e-2), torch.tensor(step)
    leaf = torch.nn.Parameter(param.double())
    optimizer = torch.optim.AdamW([leaf], lr=1e-2, betas=betas)
    kept = {"exp_avg": first.double(), "exp_avg_sq": second.double()}
    optimizer.state[leaf] = {"step": torch.tensor(float(step - 1)), **kept}
    leaf.grad = grad.double()
    optimizer.step()
    _, after = interpreted("adamw", param, grad, first, second, lr, when, betas=betas, changed=True)
    reference.adamw(param, grad, first, second, lr, when, betas)
    for made in (after, (param, grad, first, second)):
        for at, right in ((0, leaf.detach()), (2, kept["exp_avg"]), (3, kept["exp_avg_sq"])):
            torch.testing.assert_close(made[at].double(), right, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_moments_in_float64_are_refused_beside_less(name: str) -> None:
    given = {k: torch.ones(4) for k in ("param", "grad", "exp_avg", "exp_avg_sq")}
    scalars = {"lr": torch.tensor(0.1, dtype=torch.float64), "step": torch.tensor(1)}
    with pytest.raises(ShardcError, match=f"SC530.*{name} is torch.float64, param torch.float32"):
        ops.adamw(**{**given, name: given[name].double()}, **scalars)
    ops.adamw(**{k: x.double() for k, x in given.items()}, **scalars)


@pytest.mark.sampled(2)
@pytest.mark.skipif(not launch.HAS_TRITON, reason="Triton compiles it")
@pytest.mark.parametrize("schedule", [None, Schedule(8, 1, 1, 4)], ids=["each its own", "threads have the same"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_threads_wait_before_they_write_what_others_read(interleaved: bool, schedule: Schedule | None) -> None:
    """In place: neighbours are one thread's, unless a tile has fewer elements than its threads load."""
    recorded: list[CompileJob] = []
    trial = ("rope", schedule) if schedule else ("none", NONE)
    x, angles = torch.empty(2, 64, 4, 16, dtype=torch.bfloat16, device="meta"), torch.empty(64, 8, device="meta")
    for in_place in (True, False):
        with launch.recording(lambda one: recorded.append(job_of_launch("rope", 16, one))), trying(*trial):
            ops.rope(x, angles, angles, interleaved=interleaved, in_place=in_place)
    waits = ["barrier" in compile_job(source, 90).asm["ttgir"] for source in recorded]
    assert waits == [not interleaved or schedule is not None, False]
