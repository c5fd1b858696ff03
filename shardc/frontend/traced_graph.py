"""What becomes of a traced graph last: outputs that are inputs are copied, nodes and calls of modules are named.

%mul   forward 3 of module "h"          meta: fqn "h", phase "fwd"
%mul_1 backward of the same forward     meta: fqn "h", phase "bwd", fwd_node "mul"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from shardc.frontend.provenance import Origin, Origins
from shardc.frontend.traced import TracedInput, TracedOutput

aten = torch.ops.aten


def copied(graph: fx.Graph, result: TracedOutput) -> TracedOutput:
    """A buffer that becomes what an input was is a copy of it, and so is an output that is one: the input may be
    changed before the step ends, or after it."""
    if result.role not in ("buffer", "output") or result.node.op != "placeholder":
        return result
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        copy_of = graph.call_function(aten.clone.default, (result.node,))
    copy_of.meta["val"] = result.node.meta["val"]
    return replace(result, node=copy_of)


def calls_of(graph: fx.Graph, origins: Origins, replaced: dict[fx.Node, fx.Node]) -> dict[str, fx.Node]:
    """What each call of a module returned: "h" of the first, "h#2" of the second."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    returned: dict[str, set[fx.Node]] = {}
    for name, node in origins.module_outputs:
        while node in replaced:
            node = replaced[node]
        if node in order:
            returned.setdefault(name, set()).add(node)
    return {
        name if i == 1 else f"{name}#{i}": node
        for name, nodes in returned.items()
        for i, node in enumerate(sorted(nodes, key=lambda n: order[n]), 1)
    }


def rewrite_meta(graph: fx.Graph, inputs: Sequence[TracedInput], origins: Origins) -> None:
    """Leave of each node's meta its value, module, source line, phase, and the forward node that it belongs to."""
    owner = {i.node: i.name.rpartition(".")[0] for i in inputs if i.role in ("param", "buffer")}
    first: dict[int, str] = {}
    for node in graph.nodes:
        origin = origins.of.get(node, Origin())
        fqn, fwd_node = origin.fqn, None
        if node.op in ("placeholder", "output"):
            origin = Origin(phase="bwd" if node.op == "output" else "fwd")
            fqn = owner.get(node, "")
        elif origin.number is not None and origin.phase == "fwd":
            first.setdefault(origin.number, node.name)
        elif origin.number is not None:
            fwd_node = first.get(origin.number)
        node.meta = {
            "val": node.meta.get("val"),
            "fqn": fqn,
            "source": origin.source,
            "source_text": origin.source_text,
            "phase": origin.phase,
            "fwd_node": fwd_node,
        }
