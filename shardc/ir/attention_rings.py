"""What a ring of attention has to be (`shardc.ir.ops.attention_rows`): each step once, in order, of one owner's keys.

    %k.next   = next_keys(%k, [cp])                                        k : f32[2, 4, 16@cp, 8]
    %o, %lse  = sdpa_rows(%q, %k, %v, ..., rows="16", axes=[cp], step=0)
    %o', %lse' = sdpa_rows(%q, %k.next, %v.next, %o, %lse, ..., step=1)    the last of two

A step reads keys and values that have come so many places, and continues the step before it, of the same operands; only
the last one is read by others. So none is missing, or done twice. Forward a ring begins at a rank's own keys, backward
it ends there, and the gradients of keys move one place between two steps. Types say of what has come from elsewhere
that it lies as its owner has it, so nothing but a ring may read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from shardc.ir.graph import Graph, info, producer
from shardc.ir.mesh import Mesh
from shardc.ir.ops.attention_rows import ALL_KEYS, NEXT_KEYS, SDPA_ROWS, SDPA_ROWS_BWD
from shardc.ir.schema import given
from shardc.ir.types import Axes

# Of each op, the arguments that have what steps before have found.
SO_FAR: Mapping[Any, tuple[str, ...]] = {SDPA_ROWS: ("o", "lse"), SDPA_ROWS_BWD: ("dq", "dk", "dv")}


def broken_rings(graph: Graph) -> list[str]:
    """The faults of all rings of a graph."""
    steps = ((node, ring_faults(node, graph.mesh)) for node in graph.calls() if node.target in SO_FAR)
    moves = ((node, stray(node)) for node in graph.calls() if node.target is NEXT_KEYS)
    return [f"%{info(node).name} {fault}" for node, faults in (*steps, *moves) for fault in faults]


def stray(moved: fx.Node) -> list[str]:
    """What is false of the readers of what has moved a place."""
    others = [user for user in moved.users if user.target not in (*SO_FAR, NEXT_KEYS)]
    names = ["an output" if user.op == "output" else f"%{info(user).name}" for user in others]
    return [f"is of another rank, and read by {name}" for name in names]


def ring_faults(node: fx.Node, mesh: Mesh) -> list[str]:
    """What is false of a step of a ring; nothing of a call that has all keys."""
    args = given(node)
    step, axes, forward = args["step"], mesh.resolve(args["axes"]), node.target is SDPA_ROWS
    if step == ALL_KEYS:
        return []
    size, so_far = mesh.size(axes), [args[name] for name in SO_FAR[node.target]]
    if not 0 <= step < size:
        return [f"is step {step} of a ring of {size}"]
    roots: list[fx.Node] = []
    for name in ("k", "v"):
        root, places = _travelled(args[name], axes, mesh)
        if places != step:
            return [f"is step {step}, and %{info(args[name]).name} has come {places} places"]
        roots.append(root)
    last = step == (size - 1 if forward else 0)
    if args["last"] != last:
        return [f"is step {step} of {size}, and is{'' if args['last'] else ' not'} the last"]
    if not last and (wrong := _read_elsewhere(node)):
        return [f"leaves %{wrong} to others before the last step"]
    first = 0 if forward else 1
    if step == first:
        return [f"begins a ring, and continues %{info(v).name}" for v in so_far if v is not None][:1]
    return _continues(node, so_far, roots, (step - 1) % size, axes, mesh)


def _travelled(value: fx.Node, axes: Axes, mesh: Mesh) -> tuple[fx.Node, int]:
    """Whose keys a value is, and how many places they have come."""
    places = 0
    while value.target is NEXT_KEYS and mesh.resolve(given(value)["axes"]) == axes:
        value, places = given(value)["x"], places + 1
    return value, places


def _read_elsewhere(node: fx.Node) -> str:
    """A result of a step that others than the next step, and what moves gradients to it, read."""
    for value in node.users:
        for user in value.users:
            if user.target not in (node.target, NEXT_KEYS):
                return info(value).name
    return ""


def _continues(
    node: fx.Node, so_far: Sequence[fx.Node | None], roots: Sequence[fx.Node], step: int, axes: Axes, mesh: Mesh
) -> list[str]:
    """What is wrong with the step that a step continues."""
    gradients = node.target is SDPA_ROWS_BWD
    for i, value in enumerate(so_far):
        moved = gradients and i > 0
        source, places = _travelled(value, axes, mesh) if value is not None and moved else (value, int(moved))
        if source is None or source.op != "call_function" or places != int(moved):
            return [f"does not continue step {step}"]
        call, index = producer(source)
        if call.target is not node.target or index != i or given(call)["step"] != step:
            return [f"does not continue step {step} with %{info(source).name}"]
        before, now = given(call), given(node)
        same = [name for name in before if name not in ("k", "v", "step", "last", *SO_FAR[node.target])]
        if any(before[name] is not now[name] and before[name] != now[name] for name in same):
            return [f"continues %{info(source).name}, which is of other operands"]
        if [_travelled(before[name], axes, mesh)[0] for name in ("k", "v")] != list(roots):
            return [f"continues %{info(source).name}, which is of other keys"]
    return []
