"""What is false of calls that compute attention of a rank's rows (`shardc.ir.ops.attention_rows`), and of their rings.

    %k.next   = next_keys(%k, [cp])                                        k : f32[2, 4, 16@cp, 8]
    %o, %lse  = sdpa_rows(%q, %k, %v, ..., rows="16", axes=[cp], step=0)
    %o', %lse' = sdpa_rows(%q, %k.next, %v.next, %o, %lse, ..., step=1)    the last of two

A step reads keys and values that have come so many places, and continues the step before it, of the same operands; only
the last one is read by others. So none is missing, or done twice. Types say of keys that have come from elsewhere that
they lie as their owner has them. Forward a ring begins at a rank's own keys, backward it ends there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from shardc.ir.blocks import Blocks
from shardc.ir.graph import info, operands, producer, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.attention import SDPA, SDPA_BWD
from shardc.ir.ops.attention_rows import (
    ALL_KEYS,
    NEXT_KEYS,
    SDPA_HEADS,
    SDPA_HEADS_BWD,
    SDPA_RING,
    SDPA_RING_BWD,
    SDPA_ROWS,
    SDPA_ROWS_BWD,
)
from shardc.ir.schema import given
from shardc.ir.types import Axes, TensorType
from shardc.rules.attention_rows import rows_text

Declared = Sequence[TensorType | None]
BY_ROWS = (SDPA_ROWS, SDPA_ROWS_BWD)
WHOLE = (SDPA, SDPA_BWD)
ASKED = (SDPA_RING, SDPA_RING_BWD, SDPA_HEADS, SDPA_HEADS_BWD)
# What a call on rows stands for, where it has all keys and where it is a step of a ring.
MEANING: Mapping[Any, tuple[Any, Any]] = {SDPA_ROWS: (SDPA, SDPA_RING), SDPA_ROWS_BWD: (SDPA_BWD, SDPA_RING_BWD)}


def uncounted(node: fx.Node) -> list[str]:
    """What is false of `sdpa` on one rank, whose rows are the first ones of its keys where the mask is implied."""
    if node.target in ASKED:
        return ["is not what a rank runs: it says how attention is to be divided"]
    args = given(node)
    axes = [axis for atom in type_of(args["q"]).dims[-2] for axis in atom.axes]
    return [f"counts its rows from 0, and they lie over {'.'.join(axes)}"] if args["causal"] and axes else []


def moved_faults(node: fx.Node, result_types: Declared, mesh: Mesh) -> list[str]:
    """What is false of `next_keys`."""
    args = given(node)
    type, axes = type_of(args["x"]), mesh.resolve(args["axes"])
    if not any(atom.axes == axes for atom in type.dims[-2]):
        return [f"takes dim {type.ndim - 2} to lie over {'.'.join(axes)}, in {type}"]
    return [] if result_types[0] == type else [f"yields {type}, the result says {result_types[0]}"]


def rows_faults(node: fx.Node, mesh: Mesh) -> list[str]:
    """What is false of `sdpa_rows` or its backward, beside what the rule of the call that it stands for says."""
    args = given(node)
    axes, rows, step = mesh.resolve(args["axes"]), type_of(args["q"]).dims[-2], args["step"]
    if not rows or rows[0].axes != axes or any(atom.axes for atom in rows[1:]) or not axes:
        return [f"takes rows to lie over {'.'.join(axes)}, in {type_of(args['q'])}"]
    if rows_text(rows) != args["rows"]:
        return [f"takes its rows to be {args['rows']}, in {type_of(args['q'])}"]
    so_far = [args[name] for name in (("o", "lse") if node.target is SDPA_ROWS else ("dq", "dk", "dv"))]
    keys = [type_of(args[name]).dims[-2] for name in ("k", "v")]
    if step == ALL_KEYS:
        if any(atom.axes for dim in keys for atom in dim) or not args["last"] or any(v is not None for v in so_far):
            return ["has all keys, and is a part of a ring"]
        length = int(Blocks.parse(args["rows"]))
        sizes = [type_of(args[name]).shape[-2] for name in ("k", "v")]
        return [f"has {sizes[0]} keys, for {length} rows"] if args["causal"] and sizes != [length] * 2 else []
    if keys != [rows, rows]:
        return [f"is a step of a ring whose keys lie as {type_of(args['k'])}, and its rows as {type_of(args['q'])}"]
    return _ring_faults(node, args, axes, so_far, mesh)


def _ring_faults(
    node: fx.Node, args: dict[str, Any], axes: Axes, so_far: Sequence[fx.Node | None], mesh: Mesh
) -> list[str]:
    step, size, forward = args["step"], mesh.size(axes), node.target is SDPA_ROWS
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
        same = [name for name in before if name not in ("k", "v", "step", "last", *_SO_FAR[gradients])]
        if any(before[name] is not now[name] and before[name] != now[name] for name in same):
            return [f"continues %{info(source).name}, which is of other operands"]
        if [_travelled(before[name], axes, mesh)[0] for name in ("k", "v")] != list(roots):
            return [f"continues %{info(source).name}, which is of other keys"]
    return []


_SO_FAR = (("o", "lse"), ("dq", "dk", "dv"))


def stands_for(node: fx.Node) -> tuple[Any, int]:
    """The op that a call on rows stands for, and how many of its operands that op has."""
    args = given(node)
    extra = _SO_FAR[node.target is SDPA_ROWS_BWD]
    op = MEANING[node.target][args["step"] != ALL_KEYS]
    return op, len(operands(node)) - sum(args[name] is not None for name in extra)
