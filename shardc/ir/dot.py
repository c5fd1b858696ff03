"""A graph for Graphviz: `dot -Tsvg`. Values are nodes labelled with their types; what communicates stands out.

Calls of one module are framed together, so a layer reads as a box.
"""

from __future__ import annotations

import operator

from torch import fx

from shardc.ir.collectives import collective, human_bytes
from shardc.ir.graph import Graph, info, op_name, operands, producer

FILL = {"fwd": "#e8f0fe", "bwd": "#fef3e0", "opt": "#eaf7ea"}
COLLECTIVE = "#f8c9c4"
PORT = "#eeeeee"


def emit_dot(graph: Graph) -> str:
    """The graph in the DOT language."""
    lines = [
        f"digraph {_quote(graph.name)} {{",
        f'  label={_quote(f"{graph.name}   mesh({graph.mesh})")} labelloc=t fontname="monospace"',
        '  node [shape=box style=filled fontname="monospace" fontsize=10]',
        '  edge [fontname="monospace" fontsize=8]',
    ]
    modules: dict[str, list[fx.Node]] = {}
    ids = {node: f"n{i}" for i, node in enumerate(graph.fx.nodes)}
    for port, node in zip(graph.inputs, graph.placeholders, strict=True):
        label = f"{port.role} {port.name}\n{info(node).type}"
        lines.append(f'  {ids[node]} [label={_quote(label)} fillcolor="{PORT}" shape=ellipse]')
    for node in graph.calls():
        modules.setdefault(info(node).fqn, []).append(node)
    for i, (fqn, nodes) in enumerate(modules.items()):
        drawn = [f"{ids[node]} {_call(graph, node)}" for node in nodes]
        if fqn:
            lines.append(f"  subgraph cluster_{i} {{ label={_quote(fqn)} color=gray")
            lines += [f"    {line}" for line in drawn] + ["  }"]
        else:
            lines += [f"  {line}" for line in drawn]
    for node in graph.calls():
        for value in dict.fromkeys(operands(node)):
            lines.append(_edge(ids, value, ids[node]))
    for i, (port, value) in enumerate(zip(graph.outputs, graph.output_values, strict=True)):
        lines.append(f'  out{i} [label={_quote(f"{port.role} {port.name}")} fillcolor="{PORT}" shape=ellipse]')
        lines.append(_edge(ids, value, f"out{i}"))
    return "\n".join([*lines, "}"]) + "\n"


def _call(graph: Graph, node: fx.Node) -> str:
    about = info(node)
    moved = collective(graph, node)
    types = [about.type] if about.type else [info(u).type for u in node.users if u.target is operator.getitem]
    label = [about.name, op_name(node.target), *map(str, types)]
    if moved:
        label.append(f"{'.'.join(moved.axes)}: {human_bytes(moved.bytes_per_rank)}/rank")
    return f'[label={_quote(chr(10).join(label))} fillcolor="{COLLECTIVE if moved else FILL[about.phase]}"]'


def _edge(ids: dict[fx.Node, str], value: fx.Node, to: str) -> str:
    call, index = producer(value)
    label = f" [label={_quote(str(index))}]" if call is not value else ""
    return f"  {ids[call]} -> {to}{label}"


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
