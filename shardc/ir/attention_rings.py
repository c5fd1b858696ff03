"""What a ring of attention has to be (`shardc.ir.ops.attention_rows`): each step once, in order, of one owner's keys.

    %k.next   = next_keys(%k, [cp])                                        k : f32[2, 4, 16@cp, 8]
    %o, %lse  = sdpa_rows(%q, %k, %v, ..., rows="16", axes=[cp], step=0)
    %o', %lse' = sdpa_rows(%q, %k.next, %v.next, %o, %lse, ..., step=1)    the last of two

A step reads keys and values that have come so many places, and continues the step before it, of the same operands; only
the last one is read by others. So none is missing, or done twice. Forward a ring begins at a rank's own keys, backward
it ends there, and the gradients of keys move one place between two steps: the last step reads what has moved of the
sum of what the step before it has found and of what had moved until then, and so on, back to the first. Types say of
what has come from elsewhere that it lies as its owner has it, so nothing but a ring may read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from shardc.ir.graph import Graph, info, producer
from shardc.ir.mesh import Mesh
from shardc.ir.ops.attention_rows import ALL_KEYS, NEXT_KEYS, SDPA_ROWS, SDPA_ROWS_BWD, SUM_KEYS
from shardc.ir.schema import given
from shardc.ir.types import Axes

# Of each op, the arguments that have what steps before have found.
SO_FAR: Mapping[Any, tuple[str, ...]] = {SDPA_ROWS: ("o", "lse"), SDPA_ROWS_BWD: ("dq", "dk", "dv")}


def broken_rings(graph: Graph) -> list[str]:
    """The faults of all rings of a graph."""
    steps = ((node, ring_faults(node, graph.mesh)) for node in graph.calls() if node.target in SO_FAR)
    moves = ((node, stray(node)) for node in graph.calls() if node.target is NEXT_KEYS)
    sums = ((node, unsummed(node)) for node in graph.calls() if node.target is SUM_KEYS)
    return [f"%{info(node).name} {fault}" for node, faults in (*steps, *moves, *sums) for fault in faults]


def stray(moved: fx.Node) -> list[str]:
    """What is false of the readers of what has moved a place."""
    return _others(moved, (*SO_FAR, NEXT_KEYS, SUM_KEYS), "is of another rank")


def unsummed(node: fx.Node) -> list[str]:
    """What is false of the readers of a sum of gradients that are under way."""
    return _others(node, (NEXT_KEYS,), "is a part of a sum")


def _others(value: fx.Node, readers: Sequence[Any], what: str) -> list[str]:
    others = [user for user in value.users if user.target not in readers]
    names = ["an output" if user.op == "output" else f"%{info(user).name}" for user in others]
    return [f"{what}, and read by {name}" for name in names]


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
            if user.target not in (node.target, NEXT_KEYS, SUM_KEYS):
                return info(value).name
    return ""


def _continues(
    node: fx.Node, so_far: Sequence[fx.Node | None], roots: Sequence[fx.Node], step: int, axes: Axes, mesh: Mesh
) -> list[str]:
    """What is wrong with the step that a step continues."""
    gradients, last = node.target is SDPA_ROWS_BWD, given(node)["last"]
    if gradients and not last and any(value is not None for value in so_far[1:]):
        return ["waits for gradients of its keys, and is not the last"]
    call: fx.Node | None = None
    for i, value in enumerate(so_far[:1] if gradients else so_far):
        if value is None or value.op != "call_function" or value.target is NEXT_KEYS:
            return [f"does not continue step {step}"]
        call, index = producer(value)
        if call.target is not node.target or index != i or given(call)["step"] != step:
            return [f"does not continue step {step} with %{info(value).name}"]
        before, now = given(call), given(node)
        same = [name for name in before if name not in ("k", "v", "step", "last", *SO_FAR[node.target])]
        if any(before[name] is not now[name] and before[name] != now[name] for name in same):
            return [f"continues %{info(value).name}, which is of other operands"]
        if [_travelled(before[name], axes, mesh)[0] for name in ("k", "v")] != list(roots):
            return [f"continues %{info(value).name}, which is of other keys"]
    if gradients and last and call is not None:
        wrong = (_not_summed(value, i, call, axes, mesh) for i, value in enumerate(so_far[1:], start=1))
        return [fault for fault in wrong if fault][:1]
    return []


def _not_summed(value: fx.Node | None, index: int, step: fx.Node, axes: Axes, mesh: Mesh) -> str:
    """What is wrong with a gradient of keys that has arrived, of which `step` is the last that added to it."""
    while True:
        number = given(step)["step"]
        total, places = (value, 0) if value is None else _travelled(value, axes, mesh)
        if total is None or places != 1:
            return f"does not continue step {number}"
        summed = total.target is SUM_KEYS
        found = given(total)["found"] if summed else total
        if found.op != "call_function" or producer(found) != (step, index) or summed != (number > 1):
            return f"does not continue step {number} with %{info(total).name}"
        if not summed:
            return ""
        value, before = given(total)["arrived"], given(step)["dq"]
        if before is None or before.op != "call_function":
            return f"continues %{info(total).name}, and nothing is before it"
        step = producer(before)[0]
        if step.target is not SDPA_ROWS_BWD or given(step)["step"] != number - 1:
            return f"continues %{info(total).name}, and step {number - 1} is not before it"
