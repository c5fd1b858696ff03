"""join_squares: one call makes the squares that a global norm is made of.

    %a.abs = abs(%d.a)
    %a.squares = sum_of_squares(%a.abs)
    %b.abs = abs(%d.b)                             ->    %s = total_of_squares([%d.a, %d.b], ["a", "b"])
    %b.squares = sum_of_squares(%b.abs)
    %s = add(%a.squares, %b.squares)

Where placements are found, an elementwise call stands before the squares of each gradient: it lies as the update does,
and so every rank looks at its own shard. What a rank runs needs neither that call nor the copy that it makes: a sign
does not matter to a square, nor does a cast that only widens.

Needs a localized body, or a part of one. Ensures the same values under the same names, to the bit on CPUs. Squares that
something else reads stay calls of their own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import fx

from shardc.ir.graph import Graph, info, operands, type_of, update
from shardc.ir.ops.squares import SUM_OF_SQUARES, TOTAL_OF_SQUARES
from shardc.ir.schema import given
from shardc.passes.base import Pass
from shardc.passes.normalize.decompositions.table import HALF

aten = torch.ops.aten
ADD = aten.add.Tensor
SQUARES_OF = re.compile(r"opt\.(.+)\.norm\.sum_of_squares")


@dataclass(frozen=True)
class JoinSquares(Pass):
    """Make one call of each chain of additions of squares."""

    def run(self, graph: Graph) -> Graph:
        if not graph.calls_of(SUM_OF_SQUARES):
            return graph
        table: dict[fx.Node, fx.Node] = {}
        graph = graph.copy(table)
        for total, squares in _chains(graph):
            _join(graph, total, squares)
        graph.erase_dead()
        return graph


def separate_squares(graph: Graph) -> None:
    """Undo the pass, in place: of a norm over several stages each has its own terms."""
    for joined in graph.calls_of(TOTAL_OF_SQUARES):
        args, total = given(joined), None
        with graph.fx.inserting_before(joined):
            for value, name in zip(args["xs"], args["of"], strict=True):
                called = graph.unique(f"opt.{name}.norm.sum_of_squares") if name else None
                term = graph.call(SUM_OF_SQUARES, (value,), like=joined, type=type_of(joined), name=called)
                total = term if total is None else graph.call(ADD, (total, term), like=joined, type=type_of(joined))
        assert total is not None
        _take_place(graph, joined, total)
        graph.fx.erase_node(joined)


def _chains(graph: Graph) -> list[tuple[fx.Node, list[fx.Node]]]:
    """The totals, each with the squares that are added up, in order; also of one alone."""
    terms: dict[fx.Node, list[fx.Node]] = {}
    for call in graph.calls():
        if call.target is SUM_OF_SQUARES:
            terms[call] = [call]
        elif call.target is ADD and len(operands(call)) == 2 and not call.kwargs:
            before, last = operands(call)
            alone = len(before.users) == len(last.users) == 1
            if before in terms and last in terms and last.target is SUM_OF_SQUARES and alone:
                terms[call] = [*terms.pop(before), *terms.pop(last)]
    return list(terms.items())


def _join(graph: Graph, total: fx.Node, squares: list[fx.Node]) -> None:
    """The total as one call, where it was."""
    matches = [SQUARES_OF.fullmatch(info(call).name) for call in squares]
    names = ["" if match is None else match[1] for match in matches]
    with graph.fx.inserting_before(total):
        args = list(map(_squared, squares)), names
        joined = graph.call(TOTAL_OF_SQUARES, args, like=total, type=type_of(total), assignment=())
    _take_place(graph, total, joined)


def _take_place(graph: Graph, old: fx.Node, new: fx.Node) -> None:
    """Let all read the new value, which gets the name of the old one."""
    graph.replace_value(old, new)
    name = info(old).name
    update(old, name=graph.unique(f"{name}.before"))
    update(new, name=name)


def _squared(call: fx.Node) -> fx.Node:
    """What is squared: of an absolute value, or of one that was widened, the value itself."""
    (value,) = operands(call)
    if value.op != "call_function" or len(value.users) > 1 or len(operands(value)) != 1:
        return value
    (read,) = operands(value)
    was, now = type_of(read), type_of(value)
    if was.with_dtype(now.dtype) != now or was.dtype.is_complex:
        return value
    is_widened = value.target is aten._to_copy.default and was.dtype in HALF and set(value.kwargs) == {"dtype"}
    return read if value.target is aten.abs.default or is_widened else value
