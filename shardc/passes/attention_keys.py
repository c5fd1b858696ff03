"""What is false of calls that compute attention of a rank's keys (`shardc.ir.ops.attention_keys`), and of their merge.

How parts are merged, `shardc.ir.attention_parts` says. Here: that a call counts its rows and keys as they lie, and that
its types are those of `sdpa_keys`, the call on all ranks that it stands for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from shardc.ir.attention_parts import pending, read_faults
from shardc.ir.blocks import Blocks
from shardc.ir.graph import type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.attention_keys import SDPA_KEYS, SDPA_KEYS_BWD, SDPA_PART, SDPA_PART_BWD
from shardc.ir.ops.attention_window import window_fault
from shardc.ir.schema import given
from shardc.ir.types import Dim, TensorType
from shardc.rules.attention_keys import lies
from shardc.rules.attention_rows import implied

# What a call on a rank's keys stands for.
STANDS_FOR: Mapping[Any, Any] = {SDPA_PART: SDPA_KEYS, SDPA_PART_BWD: SDPA_KEYS_BWD}
Types = Sequence[TensorType | None]


def keys_faults(node: fx.Node, result_types: Types, mesh: Mesh) -> list[str]:
    """What is false of `sdpa_part` or its backward, beside what the rule of `sdpa_keys` says."""
    args = given(node)
    q, k, v = (type_of(args[name]) for name in ("q", "k", "v"))
    if k.dims[-2] != v.dims[-2]:
        return [f"has keys that lie as {k}, and values as {v}"]
    if wrong := window_fault(args.get("window", ())):
        return [wrong]
    for dim in (k.dims[-2], *([q.dims[-2]] if implied(args) else [])):
        if wrong := _no_runs(dim):
            return [f"counts {wrong}"]
    rows, row_axes, keys, axes = lies(q, k, implied(args), mesh)
    told = (args["rows"], mesh.resolve(args["row_axes"]), args["keys"], mesh.resolve(args["axes"]))
    if told != (rows, tuple(row_axes), keys, tuple(axes)):
        return [f"takes its rows to be {args['rows']} and its keys {args['keys']}, of {q} and {k}"]
    return read_faults(node, result_types, mesh) if node.target is SDPA_PART else []


def _no_runs(dim: Dim) -> str:
    if any(atom.axes for atom in dim[1:]):
        return f"along inner factors of {' '.join(map(str, dim))}"
    copied = dim and dim[0].axes and isinstance(dim[0].size, Blocks) and dim[0].size.copied
    return f"copies in {dim[0]}" if copied else ""


def as_of_whole(node: fx.Node, types: Types, mesh: Mesh) -> tuple[TensorType | None, ...]:
    """The types of a call's results as those of the call that it stands for, which merges its parts itself."""
    if node.target is not SDPA_PART:
        return tuple(types)
    axes = mesh.resolve(given(node)["axes"])
    pairs = zip(types, ("sum", ""), strict=True)
    return tuple(None if type is None else pending(type, axes, kind) for type, kind in pairs)
