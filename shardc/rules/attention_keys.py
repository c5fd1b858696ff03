"""One rank's attention, where keys lie over axes that rows do not: what `localize` makes of `sdpa_keys`.

    forward     o_i, lse_i = sdpa_part(q, k, v, ...)       o_i, lse_i : |softmax a
                lse        = merge_lse(lse_i)
                o, lse     = weigh_part(o_i, lse_i, lse)   o : |sum a
    backward    dq, dk, dv = sdpa_part_bwd(g, q, k, v, o, lse, ...)            dq : |sum a

An axis may divide the first factor of keys alone, and of rows too where the mask is implied: others would be no runs.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from shardc.ir.attention_parts import SOFTMAX, pending
from shardc.ir.blocks import Blocks
from shardc.ir.graph import info, set_info
from shardc.ir.mesh import Mesh
from shardc.ir.ops.attention_keys import (
    MERGE_LSE,
    SDPA_KEYS,
    SDPA_KEYS_BWD,
    SDPA_PART,
    SDPA_PART_BWD,
    WEIGH_PART,
)
from shardc.ir.provenance import Derivation
from shardc.ir.schema import given
from shardc.ir.types import Axes, Dim, TensorType
from shardc.rules.attention_rows import implied, rows_text
from shardc.rules.attention_rows import unfit as unfit_rows
from shardc.rules.local import LocalCall
from shardc.rules.projection import Projection
from shardc.rules.registry import by_block

ALWAYS_LOCAL = (SDPA_KEYS, SDPA_KEYS_BWD)  # which no rank runs as they are, whole operands or not


def unfit(node: fx.Node, projection: Projection, split: Mapping[int, Axes], mesh: Mesh) -> set[int]:
    """Pieces that axes cannot divide so: keys by other axes than the call says, or an inner factor or copied blocks of
    them; anything else by an axis that the call says; and rows as `attention_rows` says."""
    said = set(mesh.resolve(given(node)["axes"]))
    keys = [i for i, name in enumerate(projection.names) if name == "t" or name.startswith("t.")]
    divided = {piece for piece in keys if split.get(piece)}
    wrong = {piece for piece in divided if not {*split[piece]} <= said or piece != keys[0]}
    wrong |= {piece for piece in divided if isinstance(size := projection.sizes[piece], Blocks) and size.copied}
    wrong |= {piece for piece, axes in split.items() if piece not in keys and {*axes} & said}
    return wrong | unfit_rows(node, projection, split, mesh)


def lies(q: TensorType, k: TensorType, counted: bool, mesh: Mesh) -> tuple[str, list[str], str, list[str]]:
    """Rows and their axes, keys and theirs, as arguments of `sdpa_part`: where no mask is implied, a rank's rows are
    counted from 0."""
    rows, keys = q.dims[-2], k.dims[-2]
    if not counted:
        return str(q.local_shape(mesh)[-2]), [], rows_text(keys), _axes(keys)
    return rows_text(rows), _axes(rows), rows_text(keys), _axes(keys)


def _axes(dim: Dim) -> list[str]:
    return [axis for atom in dim for axis in atom.axes]


def _window(args: Mapping[str, Any]) -> list[list[int]]:
    return [list(args["window"])] if args.get("window") else []


@by_block
def by_keys(call: LocalCall) -> Any:
    """`sdpa_keys` on a rank's keys."""
    graph, node, args = call.graph, call.node, call.args
    told = lies(call.operands[0], call.operands[1], implied(args), graph.mesh)
    axes, window = tuple(told[-1]), _window(args)
    values = tuple(args[name] for name in ("q", "k", "v", "mask", "causal", "scale", "gqa"))
    types = tuple(pending(type, axes, SOFTMAX) for type in call.results)
    name = info(node).name
    part = graph.call(SDPA_PART, (*values, *told, *window), like=node, type=None, results=types, name=f"{name}.part")
    found: list[fx.Node] = []
    for i, type in enumerate(types):
        value = graph.fx.call_function(operator.getitem, (part, i))
        set_info(value, graph.info_like(node, SDPA_PART, type, f"{name}.part"))
        found.append(value)
    if not axes:
        return WEIGH_PART, (*found, found[1]), {}
    every = graph.call(
        MERGE_LSE, (found[1], list(axes)), like=node, type=pending(types[1], axes, ""), name=f"{name}.merge_lse",
        origin=Derivation("moved", name), cause=info(node).cause,
    )  # fmt: skip
    return WEIGH_PART, (*found, every), {}


@by_block
def backward_by_keys(call: LocalCall) -> Any:
    """The same of its backward."""
    args = call.args
    told = lies(call.operands[1], call.operands[2], implied(args), call.graph.mesh)
    values = tuple(args[name] for name in ("g", "q", "k", "v", "mask", "o", "lse", "causal", "scale", "gqa"))
    return SDPA_PART_BWD, (*values, args["need_mask"], *told, *_window(args)), {}
