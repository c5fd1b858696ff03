"""States of chunks, written as a product with a matrix of decays, as one op, while a model is traced.

    decays = exp(segment_sum(pad(x, (1, 0))))                    of Mamba2's published code, as libraries have it
    states = einsum("bzch,bzhpn->bchpn", decays, cat([first, states], 1))
    before, last = states[:, :-1], states[:, -1]

`decays[c, z]` is how much of the state behind chunk z - 1 is left before chunk c. As a product each chunk reads all
before it; `shardc::carried_states` goes from one to the next, so that ranks may have a part of the chunks each. What
the einsum's operands are made of is read in the recording under way. What is not of this form stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shardc import torch_compat
from shardc.frontend.rolled_loops import functions_of
from shardc.ir.ops.carried_states import carried_states

aten = torch.ops.aten

CASTS = (aten._to_copy.default, aten.clone.default, aten.alias.default, aten.detach.default)


def written_in(model: nn.Module) -> bool:
    """May a model's functions compute states so?"""
    names = [set(function.__code__.co_names) for function in functions_of(model)]
    return any("einsum" in found for found in names) and any("cumsum" in found for found in names)


@dataclass(frozen=True)
class _Joined:
    """Two tensors that were joined along a dim, of which the one is no longer than 1."""

    one: Tensor  # without the dim
    rest: Tensor
    dim: int


class CarriedChunks(TorchFunctionMode):
    """While it is entered, products that carry states from chunk to chunk are recorded as `shardc::carried_states`."""

    def __init__(self) -> None:
        super().__init__()
        self.padded: dict[fx.Node, Tensor] = {}  # by what has one element more in front of its last dim
        self.joined: dict[fx.Node, _Joined] = {}  # by what begins with the one
        self.carried: dict[fx.Node, _Joined] = {}  # by what ends with it

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found: Tensor | None = None
        if func is torch.einsum and len(args) == 3:
            found = self._product(*args)
        elif func is Tensor.__getitem__ and self.carried:
            node = torch_compat.node_of(args[0])
            found = _part(self.carried[node], args[1]) if node in self.carried else None
        if found is not None:
            return found
        result = func(*args, **kwargs)
        if func in (torch.cat, F.pad) and (node := torch_compat.node_of(result)) is not None:
            (self._pad if func is F.pad else self._cat)(node, *args, **kwargs)
        return result

    def _pad(self, node: fx.Node, input: Tensor, pad: Sequence[int], mode: str = "constant", value: Any = None) -> None:
        if list(pad[:2]) == [1, 0] and not any(pad[2:]) and mode == "constant":
            self.padded[node] = input

    def _cat(self, node: fx.Node, tensors: Sequence[Tensor], dim: int = 0, **_: Any) -> None:
        if len(tensors) != 2 or tensors[0].ndim != tensors[1].ndim or tensors[0].dtype != tensors[1].dtype:
            return
        one, rest = tensors
        dim %= max(1, one.ndim)
        if one.ndim and one.shape[dim] == 1:
            self.joined[node] = _Joined(one.select(dim, 0), rest, dim)

    def _product(self, equation: Any, decays: Any, states: Any) -> Tensor | None:
        if not (isinstance(equation, str) and isinstance(decays, Tensor) and isinstance(states, Tensor)):
            return None
        nodes = torch_compat.node_of(decays), torch_compat.node_of(states)
        joined = self.joined.get(nodes[1]) if nodes[1] is not None else None
        made = _decays(nodes[0]) if nodes[0] is not None and joined is not None else None
        x = self.padded.get(made[0]) if made is not None else None
        if joined is None or made is None or x is None or decays.dtype != states.dtype:
            return None
        left, _, out = equation.replace(" ", "").partition("->")
        of_decays, _, of_states = left.partition(",")
        if "." in equation or any(len(set(letters)) < len(letters) for letters in (of_decays, of_states)):
            return None
        *batch, row, column = (of_decays[d] for d in made[1])
        others = [letter for letter in of_states if letter not in (column, *batch)]
        if not {column, *batch} <= {*of_states} or row in of_states or sorted(out) != sorted([*batch, row, *others]):
            return None
        if of_states.index(column) != joined.dim:
            return None

        def ordered(x: Tensor, has: Sequence[str], wanted: Sequence[str]) -> Tensor:
            return x.permute([has.index(letter) for letter in wanted])

        first = ordered(joined.one, of_states.replace(column, ""), [*batch, *others])
        addends = ordered(joined.rest, of_states, [*batch, column, *others])
        if x.shape != addends.shape[: x.ndim]:
            return None
        before, last = carried_states(first, x, addends)
        dim = out.index(row)
        before, last = (
            ordered(before, [*batch, row, *others], out),
            ordered(last, [*batch, *others], out.replace(row, "")),
        )
        result = torch.cat([before, last.unsqueeze(dim)], dim)
        node = torch_compat.node_of(result)
        if node is not None:
            self.carried[node] = _Joined(last, before, dim)
        return result


def _part(states: _Joined, index: Any) -> Tensor | None:
    """All states but the last, or the last; None for another part of them."""
    given = index if isinstance(index, tuple) else (index,)
    before, at, behind = given[: states.dim], given[states.dim : states.dim + 1], given[states.dim + 1 :]
    if any(not isinstance(i, slice) or i != slice(None) for i in (*before, *behind)):
        return None
    if at and isinstance(at[0], slice) and at[0] == slice(None, -1):
        return states.rest
    return states.one if at and type(at[0]) is int and at[0] == -1 else None


# ------------------------------------------------------------------ what was recorded
def _decays(node: fx.Node) -> tuple[fx.Node, list[int]] | None:
    """Of exp(segment_sum(x)), whose dims may be in another order: x, and which dims are x's batch, rows and columns."""
    ndim = node.meta["val"].ndim
    order = list(range(ndim))  # for each dim, which of those of the sums it is
    while (node := _uncast(node)).target in (aten.permute.default, aten.transpose.int):
        moved = list(range(ndim))
        if node.target is aten.permute.default:
            moved = [d % ndim for d in _ints(node.args[1])]
        else:
            a, b = (d % ndim for d in _ints(node.args[1:]))
            moved[a], moved[b] = b, a
        order = [moved[d] for d in order]
        node = _operand(node)
    if node.target is not aten.exp.default:
        return None
    sums = _masked(_operand(node), -math.inf, diagonal=0)
    if sums is None or sums.target is not aten.cumsum.default or int(sums.args[1]) % ndim != ndim - 2:  # type: ignore[arg-type]
        return None
    spread = _masked(_operand(sums), 0.0, diagonal=-1)
    if spread is None or spread.target is not aten.expand.default:
        return None
    column = _uncast(_operand(spread))
    if column.target is not aten.unsqueeze.default or int(column.args[1]) % ndim != ndim - 1:  # type: ignore[arg-type]
        return None
    x, shape = _uncast(_operand(column)), spread.meta["val"].shape
    if x.meta["val"].ndim != ndim - 1 or tuple(shape) != (*x.meta["val"].shape, x.meta["val"].shape[-1]):
        return None
    return x, [order.index(d) for d in range(ndim)]


def _masked(node: fx.Node, fill: float, diagonal: int) -> fx.Node | None:
    """What is filled above a diagonal, if a node is that."""
    node = _uncast(node)
    if node.target is aten.where.self:
        mask, filled, kept = node.args
    elif node.target is aten.masked_fill.Scalar:
        kept, mask, filled = node.args
    else:
        return None
    if not isinstance(kept, fx.Node) or not isinstance(mask, fx.Node) or _number(filled) != fill:
        return None
    if mask.target not in (aten.bitwise_not.default, aten.logical_not.default):
        return None
    below = _operand(mask)
    if below.target is not aten.tril.default or (below.args[1] if len(below.args) > 1 else 0) != diagonal:
        return None
    square = below.meta["val"].shape
    ones = _uncast(_operand(below))
    whole = ones.target is aten.full.default and ones.args[1] in (1, True)
    return _uncast(kept) if whole and square == kept.meta["val"].shape[-2:] else None


def _number(value: Any) -> Any:
    """A number, or what a tensor without dims is made of."""
    if isinstance(value, fx.Node):
        value = _uncast(value)
        if value.target is aten.full.default and not value.args[0]:
            return value.args[1]
        return value.args[0] if value.target is aten.scalar_tensor.default else None
    return value


def _uncast(node: fx.Node) -> fx.Node:
    while node.target in CASTS:
        node = _operand(node)
    return node


def _operand(node: fx.Node) -> fx.Node:
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    return operand


def _ints(values: Any) -> list[int]:
    return [int(v) for v in values]
