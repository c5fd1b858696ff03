"""sum_parts: the sum over the rows of parts that lie side by side is made of the parts' sums.

    %dqkv = cat([%dq, %dk, %dv], 2)              [4, 128, (3 256)]: what two products read
    %rows = view(%dqkv, [512, 768])
    %db = sum(%rows, [0], True)            ->    %db = cat([sum(%dq, ..), sum(%dk, ..), sum(%dv, ..)], 1)

So a kernel that writes the parts side by side has what it needs of the sum in registers, and nothing reads them again:
of a layer whose query, key and value are one product, the bias' gradient. Without kernels the sums would read as much
as before, in more calls: this is for programs that have them.

Needs: a normalized graph. Ensures: the sum has its name and type; the same value up to the order of additions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import Graph, info, operands, type_of, update
from shardc.ir.schema import given
from shardc.ir.types import TensorType
from shardc.passes.base import Pass

aten = torch.ops.aten
MOST = 8  # parts


@dataclass(frozen=True)
class SumParts(Pass):
    """Take the sums of parts that lie side by side apart, if `enabled`."""

    enabled: bool = True

    def run(self, graph: Graph) -> Graph:
        for total in list(graph.calls_of(aten.sum.dim_IntList)) if self.enabled else []:
            joined = _joined(total)
            if joined is not None:
                _take_apart(graph, total, joined)
        return graph


def _joined(total: fx.Node) -> fx.Node | None:
    """The concatenation along columns whose rows are summed."""
    (rows,) = operands(total)
    joined = operands(rows)[0] if rows.target is aten.view.default else rows
    if joined.target is not aten.cat.default:
        return None
    args, shape, whole = given(total), type_of(rows).shape, type_of(joined).shape
    summed = {dim % len(shape) for dim in args.get("dim") or ()}
    along = given(joined).get("dim", 0) % len(whole) == len(whole) - 1
    parts = operands(joined)
    fits = shape[-1:] == whole[-1:] and along and summed == set(range(len(shape) - 1)) and summed
    same = {type_of(value).dtype for value in (*parts, total)} == {type_of(joined).dtype}
    sized = all(type_of(part).shape[:-1] == whole[:-1] and type_of(part).shape[-1] for part in parts)
    return joined if fits and same and sized and 2 <= len(parts) <= MOST else None


def _take_apart(graph: Graph, total: fx.Node, joined: fx.Node) -> None:
    about, dtype = info(total), type_of(total).dtype
    (rows,) = operands(total)
    args, lead = given(total), list(type_of(rows).shape[:-1])
    dims, keeps = args["dim"], args.get("keepdim", False)
    sums: list[fx.Node] = []

    def call(target: Any, args: tuple[Any, ...], shape: list[int], name: str) -> fx.Node:
        type = TensorType.plain(dtype, tuple(shape))
        return graph.call(target, args, like=total, type=type, name=f"{about.name}.{name}")

    with graph.fx.inserting_before(total):
        for part in operands(joined):
            columns = type_of(part).shape[-1]
            if lead != list(type_of(part).shape[:-1]):
                part = call(aten.view.default, (part, [*lead, columns]), [*lead, columns], "rows")
            kept = [1] * len(lead) if keeps else []
            sums.append(call(aten.sum.dim_IntList, (part, dims, keeps), [*kept, columns], "part"))
        made = call(aten.cat.default, (sums, len(type_of(total).shape) - 1), list(type_of(total).shape), "parts")
    graph.replace_value(total, made)
    update(total, name=graph.unique(f"{about.name}.before"))
    update(made, name=about.name)
    graph.erase_dead()
