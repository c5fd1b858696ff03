"""pack_parts: where all ranks want the sum of parts of attention at once, their group meets once, not twice.

    lse = merge_lse(lse_i)                        x    = pack_part(o_i, lse_i)
    o_i, lse = weigh_part(o_i, lse_i, lse)   ->   y    = merge_parts(x)
    o = all_reduce(o_i, sum)                      o, lse = split_parts(y)

A start is saved. Of a result of n bytes in a group of g, a rank sends (g-1) n to gather it, and 2 (g-1)/g n to
all-reduce it: no more where g is 2. The rule: a start, in bytes that a link sends meanwhile, must outweigh what is sent
more. So decoding with a sharded cache, of a few KiB a layer, starts one collective instead of two.

Needs a localized body. Ensures the same values but for rounding, under the same names; fewer collectives.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from shardc.ir.attention_parts import packed, pending
from shardc.ir.collectives import collective
from shardc.ir.graph import Graph, info, results, type_of, update
from shardc.ir.hardware import DEFAULT, Hardware
from shardc.ir.ops.attention_keys import MERGE_LSE, MERGE_PARTS, PACK_PART, SPLIT_PARTS, WEIGH_PART
from shardc.ir.ops.collectives import all_reduce
from shardc.ir.provenance import Cause, Derivation
from shardc.passes.base import Pass
from shardc.passes.softmax.split_softmax import replaced


@dataclass(frozen=True)
class PackParts(Pass):
    """One collective for the parts of a call and their log-sums, where that costs less."""

    hardware: Hardware = DEFAULT

    def run(self, graph: Graph) -> Graph:
        for node in [node for node in graph.calls() if node.target is WEIGH_PART]:
            reduced = _reduced(graph, node)
            if reduced is not None and self._pays(graph, node, reduced):
                _pack(graph, node, reduced)
        return graph

    def _pays(self, graph: Graph, node: fx.Node, reduced: fx.Node) -> bool:
        o, _, every = node.args
        assert isinstance(o, fx.Node)
        assert isinstance(every, fx.Node)
        axes = tuple(every.args[1])  # type: ignore[arg-type]
        gathered = (graph.mesh.size(axes) - 1) * packed(type_of(o)).local_bytes(graph.mesh)
        moved = (collective(graph, call) for call in (every, reduced))
        sent = sum(transfer.bytes_per_rank for transfer in moved if transfer is not None)
        return gathered - sent <= self.hardware.start_bytes(axes)


def _reduced(graph: Graph, node: fx.Node) -> fx.Node | None:
    """The all-reduce over the same axes that alone reads the weighed part; None if there is none."""
    o, every = results(node)[0], node.args[2]
    if o is None or not isinstance(every, fx.Node) or every.target is not MERGE_LSE or len(o.users) != 1:
        return None
    (reader,) = o.users
    same = reader.target is all_reduce and tuple(reader.args[1:]) == ("sum", every.args[1])
    return reader if same and not {o, reader} & {*graph.seeds} else None


def _pack(graph: Graph, node: fx.Node, reduced: fx.Node) -> None:
    o, lse, every = node.args
    assert isinstance(o, fx.Node)
    assert isinstance(every, fx.Node)
    name, axes = info(node).name, tuple(every.args[1])  # type: ignore[arg-type]
    type = packed(type_of(o))
    with graph.fx.inserting_before(node):
        pack = graph.call(PACK_PART, (o, lse), like=node, type=type, name=f"{name}.packed")
        merged = graph.call(
            MERGE_PARTS, (pack, list(axes)), like=node, type=pending(type, axes, ""), name=f"{name}.merge_parts",
            origin=Derivation("moved", name), cause=Cause.joined(info(call).cause for call in (every, reduced)),
        )  # fmt: skip
    node.target, node.args = SPLIT_PARTS, (merged,)
    whole = results(node)[0]
    assert whole is not None
    declared = list(info(node).results)
    declared[0] = type_of(reduced)
    update(node, results=tuple(declared))
    update(whole, type=type_of(reduced))
    replaced(graph, reduced, whole)
    graph.fx.erase_node(every)
