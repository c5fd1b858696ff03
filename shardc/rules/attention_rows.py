"""One rank's attention, where the rows of its sequence lie over axes: what `localize` makes of `sdpa` and its kin.

    sdpa, sdpa_heads     implied    sdpa_rows(q, k, v, ...)                     a rank's rows, and all keys
                         else       sdpa(q, k, v, ...)                          its rows are like any others
    sdpa_ring            forward    o, lse = sdpa_rows(q, k, v, step=0)         own keys
                                    k, v   = next_keys(k), next_keys(v)         while that is computed
                                    o, lse = sdpa_rows(q, k, v, o, lse, step=1) those of the rank before, and so on
                         backward   dq, dk, dv = sdpa_rows_bwd(.., step=1)      others' keys first
                                    a, b       = next_keys(dk), next_keys(dv)   gradients travel with their keys
                                    dq, dk, dv = sdpa_rows_bwd(.., step=2)      while that is computed
                                    a, b       = next_keys(sum_keys(dk, a)), .. and so on
                                    dq, dk, dv = sdpa_rows_bwd(.., step=0)      back at the rank that has the keys

                window     k', v' = next_keys(reach_rows(k)), ..            what it reaches of others' keys
                           dk, dv = reach_sum(next_keys(dk'), ..)           their gradients, back at the keys

So the last call of a ring has the results of the call that it stands for. An axis may divide the first factor of a
sequence alone, since rows of others would be no runs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from shardc.ir.blocks import Block, Blocks
from shardc.ir.graph import info, set_info, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.attention import SDPA, SDPA_BWD
from shardc.ir.ops.attention_rows import (
    ALL_KEYS,
    NEXT_KEYS,
    REACH_ROWS,
    REACH_SUM,
    SDPA_RING,
    SDPA_RING_BWD,
    SDPA_ROWS,
    SDPA_ROWS_BWD,
    SUM_KEYS,
    reach,
)
from shardc.ir.provenance import Derivation
from shardc.ir.schema import given
from shardc.ir.types import Axes, Dim, TensorType
from shardc.rules.halo import with_rows
from shardc.rules.local import LocalCall
from shardc.rules.notation import Dims
from shardc.rules.projection import Projection
from shardc.rules.registry import by_block

RINGS = (SDPA_RING, SDPA_RING_BWD)


def row_pieces(projection: Projection) -> list[int]:
    """The pieces of query rows, major first."""
    return [i for i, name in enumerate(projection.names) if name == "s" or name.startswith("s.")]


def rows_text(dim: Dim) -> str:
    """The rows of a sequence as an argument of `sdpa_rows`: blocks, of which axes divide the pieces. One row has no
    atoms."""
    if not dim:
        return "1"
    first, *rest = dim
    inner = math.prod(atom.size for atom in rest)
    parts = first.size.parts if isinstance(first.size, Blocks) else (Block(first.size),)
    return str(Blocks(replace(block, unit=block.unit * inner) for block in parts))


def implied(args: Mapping[str, Any]) -> bool:
    """Is the mask of a call, or a part of it, one of positions, so that its rows are counted?"""
    return bool(args["causal"] or args.get("window"))


def keys_are_rows(q: Dims | TensorType, k: Dims | TensorType) -> bool:
    """Of a ring, are there as many keys as rows, and is neither or are both in blocks? Else only axes are the same."""
    return q.shape[-2] == k.shape[-2] and (q.ndim - 2 in q.in_blocks) == (k.ndim - 2 in k.in_blocks)


def unfit(node: fx.Node, projection: Projection, split: Mapping[int, Axes], mesh: Mesh) -> set[int]:
    """Pieces of rows that axes cannot divide so: of a call that counts its rows or a ring any but the first; of one
    that counts them and is no ring, and has more keys than rows or fewer, all; of a call that divides heads along an
    axis, rows along that one.
    """
    args, pieces = given(node), [piece for piece in row_pieces(projection) if split.get(piece)]
    ring = node.target in RINGS
    if implied(args) and not ring and type_of(args["q"]).shape[-2] != type_of(args["k"]).shape[-2]:
        return {*pieces}
    others = {*pieces} - {*row_pieces(projection)[:1]} if implied(args) or ring else set[int]()
    return others | {piece for piece in pieces if {*split[piece]} & {*args.get("heads", ())}}


class _Rows:
    """Of a call, over which axes its rows lie; and the arguments by which a call on a rank's rows is told so."""

    def __init__(self, call: LocalCall, q: int) -> None:
        self.call, self.args = call, call.args
        self.axes = tuple(axis for piece in row_pieces(call.projection) for axis in call.split.get(piece, ()))
        self.type = call.operands[q]
        self.ring = call.node.target in RINGS
        self.text, self.window = rows_text(self.type.dims[-2]), list(call.args.get("window", ()))
        keys = call.operands[q + 1]
        # Of a ring with other keys than its rows, how these lie.
        self.keys = rows_text(keys.dims[-2]) if self.ring and not keys_are_rows(self.type, keys) else ""

    @property
    def by_rows(self) -> bool:
        return bool(self.axes) and (self.ring or implied(self.args))

    def told(self, step: int, last: bool) -> tuple[Any, ...]:
        more = [self.window, self.keys] if self.keys else [self.window] if self.window else []
        return (self.text, list(self.axes), step, last, *more)

    def moved(self, value: fx.Node, places: int = 1) -> fx.Node:
        """What the rank so many places before has of a value."""
        args = (value, list(self.axes), *([places] if places != 1 else []))
        return self._call(NEXT_KEYS, args, type_of(value), value, "next_keys")

    # ------------------------------------------------------------------ what a window reaches
    @property
    def reach(self) -> dict[int, int]:
        return reach(self.text, self.axes, self.window, self.call.graph.mesh)

    def came(self, value: fx.Node, places: int) -> fx.Node:
        """Of a value of keys, what comes from the rank so many places before."""
        length, type = self.reach[places], type_of(value)
        some = with_rows(type, type.ndim - 2, length, self.axes, self.call.graph.mesh)
        args = (value, self.text, list(self.axes), self.window, places, length)
        return self.moved(self._call(REACH_ROWS, args, some, value, "reach_rows"), places)

    def back(self, parts: Mapping[int, fx.Node], type: TensorType) -> fx.Node | None:
        """The gradients of all that has come of a value, at their places in one of this type."""
        returned = [self.moved(part, -places) for places, part in parts.items()]
        if not returned:
            return None
        length = self.type.dims[-2]
        rows = math.prod(atom.local(self.call.graph.mesh) for atom in length)
        args = (returned, self.text, list(self.axes), self.window, list(parts), rows)
        return self._call(REACH_SUM, args, type, returned[0], "reach_sum")

    def _call(self, target: Any, args: tuple[Any, ...], type: TensorType, of: fx.Node, what: str) -> fx.Node:
        about = info(of)
        origin = about.origin or Derivation("moved", about.name)
        return self.call.graph.call(
            target, args, like=self.call.node, type=type,
            name=f"{origin.of}.{what}", origin=origin, cause=about.cause or info(self.call.node).cause,
        )  # fmt: skip

    def summed(self, found: fx.Node, arrived: fx.Node) -> fx.Node:
        """Gradients of keys that a step has found and those of the steps before it."""
        name = f"{info(self.call.node).name}.sum_keys"
        return self.call.graph.call(SUM_KEYS, (found, arrived), like=self.call.node, type=type_of(found), name=name)

    def stepped(self, target: Any, args: tuple[Any, ...], types: tuple[TensorType, ...], read: int) -> list[fx.Node]:
        """A call of several results before this one, and the first ones of them, that are read."""
        graph, node = self.call.graph, self.call.node
        base = info(node).name
        step = graph.call(target, args, like=node, type=None, results=types, name=f"{base}.step")
        found: list[fx.Node] = []
        for i, type in enumerate(types[:read]):
            value = graph.fx.call_function(operator.getitem, (step, i))
            set_info(value, graph.info_like(node, target, type, f"{base}.step"))
            found.append(value)
        return found


def _wide(type: TensorType) -> TensorType:
    return type.with_dtype(torch.float64 if type.dtype == torch.float64 else torch.float32)


@by_block
def by_rows(call: LocalCall) -> Any:
    """`sdpa`, `sdpa_heads` or `sdpa_ring` on a rank's rows."""
    rows, args = _Rows(call, 0), call.args
    q, k, v, mask = (args[name] for name in ("q", "k", "v", "mask"))
    options = (args["causal"], args["scale"], args["gqa"])
    if not rows.by_rows:
        return SDPA, (q, k, v, mask, *options, *([rows.window] if rows.window else [])), {}
    if not rows.ring:
        return SDPA_ROWS, (q, k, v, mask, None, None, *options, *rows.told(ALL_KEYS, True)), {}
    o: fx.Node | None = None
    lse: fx.Node | None = None
    keys, values = k, v
    *steps, last = (0, *rows.reach) if rows.window else range(call.graph.mesh.size(rows.axes))
    for step, following in pairwise((*steps, last)):
        if rows.window:
            after = rows.came(k, following), rows.came(v, following)
        else:
            after = rows.moved(keys), rows.moved(values)
        arguments = (q, keys, values, mask, o, lse, *options, *rows.told(step, False))
        o, lse = rows.stepped(SDPA_ROWS, arguments, (_wide(call.results[0]), call.results[1]), 2)
        keys, values = after
    return SDPA_ROWS, (q, keys, values, mask, o, lse, *options, *rows.told(last, True)), {}


@by_block
def backward_by_rows(call: LocalCall) -> Any:
    """The same of their backward."""
    rows, args = _Rows(call, 1), call.args
    g, q, k, v, mask, o, lse = (args[name] for name in ("g", "q", "k", "v", "mask", "o", "lse"))
    options = (args["causal"], args["scale"], args["gqa"], args["need_mask"])
    if not rows.by_rows:
        return SDPA_BWD, (g, q, k, v, mask, o, lse, *options, *([rows.window] if rows.window else [])), {}
    if not rows.ring:
        return SDPA_ROWS_BWD, (g, q, k, v, mask, o, lse, *[None] * 4, *options, *rows.told(ALL_KEYS, True)), {}
    dq: fx.Node | None = None
    dmask: fx.Node | None = None
    needed = args["need_mask"] and mask is not None
    types = (*map(_wide, call.results[:3]), _wide(call.results[3]))
    if rows.window:
        parts: list[dict[int, fx.Node]] = [{}, {}]
        for places in rows.reach:
            keys, values = rows.came(k, places), rows.came(v, places)
            arguments = (g, q, keys, values, mask, o, lse, dq, None, None, dmask, *options, *rows.told(places, False))
            came = [replace(t, dims=type_of(part).dims) for t, part in zip(types[1:3], (keys, values), strict=True)]
            of_keys = (types[0], *came, types[3])
            dq, parts[0][places], parts[1][places], *more = rows.stepped(SDPA_ROWS_BWD, arguments, of_keys, 3 + needed)
            dmask = more[0] if needed else None
        dk, dv = rows.back(parts[0], types[1]), rows.back(parts[1], types[2])
        return SDPA_ROWS_BWD, (g, q, k, v, mask, o, lse, dq, dk, dv, dmask, *options, *rows.told(0, True)), {}
    arrived: list[fx.Node] = []
    size = call.graph.mesh.size(rows.axes)
    keys, values = rows.moved(k), rows.moved(v)
    for step in range(1, size):
        following = (rows.moved(keys), rows.moved(values)) if step < size - 1 else (k, v)
        arguments = (g, q, keys, values, mask, o, lse, dq, None, None, dmask, *options, *rows.told(step, False))
        dq, *found = rows.stepped(SDPA_ROWS_BWD, arguments, types, 3 + needed)
        dmask = found.pop() if needed else None
        sums = [rows.summed(*pair) for pair in zip(found, arrived, strict=True)] if arrived else found
        arrived = [rows.moved(value) for value in sums]
        keys, values = following
    return SDPA_ROWS_BWD, (g, q, k, v, mask, o, lse, dq, *arrived, dmask, *options, *rows.told(0, True)), {}
