"""Scans along a sequence that ranks have parts of, in segments: ranks can then take their steps each (`rules.scan`).

%y, %h, %starts = scan([%h0], [%x], "h:bd | x:btd | ...")      %starts : f32[2, 4, 8], of 128 steps
%y, %h, %starts = scan([%h0], [%x], "h:bd | x:btd | ...", [32, 32, 32, 32])    %starts : f32[4, 4, 8], of 4 ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch import fx

from shardc.ir.graph import Graph, info, results, type_of, update
from shardc.ir.ops.scan import SCAN, SCAN_BACKWARD
from shardc.ir.ops.scan_body import TIME, parse_body
from shardc.ir.ops.step_runs import segments_of, starts_of
from shardc.ir.schema import given
from shardc.ir.types import Atom, Axes, TensorType

Along = Callable[[fx.Node, int], bool]


def scans_along(graph: Graph, along: Along) -> list[fx.Node]:
    """The scans all of whose dims of time are `along` the sequence, and whose starts nothing but backward reads."""
    found: list[fx.Node] = []
    for node in graph.calls():
        if node.target is SCAN and all(along(x, dim) for x, dim in timed(node)):
            readers = {user for value in _starts(node) for user in value.users}
            found += [node] if all(user.target is SCAN_BACKWARD for user in readers) else []
    return found


def divide_scans(graph: Graph, scans: Sequence[fx.Node], source: str, axes: Axes) -> None:
    """Put scans along a sequence that lies so, and their backward, in the segments that ranks have."""
    segments = segments_of(source, axes, graph.mesh)
    blocks = starts_of(source, segments)
    for node in scans:
        for call in (node, *(user for value in _starts(node) for user in value.users)):
            names = [a.name for a in call.target._schema.arguments[:-1]]  # type: ignore[union-attr]
            call.args = (*(given(call)[name] for name in names), segments)
        declared, states = list(info(node).results), len(given(node)["carried"])
        for i in range(len(declared) - states, len(declared)):
            before = declared[i]
            declared[i] = before and _of_blocks(before, blocks)
        update(node, results=tuple(declared))
        for value in _starts(node):
            update(value, type=_of_blocks(type_of(value), blocks))


def _starts(node: fx.Node) -> list[fx.Node]:
    """The starts that a scan keeps, of those that are read."""
    return [value for value in results(node)[-len(given(node)["carried"]) :] if value is not None]


def timed(node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """The inputs that a step reads an element of, and their dims of time."""
    args = given(node)
    for (_, dims), x in zip(parse_body(args["body"]).inputs, args["inputs"], strict=True):
        if TIME in dims:
            yield x, dims.index(TIME)


def _of_blocks(type: TensorType, blocks: int) -> TensorType:
    return replace(type, dims=((Atom(blocks),), *type.dims[1:]))
