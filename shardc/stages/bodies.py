"""A part of a graph as a graph of its own, with a port for everything that it takes and gives.

    stage 1's dgrad     %x1 = value "x1" ...       what another part made, of this microbatch
                        %w  = param "h.1.w" ...    what the stage holds
                        ...
                        return value "d.x1" = %d.x1, sum "d.b.sum" = %d.b

A "value" passes from part to part, within a stage or between two; a "sum" is what a microbatch adds to a sum over all
of them, and, among inputs, that sum. The other ports are those of the whole step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import fx

from shardc.ir.graph import Graph, Port, info, operands, producer, set_info, type_of, update
from shardc.stages.anatomy import values_of

Output = tuple[Port, fx.Node]


def extract(
    whole: Graph, name: str, calls: Iterable[fx.Node], outputs: Sequence[Output], sums: Iterable[fx.Node] = ()
) -> Graph:
    """The graph of some calls, which must be in order. What they read and do not make are its inputs."""
    listed = list(calls)
    ports = dict(zip(whole.placeholders, whole.inputs, strict=True))
    made = set(listed)
    read = [v for call in listed for v in operands(call)] + [value for _, value in outputs]
    taken = dict.fromkeys(v for v in read if producer(v)[0] not in made)
    summed = set(sums)
    fresh = fx.Graph()
    table: dict[fx.Node, fx.Node] = {}
    inputs: list[Port] = []
    for value in sorted(taken, key=lambda v: v not in ports):
        found = info(value).name
        inputs.append(ports.get(value) or Port("sum" if value in summed else "value", found))
        table[value] = node = fresh.placeholder(f"in_{len(inputs)}")
        set_info(node, replace(info(value), phase="fwd", assignment=(), passes=(), fallback=(), results=()))
    wanted = {v for call in listed for v in operands(call)} | {value for _, value in outputs}
    for call in listed:
        table[call] = copy = fresh.node_copy(call, table.__getitem__)
        for value in values_of(call):
            if value is not call and value in wanted:
                table[value] = fresh.node_copy(value, table.__getitem__)
            elif value is not call:
                _declare(copy, value)
    fresh.output(tuple(table[value] for _, value in outputs))
    return Graph(fresh, whole.mesh, inputs, [port for port, _ in outputs], name)


def _declare(call: fx.Node, value: fx.Node) -> None:
    """Note the type of a result that is not read here, as `Graph.erase_dead` does."""
    declared = list(info(call).results)
    declared[producer(value)[1]] = type_of(value).replicated()
    update(call, results=tuple(declared))
