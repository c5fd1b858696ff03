"""Extracts a subgraph as a graph of its own, with a port for each of its inputs and outputs.

    stage 1's dgrad     %x1 = value "x1" ...       produced by another part, for this microbatch
                        %w  = param "h.1.w" ...    held by the stage
                        ...
                        return value "d.x1" = %d.x1, sum "d.b.sum" = %d.b

A "value" passes between parts, within a stage or between two stages. A "sum" output is one microbatch's term of a sum
over all microbatches; a "sum" input is that sum. The other ports are those of the whole step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import fx

from shardc.ir.graph import Graph, Port, info, operands, producer, set_info, type_of, update
from shardc.partition.step_analysis import result_values

SubgraphOutput = tuple[Port, fx.Node]


def extract_subgraph(
    graph: Graph, name: str, calls: Iterable[fx.Node], outputs: Sequence[SubgraphOutput], sums: Iterable[fx.Node] = ()
) -> Graph:
    """The graph of these calls, which must be in order. Its inputs are the values that they read and do not produce."""
    call_list = list(calls)
    ports = dict(zip(graph.placeholders, graph.inputs, strict=True))
    produced = set(call_list)
    read = [v for call in call_list for v in operands(call)] + [value for _, value in outputs]
    subgraph_inputs = dict.fromkeys(v for v in read if producer(v)[0] not in produced)
    summed = set(sums)
    fresh = fx.Graph()
    table: dict[fx.Node, fx.Node] = {}
    inputs: list[Port] = []
    for value in sorted(subgraph_inputs, key=lambda v: v not in ports):
        name_of_input = info(value).name
        inputs.append(ports.get(value) or Port("sum" if value in summed else "value", name_of_input))
        table[value] = node = fresh.placeholder(f"in_{len(inputs)}")
        set_info(node, replace(info(value), phase="fwd", assignment=(), passes=(), fallback=(), results=()))
    read_values = {v for call in call_list for v in operands(call)} | {value for _, value in outputs}
    for call in call_list:
        table[call] = copy = fresh.node_copy(call, table.__getitem__)
        for value in result_values(call):
            if value is not call and value in read_values:
                table[value] = fresh.node_copy(value, table.__getitem__)
            elif value is not call:
                _declare_unread_result(copy, value)
    fresh.output(tuple(table[value] for _, value in outputs))
    return Graph(fresh, graph.mesh, inputs, [port for port, _ in outputs], name)


def _declare_unread_result(call: fx.Node, value: fx.Node) -> None:
    """Note the type of a result that is not read here, as `Graph.erase_dead` does."""
    declared = list(info(call).results)
    declared[producer(value)[1]] = type_of(value).replicated()
    update(call, results=tuple(declared))
