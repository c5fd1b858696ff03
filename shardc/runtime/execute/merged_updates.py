"""Adam's updates of many parameters as one call of ATen's fused kernel, on CPUs.

    %m.new = lerp(%m, %g, 0.1)                 _foreach_add_([step, ...], 1)
    %v.new = add(mul(%v, 0.999), ...)     ->   _fused_adamw_([w, ...], [g, ...], [m, ...], [v, ...], ...)
    %w.new = add(%w.decayed, ...)              (some 25 calls a parameter before)

A graph has one instance of the optimizer's update for each parameter, with rules that say how it is split. What a rank
runs of it is elementwise on its own shards, whatever the plan: so it is found in the prepared calls, from the new
parameter back to the gradient, and only where all that it makes is written over held tensors and nothing else reads
what lies between. Gradients may be clipped, cast or negated before. Only float32 and float64 are merged: of shorter
floats a fused update rounds otherwise.

Updates are collected in the code's order, and made together at the last. They are made earlier: before a call that
reads what they make; before one that writes to memory with a fixed place, which a gradient may lie in; and where
gradients that wait for the others would hold more bytes than the single calls' results did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from shardc import torch_compat
from shardc.ir.graph import type_of
from shardc.runtime.execute.call_arguments import CallArguments, Slot
from shardc.runtime.execute.written_code import CodeLine

aten = torch.ops.aten
DTYPES = (torch.float32, torch.float64)
TEMPORARIES = 3  # at least so many results of a parameter's size exist at once where its update is made of single calls


@dataclass(frozen=True)
class Options:
    """What updates must have alike to be made by one call: the learning rate's node, and numbers."""

    lr: fx.Node
    beta1: float
    beta2: float
    weight_decay: float
    eps: float
    amsgrad: bool
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class AdamUpdate:
    """An update: what it reads, and the new values of `held`, in their order; `calls` are all that it consists of."""

    options: Options
    gradient: fx.Node
    held: tuple[fx.Node, ...]  # the parameter, step, both averages, and with amsgrad the largest square
    new: tuple[fx.Node, ...]
    calls: frozenset[fx.Node]


class _NoMatchError(Exception):
    pass


class _Matcher:
    """Takes a call's operands, and records the call."""

    def __init__(self) -> None:
        self.calls: set[fx.Node] = set()

    def of(self, value: Any, target: Any) -> tuple[Any, ...]:
        if not isinstance(value, fx.Node) or value.target is not target or value.kwargs:
            raise _NoMatchError
        self.calls.add(value)
        return value.args

    def number(self, value: Any) -> float:
        if not isinstance(value, (int, float)):
            raise _NoMatchError
        return value

    def one_minus(self, value: Any) -> Any:
        """x of add(neg(x), 1)."""
        negative, one = self.of(value, aten.add.Tensor)
        (x,) = self.of(negative, aten.neg.default)
        _same(one, 1)
        return x


def _same(a: Any, b: Any) -> None:
    if not (a is b or (not isinstance(a, fx.Node) and not isinstance(b, fx.Node) and a == b)):
        raise _NoMatchError


def adam_update(new: fx.Node, over: Mapping[fx.Node, fx.Node]) -> AdamUpdate | None:
    """The update whose new parameter is `new`. `over` gives what each new value is written over."""
    try:
        update = _matched(new, over)
    except (_NoMatchError, ValueError):
        return None
    inner = update.calls - set(update.new)
    if any(user not in update.calls for call in inner for user in call.users):
        return None
    floats = [update.gradient, update.held[0], *update.held[2:]]
    types = [type_of(value) for value in floats]
    if any(t.dims != types[1].dims or t.dtype != types[1].dtype for t in types) or types[1].dtype not in DTYPES:
        return None
    return update


def _matched(new: fx.Node, over: Mapping[fx.Node, fx.Node]) -> AdamUpdate:
    match = _Matcher()
    decayed, change = match.of(new, aten.add.Tensor)
    numerator, denominator = match.of(change, aten.div.Tensor)
    average, negative_size = match.of(numerator, aten.mul.Tensor)
    (size,) = match.of(negative_size, aten.neg.default)
    lr, correction1 = match.of(size, aten.div.Tensor)
    beta1, step = match.of(match.one_minus(correction1), aten.pow.Scalar)
    old_step, one = match.of(step, aten.add.Tensor)
    _same(one, 1)
    old_average, gradient, weight = match.of(average, aten.lerp.Scalar)
    _same(weight, 1 - match.number(beta1))
    quotient, eps = match.of(denominator, aten.add.Tensor)
    root, root_correction = match.of(quotient, aten.div.Tensor)
    correction2, half = match.of(root_correction, aten.pow.Tensor_Scalar)
    _same(half, 0.5)
    beta2, again = match.of(match.one_minus(correction2), aten.pow.Scalar)
    _same(again, step)
    (square,) = match.of(root, aten.sqrt.default)
    largest: tuple[fx.Node, ...] = ()
    if square.target is aten.maximum.default:
        largest = (square,)
        old_largest, square = match.of(square, aten.maximum.default)
        _same(over.get(largest[0]), old_largest)
    kept, added = match.of(square, aten.add.Tensor)
    old_square, factor = match.of(kept, aten.mul.Tensor)
    _same(factor, match.number(beta2))
    product, rest = match.of(added, aten.mul.Tensor)
    _same(rest, 1 - beta2)
    left, right = match.of(product, aten.mul.Tensor)
    _same(left, gradient)
    _same(right, gradient)
    parameter, decay = over.get(new), 0.0
    if decayed is not parameter:
        base, remaining = match.of(decayed, aten.mul.Tensor)
        _same(base, parameter)
        rate, decay = match.of(match.one_minus(remaining), aten.mul.Tensor)
        _same(rate, lr)
    values = (new, step, average, square, *largest)
    held = tuple(over[value] for value in values if value in over)
    for old, expected in zip(held, (parameter, old_step, old_average, old_square), strict=False):
        _same(old, expected)
    if len(held) != len(values) or not isinstance(gradient, fx.Node):
        raise _NoMatchError
    assert isinstance(lr, fx.Node)
    options = Options(
        lr, beta1, beta2, match.number(decay), match.number(eps), bool(largest), type_of(new).dtype
    )  # fmt: skip
    return AdamUpdate(options, gradient, held, values, frozenset(match.calls))


@dataclass
class _Waiting:
    """Updates that the code has come by: `open` are those of which calls are still to come, `ready` the others, each
    with the index of its last call. `free` are the slots that may be freed when the updates are made."""

    slots: Mapping[fx.Node, int]
    size_of: Callable[[int], int]
    open: set[AdamUpdate] = field(default_factory=set[AdamUpdate])
    ready: list[tuple[int, AdamUpdate]] = field(default_factory=list[tuple[int, AdamUpdate]])
    free: list[int] = field(default_factory=list[int])
    growth: int = 0  # bytes that other calls have made and not freed since the first update was ready

    def read(self, updates: Iterable[AdamUpdate]) -> set[int]:
        return {self.slots[v] for u in updates for v in (u.gradient, u.options.lr, *u.held)}

    def needs(self) -> set[int]:
        return self.read((*self.open, *(update for _, update in self.ready)))

    def makes(self) -> set[int]:
        return {self.slots[value] for _, update in self.ready for value in update.new}

    def allowed(self) -> int:
        return TEMPORARIES * max(self.size_of(self.slots[update.new[0]]) for _, update in self.ready)

    def made(self) -> list[CodeLine]:
        """The lines that make what is ready: one for each kind of update."""
        kinds: dict[Options, list[AdamUpdate]] = {}
        for _, update in self.ready:
            kinds.setdefault(update.options, []).append(update)
        index = self.ready[-1][0] if self.ready else 0
        lines = [self._line(index, options, updates) for options, updates in kinds.items()]
        if lines:
            held_back = self.read(self.open)
            lines[-1] = (*lines[-1][:4], tuple(slot for slot in self.free if slot not in held_back))
            self.free = [slot for slot in self.free if slot in held_back]
        self.ready, self.growth = [], 0
        return lines

    def _line(self, index: int, options: Options, updates: Sequence[AdamUpdate]) -> CodeLine:
        gradients = [Slot(self.slots[update.gradient]) for update in updates]
        held = [[Slot(self.slots[update.held[i]]) for update in updates] for i in range(len(updates[0].held))]
        arguments = CallArguments((gradients, held, Slot(self.slots[options.lr])), {})
        new = [self.slots[update.new[i]] for i in range(len(held)) for update in updates]
        return index, partial(_update, options), arguments, tuple(enumerate(new)), ()


def _update(options: Options, gradients: Sequence[Tensor], held: Sequence[list[Tensor]], lr: Tensor) -> list[Tensor]:
    """Update what is held in place; returns all of it, the tensors of one sort after those of the other."""
    parameters, steps, averages, squares, *largest = held
    every = [list(gradients), parameters, averages, squares, *largest]
    # The kernel goes through memory and looks at no strides.
    plain = [[x if x.is_contiguous() else x.contiguous() for x in tensors] for tensors in every]
    torch_compat.fused_adamw(
        plain[1], plain[0], plain[2], plain[3], plain[4] if largest else [], steps, lr,
        betas=(options.beta1, options.beta2), weight_decay=options.weight_decay, eps=options.eps,
    )  # fmt: skip
    for tensors, changed in zip(every[1:], plain[1:], strict=True):
        for x, y in zip(tensors, changed, strict=True):
            if x is not y:
                x.copy_(y)
    return [x for tensors in held for x in tensors]


def merge_updates(
    code: Sequence[CodeLine],
    over: Mapping[fx.Node, fx.Node],
    node_of: Callable[[int], fx.Node],
    slots: Mapping[fx.Node, int],
    size_of: Callable[[int], int],
    writes_fixed: Callable[[int], bool],
) -> list[CodeLine]:
    """The code with its updates merged. `over` gives the held value that a new one is written over, `slots` a value's
    slot, `size_of` the bytes of the value in a slot, and `writes_fixed` whether the call of an index writes to memory
    that has its place."""
    nodes = [node_of(line[0]) for line in code]
    of = _updates_of(nodes, over)
    if not of:
        return list(code)
    last = {of[call]: at for at, call in enumerate(nodes) if call in of}
    inner = {slots[call] for call, update in of.items() if call not in update.new}
    merged: list[CodeLine] = []
    waiting = _Waiting(slots, size_of)
    for at, (line, node) in enumerate(zip(code, nodes, strict=True)):
        index, _, _, into, free = line
        update = of.get(node)
        if update is not None:
            waiting.free += (slot for slot in free if slot not in inner)
            waiting.open.add(update)
            if last[update] == at:
                waiting.open.remove(update)
                waiting.ready.append((index, update))
            continue
        filled = (into,) if isinstance(into, int) else tuple(slot for _, slot in into)
        growth = sum(map(size_of, filled))
        if waiting.ready:
            reads = any(slots.get(value) in waiting.makes() for value in node.all_input_nodes)
            if reads or writes_fixed(index) or waiting.growth + growth > waiting.allowed():
                merged += waiting.made()
        needs = waiting.needs()
        kept = tuple(slot for slot in free if slot not in needs)
        waiting.free += (slot for slot in free if slot in needs)
        if waiting.ready:
            waiting.growth += growth - sum(map(size_of, kept))
        merged.append((*line[:4], kept))
    return [*merged, *waiting.made()]


def _updates_of(nodes: Sequence[fx.Node], over: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, AdamUpdate]:
    """The updates that the calls of a code make, by each of their calls: those of which it has all calls, none in
    common with another's, and no reader of a new value before all of them are made."""
    places: dict[fx.Node, list[int]] = {}
    for at, node in enumerate(nodes):
        places.setdefault(node, []).append(at)
    of: dict[fx.Node, AdamUpdate] = {}
    for value in over:
        update = adam_update(value, over)
        if update is None or not update.calls <= places.keys() or update.calls & of.keys():
            continue
        end = max(places[call][-1] for call in update.calls)
        readers = {user for value in update.new for user in value.users} - update.calls
        if all(places[user][0] > end for user in readers if user in places):
            of |= dict.fromkeys(update.calls, update)
    return of
