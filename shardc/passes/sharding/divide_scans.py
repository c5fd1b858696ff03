"""Scans along a sequence that ranks have parts of, in segments: ranks can then take their steps each (`rules.scan`).

%y, %h, %starts = scan([%h0], [%x], "h:bd | x:btd | ...")      %starts : f32[2, 4, 8], of 128 steps
%y, %h, %starts = scan([%h0], [%x], "h:bd | x:btd | ...", 32)  %starts : f32[4, 4, 8], where a rank has 32
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import fx

from shardc.ir.graph import Graph, info, results, type_of, update
from shardc.ir.ops.scan import SCAN, SCAN_BACKWARD, blocks_of_steps
from shardc.ir.ops.scan_body import TIME, parse_body
from shardc.ir.schema import given
from shardc.ir.types import Atom, TensorType

Along = Callable[[fx.Node, int], bool]


def divide_scans(graph: Graph, along: Along, segment: int) -> None:
    """Put each scan, all of whose dims of time are `along` the sequence, and its backward, in segments."""
    for node in list(graph.calls()):
        if node.target is not SCAN or given(node).get("segment", 0):
            continue
        timed = list(_timed(node))
        states = len(given(node)["carried"])
        starts = results(node)[-states:]
        readers = {user for value in starts if value is not None for user in value.users}
        if not all(along(x, dim) for x, dim in timed) or any(user.target is not SCAN_BACKWARD for user in readers):
            continue
        for call in (node, *readers):
            call.args = (*(given(call)[a.name] for a in call.target._schema.arguments[:-1]), segment)  # type: ignore[union-attr]
        x, dim = timed[0]
        blocks = len(blocks_of_steps(type_of(x).shape[dim], segment))
        declared = list(info(node).results)
        for i in range(len(declared) - states, len(declared)):
            before = declared[i]
            declared[i] = before and _of_blocks(before, blocks)
        update(node, results=tuple(declared))
        for value in starts:
            if value is not None:
                update(value, type=_of_blocks(type_of(value), blocks))


def _timed(node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """The inputs that a step reads an element of, and their dims of time."""
    args = given(node)
    for (_, dims), x in zip(parse_body(args["body"]).inputs, args["inputs"], strict=True):
        if TIME in dims:
            yield x, dims.index(TIME)


def _of_blocks(type: TensorType, blocks: int) -> TensorType:
    return replace(type, dims=((Atom(blocks),), *type.dims[1:]))
