"""Activations. `act` is one of `silu`, `gelu` (erf), `gelu_tanh`, `relu2`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kernels_triton.reference.wide import rows_sum, wide

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu2": lambda x: functional.relu(x).square(),
}


def bias_gelu(x: Tensor, bias: Tensor | None, act: str = "gelu_tanh") -> Tensor:
    """act(x + bias) of x [..., columns] and bias [columns] or None, by torch's own GELU (Hendrycks & Gimpel 2016).

    Raises KeyError for another `act`.
    """
    return ACTIVATIONS[act](_biased(x, bias)).to(x.dtype)


def bias_gelu_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, act: str = "gelu_tanh"
) -> tuple[Tensor, Tensor | None]:
    """(dx, dbias): dy * act'(x + bias) of dy and x [..., columns], and its sum over rows; bias [columns] or None.

    Raises KeyError for another `act`.
    """
    dx = wide(dy) * _slope(_biased(x, bias), act)[1]
    return dx.to(x.dtype), None if bias is None else rows_sum(dx).to(bias.dtype)


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0) ** 2 of x [..., columns] (So et al. 2021). Raises nothing of its own."""
    return ACTIVATIONS["relu2"](wide(x)).to(x.dtype)


def squared_relu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """2 * max(x, 0) * dy, of dy and x [..., columns]. Raises nothing of its own."""
    return (wide(dy) * 2.0 * functional.relu(wide(x))).to(x.dtype)


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
    value, slope = _slope(wide(first), act)
    dgate, dup = wide(dy) * wide(second) * slope, wide(dy) * value
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


def _slope(x: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """(f(x), f'(x)), by torch's own derivative; both can be differentiated again where autograd is on."""
    again = torch.is_grad_enabled() and x.requires_grad
    with torch.enable_grad():
        at = x if again else x.detach().requires_grad_()
        value = ACTIVATIONS[act](at)
        (slope,) = torch.autograd.grad(value, at, torch.ones_like(value), create_graph=again)
    return value if again else value.detach(), slope
