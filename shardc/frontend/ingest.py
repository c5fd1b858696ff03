"""ingest: the tracer's fx graph becomes a `Graph`: typed values, names from FQNs, ports.

Names: parameters and inputs keep the user's; a call is named `<module FQN>.<op>`, in backward
`d.<module FQN>.<op>`, and numbered within its module, so editing one layer renames nothing in another.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import fx

from shardc.frontend.traced import Traced
from shardc.ir.diagnostic import error
from shardc.ir.graph import Graph, Port, ValueInfo, info, op_name, set_info, type_of, update
from shardc.ir.mesh import Mesh
from shardc.ir.ops.kernels import LAYER_NORM, LAYER_NORM_BACKWARD, NARROW
from shardc.ir.types import TensorType


def ingest(traced: Traced, mesh: Mesh) -> Graph:
    """Wrap a traced joint graph. Types are unplaced: one atom a dim."""
    if (whole := traced.whole()) is not None:
        whole.mesh = mesh
        return whole
    graph = Graph(traced.graph, mesh, [], [])
    by_node = {i.node: i for i in traced.inputs}
    inputs: list[Port] = []
    fqns: dict[str, str] = {}
    for node in list(traced.graph.nodes):
        if node.op == "output":
            continue
        if node.op == "placeholder":
            described = by_node[node]
            inputs.append(Port(described.role, described.name, tuple(described.aliases), described.trainable))
            set_info(node, ValueInfo(graph.unique(described.name), TensorType.of(node.meta["val"])))
            continue
        _merge_getitem(node)
        if node.op == "call_function":
            fqns[node.name] = _describe(graph, node, fqns)
    _refuse_namesakes(inputs)
    graph.inputs = tuple(inputs)
    graph.outputs = tuple(Port(o.role, o.name) for o in traced.outputs)
    graph.output_node.args = (tuple(o.node for o in traced.outputs),)
    graph.activations = dict(traced.modules)
    for node in traced.graph.nodes:
        if node.op == "output":
            node.meta = {}
    graph.erase_dead()
    _keep_statistics(graph)
    graph.activations = {
        k: v for k, v in graph.activations.items() if v.graph is graph.fx and (v.users or v.op == "placeholder")
    }
    return graph


def _keep_statistics(graph: Graph) -> None:
    """Layer norm's statistics of 16-bit rows are float32, as GPUs give them, and not what a trace without one says.

    See `ir.ops.kernels`. Whatever else reads them than its backward gets them as traced.
    """
    for node in list(graph.calls()):
        if node.target is not LAYER_NORM or type_of(node.all_input_nodes[0]).dtype not in NARROW:
            continue
        exact = [t and replace(t, dtype=torch.float32) for t in info(node).results]
        update(node, results=(info(node).results[0], *exact[1:]))
        for value in (user for user in list(node.users) if user.args[1] != 0):
            traced = type_of(value)
            update(value, type=replace(traced, dtype=torch.float32))
            readers = [user for user in value.users if user.target is not LAYER_NORM_BACKWARD]
            if readers:
                with graph.fx.inserting_after(value):
                    cast = graph.call(
                        torch.ops.aten._to_copy.default, (value,), {"dtype": traced.dtype}, like=value, type=traced
                    )
                for user in readers:
                    user.replace_input_with(value, cast)


def _refuse_namesakes(ports: list[Port]) -> None:
    """A program's inputs go by name alone: an argument of forward must not be called as a parameter is."""
    for name, count in Counter(port.name for port in ports).items():
        if count > 1:
            roles = " and ".join(sorted(port.role for port in ports if port.name == name))
            message = f"two inputs of the program are named '{name}': {roles}"
            raise error("SC103", message, tensor=name, hint="rename the argument of forward, or the parameter")


def rank_of(node: fx.Node) -> int:
    """The number of dims of a traced value, before or after `ingest`."""
    return node.meta["val"].ndim if "val" in node.meta else type_of(node).ndim


def _merge_getitem(node: fx.Node) -> None:
    """Keep one getitem a result."""
    if node.op != "call_function" or node.target is operator.getitem:
        return
    first: dict[int, fx.Node] = {}
    for user in list(node.users):
        if user.target is operator.getitem:
            first_user = first.setdefault(user.args[1], user)  # type: ignore[arg-type]
            if first_user is not user:
                user.replace_all_uses_with(first_user)
                node.graph.erase_node(user)


def _describe(graph: Graph, node: fx.Node, fqns: dict[str, str]) -> str:
    """Set the node's info from the tracer's meta; returns its module FQN, inherited from the forward node it undoes."""
    meta = node.meta
    value = meta["val"]
    if node.target is operator.getitem:
        call = info(node.args[0])  # type: ignore[arg-type]
        name, fqn, phase = f"{call.name}.{node.args[1]}", call.fqn, call.phase
        source, text = call.source, call.source_text
    else:
        fqn = meta.get("fqn") or fqns.get(meta.get("fwd_node") or "", "")
        phase = meta.get("phase", "fwd")
        prefix = ["d"] if phase == "bwd" else []
        library = f"{getattr(node.target, 'namespace', '')}."
        name = ".".join(
            [*prefix, *([fqn] if fqn else []), op_name(node.target).removeprefix(library).partition(".")[0]]
        )
        source, text = meta.get("source", ""), meta.get("source_text", "")
    single = isinstance(value, torch.Tensor)
    types = (
        tuple(TensorType.of(v) if isinstance(v, torch.Tensor) else None for v in value) if _is_sequence(value) else ()
    )
    set_info(
        node,
        ValueInfo(
            graph.unique(name),
            TensorType.of(value) if single else None,
            types,
            fqn=fqn,
            source=source,
            source_text=text,
            phase=phase,
        ),
    )
    return fqn


def _is_sequence(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, torch.Tensor)
