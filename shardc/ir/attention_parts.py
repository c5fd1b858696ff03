"""How ranks merge the softmax over their own keys (`shardc.ir.ops.attention_keys`): each part with its own log-sums.

    %part, %sums = sdpa_part(...)                   |softmax a
    %lse         = merge_lse(%sums, [a])
    %o, %lse'    = weigh_part(%part, %sums, %lse)   |sum a, and whole

or, in one meeting:

    %packed      = pack_part(%part, %sums)          |softmax a
    %merged      = merge_parts(%packed, [a])
    %o, %lse     = split_parts(%merged)

A part says of itself that it is pending by `softmax` over the axes of its keys. Only the calls of its merge read it, so
that none is left out, taken for a sum, or weighed by another's log-sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from shardc.ir.graph import Graph, info, producer, results, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.attention_keys import MERGE_LSE, MERGE_PARTS, PACK_PART, SDPA_PART, SPLIT_PARTS, WEIGH_PART
from shardc.ir.schema import given
from shardc.ir.types import Atom, Axes, TensorType

SOFTMAX = "softmax"  # the kind of what is pending


def pending(type: TensorType, axes: Axes, kind: str) -> TensorType:
    """The type of a value that is pending by this kind over the axes, whatever it was before; no kind: it is whole."""
    others = [p for p in type.partial if p[0] not in axes]
    return type.place(type.placement, [*others, *((axis, kind) for axis in axes if kind)])


def broken_parts(graph: Graph) -> list[str]:
    """The faults of all merges of a graph."""
    checks: dict[Any, Any] = {SDPA_PART: read_faults, MERGE_LSE: merge_faults, WEIGH_PART: weigh_faults}
    checks |= {PACK_PART: pack_faults, MERGE_PARTS: merge_faults, SPLIT_PARTS: split_faults}
    calls = [(node, checks[node.target]) for node in graph.calls() if node.target in checks]
    lines = [f"%{info(node).name} {fault}" for node, check in calls for fault in check(node, _shown(node), graph.mesh)]
    strays = [v for v in graph.values() if SOFTMAX in dict(type_of(v).partial).values()]
    return lines + [
        f"%{info(v).name} is pending by {SOFTMAX}, and is no part of attention"
        for v in strays
        if v.op != "call_function" or producer(v)[0].target not in (SDPA_PART, PACK_PART)
    ]


def _shown(node: fx.Node) -> list[TensorType | None]:
    if info(node).type is not None:
        return [info(node).type]
    return [None if value is None else type_of(value) for value in results(node)]


def read_faults(node: fx.Node, result_types: Sequence[TensorType | None], mesh: Mesh) -> list[str]:
    """What is false of a part: what it says is pending of it, and who reads it."""
    axes = mesh.resolve(given(node)["axes"])
    keys = tuple(axis for atom in type_of(given(node)["k"]).dims[-2] for axis in atom.axes)
    if keys != axes:
        return [f"takes keys to lie over {'.'.join(axes) or 'no axis'}, in {type_of(given(node)['k'])}"]
    kinds = dict.fromkeys(axes, SOFTMAX)
    wrong = [t for t in result_types if t is not None and {a: k for a, k in t.partial if a in axes} != kinds]
    return [f"is pending by {SOFTMAX} over {'.'.join(axes)}, and not {t}" for t in wrong[:1]] + [
        f"leaves %{info(value).name} to %{info(user).name if user.op != 'output' else 'an output'}, which is no merge"
        for value in node.users
        for user in value.users
        if user.target not in (MERGE_LSE, WEIGH_PART, PACK_PART)
    ]


def merge_faults(node: fx.Node, result_types: Sequence[TensorType | None], mesh: Mesh) -> list[str]:
    """What is false of `merge_lse` and `merge_parts`."""
    args = given(node)
    x, axes = args["x"], mesh.resolve(args["axes"])
    if node.target is MERGE_PARTS:
        if x.target is not PACK_PART or len(x.users) > 1:
            return [f"merges %{info(x).name}, which is not packed for it alone"]
        wrong = [*_not_of_part(given(x)["o"], 0, axes, mesh)]
    else:
        wrong = [*_not_of_part(x, 1, axes, mesh)]
    return wrong or _unlike(result_types, [pending(type_of(x), axes, "")])


def packed(o: TensorType) -> TensorType:
    """The type of a part with its log-sums behind its last dim."""
    return TensorType(o.dtype, (*o.dims[:-1], (Atom(o.shape[-1] + 1),)), o.partial)


def pack_faults(node: fx.Node, result_types: Sequence[TensorType | None], mesh: Mesh) -> list[str]:
    """What is false of `pack_part`: it takes a part and its log-sums, and is read by a merge alone."""
    args = given(node)
    o, lse = args["o"], args["lse"]
    call = producer(o)[0] if o.op == "call_function" else o
    if call.target is not SDPA_PART:
        return [f"packs %{info(o).name}, which is no part of attention"]
    axes = mesh.resolve(given(call)["axes"])
    wrong = [*_not_of_part(o, 0, axes, mesh), *_not_of_part(lse, 1, axes, mesh)]
    if not wrong and producer(lse)[0] is not call:
        wrong = [f"packs %{info(o).name} with the log-sums of %{info(producer(lse)[0]).name}"]
    wrong += [f"leaves a part to {user.op}, which is no merge" for user in node.users if user.target is not MERGE_PARTS]
    return wrong or _unlike(result_types, [packed(type_of(o))])


def split_faults(node: fx.Node, result_types: Sequence[TensorType | None], mesh: Mesh) -> list[str]:
    """What is false of `split_parts`: it takes what is merged of a pack."""
    x = given(node)["x"]
    if x.target is not MERGE_PARTS or given(x)["x"].target is not PACK_PART:
        return [f"splits %{info(x).name}, which is not merged"]
    o, lse = (type_of(given(given(x)["x"])[name]) for name in ("o", "lse"))
    axes = mesh.resolve(given(x)["axes"])
    return _unlike(result_types, [pending(o, axes, ""), pending(lse, axes, "")])


def weigh_faults(node: fx.Node, result_types: Sequence[TensorType | None], mesh: Mesh) -> list[str]:
    """What is false of `weigh_part`: it takes a part, its log-sums, and what is merged of these."""
    args = given(node)
    o, lse, every = args["o"], args["lse"], args["every"]
    if o.op != "call_function" or producer(o)[0].target is not SDPA_PART:
        return [f"weighs %{info(o).name}, which is no part of attention"]
    axes = mesh.resolve(given(producer(o)[0])["axes"])
    wrong = [*_not_of_part(o, 0, axes, mesh), *_not_of_part(lse, 1, axes, mesh)]
    if wrong:
        return wrong
    if producer(lse)[0] is not producer(o)[0]:
        return [f"weighs %{info(o).name} by the log-sums of %{info(producer(lse)[0]).name}"]
    merged = every.target is MERGE_LSE and given(every)["x"] is lse and mesh.resolve(given(every)["axes"]) == axes
    if not merged and (axes or every is not lse):
        return [f"weighs %{info(o).name} by %{info(every).name}, which is not merged of its log-sums"]
    return _unlike(result_types, [pending(type_of(o), axes, "sum"), pending(type_of(lse), axes, "")])


def _not_of_part(value: fx.Node, index: int, axes: Axes, mesh: Mesh) -> Iterator[str]:
    """What is wrong with a value that is to be a result of a part over these axes."""
    call, place = producer(value) if value.op == "call_function" else (value, -1)
    if call.target is not SDPA_PART or place != index:
        yield f"merges %{info(value).name}, which is not result {index} of a part of attention"
    elif mesh.resolve(given(call)["axes"]) != axes:
        yield f"merges %{info(value).name} over {'.'.join(axes)}, whose keys lie over {'.'.join(given(call)['axes'])}"


def _unlike(result_types: Sequence[TensorType | None], want: Sequence[TensorType]) -> list[str]:
    pairs = zip(want, result_types, strict=False)
    return [f"yields {type}, the result says {shown}" for type, shown in pairs if shown is not None and shown != type]
