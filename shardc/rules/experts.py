"""Rows in the order of their experts: a row is of a token slot `s` and of an expert `e`, and may be split by both.

    limit_rows     s -> s                                   each rank's rows are a group of their own
    group_rows     s -> s; e, e; s
    expert_mm      s k; e, e k n, e; s -> s n; e            sum="k"
    expert_wgrad   s k; e, s n; e, e; s -> e k n            sum="s"
    ungroup_rows   s n; e, s; e, e; s -> s n                sum="e"

With `s` split, a rank groups the rows of its own tokens; with `e` split, it has the rows that are routed to its own
experts, and those of other ranks' experts are in the tail. So tokens over dp need no communication, experts over ep
one reduction of what `ungroup_rows` yields, and the gradients of experts one over the axes of `s`, not those of `e`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardc.ir.graph import type_of
from shardc.ir.ops.exchange import EXCHANGED_PERM, GROUP_ENDS
from shardc.ir.ops.expert_capacity import COUNT_ROWS, LIMIT_ROWS
from shardc.ir.ops.experts import (
    EXPERT_MM,
    EXPERT_WGRAD,
    GATHER_ROWS,
    GROUP_ROWS,
    SPREAD_GROUPS,
    SUM_GROUPS,
    UNGROUP_ROWS,
)
from shardc.rules.embedding import owned, sharded
from shardc.rules.local import LocalCall, fill_padding
from shardc.rules.notation import Dims, Notation, RuleError
from shardc.rules.registry import by_block, example, rule

aten = torch.ops.aten
COUNTED = [example((8,), (8,), 4, 6, ints={"ids": 4, "limited": range(-1, 5)})]


def _without_padding(call: LocalCall) -> fx.Node:
    """The ids of a call, negative for padding: that is of no expert."""
    return fill_padding(call, call.args["ids"], -1.0)


@by_block
def _limit_rows_local(call: LocalCall) -> Any:
    """The rows of a rank are one group, whatever their atoms are."""
    return call.with_args(ids=_without_padding(call), layout=[])


def _group_rows_local(call: LocalCall) -> Any:
    """Global numbers of experts become local ones, negative where the expert, or the token, is not this rank's."""
    mesh, ids = call.graph.mesh, _without_padding(call)
    type = type_of(ids)
    experts = call.results[1].dims[0]
    if sharded(experts):
        numbers, is_own = owned(call, ids, experts, known=True)
        if any(atom.axes and atom.uneven(mesh) for atom in experts):  # else a rank owns ids that pad its experts
            mask = type.with_dtype(torch.bool)
            real = call.emit(aten.lt.Scalar, ids, call.args["experts"], type=mask)
            is_own = call.emit(aten.bitwise_and.Tensor, is_own, real, type=mask)
        ids = call.emit(aten.where.ScalarOther, is_own, numbers, -1, type=type)
    return call.with_args(ids=ids, experts=call.result_shape(1)[0])


rule(LIMIT_ROWS, "s -> s", localize=_limit_rows_local, ragged=True)  # what a rank limits is not a part of the whole
rule(COUNT_ROWS, "s, s -> c", whole="c", sum="s", padding="largest", examples=COUNTED)
rule(GROUP_ENDS, "e r; s -> e; s", whole="r", ragged=True)
rule(EXCHANGED_PERM, "e r; s -> s; e", whole="r", ragged=True)
rule(EXPERT_MM, "s k; e, e k n, e; s -> s n; e", sum="k", linear=(0, 1), ragged=True)
rule(EXPERT_WGRAD, "s k; e, s n; e, e; s -> e k n", sum="s", linear=(0, 1), ragged=True)


@rule(GROUP_ROWS, localize=_group_rows_local, ragged=True)
def group_rows(ids: Dims, experts: int) -> Notation:
    """Experts have numbers. Rows have none but a rank's own, so it may have any of them."""
    return Notation("s -> s; e, e; s", counts="e")


@rule(GATHER_ROWS, linear=(0,), ragged=True)
def gather_rows(x: Dims, perm: Dims, each: int) -> str:
    if x.shape[0] * each != perm.shape[0]:
        raise RuleError(f"{x.shape[0]} tokens of {each} rows each are not {perm.shape[0]} rows")
    return f"{x.replace(0, 't')}, (t k); e -> (t k) {' '.join(x.labels[1:])}; e"


@rule(UNGROUP_ROWS, ragged=True)
def ungroup_rows(y: Dims, perm: Dims, offs: Dims) -> Notation:
    row = f"s {' '.join(y.labels[1:-1])}"
    return Notation(f"{row}; e, s; e, e; s -> {row}", sum="e", linear=(0,))


@rule(SPREAD_GROUPS, linear=(0,), ragged=True)
def spread_groups(b: Dims, perm: Dims, offs: Dims) -> str:
    rest = " ".join(b.labels[1:])
    return f"e {rest}, s; e, e; s -> s {rest}; e"


@rule(SUM_GROUPS, ragged=True)
def sum_groups(g: Dims, offs: Dims) -> Notation:
    rest = " ".join(g.labels[1:-1])
    return Notation(f"s {rest}; e, e; s -> e {rest}", sum="s", linear=(0,))
