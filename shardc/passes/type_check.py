"""What a graph says of its values, against what its calls compute: ops, dtypes, shapes, placements, pending sums.

Nothing that the graph says of a result is used to derive it. Calls are derived from their operands, one at a time, so a
false type is found where it stands:

    %d.fc.sum : f32[64@tp] |sum dp          an all-reduce over dp left out, and its reader says f32[64@tp]:
    %update = mul(%d.fc.sum, %rate) : ...   pending in its result is sum dp, not nothing

`violations` must have found nothing: names, ports and schemas are taken to fit. What it costs is linear in distinct
calls. `compile` leaves graphs in which nothing is found; so does whoever saved a program that loads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from shardc.ir.diagnostic import Diagnostic
from shardc.ir.graph import Graph, info, op_name, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.host_copies import HOST_COPIES
from shardc.ir.schema import given
from shardc.ir.types import DTYPE_NAMES, TensorType
from shardc.passes.infer_placement import MEANT, placement_faults
from shardc.passes.infer_types import Local, UnfitOperandsError, results_of
from shardc.passes.sharding.insert_reshards import UPDATES
from shardc.passes.verify import buckets_match, groups_agree
from shardc.rules.registry import find_rule

MOST_BYTES = 2**44  # of one value on one rank: 16 TiB


@dataclass(frozen=True)
class Fault:
    """What is false of one instruction, or, without a node, of a graph."""

    graph: str
    message: str
    node: fx.Node | None = None

    def diagnostic(self, hint: str) -> Diagnostic:
        if self.node is None:
            return Diagnostic("SC410", f"@{self.graph}: {self.message}", hint=hint)
        about = info(self.node)
        return Diagnostic(
            "SC410",
            f"@{self.graph}: %{about.name}: {self.message}",
            location=about.source or None,
            source_text=about.source_text or None,
            fqn=about.fqn or None,
            tensor=about.name,
            op=op_name(self.node.target) if self.node.op == "call_function" else None,
            hint=hint,
        )


def type_faults(graph: Graph) -> list[Fault]:
    """All faults in the types of a graph's values."""
    faults: list[Fault] = []
    for node in graph.placeholders:
        if wrong := _too_large(type_of(node), graph.mesh):
            faults.append(Fault(graph.name, wrong, node))
    faults += copy_faults(graph)
    plain = without_copies(graph)
    for node in plain.calls():
        faults += [Fault(graph.name, line, node) for line in _call_faults(node, graph.mesh)]
    if not faults:  # it takes the types of members to be right
        faults += [Fault(graph.name, line) for line in (*buckets_match(plain), *groups_agree(plain))]
    return faults


def copy_faults(graph: Graph) -> list[Fault]:
    """The faults in the types of copies to the host and back."""
    copies = (node for node in graph.calls() if node.target in HOST_COPIES)
    return [Fault(graph.name, line, node) for node in copies for line in _call_faults(node, graph.mesh)]


def without_copies(graph: Graph) -> Graph:
    """A graph in which whoever reads a copy to the host, or back from there, reads what was copied; the graph itself
    where there is none. Where a value comes from does not depend on where it lies in between."""
    if not any(node.target in HOST_COPIES for node in graph.calls()):
        return graph
    plain = graph.copy()
    for node in reversed(list(plain.calls())):
        if node.target in HOST_COPIES:  # `begin` copies its first operand, and `end` is what its `begin` has made
            node.replace_all_uses_with(next(iter(given(node).values())))
            plain.fx.erase_node(node)
    return plain


def step_faults(graph: Graph) -> list[Fault]:
    """Of a whole step: nothing it takes or returns is pending, and what replaces an input lies as that does."""
    faults: list[Fault] = []
    twins = {port.name: type_of(node) for port, node in zip(graph.inputs, graph.placeholders, strict=True)}
    for node in graph.placeholders:
        if type_of(node).partial:
            faults.append(Fault(graph.name, f"the input is pending: {type_of(node)}", node))
    for port, value in zip(graph.outputs, graph.output_values, strict=True):
        type, twin = type_of(value), twins.get(port.name)
        what = f"{port.role} '{port.name}'"
        if type.partial:
            faults.append(Fault(graph.name, f"{what} is returned pending: {type}", value))
        elif port.role in UPDATES and twin is None:
            faults.append(Fault(graph.name, f"{what} is of no input", value))
        elif (
            port.role in UPDATES and twin is not None and (type.placement, type.shape) != (twin.placement, twin.shape)
        ) or (port.role in ("param", "buffer", "state") and twin != type):
            faults.append(Fault(graph.name, f"{what} is {type}, and its input {twin}", value))
        elif port.role == "loss" and type.shape != ():
            faults.append(Fault(graph.name, f"{what} is no number, but {type}", value))
    return faults


def single_faults(graph: Graph) -> list[Fault]:
    """Of a graph for one device: nothing of it is sharded or pending."""
    placed = (node for node in graph.values() if type_of(node).axes or type_of(node).partial)
    return [Fault(graph.name, f"on one device, {type_of(node)} cannot be", node) for node in placed]


def unknown_ops(graph: Graph) -> dict[str, fx.Node]:
    """The ops of which loading knows nothing, having no rule or meaning here, and the first call of each."""
    unknown: dict[str, fx.Node] = {}
    for node in graph.calls():
        if not _known(node.target):
            unknown.setdefault(op_name(node.target), node)
    return unknown


def _known(op: object) -> bool:
    return find_rule(op) is not None or op in MEANT


def _call_faults(node: fx.Node, mesh: Mesh) -> Iterator[str]:
    about = info(node)
    if not _known(node.target):
        yield f"{op_name(node.target)} has no sharding rule here, so that nothing is known of what it means"
        return
    result_types: list[TensorType | None] = [about.type] if about.type is not None else [None] * len(about.results)
    if about.type is None:
        for value in node.users:
            result_types[int(value.args[1])] = type_of(value)  # type: ignore[arg-type]
    try:
        computed = results_of(node, mesh)
    except UnfitOperandsError as wrong:
        yield f"{op_name(node.target)} does not take its operands: {wrong}"
        return
    if len(computed) < len(result_types) or (about.type is not None and len(computed) != 1):
        yield f"{op_name(node.target)} yields {len(computed)} results, and {len(result_types)} are declared"
        return
    for i, (type, local) in enumerate(zip(result_types, computed, strict=False)):
        which = f"result {i} " if about.type is None else ""
        if type is not None and (wrong := _too_large(type, mesh)):
            yield which + wrong
        elif type is not None and (local is None or Local.of(type, mesh) != local):
            yield f"{which}is {_shown(local)} on a rank, not {_shown(Local.of(type, mesh))} as in {type}"
        declared = about.results[i] if about.type is None else None
        if ((declared is None) != (local is None) and about.type is None) or (
            declared is not None
            and local is not None
            and (declared.dtype, declared.ndim) != (local.dtype, len(local.shape))
        ):
            yield f"{which}is {_shown(local)}, the call declares {declared}"
    yield from placement_faults(node, result_types, mesh)


def _shown(local: Local | None) -> str:
    return "no tensor" if local is None else f"{DTYPE_NAMES.get(local.dtype, local.dtype)}{list(local.shape)}"


def _too_large(type: TensorType, mesh: Mesh) -> str:
    if max([*type.shape, math.prod(type.shape) * type.dtype.itemsize], default=0) // mesh.world_size < MOST_BYTES:
        return ""
    return f"{type} is more than a rank can hold"
