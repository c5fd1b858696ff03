"""Activations. `act` is one of `silu`, `gelu` (erf), `gelu_tanh`, `relu2`.

The GELUs are torch's, written without cancellation where x is very negative: there `1 + erf` and `1 + tanh` lose all
digits, which a single rounding to bfloat16 at the end would reveal.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kernels_triton.library.reference.wide import rows_sum, wide

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": lambda x: x * (0.5 * torch.special.erfc(x * -math.sqrt(0.5))),
    "gelu_tanh": lambda x: x * torch.sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)),
    "relu2": lambda x: functional.relu(x).square(),
}
SATURATED = 1e6  # beyond this the slope of all but `relu2` is 0 or 1, in float64 too


def bias_gelu(x: Tensor, bias: Tensor | None, act: str = "gelu_tanh") -> Tensor:
    """act(x + bias) of x [..., columns] and bias [columns] or None (Hendrycks & Gimpel 2016).

    Raises KeyError for another `act`.
    """
    return ACTIVATIONS[act](_biased(x, bias)).to(x.dtype)


def bias_gelu_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, act: str = "gelu_tanh"
) -> tuple[Tensor, Tensor | None]:
    """(dx, dbias): dy * act'(x + bias) of dy and x [..., columns], and its sum over rows; bias [columns] or None.

    Raises KeyError for another `act`.
    """
    _, dx = _with_gradient(_biased(x, bias), wide(dy), act)
    return dx.to(x.dtype), None if bias is None else rows_sum(dx).to(bias.dtype)


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0) ** 2 of x [..., columns] (So et al. 2021). Raises nothing of its own."""
    return ACTIVATIONS["relu2"](wide(x)).to(x.dtype)


def squared_relu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """2 * max(x, 0) * dy, of dy and x [..., columns]; 0 where x is not positive. Raises nothing of its own."""
    return _with_gradient(wide(x), wide(dy), "relu2")[1].to(x.dtype)


def gated(gate: Tensor, up: Tensor | None = None, act: str = "silu") -> Tensor:
    """act(gate) * up of gate and up [..., columns] (Shazeer 2020); without `up`, gate [..., 2 * columns] is both.

    Raises KeyError for another `act`.
    """
    first, second = _halves(gate, up)
    return (ACTIVATIONS[act](wide(first)) * wide(second)).to(gate.dtype)


def gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor | None = None, act: str = "silu"
) -> tuple[Tensor, Tensor | None]:
    """(dgate, dup), from dy, gate and up [..., columns]; one, packed, [..., 2 * columns], where they were.

    Raises KeyError for another `act`.
    """
    first, second = _halves(gate, up)
    value, dgate = _with_gradient(wide(first), wide(dy) * wide(second), act)
    dup = wide(dy) * value
    if up is None:
        return torch.cat((dgate, dup), -1).to(gate.dtype), None
    return dgate.to(gate.dtype), dup.to(up.dtype)


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    if up is not None:
        return gate, up
    first, second = gate.chunk(2, -1)
    return first, second


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return wide(x) if bias is None else wide(x) + wide(bias)


def _with_gradient(x: Tensor, dy: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """(f(x), dy * f'(x)), by torch's own derivative; both can be differentiated again where autograd is on."""
    value = ACTIVATIONS[act](x)
    if act == "relu2":  # doubled last, or twice a large x would be infinite; nothing passes where x is not positive
        return value, torch.where(x <= 0.0, 0.0, dy * functional.relu(x) * 2.0)
    differentiable = torch.is_grad_enabled() and x.requires_grad
    with torch.enable_grad():
        # The slope of `gelu_tanh` would be NaN where the cube of x overflows. Slopes are 0 or 1 long before that.
        point = torch.where(x.isinf(), x, x.clamp(-SATURATED, SATURATED))
        point = point if differentiable else point.detach().requires_grad_()
        (slope,) = torch.autograd.grad(ACTIVATIONS[act](point).sum(), point, create_graph=differentiable)
    return value, dy * slope
