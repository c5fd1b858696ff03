"""What a ring of attention has to be (`shardc.ir.ops.attention_rows`): each step once, in order, of one owner's keys.

    %k.next   = next_keys(%k, [cp])                                        k : f32[2, 4, 16@cp, 8]
    %o, %lse  = sdpa_rows(%q, %k, %v, ..., rows="16", axes=[cp], step=0)
    %o', %lse' = sdpa_rows(%q, %k.next, %v.next, %o, %lse, ..., step=1)    the last of two

A step reads keys and values that have come so many places, and continues the step before it, of the same operands; only
the last one is read by others. So none is missing, or done twice. Forward a ring begins at a rank's own keys, backward
it ends there, and the gradients of keys move one place between two steps: the last step reads what has moved of the
sum of what the step before it has found and of what had moved until then, and so on, back to the first. Types say of
what has come from elsewhere that it lies as its owner has it, so nothing but a ring may read it.

Of a window, the steps are those of the ranks that it reaches, and each reads what has come from one of them alone:

    %k.rows = reach_rows(%k, "16", [cp], window=[-2, 0], places=1, length=2)
    %k.next = next_keys(%k.rows, [cp])
    %dk     = reach_sum([next_keys(%dk', [cp], -1), ..], ..)               read by the last step of backward
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from shardc.ir.graph import Graph, info, producer
from shardc.ir.mesh import Mesh
from shardc.ir.ops.attention_rows import (
    ALL_KEYS,
    NEXT_KEYS,
    REACH_ROWS,
    REACH_SUM,
    SDPA_ROWS,
    SDPA_ROWS_BWD,
    SUM_KEYS,
    reach,
)
from shardc.ir.ops.attention_window import window_fault
from shardc.ir.schema import given
from shardc.ir.types import Axes

# Of each op, the arguments that have what steps before have found.
SO_FAR: Mapping[Any, tuple[str, ...]] = {SDPA_ROWS: ("o", "lse"), SDPA_ROWS_BWD: ("dq", "dk", "dv", "dmask")}


# What moves keys and gradients between steps, and what may read the result of each.
READERS: Mapping[Any, tuple[Any, ...]] = {
    NEXT_KEYS: (*SO_FAR, NEXT_KEYS, SUM_KEYS, REACH_SUM),
    SUM_KEYS: (NEXT_KEYS,),
    REACH_ROWS: (NEXT_KEYS,),
    REACH_SUM: (SDPA_ROWS_BWD,),
}
KEYS = ("k", "v", "dk", "dv")  # what steps take of other ranks


def broken_rings(graph: Graph) -> list[str]:
    """The faults of all rings of a graph."""
    steps = ((node, ring_faults(node, graph.mesh)) for node in graph.calls() if node.target in SO_FAR)
    moves = ((node, stray(node)) for node in graph.calls() if node.target in READERS)
    return [f"%{info(node).name} {fault}" for node, faults in (*steps, *moves) for fault in faults]


def stray(moved: fx.Node) -> list[str]:
    """What is false of the readers of what has moved a place, or is to."""
    others = [user for user in moved.users if user.target not in READERS[moved.target]]
    names = ["an output" if user.op == "output" else f"%{info(user).name}" for user in others]
    steps = [(user, given(user)) for user in moved.users if user.target in SO_FAR and user not in others]
    wrong = [
        (user, name) for user, args in steps for name, value in args.items() if value is moved and name not in KEYS
    ]
    names += [f"%{info(user).name} as {name}" for user, name in wrong]
    return [f"is of another rank, and read by {name}" for name in names]


def ring_faults(node: fx.Node, mesh: Mesh) -> list[str]:
    """What is false of a step of a ring; nothing of a call that has all keys."""
    args = given(node)
    step, axes = args["step"], mesh.resolve(args["axes"])
    if step == ALL_KEYS:
        return []
    if wrong := window_fault(args.get("window", ())):
        return [wrong]
    order = _order(node, axes, mesh)
    if step not in order:
        return [f"is step {step} of a ring of {order}"]
    roots: list[fx.Node] = []
    for name in ("k", "v"):
        root, places = _came(args[name], node, axes, mesh)
        if places != step:
            return [f"is step {step}, and %{info(args[name]).name} has come {places} places"]
        roots.append(root)
    last, so_far = step == order[-1], [args[name] for name in SO_FAR[node.target]]
    if args["last"] != last:
        return [f"is step {step} of {len(order)}, and is{'' if args['last'] else ' not'} the last"]
    if not last and (wrong := _read_elsewhere(node)):
        return [f"leaves %{wrong} to others before the last step"]
    if step == order[0]:
        return [f"begins a ring, and continues %{info(v).name}" for v in so_far if v is not None][:1]
    return _continues(node, so_far, roots, order, axes, mesh)


def _order(node: fx.Node, axes: Axes, mesh: Mesh) -> list[int]:
    """The steps of a ring."""
    args = given(node)
    window = args.get("window", ())
    others = list(reach(args["rows"], axes, window, mesh)) if window else list(range(1, mesh.size(axes)))
    return [0, *others] if node.target is SDPA_ROWS else [*others, 0]


def _came(value: fx.Node, node: fx.Node, axes: Axes, mesh: Mesh) -> tuple[fx.Node, int]:
    """Whose keys a value is, and how many places they have come."""
    window = given(node).get("window", ())
    if not window:
        return _travelled(value, axes, mesh)
    sent = given(value)["x"] if value.target is NEXT_KEYS else value
    if sent.target is not REACH_ROWS:
        return value, 0 if sent is value else -1
    said, way = given(sent), given(value)
    want = (given(node)["rows"], axes, [*window])
    places = way.get("places", 1)
    fits = (said["rows"], mesh.resolve(said["axes"]), [*said["window"]]) == want and mesh.resolve(way["axes"]) == axes
    fits = fits and reach(said["rows"], axes, window, mesh).get(places) == said["length"]
    return said["x"], places if fits and said["places"] == places else -1


def _travelled(value: fx.Node, axes: Axes, mesh: Mesh) -> tuple[fx.Node, int]:
    """Whose keys a value is that has gone from place to place, and how many places."""
    places = 0
    while value.target is NEXT_KEYS and mesh.resolve(given(value)["axes"]) == axes:
        value, places = given(value)["x"], places + given(value).get("places", 1)
    return value, places


def _read_elsewhere(node: fx.Node) -> str:
    """A result of a step that others than the next step, and what moves gradients to it, read."""
    for value in node.users:
        for user in value.users:
            if user.target not in (node.target, NEXT_KEYS, SUM_KEYS):
                return info(value).name
    return ""


def _continues(
    node: fx.Node, so_far: Sequence[fx.Node | None], roots: Sequence[fx.Node], order: Sequence[int], axes: Axes,
    mesh: Mesh,
) -> list[str]:  # fmt: skip
    """What is wrong with the steps that a step continues."""
    args = given(node)
    step, window = args["step"], args.get("window", ())
    before = order[order.index(step) - 1]
    for i, value in enumerate(so_far):
        of_keys = node.target is SDPA_ROWS_BWD and i in (1, 2)
        if node.target is SDPA_ROWS_BWD and i == 3 and not args["need_mask"]:
            if value is not None:
                return [f"continues %{info(value).name}, the gradient of a mask that needs none"]
            continue
        if of_keys:
            if step != order[-1]:  # gradients of keys are for the rank that has them, and wait for no step
                if value is not None:
                    return [f"continues %{info(value).name}, the gradient of other keys"]
                continue
            came = _returned(value, node, order[:-1], axes, mesh) if window else _summed(value, order[:-1], axes, mesh)
        else:
            came = [] if value is None else [(before, value)]
        if not came:
            return [f"does not continue step {before}"]
        for of, source in came:
            if wrong := _not_of(source, i, of, node, roots, axes, mesh):
                return [wrong]
    return []


def _summed(value: fx.Node | None, steps: Sequence[int], axes: Axes, mesh: Mesh) -> list[tuple[int, fx.Node]]:
    """What each of the steps has found, in a sum that has moved a place after each; nothing where it has not."""
    found: list[tuple[int, fx.Node]] = []
    for step in reversed(steps):
        total, places = (value, 0) if value is None else _travelled(value, axes, mesh)
        if total is None or places != 1:
            return []
        if total.target is SUM_KEYS:
            args = given(total)
            found.append((step, args["found"]))
            value = args["arrived"]
        else:
            found.append((step, total))
            value = None
    return found if value is None else []


def _returned(
    value: fx.Node | None, node: fx.Node, steps: Sequence[int], axes: Axes, mesh: Mesh
) -> list[tuple[int, fx.Node]]:
    """The gradients that have come back from each of the steps; none where one is missing."""
    if value is None or value.target is not REACH_SUM:
        return []
    said, args = given(value), given(node)
    told = (said["rows"], mesh.resolve(said["axes"]), [*said["window"]], list(said["places"]))
    if told != (args["rows"], axes, [*args["window"]], list(steps)) or len(said["parts"]) != len(steps):
        return []
    for part, places in zip(said["parts"], steps, strict=True):
        way = given(part) if part.target is NEXT_KEYS else {}
        if not way or mesh.resolve(way["axes"]) != axes or way.get("places", 1) != -places:
            return []
    return [(places, given(part)["x"]) for part, places in zip(said["parts"], steps, strict=True)]


def _not_of(
    source: fx.Node, index: int, step: int, node: fx.Node, roots: Sequence[fx.Node], axes: Axes, mesh: Mesh
) -> str:
    """Why a value is not result `index` of that step of the same ring."""
    if source.op != "call_function":
        return f"does not continue step {step}"
    call, at = producer(source)
    if call.target is not node.target or at != index or given(call)["step"] != step:
        return f"does not continue step {step} with %{info(source).name}"
    before, now = given(call), given(node)
    same = [name for name in before if name not in ("k", "v", "step", "last", *SO_FAR[node.target])]
    if any(before[name] is not now[name] and before[name] != now[name] for name in same):
        return f"continues %{info(source).name}, which is of other operands"
    if [_came(before[name], call, axes, mesh)[0] for name in ("k", "v")] != list(roots):
        return f"continues %{info(source).name}, which is of other keys"
    return ""
