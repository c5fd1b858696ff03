"""The statements of a scan's body on tensors: what each computes, and the gradient of each of its operands.

A value is a tensor with one dim for each of its letters, in the body's order; one that holds many steps has time in
front. `gradient(...)` is already summed over what its operand does not have, over time too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from shardc.ir.ops.scan_body import RENAME, WITH_LETTERS, Statement

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg,
    "exp": torch.exp,
    "log": torch.log,
    "abs": torch.abs,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "softplus": F.softplus,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
}
_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "keep": lambda x, m: torch.where(m != 0, x, 0.0),
}
# The gradient of x, given that of y = op(x).
_SLOPES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "neg": lambda g, x, y: -g,
    "exp": lambda g, x, y: g * y,
    "log": lambda g, x, y: g / x,
    "abs": lambda g, x, y: g * x.sign(),
    "sigmoid": lambda g, x, y: g * (y * (1 - y)),
    "tanh": lambda g, x, y: g * (1 - y * y),
    "relu": lambda g, x, y: torch.where(y > 0, g, 0.0),
    "softplus": lambda g, x, y: torch.where(x > 20.0, g, g * x.sigmoid()),  # torch is linear from there on
    "sqrt": lambda g, x, y: g / (2 * y),
    "rsqrt": lambda g, x, y: g * (-0.5 * y * y * y),
}


@lru_cache(maxsize=4096)
def _missing(dims: str, of: str) -> tuple[int, ...]:
    """Where dims that `of` has, and a tensor has not, would be: time need not be there to be broadcast."""
    return tuple(place for place, letter in enumerate(of) if letter not in dims)


def aligned(x: Tensor, dims: str, to: str) -> Tensor:
    """With a dim of size 1 for each that is missing."""
    for place in _missing(dims, to):
        x = x.unsqueeze(place)
    return x


@lru_cache(maxsize=4096)
def _order(dims: str, to: str) -> tuple[int, ...]:
    return tuple(dims.index(letter) for letter in to)


def reordered(x: Tensor, dims: str, to: str) -> Tensor:
    return x if dims == to else x.permute(_order(dims, to))


def reduced(x: Tensor, dims: str, to: str) -> Tensor:
    """Summed over the dims that `to` does not have."""
    extra = _missing(to, dims)
    return x.sum(extra) if extra else x


def evaluate(st: Statement, values: list[Tensor], dims: list[str], to: str) -> Tensor:
    """The value of a statement, whose operands have these dims and whose result has the dims `to`."""
    first = values[0]
    if st.op in _BINARY:
        return _BINARY[st.op](*(aligned(value, own, to) for value, own in zip(values, dims, strict=True)))
    if st.op in _UNARY:
        return _UNARY[st.op](first)
    if st.op == "scale":
        return first * float(st.note)
    if st.op == "shift":
        return first + float(st.note)
    if st.op == "sum":
        return reduced(first, dims[0], to)
    if st.op == "dot":
        return torch.einsum(f"{dims[0]},{dims[1]}->{to}", *values)
    assert st.op == RENAME
    return reordered(first, dims[0].replace(st.note[0], st.note[1]), to)


def gradient(
    st: Statement, operand: int, g: Tensor, of: str, values: list[Tensor], dims: list[str], result: Tensor
) -> Tensor | None:
    """The gradient of one operand, given that of the result, `g`, whose dims are `of`; None if there is none."""
    own, value = dims[operand], values[operand]
    if st.op in _SLOPES:
        return reduced(_SLOPES[st.op](g, value, result), of, own)
    if st.op in ("mul", "dot"):
        other, other_dims = values[1 - operand], dims[1 - operand]
        if st.op == "mul" and own == of:
            return g * aligned(other, other_dims, of)
        return torch.einsum(f"{of},{other_dims}->{own}", g, other)
    if st.op in ("add", "shift"):
        return reduced(g, of, own)
    if st.op == "sub":
        return reduced(-g if operand else g, of, own)
    if st.op == "scale":
        return reduced(g * float(st.note), of, own)
    if st.op == "div":
        slope = g / aligned(values[1], dims[1], of)
        return reduced(-slope * result if operand else slope, of, own)
    if st.op == "maximum":
        mine = aligned(value, own, of)
        other = aligned(values[1 - operand], dims[1 - operand], of)
        return reduced(torch.where(mine > other, g, torch.where(mine == other, g * 0.5, 0.0)), of, own)
    if st.op == "keep":
        return None if operand else reduced(torch.where(aligned(values[1], dims[1], of) != 0, g, 0.0), of, own)
    if st.op == "sum":
        return aligned(g, of, own).expand(value.shape)
    assert st.op == RENAME, st.op
    return reordered(g, of.replace(st.note[1], st.note[0]), own)


assert {*_UNARY} == {*_SLOPES}
assert {"dot", "sum"} == {*WITH_LETTERS}
