"""Heads of attention in other groups, so that an axis divides them that does not divide the heads of keys.

Of 8 query heads that read 2 heads of keys, 4 each, an axis of 4 is to have 2 query heads a rank:

    q  (2 4)   group_heads      (4 2)     the same heads: 4 groups of 2
    k  2       repeat_heads     4         head 0 twice, then head 1 twice: one for each group
    o  (4 2)   ungroup_heads    (2 4)     the inverse of `group_heads`
    dk 4       sum_heads        2         the gradient of the heads of keys, a sum over their copies

A rank that then gets one group of each is sent one head of keys, that which its query heads read. Where the query heads
of a head of keys do not divide into as many groups, the last one of them is filled with zeros; of a mask of truth
values with true, so that what is not read has scores.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels_triton.base.library import define
from shardc.ir.ops.attention_sums import wide


def _group_heads(x: Tensor, dim: int, each: int, times: int) -> Tensor:
    after = -(-each // times)
    if times * after == each:
        return x.view(x.shape)
    parts, behind = x.unflatten(dim, (-1, each)), [0, 0] * (x.ndim - 1 - dim)
    return pad(parts, [*behind, 0, times * after - each], value=float(x.dtype == torch.bool)).flatten(dim, dim + 1)


def _ungroup_heads(x: Tensor, dim: int, each: int, times: int) -> Tensor:
    after = -(-each // times)
    if times * after == each:
        return x.view(x.shape)
    return x.unflatten(dim, (-1, times * after)).narrow(dim + 1, 0, each).flatten(dim, dim + 1)


def _regrouped(x: Tensor, dim: int, held: int, wanted: int) -> Tensor:
    if held == wanted:
        return x.view(x.shape)
    return x.new_empty([*x.shape[:dim], x.shape[dim] // held * wanted, *x.shape[dim + 1 :]])


def _with_heads(x: Tensor, heads: int) -> Tensor:
    return x.new_empty([*x.shape[:-3], heads, *x.shape[-2:]])


# `each`: how many query heads read a head of keys; `times`: into how many groups these are cut.
GROUP_HEADS = define(
    "group_heads(Tensor(a) x, int dim, int each, int times) -> Tensor(a)",
    _group_heads,
    lambda x, dim, each, times: _regrouped(x, dim, each, times * -(-each // times)),
)
UNGROUP_HEADS = define(
    "ungroup_heads(Tensor(a) x, int dim, int each, int times) -> Tensor(a)",
    _ungroup_heads,
    lambda x, dim, each, times: _regrouped(x, dim, times * -(-each // times), each),
)
REPEAT_HEADS = define(
    "repeat_heads(Tensor x, int times) -> Tensor",
    lambda x, times: torch.repeat_interleave(x, times, -3),
    lambda x, times: _with_heads(x, x.shape[-3] * times),
)
SUM_HEADS = define(
    "sum_heads(Tensor x, int times) -> Tensor",
    lambda x, times: x.unflatten(-3, (-1, times)).sum(-3, dtype=wide(x.dtype)).to(x.dtype),
    lambda x, times: _with_heads(x, x.shape[-3] // times),
)
