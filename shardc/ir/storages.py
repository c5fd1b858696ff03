"""Which values of a per-rank body share memory: each call makes storages of its own, or views of its operands'.

That depends on strides: `view` runs as `reshape`, which copies where the strides of its operand do not allow the new
shape. torch itself is asked, on the meta device, once for each distinct call; layers repeat, so a graph of a hundred
layers asks no more than a graph of one, and the next one not at all.

    %t = transpose(%x, 1, 2)      f32[8, 4, 16, 32]    views x
    %v = view(%t, [8, 4, 512])    f32[8, 4, 512]       views x too: rows still lie one after another
    %w = view(%t, [32, 512])      f32[32, 512]         a storage of its own: batch and heads are apart in x

Few results that are no views lie in an operand's memory too: those that are written over it (`dead_operands`), and sums
that are added to (`sums`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from shardc.ir.dead_operands import over_dead_operands
from shardc.ir.graph import LITERALS, Graph, info, operands, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.accumulate import ACCUMULATE_MORE_ROWS
from shardc.ir.ops.kernels import KERNELS
from shardc.ir.types import TensorType
from shardc.torch_compat import args_of

META = torch.device("meta")
Strides = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Storage:
    """Memory of one rank, allocated for `value`, shared by its views. It never changes; a frozen class takes three
    times as long to make, and a graph has tens of thousands."""

    value: fx.Node
    bytes: int


class _Layout(NamedTuple):
    """How a result lies in memory: the position of the operand that it is a view of, None if fresh; its strides."""

    views: int | None
    shape: tuple[int, ...]
    strides: Strides
    bytes: int  # of its storage


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """What of an operand decides the layout of a result. Equal ones are one object, so that keys of them are cheap."""

    shape: tuple[int, ...]
    strides: Strides
    dtype: torch.dtype
    bytes: int


class Layouts(NamedTuple):
    """Of every value of a localized body: its storage, which views share with the value that they look into; and its
    shape, dtype and strides as far as torch can infer them, else contiguous ones. `over`: the results that are written
    over an operand, with it, whose storage they share."""

    storages: dict[fx.Node, Storage]
    operands: dict[fx.Node, Operand]
    over: dict[fx.Node, fx.Node]


def storages(body: Graph) -> dict[fx.Node, Storage]:
    """The storage of every value of a localized body."""
    return layouts(body).storages


def operand_layouts(body: Graph) -> dict[fx.Node, Operand]:
    """The shape, strides and dtype of every value, which `frozen` puts into arguments."""
    return layouts(body).operands


def unread_bytes(body: Graph, operand_of: dict[fx.Node, Operand] | None = None) -> dict[fx.Node, int]:
    """Bytes of unread results, by call of several results, as far as torch can infer the layout. `operand_of` are the
    operands of the body, where the caller knows them."""
    operand_of = operand_layouts(body) if operand_of is None else operand_of
    sizes: dict[fx.Node, int] = {}
    for node in body.calls():
        if info(node).type is None:
            used = {position for _, position in yields(node)}
            layouts = enumerate(_layouts(node, operand_of))
            size = sum(x.bytes for index, x in layouts if index not in used and x is not None and x.views is None)
            if size:
                sizes[node] = size
    return sizes


def layouts(body: Graph) -> Layouts:
    """One walk over a localized body."""
    storage_of: dict[fx.Node, Storage] = {}
    operand_of: dict[fx.Node, Operand] = {}
    mesh = body.mesh
    in_order: dict[int, Operand] = {}  # by the id of a type, of which few are many values'
    answers: dict[Any, Sequence[_Layout | None]] = {}  # by the id of an op, whose own hash is written in Python

    def contiguous(type: TensorType) -> Operand:
        operand = in_order[id(type)] = _in_order(type.local_shape(mesh), type.dtype)
        return operand

    for node in body.placeholders:
        type_ = type_of(node)
        operand_of[node] = operand = in_order.get(id(type_)) or contiguous(type_)
        storage_of[node] = Storage(node, operand.bytes)
    for node in body.calls():
        args = args_of(node)
        results: Sequence[_Layout | None] = ()
        if (args and type(args[0]) is fx.Node) or node.all_input_nodes:
            arguments = _frozen_arguments(node, args, operand_of)
            key = (id(node.target), *arguments)
            known = answers.get(key)
            results = answers[key] = _ask(node.target, *arguments) if known is None else known
        result_type = info(node).type
        for value, position in ((node, 0),) if result_type is not None else yields(node):
            type_ = result_type or type_of(value)
            operand_of[value] = operand = in_order.get(id(type_)) or contiguous(type_)
            layout = results[position] if position < len(results) else None
            if layout is None or layout.shape != operand.shape:
                storage_of[value] = Storage(value, operand.bytes)
                continue
            if layout.strides != operand.strides:
                operand_of[value] = _strided(operand.shape, layout.strides, operand.dtype, operand.bytes)
            views = layout.views
            if views is None:
                storage_of[value] = Storage(value, operand.bytes)
            else:  # nearly always of the first argument
                source = args[0] if views == 0 and args else None
                storage_of[value] = storage_of[source if type(source) is fx.Node else operands(node)[views]]
    over = over_dead_operands(body, storage_of, operand_of)
    for value, operand in over.items():
        unused = storage_of[value]
        storage_of |= {view: storage_of[operand] for view, storage in storage_of.items() if storage is unused}
    for call in body.calls_of(ACCUMULATE_MORE_ROWS):
        unused, source = storage_of[call], storage_of[operands(call)[0]]
        storage_of |= {view: source for view, storage in storage_of.items() if storage is unused}
    return Layouts(storage_of, operand_of, over)


def extended(body: Graph, known: dict[fx.Node, Operand]) -> dict[fx.Node, Operand]:
    """The operands of a body in which calls were inserted, and then read instead of others: `known` has all values but
    those of the new calls. It asks only about these, and about readers of what lies otherwise now."""
    changed: set[fx.Node] = set()
    operand_of = dict(known)
    for node in body.calls():
        if node in operand_of and node not in changed:
            continue
        if node not in changed and operand_of.keys() >= {value for value, _ in yields(node)}:
            continue
        for value in note_layout(node, operand_of, body.mesh):
            changed.update(value.users)
    return operand_of


def note_layout(node: fx.Node, operand_of: dict[fx.Node, Operand], mesh: Mesh) -> list[fx.Node]:
    """Note how the values of a call lie, given how those lie that it reads. Returns the values that were not known, or
    known to lie otherwise."""
    changed: list[fx.Node] = []
    results = _layouts(node, operand_of)
    for value, position in yields(node):
        operand = _in_order(type_of(value).local_shape(mesh), type_of(value).dtype)
        layout = results[position] if position < len(results) else None
        if layout is not None and layout.shape == operand.shape:
            operand = _strided(operand.shape, layout.strides, operand.dtype, operand.bytes)
        if operand_of.get(value) is not operand:
            operand_of[value] = operand
            changed.append(value)
    return changed


def lie_alike(call: fx.Node, value: fx.Node, operand: Operand, operand_of: dict[fx.Node, Operand]) -> bool:
    """Would all results of a call lie as they do, if a value that it reads lay as `operand`?"""
    others = {read: operand_of[read] for read in call.all_input_nodes} | {value: operand}
    return _layouts(call, others) == _layouts(call, operand_of)


def yields(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """The values of a call that something uses, each with its position among the results."""
    if info(node).type is not None:
        return [(node, 0)]
    return [(user, cast(int, user.args[1])) for user in node.users if user.target is operator.getitem]


@lru_cache(maxsize=65536)  # few differ
def _strided(shape: tuple[int, ...], strides: Strides, dtype: torch.dtype, bytes: int) -> Operand:
    return Operand(shape, strides, dtype, bytes)


@lru_cache(maxsize=65536)
def _in_order(shape: tuple[int, ...], dtype: torch.dtype) -> Operand:
    strides, step = list[int](), 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return _strided(shape, tuple(strides[::-1]), dtype, math.prod(shape) * dtype.itemsize)


def _layouts(node: fx.Node, operand_of: dict[fx.Node, Operand]) -> Sequence[_Layout | None]:
    """The layout of each result of a call; empty where torch cannot infer it: results then count as contiguous."""
    return _ask(node.target, *_frozen_arguments(node, node.args, operand_of)) if node.all_input_nodes else ()


def _frozen_arguments(
    node: fx.Node, args: tuple[Any, ...], operand_of: dict[fx.Node, Operand]
) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    """The arguments and the keyword arguments of a call as parts of a key."""
    kwargs = node.kwargs
    positional = tuple(
        [
            operand_of[arg] if type(arg) is fx.Node else arg if type(arg) in LITERALS else frozen(arg, operand_of)
            for arg in args
        ]
    )
    return positional, tuple([(name, frozen(arg, operand_of)) for name, arg in kwargs.items()]) if kwargs else ()


def frozen(arg: Any, operand_of: dict[fx.Node, Operand]) -> Any:
    """An argument as part of a key: values by their layout, lists as tuples."""
    if type(arg) in LITERALS:
        return arg
    if isinstance(arg, fx.Node):
        return operand_of[arg]
    if isinstance(arg, (list, tuple)):
        return tuple([frozen(item, operand_of) for item in cast("Sequence[Any]", arg)])
    return META if isinstance(arg, torch.device) else arg


@lru_cache(maxsize=65536)
@torch.no_grad()
def _ask(target: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> Sequence[_Layout | None]:
    tensors: list[torch.Tensor] = []

    def empty(arg: Any) -> Any:
        if isinstance(arg, Operand):
            tensors.append(torch.empty_strided(arg.shape, arg.strides, dtype=arg.dtype, device=META))
            return tensors[-1]
        return [empty(item) for item in cast("Sequence[Any]", arg)] if isinstance(arg, tuple) else arg

    arguments = [empty(arg) for arg in args]
    keywords = {name: empty(arg) for name, arg in kwargs}
    try:
        kernel = cast("Callable[..., Any]", KERNELS.get(target, target))
        results = kernel(*arguments, **keywords)
    except Exception:  # shapes that depend on data, and ops that know no meta device: torch raises all kinds
        return ()
    homes = [tensor.untyped_storage() for tensor in tensors]

    def layout(result: Any) -> _Layout | None:
        if not isinstance(result, torch.Tensor):
            return None
        home = result.untyped_storage()
        views = next((i for i, other in enumerate(homes) if other is home), None)
        return _Layout(views, tuple(result.shape), result.stride(), home.nbytes())

    return tuple([layout(result) for result in (results if isinstance(results, (list, tuple)) else (results,))])
