"""Rows of tokens in the order of their experts: how they come into it, products there, and how they leave it.

`ids` names the expert of each row. `group_rows` sorts: `perm[i]` is the row that lies at place i, and group e ends at
`offs[e]`. Rows of no expert, whose id is none of 0 ... experts - 1, lie behind the last group, in the tail:

    ids    2 0 9 0          perm   1 3 0 2     offs   2 2 3     (3 experts; row 2 is in the tail)

    gather_rows    x[perm // each]: each token is `each` consecutive rows
    expert_mm      a row meets the matrix of its group: s k, e k n -> s n
    expert_wgrad   rows of a group meet rows of a group: s k, s n -> e k n
    spread_groups  each group's vector, for each of its rows: e n -> s n
    sum_groups     its gradient, the sum over a group's rows: s n -> e n
    ungroup_rows   rows where they came from, those of the tail as zeros

The tail holds anything: `expert_mm` and `spread_groups` write zeros there, nothing reads it but what goes row by row.
Traces hold none of these ops: `group_experts` puts them in the place of what libraries write, gradients too, so they
need no derivatives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton.base.library import define
from shardc.ir.ops.grouped import grouped_product, grouped_product_fake, grouped_wgrad, grouped_wgrad_fake


def _group_rows(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    group = torch.where((ids >= 0) & (ids < experts), ids, experts)
    perm = torch.sort(group, stable=True)[1]
    counts = group.new_zeros(experts + 1).scatter_add_(0, group, torch.ones_like(group))
    return perm, counts[:experts].cumsum(0).to(torch.int32)


def _group_rows_fake(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    return ids.new_empty(ids.shape, dtype=torch.int64), ids.new_empty((experts,), dtype=torch.int32)


def _gather_rows(x: Tensor, perm: Tensor, each: int) -> Tensor:
    return x[perm // each]


def _gather_rows_fake(x: Tensor, perm: Tensor, each: int) -> Tensor:
    return x.new_empty((*perm.shape, *x.shape[1:]))


def _groups(rows: Tensor, offs: Tensor) -> Tensor:
    """The group of each place; for the tail, the number of groups."""
    places = torch.arange(rows.shape[0], device=rows.device, dtype=offs.dtype)
    return torch.searchsorted(offs, places, right=True)


def _ungroup_rows(y: Tensor, perm: Tensor, offs: Tensor) -> Tensor:
    tail = (_groups(y, offs) == offs.shape[0]).view(-1, *[1] * (y.dim() - 1))
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    out[perm] = torch.where(tail, 0, y)
    return out


def _ungroup_rows_fake(y: Tensor, perm: Tensor, offs: Tensor) -> Tensor:
    return y.new_empty(y.shape)


def _spread_groups(b: Tensor, perm: Tensor, offs: Tensor) -> Tensor:
    padded = torch.cat([b, b.new_zeros((1, *b.shape[1:]))])
    return padded[_groups(perm, offs)]


def _spread_groups_fake(b: Tensor, perm: Tensor, offs: Tensor) -> Tensor:
    return b.new_empty((*perm.shape, *b.shape[1:]))


def _sum_groups(g: Tensor, offs: Tensor) -> Tensor:
    """What the tail holds, which may be no number, falls into a group of its own."""
    sums = g.new_zeros((offs.shape[0] + 1, *g.shape[1:]))
    return sums.index_add_(0, _groups(g, offs), g)[: offs.shape[0]].clone()


def _sum_groups_fake(g: Tensor, offs: Tensor) -> Tensor:
    return g.new_empty((offs.shape[0], *g.shape[1:]))


GROUP_ROWS = define("group_rows(Tensor ids, int experts) -> (Tensor, Tensor)", _group_rows, _group_rows_fake)
GATHER_ROWS = define("gather_rows(Tensor x, Tensor perm, int each) -> Tensor", _gather_rows, _gather_rows_fake)
UNGROUP_ROWS = define("ungroup_rows(Tensor y, Tensor perm, Tensor offs) -> Tensor", _ungroup_rows, _ungroup_rows_fake)
EXPERT_MM = define("expert_mm(Tensor a, Tensor b, Tensor offs) -> Tensor", grouped_product, grouped_product_fake)
EXPERT_WGRAD = define("expert_wgrad(Tensor a, Tensor g, Tensor offs) -> Tensor", grouped_wgrad, grouped_wgrad_fake)
SPREAD_GROUPS = define(
    "spread_groups(Tensor b, Tensor perm, Tensor offs) -> Tensor", _spread_groups, _spread_groups_fake
)
SUM_GROUPS = define("sum_groups(Tensor g, Tensor offs) -> Tensor", _sum_groups, _sum_groups_fake)
