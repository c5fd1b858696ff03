"""Make a recorded graph one of values: what means nothing in such a graph goes, views are spelled one way."""

from __future__ import annotations

import torch
from torch import fx
from torch._ops import OpOverload

from shardc import torch_compat
from shardc.frontend.provenance import Origin, Origins
from shardc.frontend.traced import TracedInput
from shardc.frontend.unsupported import refuse_sparse
from shardc.ir.diagnostic import error

aten = torch.ops.aten


def clean(graph: fx.Graph, inputs: list[TracedInput], origins: Origins) -> dict[fx.Node, fx.Node]:
    """Erase ops that have no effect in a graph of values, and normalise views. Returns erased node -> replacement."""
    role = {i.node: i for i in inputs}
    replaced: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        target = node.target
        if node.op != "call_function" or not isinstance(target, OpOverload):
            continue
        refuse_sparse(node, origins)
        if target in torch_compat.IDENTITIES or (target is aten.t.default and node.meta["val"].dim() < 2):
            replaced[node] = node.args[0]
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif target is aten.t.default:
            node.target, node.args = aten.transpose.int, (node.args[0], 0, 1)
        elif target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.view.default
            node.args = (node.args[0], list(node.meta["val"].shape))  # no -1: sizes are rewritten per shard later
        elif target is aten.copy_.default and node.args[0] in role and not node.users:
            written = role[node.args[0]]
            if written.role == "param":
                raise error("SC104", f"forward overwrites the parameter {written.name}", hint="make it a buffer")
            graph.erase_node(node)
        elif target is aten.cat.default and any(_is_nothing(one) for one in node.args[0]):
            node.args = ([one for one in node.args[0] if not _is_nothing(one)], *node.args[1:])
        elif target.name().startswith("aten::_assert"):
            graph.erase_node(node)
        else:
            assert not torch_compat.mutates(node), f"{node.format_node()} survived functionalization"
            if torch.Tag.nondeterministic_seeded in target.tags:
                origin = origins.of.get(node, Origin())
                raise error(
                    "SC104",
                    f"the random op {target} has no layout-independent form yet",
                    location=origin.source or None,
                    source_text=origin.source_text or None,
                    fqn=origin.fqn or None,
                    hint="draw from torch.rand, randn, bernoulli or dropout instead",
                )
    return replaced


def _is_nothing(operand: fx.Node) -> bool:
    """A tensor of shape [0], which torch joins to tensors of any shape: of a cache that is empty still."""
    return tuple(operand.meta["val"].shape) == (0,)


def constants_as_inputs(graph: fx.Graph, after: fx.Node) -> dict[str, fx.Node]:
    """Turn each captured tensor into one placeholder; returns attribute of the GraphModule -> placeholder."""
    constants: dict[str, fx.Node] = {}
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        target = str(node.target)
        if target not in constants:
            with graph.inserting_after(after):
                after = constants[target] = graph.placeholder(f"constant_{len(constants)}")
        node.replace_all_uses_with(constants[target])
        graph.erase_node(node)
    return constants
