"""Rows of logits that lie where float32 has few digits for what they differ by, and what their loss is held to.

The logits are given: what float32 makes of their differences depends on these alone. So nothing here grows with the
logits, and every element of a gradient is held to its own size.
"""

import torch
from test_templates import line
from torch import Tensor
from torch.nn import functional

LEAST = torch.finfo(torch.float32).min
SCALE = 0.5
OFFSETS = (0.0, 1e2, -1e4, 1e6)
RTOL = {torch.bfloat16: 2.0**-8, torch.float32: 4e-6}


def far_out(dtype: torch.dtype, cols: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """(logits, targets). The rows after the offsets': the least number alone; below one other; numbers of any size;
    minus infinity alone, and in every other column."""
    generator = torch.Generator().manual_seed(cols)
    x = torch.randn(len(OFFSETS) + 5, cols, generator=generator)
    x[: len(OFFSETS)] += torch.tensor(OFFSETS).unsqueeze(-1)
    least, below, huge, nothing, holes = x[len(OFFSETS) :]
    least[:], below[:], below[0] = LEAST, LEAST, 0.0
    huge *= 5e37
    nothing[:], holes[::2] = -torch.inf, -torch.inf
    x = x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).where(x.isfinite(), x)
    return x.to(device, dtype), torch.arange(1, 2 * len(x), 2, device=device)


def exactly(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.double().requires_grad_()
    loss = functional.cross_entropy(leaf, target, reduction="none")
    (grad,) = torch.autograd.grad(loss.sum() * SCALE, leaf)
    return loss.detach(), grad


def held(x: Tensor, target: Tensor, loss: Tensor, grad: Tensor) -> None:
    """To float64. What is taken from a target's own exponential has the rounding of one."""
    exact, exact_grad = exactly(x, target)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=1e-6, equal_nan=True)
    hot = functional.one_hot(target, x.shape[1])
    allowed = RTOL[grad.dtype] * exact_grad.abs() + 2e-7 * hot + 1e-35
    off = (grad.double() - exact_grad).abs()
    assert torch.equal(grad.isnan(), exact_grad.isnan())
    assert (off.nan_to_num(0.0) <= allowed.nan_to_num(0.0)).all(), (off / allowed).nan_to_num(0.0).amax(-1).tolist()


def in_graphs(dtype: torch.dtype, rows: int, cols: int, biased: bool) -> str:
    """The text that graphs launch the template by: (sum of exponentials, target's logit less the maximum, dlogits)."""
    name = "cross_entropy, biased" if biased else "cross_entropy"
    return line(name, {torch.bfloat16: "bf16", torch.float32: "f32"}[dtype], cols).replace("[5", f"[{rows}")


def given(x: Tensor, target: Tensor, biased: bool) -> list[Tensor]:
    """The inputs of that text, which has one over the scale where there is no bias."""
    if biased:
        return [x, target, torch.tensor(SCALE, device=x.device), torch.zeros(x.shape[1], device=x.device)]
    return [x, target, torch.tensor(1.0 / SCALE, device=x.device)]
