"""Which slots a mask gives to an expert, read off the calls that made it.

    ids == 3                                     slots of expert 3: dims (0, 1) of ids, the tokens and their choices
    one_hot(ids, 8).permute(2, 1, 0)[3]          the same, dims (1, 0)
    (ids == 3).any(-1)                           tokens of expert 3: dim (0,)
    (ids == 3).any(), bincount(ids)[3] == 0      whether it has any

A *label* is a dim of the integers that a router chose. Each dim of a mask stands for some labels, most significant
first, or for the experts (`EXPERTS`); a dim of size 1 for none. Integers that are views of others count as these.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx

aten = torch.ops.aten
EXPERTS = -1
Dims = tuple[tuple[int, ...], ...]
Constant = Callable[[fx.Node], "list[int] | None"]  # the numbers of a constant; None for anything else
_SAME = (
    aten.alias.default, aten.detach.default, aten.clone.default, aten._to_copy.default, aten.lift_fresh_copy.default,
)  # fmt: skip
_SHAPED = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_CHOICES: dict[Any, int] = {
    aten.topk.default: 1, aten.sort.default: 1, aten.sort.stable: 1, aten.max.dim: 1, aten.min.dim: 1,
    aten.argmax.default: 0, aten.argmin.default: 0, aten.argsort.default: 0, aten.argsort.stable: 0,
}  # fmt: skip
_MANY = (aten.topk.default, aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable)


@dataclass(frozen=True)
class Chosen:
    """`kind`: "is", true (or 1) where an id is the expert; "count", how many are; "some" and "none", whether any is."""

    ids: fx.Node
    dims: Dims
    kind: Literal["is", "count", "some", "none"] = "is"
    expert: int | None = None  # None: one along the dim `EXPERTS`
    first: int = 0  # the expert at the start of that dim
    summed: frozenset[int] = frozenset()  # labels over which it is counted

    @property
    def labels(self) -> tuple[int, ...]:
        """Those of its dims, in the order of the ids' own."""
        return tuple(sorted(label for dim in self.dims for label in dim if label != EXPERTS))


def shape_of(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


class Masks:
    """The masks of one recording. `constant` gives the numbers of a node that no input leads to."""

    def __init__(self, constant: Constant) -> None:
        self._constant = constant
        self._known: dict[fx.Node, Chosen | None] = {}

    def read(self, node: fx.Node | None) -> Chosen | None:
        """What a node says of experts; None if it is anything else."""
        if node is None or not isinstance(node.meta.get("val"), Tensor):
            return None
        if node not in self._known:
            self._known[node] = self._read(node)
        return self._known[node]

    def _read(self, node: fx.Node) -> Chosen | None:
        if node.op != "call_function":
            return None
        args: tuple[Any, ...] = node.args
        target: Any = node.target
        if target is operator.getitem and args[0].target is aten.unbind.int:
            source, dim = args[0].args[0], (args[0].args[1] if len(args[0].args) > 1 else 0)
            return self._selected(source, dim, args[1])
        source = args[0] if args and isinstance(args[0], fx.Node) else None
        if source is None or not isinstance(source.meta.get("val"), Tensor):
            return None
        of = self.read(source)
        if of is None:
            return self._compared(node, source) if target in (aten.eq.Scalar, aten.eq.Tensor) else None
        if target is aten.select.int:
            return self._selected(source, args[1], args[2])
        if target is aten.index.Tensor:
            return self._indexed(of, args[1])
        if target is aten.slice.Tensor:
            return _sliced(of, shape_of(source), shape_of(node), args)
        if (dims := _viewed(node, of.dims, shape_of(source), shape_of(of.ids))) is not None:
            return replace(of, dims=dims)
        return _questioned(node, of, args)

    def _compared(self, node: fx.Node, source: fx.Node) -> Chosen | None:
        """`ids == e`, or `ids == arange(experts)` along a dim of its own."""
        if source.meta["val"].dtype not in (torch.int64, torch.int32):
            return None
        base, dims = layout(source)
        other: Any = node.args[1]
        if isinstance(other, int) and not isinstance(other, bool):
            return Chosen(base, dims, expert=other)
        if not isinstance(other, fx.Node) or (numbers := self._constant(other)) is None or not numbers:
            return None
        shape = shape_of(other)
        if math.prod(shape) == 1 and len(shape) <= len(dims):
            return Chosen(base, dims, expert=numbers[0])
        along = [d for d, size in enumerate(shape) if size != 1]
        place = along[0] - len(shape)
        if len(along) != 1 or numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            return None
        padded: list[tuple[int, ...]] = [()] * (len(shape) - len(dims)) + list(dims)
        if padded[place] != () or (len(shape) <= len(dims) and shape_of(source)[place] != 1):
            return None
        padded[place] = (EXPERTS,)
        return Chosen(base, tuple(padded), first=numbers[0])

    def _selected(self, source: fx.Node, dim: int, index: int) -> Chosen | None:
        of = self.read(source)
        if of is None:
            return None
        dim %= len(of.dims)
        rest = (*of.dims[:dim], *of.dims[dim + 1 :])
        if of.dims[dim] == (EXPERTS,):
            index %= shape_of(source)[dim]
            return replace(of, dims=rest, expert=of.first + index)
        return replace(of, dims=rest) if of.dims[dim] == () else None

    def _indexed(self, of: Chosen, indices: Sequence[Any]) -> Chosen | None:
        """`mask[e]`, where e is a constant tensor of one number."""
        if len(indices) != 1 or not isinstance(indices[0], fx.Node) or of.dims[:1] != ((EXPERTS,),):
            return None
        numbers = self._constant(indices[0])
        if numbers is None or len(numbers) != 1 or numbers[0] < 0:
            return None
        kept: Dims = ((),) * len(shape_of(indices[0]))
        return replace(of, dims=(*kept, *of.dims[1:]), expert=of.first + numbers[0])


def layout(node: fx.Node) -> tuple[fx.Node, Dims]:
    """The integers that these are a view of, or a copy; and which labels of those each dim has."""
    chain: list[fx.Node] = []
    base = node
    while base.op == "call_function" and base.all_input_nodes:
        source = base.all_input_nodes[0]
        plain: Dims = tuple((d,) for d in range(len(shape_of(source)))) if _is_tensor(source) else ()
        if not _is_tensor(source) or source.meta["val"].dtype.is_floating_point:
            break
        if source.meta["val"].dtype == torch.bool or _viewed(base, plain, shape_of(source), shape_of(source)) is None:
            break
        chain.append(base)
        base = source
    sizes = shape_of(base)
    dims: Dims = tuple((d,) if size != 1 else () for d, size in enumerate(sizes))
    before = sizes
    for call in reversed(chain):
        viewed = _viewed(call, dims, before, sizes)
        if viewed is None:  # a view that takes dims of the base apart: what it yields is a base of its own
            base, sizes = call, shape_of(call)
            viewed = tuple((d,) if size != 1 else () for d, size in enumerate(sizes))
        dims, before = viewed, shape_of(call)
    return base, dims


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _viewed(node: fx.Node, dims: Dims, before: tuple[int, ...], sizes: Sequence[int]) -> Dims | None:
    """The dims behind a call that keeps the row-major order of elements, or permutes dims; None of another call.
    `sizes` are those of the labels."""
    args: tuple[Any, ...] = node.args
    target: Any = node.target
    if target in _SHAPED:
        return _reshaped(dims, before, shape_of(node), sizes)
    if target in _SAME:
        return dims
    if target is aten.permute.default:
        return tuple(dims[d] for d in args[1])
    if target in (aten.transpose.int, aten.t.default):
        a, b = args[1:3] if target is aten.transpose.int else (0, len(dims) - 1)
        order = list(dims)
        order[a], order[b] = order[b], order[a]
        return tuple(order)
    if target is aten.unsqueeze.default:
        place = args[1] % (len(dims) + 1)
        return (*dims[:place], (), *dims[place:])
    if target in (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims):
        asked = range(len(dims)) if target is aten.squeeze.default else args[1]
        asked = {d % len(dims) for d in ([asked] if isinstance(asked, int) else asked)}
        return tuple(dim for d, dim in enumerate(dims) if d not in asked or before[d] != 1)
    return None


def _reshaped(dims: Dims, before: Sequence[int], after: Sequence[int], sizes: Sequence[int]) -> Dims | None:
    """Dims that a view merges, or takes apart at their labels."""
    pieces = [(x, sizes[x] if x != EXPERTS else size) for dim, size in zip(dims, before, strict=True) for x in dim]
    whole = [piece for piece in pieces if piece[1] != 1]
    result: list[tuple[int, ...]] = []
    for size in after:
        held, product = (), 1
        while product < size and whole:
            label, count = whole.pop(0)
            held, product = (*held, label), product * count
        if product != size:
            return None
        result.append(held)
    merged_experts = any(EXPERTS in dim and len(dim) > 1 for dim in result)
    return None if whole or merged_experts else tuple(result)


def _sliced(of: Chosen, before: tuple[int, ...], after: tuple[int, ...], args: tuple[Any, ...]) -> Chosen | None:
    """`mask[e : e + 1]`, or all of it."""
    if before == after:
        return of
    dim = (args[1] if len(args) > 1 else 0) % len(before)
    start = args[2] if len(args) > 2 and args[2] is not None else 0
    if of.dims[dim] != (EXPERTS,) or (len(args) > 4 and args[4] != 1) or start < 0:
        return None
    if after[dim] != 1:
        return replace(of, first=of.first + start)
    return replace(of, dims=(*of.dims[:dim], (), *of.dims[dim + 1 :]), expert=of.first + start)


def _questioned(node: fx.Node, of: Chosen, args: tuple[Any, ...]) -> Chosen | None:
    target: Any = node.target
    name = str(target).removeprefix("aten.").partition(".")[0]
    number = args[1] if len(args) > 1 and isinstance(args[1], (int, float)) else None
    if name in ("any", "sum"):
        return _summed(of, name, args)
    if of.kind == "is" and (name, number) in (("ne", 0), ("gt", 0), ("ge", 1), ("eq", 1)):
        return of
    if of.kind == "count":
        if (name, number) in (("gt", 0), ("ne", 0), ("ge", 1)):
            return replace(of, kind="some")
        if (name, number) in (("eq", 0), ("lt", 1), ("le", 0)):
            return replace(of, kind="none")
    if name in ("logical_not", "bitwise_not") and of.kind in ("some", "none"):
        return replace(of, kind="none" if of.kind == "some" else "some")
    return None


def _summed(of: Chosen, name: str, args: tuple[Any, ...]) -> Chosen | None:
    if of.kind not in ("is", "count") or (name == "any" and of.kind == "count"):
        return None
    asked = args[1] if len(args) > 1 else None
    asked = [asked] if isinstance(asked, int) else asked
    places = set(range(len(of.dims))) if not asked else {d % len(of.dims) for d in asked}
    keep = args[2] if len(args) > 2 else False
    if any(EXPERTS in of.dims[d] for d in places):
        return None
    gone = {label for d in places for label in of.dims[d]}
    dims = tuple(() if d in places else dim for d, dim in enumerate(of.dims) if keep or d not in places)
    rest = replace(of, dims=dims, summed=of.summed | gone)
    if name == "sum":
        return replace(rest, kind="count")
    return rest if rest.labels else replace(rest, kind="some")


def choice_of(ids: fx.Node) -> tuple[int | None, bool]:
    """Of how many experts ids are chosen, if each is a position in a dim of so many; and whether those of the last dim
    differ from each other."""
    node, same_dims = ids, True
    while node.op == "call_function":
        call, result = (node.args[0], node.args[1]) if node.target is operator.getitem else (node, 0)
        call = cast("fx.Node", call)
        if call.target in _CHOICES and result == _CHOICES[call.target]:
            source = shape_of(call.all_input_nodes[0])
            dim = _dim_of(call)
            if dim is None:
                return None, False
            last = dim % len(source) == len(source) - 1
            return source[dim], call.target in _MANY and last and same_dims
        if call.target is aten.slice.Tensor:
            node = call.all_input_nodes[0]
        elif call.target in (*_SAME, *_SHAPED, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim):
            node = call.all_input_nodes[0]
            if not _is_tensor(node) or node.meta["val"].dtype.is_floating_point:
                return None, False
            same_dims = same_dims and shape_of(node) == shape_of(call) and call.target is not aten.permute.default
        else:
            return None, False
    return None, False


def _dim_of(call: fx.Node) -> int | None:
    schema = call.target._schema.arguments  # type: ignore[union-attr]
    place = next(i for i, argument in enumerate(schema) if argument.name == "dim")
    if place < len(call.args):
        return call.args[place]  # type: ignore[return-value]
    return call.kwargs.get("dim", schema[place].default_value)  # type: ignore[return-value]
