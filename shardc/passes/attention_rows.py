"""What is false of calls that compute attention of a rank's rows (`shardc.ir.ops.attention_rows`), and of their rings.

    %k.next   = next_keys(%k, [cp])                                        k : f32[2, 4, 16@cp, 8]
    %o, %lse  = sdpa_rows(%q, %k, %v, ..., rows="16", axes=[cp], step=0)
    %o', %lse' = sdpa_rows(%q, %k.next, %v.next, %o, %lse, ..., step=1)    the last of two

What the steps of a ring have to be, `shardc.ir.attention_rings` says. Types say of keys that have come from elsewhere
that they lie as their owner has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from shardc.ir.attention_rings import SO_FAR, ring_faults, stray, unsummed
from shardc.ir.blocks import Blocks
from shardc.ir.graph import operands, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.attention import SDPA, SDPA_BWD
from shardc.ir.ops.attention_rows import (
    ALL_KEYS,
    SDPA_HEADS,
    SDPA_HEADS_BWD,
    SDPA_RING,
    SDPA_RING_BWD,
    SDPA_ROWS,
    SDPA_ROWS_BWD,
)
from shardc.ir.schema import given
from shardc.ir.types import TensorType
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
    if wrong := stray(node):
        return wrong
    return [] if result_types[0] == type else [f"yields {type}, the result says {result_types[0]}"]


def summed_faults(node: fx.Node, result_types: Declared, mesh: Mesh) -> list[str]:
    """What is false of `sum_keys`."""
    args = given(node)
    types = [type_of(args["found"]), type_of(args["arrived"])]
    if types[0] != types[1] or result_types[0] != types[0]:
        return [f"adds {types[1]} to {types[0]}, the result says {result_types[0]}"]
    return unsummed(node)


def rows_faults(node: fx.Node, mesh: Mesh) -> list[str]:
    """What is false of `sdpa_rows` or its backward, beside what the rule of the call that it stands for says."""
    args = given(node)
    axes, rows, step = mesh.resolve(args["axes"]), type_of(args["q"]).dims[-2], args["step"]
    if not rows or rows[0].axes != axes or any(atom.axes for atom in rows[1:]) or not axes:
        return [f"takes rows to lie over {'.'.join(axes)}, in {type_of(args['q'])}"]
    if rows_text(rows) != args["rows"]:
        return [f"takes its rows to be {args['rows']}, in {type_of(args['q'])}"]
    so_far = [args[name] for name in SO_FAR[node.target]]
    keys = [type_of(args[name]).dims[-2] for name in ("k", "v")]
    if step == ALL_KEYS:
        if any(atom.axes for dim in keys for atom in dim) or not args["last"] or any(v is not None for v in so_far):
            return ["has all keys, and is a part of a ring"]
        length = int(Blocks.parse(args["rows"]))
        sizes = [type_of(args[name]).shape[-2] for name in ("k", "v")]
        return [f"has {sizes[0]} keys, for {length} rows"] if args["causal"] and sizes != [length] * 2 else []
    if keys != [rows, rows]:
        return [f"is a step of a ring whose keys lie as {type_of(args['k'])}, and its rows as {type_of(args['q'])}"]
    return ring_faults(node, mesh)


def stands_for(node: fx.Node) -> tuple[Any, int]:
    """The op that a call on rows stands for, and how many of its operands that op has."""
    args = given(node)
    extra = SO_FAR[node.target]
    op = MEANING[node.target][args["step"] != ALL_KEYS]
    return op, len(operands(node)) - sum(args[name] is not None for name in extra)
