"""What is false of calls that compute attention of a rank's rows (`shardc.ir.ops.attention_rows`), and of their rings.

    %k.next   = next_keys(%k, [cp])                                        k : f32[2, 4, 16@cp, 8]
    %o, %lse  = sdpa_rows(%q, %k, %v, ..., rows="16", axes=[cp], step=0)
    %o', %lse' = sdpa_rows(%q, %k.next, %v.next, %o, %lse, ..., step=1)    the last of two

What the steps of a ring have to be, `shardc.ir.attention_rings` says. Types say of keys that have come from elsewhere
that they lie as their owner has them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from shardc.ir.attention_rings import SO_FAR, ring_faults, stray
from shardc.ir.blocks import Blocks
from shardc.ir.graph import info, operands, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.attention import SDPA, SDPA_BWD
from shardc.ir.ops.attention_keys import SDPA_KEYS, SDPA_KEYS_BWD
from shardc.ir.ops.attention_rows import (
    ALL_KEYS,
    REACH_ROWS,
    SDPA_HEADS,
    SDPA_HEADS_BWD,
    SDPA_RING,
    SDPA_RING_BWD,
    SDPA_ROWS,
    SDPA_ROWS_BWD,
    reach,
)
from shardc.ir.ops.attention_window import window_fault
from shardc.ir.schema import given
from shardc.ir.types import Axes, TensorType
from shardc.rules.attention_rows import implied, keys_are_rows, rows_text
from shardc.rules.halo import with_rows

Declared = Sequence[TensorType | None]
BY_ROWS = (SDPA_ROWS, SDPA_ROWS_BWD)
WHOLE = (SDPA, SDPA_BWD)
ASKED = (SDPA_RING, SDPA_RING_BWD, SDPA_HEADS, SDPA_HEADS_BWD, SDPA_KEYS, SDPA_KEYS_BWD)
# What a call on rows stands for, where it has all keys and where it is a step of a ring.
MEANING: Mapping[Any, tuple[Any, Any]] = {SDPA_ROWS: (SDPA, SDPA_RING), SDPA_ROWS_BWD: (SDPA_BWD, SDPA_RING_BWD)}


def uncounted(node: fx.Node) -> list[str]:
    """What is false of `sdpa` on one rank, whose rows are the first ones of its keys where the mask is implied."""
    if node.target in ASKED:
        return ["is not what a rank runs: it says how attention is to be divided"]
    args = given(node)
    axes = [axis for atom in type_of(args["q"]).dims[-2] for axis in atom.axes]
    if wrong := window_fault(args.get("window", ())):
        return [wrong]
    return [f"counts its rows from 0, and they lie over {'.'.join(axes)}"] if implied(args) and axes else []


def moved_faults(node: fx.Node, result_types: Declared, mesh: Mesh) -> list[str]:
    """What is false of `next_keys`."""
    args = given(node)
    type, axes = type_of(args["x"]), mesh.resolve(args["axes"])
    if not any(atom.axes == axes for atom in type.dims[-2]):
        return [f"takes dim {type.ndim - 2} to lie over {'.'.join(axes)}, in {type}"]
    if wrong := stray(node):
        return wrong
    return [] if result_types[0] == type else [f"yields {type}, the result says {result_types[0]}"]


def _reach_fault(type: TensorType, args: Mapping[str, Any], mesh: Mesh) -> str | None:
    """What is wrong with keys of which a window reaches some, as a call tells it."""
    axes, rows = mesh.resolve(args["axes"]), type.dims[-2]
    if wrong := window_fault(args["window"]):
        return wrong
    if not rows or rows[0].axes != axes or any(atom.axes for atom in rows[1:]) or not axes or not args["window"]:
        return f"takes keys to lie over {'.'.join(axes)}, in {type}"
    return None if rows_text(rows) == args["rows"] else f"takes its keys to be {args['rows']}, in {type}"


def reach_faults(node: fx.Node, result_types: Declared, mesh: Mesh) -> list[str]:
    """What is false of `reach_rows`, and of `reach_sum`."""
    args, after = given(node), result_types[0]
    assert after is not None
    forward = node.target is REACH_ROWS
    keys = type_of(args["x"]) if forward else after
    if (wrong := _reach_fault(keys, args, mesh)) is not None:
        return [wrong]
    if found := stray(node):
        return found
    axes = mesh.resolve(args["axes"])
    needed = reach(args["rows"], axes, args["window"], mesh)
    if forward:
        if needed.get(args["places"]) != args["length"]:
            return [f"sends {args['length']} keys {args['places']} places, where {needed.get(args['places'], 0)} do"]
        want = with_rows(keys, keys.ndim - 2, args["length"], axes, mesh)
        return [] if after == want else [f"yields {want}, the result says {after}"]
    if list(args["places"]) != list(needed) or len(args["parts"]) != len(needed):
        return [f"sums what comes from {list(args['places'])} places, where {list(needed)} do"]
    for length, part in zip(needed.values(), args["parts"], strict=True):
        if type_of(part) != with_rows(keys, keys.ndim - 2, length, axes, mesh):
            return [f"has {length} keys of {keys} in %{info(part).name} : {type_of(part)}"]
    local = math.prod(atom.local(mesh) for atom in keys.dims[-2])
    return [] if args["length"] == local else [f"yields {args['length']} keys, the result says {local}"]


def summed_faults(node: fx.Node, result_types: Declared, mesh: Mesh) -> list[str]:
    """What is false of `sum_keys`."""
    args = given(node)
    types = [type_of(args["found"]), type_of(args["arrived"])]
    if types[0] != types[1] or result_types[0] != types[0]:
        return [f"adds {types[1]} to {types[0]}, the result says {result_types[0]}"]
    return stray(node)


def rows_faults(node: fx.Node, mesh: Mesh) -> list[str]:
    """What is false of `sdpa_rows` or its backward, beside what the rule of the call that it stands for says."""
    args = given(node)
    axes, rows, step = mesh.resolve(args["axes"]), type_of(args["q"]).dims[-2], args["step"]
    if not rows or rows[0].axes != axes or any(atom.axes for atom in rows[1:]) or not axes:
        return [f"takes rows to lie over {'.'.join(axes)}, in {type_of(args['q'])}"]
    if rows_text(rows) != args["rows"]:
        return [f"takes its rows to be {args['rows']}, in {type_of(args['q'])}"]
    if wrong := window_fault(args.get("window", ())):
        return [wrong]
    so_far = [args[name] for name in SO_FAR[node.target]]
    keys = [type_of(args[name]).dims[-2] for name in ("k", "v")]
    if step == ALL_KEYS:
        if any(atom.axes for dim in keys for atom in dim) or not args["last"] or any(v is not None for v in so_far):
            return ["has all keys, and is a part of a ring"]
        length = int(Blocks.parse(args["rows"]))
        sizes = [type_of(args[name]).shape[-2] for name in ("k", "v")]
        return [f"has {sizes[0]} keys, for {length} rows"] if implied(args) and sizes != [length] * 2 else []
    if args.get("window") and step:
        length = reach(args["rows"], axes, args["window"], mesh).get(step, 0)
        some = with_rows(type_of(args["k"]), type_of(args["k"]).ndim - 2, length, axes, mesh).dims[-2]
        if keys != [some, some]:
            return [f"has other keys than the {length} of a rank that its window reaches, in {type_of(args['k'])}"]
    elif args.get("keys", ""):
        if wrong := _other_keys_fault(args, axes):
            return [wrong]
    elif keys != [rows, rows]:
        return [f"is a step of a ring whose keys lie as {type_of(args['k'])}, and its rows as {type_of(args['q'])}"]
    return ring_faults(node, mesh)


def _other_keys_fault(args: Mapping[str, Any], axes: Axes) -> str:
    """What is false of the keys of a ring that are others than its rows."""
    q, k, v = (type_of(args[name]) for name in ("q", "k", "v"))
    dim = k.dims[-2]
    size = dim[0].size if dim else 1
    if [atom.axes for atom in dim] != [axes] or v.dims[-2] != dim or (isinstance(size, Blocks) and size.copied):
        return f"takes keys to lie over {'.'.join(axes)}, in {k} and {v}"
    if rows_text(dim) != args["keys"]:
        return f"takes its keys to be {args['keys']}, in {k}"
    if args.get("window"):
        return "has a window, and other keys than its rows"
    return f"takes its keys for others, and they lie as {q}" if keys_are_rows(q, k) else ""


def own_keys(node: fx.Node, types: Sequence[TensorType | None], of: Sequence[str]) -> tuple[TensorType | None, ...]:
    """The types of a call's operands or results, where those of a few keys of another rank, or of other keys than its
    rows, are as those of keys of a rank's own rows: so they are in the call that a step stands for."""
    args = given(node)
    if not args.get("keys", "") and (not args.get("window") or args["step"] <= 0):
        return tuple(types)
    rows = type_of(args["q"]).dims[-2]
    return tuple(
        replace(type, dims=(*type.dims[:-2], rows, type.dims[-1])) if type is not None and name in KEYS else type
        for type, name in zip(types, of, strict=True)
    )


KEYS = ("k", "v", "dk", "dv")


def stands_for(node: fx.Node) -> tuple[Any, int]:
    """The op that a call on rows stands for, and how many of its operands that op has."""
    args = given(node)
    extra = SO_FAR[node.target]
    op = MEANING[node.target][args["step"] != ALL_KEYS]
    return op, len(operands(node)) - sum(args[name] is not None for name in extra)
