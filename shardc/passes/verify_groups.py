"""Rows of a mixture of experts lie as the calls that read them think: one of the checks of `verify`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from shardc.ir.graph import Graph, info, operands, producer, results, type_of
from shardc.ir.ops import collectives, local
from shardc.ir.ops.exchange import COMBINE_ROWS, EXCHANGE_COUNTS, EXCHANGES, ROW_MOVES
from shardc.ir.ops.expert_capacity import LIMIT_ROWS
from shardc.ir.ops.experts import GATHER_ROWS, GROUP_ROWS, UNGROUP_ROWS
from shardc.ir.schema import given

GROUPED = frozenset((GROUP_ROWS, UNGROUP_ROWS, GATHER_ROWS, LIMIT_ROWS, *EXCHANGES))
MOVES = (*collectives.COLLECTIVES, collectives.reshard, local.shard_slice, local.slice_blocks)


def groups_agree(graph: Graph) -> list[str]:
    """Rows in the order of their experts meet rows of the same grouping alone, and stay where it has put them, or are
    sent to their experts by the counts of that grouping. What was sent comes back before it is ungrouped.

    Of a stage's inputs it is not known which grouping they are of, nor where they are.
    """
    if not any(node.target in GROUPED or _is_ragged(node) for node in graph.fx.nodes):
        return []
    faults: list[str] = []
    grouping: dict[fx.Node, str] = {}  # value -> the name of its grouping; "" if it is not known
    at_experts: dict[fx.Node, bool] = {}  # value -> whether it lies by the ranks of experts; nothing if it is not known
    for node in graph.placeholders:
        if type_of(node).ragged:
            grouping[node] = ""
    for node in graph.calls():
        name, rows = info(node).name, [v for v in operands(node) if type_of(v).ragged]
        origin = info(node).origin
        if node.target is GROUP_ROWS:  # recomputed, it yields the same
            of = origin.of if origin is not None and origin.kind == "recomputed" else name
        else:
            known = {grouping.get(v, "") for v in rows} - {""}
            if len(known) > 1:
                faults.append(f"{name} reads rows of {' and '.join(sorted(known))}")
            of = next(iter(known), "")
        if node.target is LIMIT_ROWS and given(node)["layout"] and type_of(node).is_sharded:
            faults.append(f"{name} limits a rank's rows in groups")
        where, wrong = _where(node, rows, at_experts)
        faults += wrong
        for value in results(node):
            if value is None or not type_of(value).ragged:
                continue
            if where is not None:
                at_experts[value] = where
            if not rows and node.target is not GROUP_ROWS:
                faults.append(f"{info(value).name} is {type_of(value)}, of rows that nothing has grouped")
            grouping[value] = of
        if node.target in MOVES and rows and node.target not in EXCHANGES and not _is_exchange(node, rows):
            before, after = type_of(rows[0]), type_of(node)
            moved = any(before.placement[i] != after.placement[i] for i in before.bound_atoms)
            if before.ragged != after.ragged or moved:
                faults.append(f"{name} moves rows that lie as {before}, to {after}")
    for port, value in zip(graph.outputs, graph.output_values, strict=True):
        if type_of(value).ragged and port.role not in ("value", "sum"):
            faults.append(f"{port.role} {port.name} is {type_of(value)}, in an order of each rank's own")
    return faults


def _is_ragged(node: fx.Node) -> bool:
    """Has a value dims of an order of each rank's own?"""
    return node.op != "output" and (type := info(node).type) is not None and type.ragged > 0


def _is_exchange(node: fx.Node, rows: list[fx.Node]) -> bool:
    """A reshard that becomes an exchange: axes go from dim 0 to the ragged dim, or the other way."""
    if node.target is not collectives.reshard or not rows:
        return False
    before, after = type_of(rows[0]), type_of(node)
    ends = [[type.placement[i] for i in sorted(type.bound_atoms)] for type in (before, after)]
    axes = [{axis for placed in end for axis in placed} for end in ends]
    return ends[0] != ends[1] and axes[0] == axes[1]


def _where(node: fx.Node, rows: list[fx.Node], at_experts: Mapping[fx.Node, bool]) -> tuple[bool | None, list[str]]:
    """Whether the rows that a call yields lie by the ranks of experts, None if it is not known; and what is wrong."""
    name = info(node).name
    known = {at_experts[v] for v in rows if v in at_experts}
    if node.target is GROUP_ROWS:
        return False, []
    if node.target in EXCHANGES:
        moved, *notes = rows
        offs = moved if node.target is EXCHANGE_COUNTS else notes[0]
        faults: list[str] = []
        if producer(offs)[0].target is not GROUP_ROWS and offs.op != "placeholder":
            faults.append(f"{name} sends rows whose groups end at {info(offs).name}, which no grouping yields")
        if node.target in ROW_MOVES and producer(notes[1])[0].target is not EXCHANGE_COUNTS:
            faults += [] if notes[1].op == "placeholder" else [f"{name} goes by {info(notes[1]).name}, no counts"]
        if at_experts.get(moved, node.target is COMBINE_ROWS) != (node.target is COMBINE_ROWS):
            faults.append(f"{name} moves {info(moved).name}, which is there already")
        return node.target is not COMBINE_ROWS, faults
    if len(known) > 1:
        return None, [f"{name} reads rows at their tokens and rows at their experts"]
    where = next(iter(known), None)
    if where and node.target in (GATHER_ROWS, UNGROUP_ROWS):
        return None, [f"{name} reads rows that have not come back from their experts"]
    return (not where if where is not None else None) if _is_exchange(node, rows) else where, []
