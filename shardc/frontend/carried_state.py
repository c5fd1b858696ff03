"""Would the next step read what this one left? Two traces compared, the second made over what the first has left.

Graphs are compared by what they return and what they change, each value spelled as the whole expression that computes
it. A tensor left behind that no input had a part in is spelled by its expression too, so that a table which is made
once and kept is the same as one that is made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from shardc import torch_compat
from shardc.frontend.provenance import Origin, Origins, named_at
from shardc.frontend.python_state import Change, Snapshot, left_tensors, reachable
from shardc.ir.diagnostic import Diagnostic, ShardcError, error

READ = "forward reads what an earlier step left in {}; every step of a program finds there what the first would"
COUNTED = "forward counts on in {} from step to step; every step of a program counts as the first"
KEPT = (
    "forward keeps in the cache of {} what depends on weights, on the batch or on random numbers: later steps of eager "
    "PyTorch find there what the first has left; every step of a program computes it"
)
IN_PLACE = "forward changes {} in place, a tensor that is no buffer"
HINT = "register_buffer what is to last from step to step, and change it in place; set the rest before it is read"


def carried(
    model: nn.Module,
    snapshot: Snapshot,
    first: fx.GraphModule,
    origins: Origins,
    nodes_left: Mapping[int, fx.Node],
    retrace: Callable[[], fx.GraphModule],
) -> list[Diagnostic]:
    """What steps would hand on and a program's do not: a warning (SC109) for each kind of it. Raises for a plain tensor
    that is changed in place, which no graph can say.

    The model is as the trace of `first` left it. `nodes_left`: the nodes that computed the tensors left behind, by the
    id of the tensor. `retrace` traces a second step.
    """
    if written := _changed_in_place(model, first):
        diagnostic = _warning(model, IN_PLACE, [*written])
        fields = {key: value for key, value in _place_of(next(iter(written.values())), origins).items() if value}
        raise ShardcError(replace(diagnostic, severity="error", **fields))
    changes = snapshot.changes()
    if not changes:
        return []
    between, keys = Snapshot(model), _expressions(first, {})
    inputs = _from_inputs(first.graph)
    known = {key: keys[node] for key, node in nodes_left.items() if node in keys and node not in inputs}
    unexplained = [
        c for c in changes if not (ts := [id(t) for t in left_tensors([c])]) or any(key not in known for key in ts)
    ]
    try:
        second = retrace()
    except Exception as problem:  # of a step that the user did not ask for: it is the cause, not the error
        why = f"a second step raises {type(problem).__name__}: {str(problem).partition(chr(10))[0]}"
        return [_warning(model, READ, _names(unexplained) or _names(changes), why)]
    warnings: list[Diagnostic] = []
    counted = _names(change for change in between.changes() if change.counts)
    if _effects(first, keys) != _effects(second, _expressions(second, known)):
        constants_read = {id(t) for t in _constants(second).values()} - known.keys()
        names = _names(c for c in unexplained if any(id(t) in constants_read for t in left_tensors([c])))
        names = names or [name for name in _names(unexplained) if name not in counted]
        names = names or ([] if counted else _names(changes))
        if names:
            warnings.append(_warning(model, READ, names))
    if counted:
        warnings.append(_warning(model, COUNTED, counted))
    return warnings


def kept_in_caches(
    model: nn.Module, first: fx.GraphModule, remembered: Sequence[tuple[str, list[fx.Node]]], constant: Sequence[bool]
) -> list[Diagnostic]:
    """A warning (SC109) for functions that remember what changes from step to step.

    `remembered`: what they would give again, by their names. `constant`: of the graph's inputs, from first to last,
    whether they are the same in each step.
    """
    if not remembered:
        return []
    placeholders = [node for node in first.graph.nodes if node.op == "placeholder"]
    same = {node for node, is_same in zip(placeholders, constant, strict=False) if is_same}  # the rest are the batch's
    changing = [node for node in placeholders if node not in same]
    derived = _from_inputs(first.graph, changing)
    names = [name for name, nodes in remembered if any(node in derived for node in nodes)]
    return [_warning(model, KEPT, [*dict.fromkeys(names)])] if names else []


def refuse_written_constants(gm: fx.GraphModule, origins: Origins) -> None:
    """Raise ShardcError (SC109) for a write into a tensor that is neither the model's nor made in forward: a global."""
    constants = _constants(gm)
    for node in gm.graph.nodes:
        if any(_base(written) in constants for written in torch_compat.written_by(node)):
            raise error(
                "SC109", IN_PLACE.format("what lies outside of the model"), hint=HINT, **_place_of(node, origins)
            )


def _place_of(node: fx.Node, origins: Origins) -> dict[str, str | None]:
    origin = origins.of.get(node, Origin())
    return {
        "location": origin.source or None,
        "source_text": origin.source_text or None,
        "fqn": origin.fqn or None,
    }


def _names(changes: Iterable[Change]) -> list[str]:
    return list(dict.fromkeys(change.attribute for change in changes))


def _warning(model: nn.Module, message: str, names: list[str], cause: str | None = None) -> Diagnostic:
    """The warning, at the line that first mentions the first of the attributes."""
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    fqn, fields = named_at(model, names[0])
    return Diagnostic("SC109", message.format(shown), "warning", fqn=fqn or None, cause=cause, hint=HINT, **fields)


# ------------------------------------------------------------------ graphs
def _constants(gm: fx.GraphModule) -> dict[fx.Node, Tensor]:
    return {node: getattr(gm, str(node.target)) for node in gm.graph.nodes if node.op == "get_attr"}


def _expressions(gm: fx.GraphModule, known: Mapping[int, str]) -> dict[fx.Node, str]:
    """Every value by a name for how it is computed; `known` names tensors that another graph left, by their id."""
    names: dict[fx.Node, str] = {}
    constants = _constants(gm)
    for number, node in enumerate(gm.graph.nodes):
        if node.op == "placeholder":
            names[node] = f"input {number}"
        elif node.op == "get_attr":
            names[node] = known.get(id(constants[node])) or _data(constants[node])
        elif node.op == "call_function":
            arguments: Any = fx.map_arg((node.args, node.kwargs), lambda n: names[n])
            names[node] = f"{hash(f'{node.target}{arguments}'):x}"
    return names


def _data(t: Tensor) -> str:
    """The value of a real tensor. A tensor left behind by a trace has none, and equals no other."""
    if torch_compat.is_fake(t):
        return f"left {id(t)}"
    data = b"" if t.is_meta else t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"constant {t.dtype} {list(t.shape)} {hash(data):x}"


def _effects(gm: fx.GraphModule, names: Mapping[fx.Node, str]) -> list[str]:
    """The results of a graph, and in order its writes of values that depend on its inputs."""
    inputs = _from_inputs(gm.graph)
    written = [names[node] for node in gm.graph.nodes if torch_compat.mutates(node) and node in inputs]
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    returned: Any = output.args[0]
    return [*written, *(names[node] if isinstance(node, fx.Node) else repr(node) for node in returned)]


def _from_inputs(graph: fx.Graph, inputs: Iterable[fx.Node] | None = None) -> set[fx.Node]:
    """Values that depend on an input, or on one of these, also by a write into the tensor that they are a view of."""
    derived = {node for node in graph.nodes if node.op == "placeholder"} if inputs is None else {*inputs}
    count = 0
    while count < len(derived):
        count = len(derived)
        for node in graph.nodes:
            if _base(node) in derived or any(value in derived for value in node.all_input_nodes):
                derived |= {node, *map(_base, torch_compat.written_by(node))}
    return derived


def _base(node: fx.Node) -> fx.Node:
    """The value whose memory a node's is: through views and writes in place."""
    while torch_compat.shares_memory(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _changed_in_place(model: nn.Module, gm: fx.GraphModule) -> dict[str, fx.Node]:
    """Attributes of the model that hold a plain tensor which the graph writes to, and the first node that does."""
    constants = _constants(gm)
    written: dict[int, fx.Node] = {}
    for node in gm.graph.nodes:
        for base in map(_base, torch_compat.written_by(node)):
            if base in constants:
                written.setdefault(id(constants[base]), node)
    if not written:
        return {}
    return {
        place.path.partition("[")[0]: written[id(value)] for place, value in reachable(model) if id(value) in written
    }
