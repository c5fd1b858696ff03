"""Attention whose keys lie over axes that its rows do not: each rank has the softmax over its own keys, and merges it.

    o_i, lse_i = sdpa_part(q, k_i, v_i)          the softmax over a rank's keys, and the log of its sum
    lse        = merge_lse(lse_i)                the log of the sum over all keys: one number a row and head is gathered
    o_i, lse   = weigh_part(o_i, lse_i, lse)     o_i exp(lse_i - lse): the terms of a sum over ranks

    scores [1, 3 | 2], values [a, b | c], the bar between two ranks: lse_i = 3.13, 2, and lse = 3.41
    o = 0.12 a + 0.88 b | c, weighed by exp(3.13 - 3.41) = 0.76 and exp(2 - 3.41) = 0.24

A part, and the log of its sum, are pending by `softmax`: nothing but the two calls that merge them may read them. What
comes of it is a pending sum like any other. Backward needs no part: from `lse` over all keys a rank has the
probabilities of its own, so the gradients of its keys and values, and a term of the queries' (FlashAttention-2,
arXiv:2307.08691, 3.1.2). A row that sees none of a rank's keys has lse_i = -inf and the weight 0; one that sees no key
at all yields 0.

Where the sum is wanted at once, by all ranks alike, parts travel with their log-sums, and the group meets once:

    x = pack_part(o_i, lse_i);  y = merge_parts(x);  o, lse = split_parts(y)

`sdpa_keys` is `sdpa` on global tensors whose keys lie over `axes`; `localize` leaves none of it. Its result is in
float32 where operands are halves, and so are parts, weights and their sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels_triton.base.library import define, implement
from shardc.ir.mesh import Mesh
from shardc.ir.ops import attention
from shardc.ir.ops.attention_rows import layout
from shardc.ir.ops.attention_sums import wide
from shardc.ir.ops.attention_tiles import Kernels, Tile, attend, attend_backward, tiles
from shardc.ir.ops.collectives import COLLECTIVES, Exchange, Steps, run_collective
from shardc.ir.ops.context import current
from shardc.ir.ops.local import AXES_READ


def part_tiles(
    rows: str,
    row_axes: Sequence[str],
    keys: str,
    axes: Sequence[str],
    causal: bool,
    mesh: Mesh,
    coordinate: Mapping[str, int],
    window: Sequence[int] = (),
) -> list[Tile]:
    """What a rank computes of attention between its rows and its keys, padding left out."""
    of_rows = layout(rows, mesh.resolve(row_axes), mesh, coordinate)
    return tiles(of_rows, layout(keys, mesh.resolve(axes), mesh, coordinate), causal, window)


def _todo(
    causal: bool, rows: str, row_axes: list[str], keys: str, axes: list[str], window: Sequence[int] = ()
) -> list[Tile]:
    context = current()
    return part_tiles(rows, row_axes, keys, axes, causal, context.mesh, context.coordinate, window)


def _sdpa_part(
    kernels: Kernels,
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, gqa: bool,
    *lies: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return attend(kernels, _todo(causal, *lies), q, k, v, mask, None, scale, gqa, wide(q.dtype))


def _sdpa_part_fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, gqa: bool, *said: Any
) -> tuple[Tensor, Tensor]:
    dtype = wide(q.dtype)
    return attention.empty(q, *q.shape[:-1], v.shape[-1], dtype=dtype), q.new_empty(q.shape[:-1], dtype=dtype)


def _sdpa_part_bwd(
    kernels: Kernels,
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, o: Tensor, lse: Tensor,
    causal: bool, scale: float | None, gqa: bool, need_mask: bool, *lies: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    *results, none = attention.sdpa_bwd_fake(g, q, k, v, mask, o, lse, causal, scale, gqa, need_mask)
    dmask = torch.zeros_like(mask, dtype=wide(q.dtype)) if need_mask and mask is not None else None
    dq, dk, dv = attend_backward(
        kernels, _todo(causal, *lies), g, q, k, v, mask, o, lse, results, (None, None, None), dmask, scale, gqa
    )
    return dq, dk, dv, none if dmask is None else dmask.to(none.dtype)


def _weigh_part(o: Tensor, lse: Tensor, every: Tensor) -> tuple[Tensor, Tensor]:
    finite = every.masked_fill(every == float("-inf"), 0.0)
    weighed = attention.empty(o, *o.shape)
    return torch.mul(o, (lse - finite).exp().unsqueeze(-1), out=weighed), every.clone()


def _merge_lse(lse: Tensor, axes: list[str]) -> Steps:
    every = yield Exchange("all_gather", lse.contiguous(), tuple(axes))
    return torch.logsumexp(every, 0)


def _merge_parts(x: Tensor, axes: list[str]) -> Steps:
    every = yield Exchange("all_gather", x.contiguous(), tuple(axes))
    o, lse = every[..., :-1], every[..., -1]
    total = torch.logsumexp(lse, 0)
    weights = (lse - total.masked_fill(total == float("-inf"), 0.0)).exp().unsqueeze(-1)
    return torch.cat([(o * weights).sum(0), total.unsqueeze(-1)], -1)


def _split_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    o, lse = _split_parts_fake(x)
    return o.copy_(x[..., :-1]), lse.copy_(x[..., -1])


def _split_parts_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    return attention.empty(x, *x.shape[:-1], x.shape[-1] - 1), x.new_empty(x.shape[:-1])


# ---------------------------------------------------------------------- what a rank runs
LIES = "str rows, str[] row_axes, str keys, str[] axes, int[] window=[]"
SDPA_PART = define(
    f"sdpa_part(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float? scale, bool gqa, {LIES})"
    " -> (Tensor o, Tensor lse)",
    partial(_sdpa_part, attention.REFERENCE),
    _sdpa_part_fake,
)
SDPA_PART_BWD = define(
    "sdpa_part_bwd(Tensor g, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor o, Tensor lse, bool causal, "
    f"float? scale, bool gqa, bool need_mask, {LIES}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dmask)",
    partial(_sdpa_part_bwd, attention.REFERENCE),
    lambda *args: attention.sdpa_bwd_fake(*args[:11]),
)
MERGE_LSE = define(
    "merge_lse(Tensor x, str[] axes) -> Tensor",
    partial(run_collective, _merge_lse),
    lambda x, axes: x.new_empty(x.shape),
)
COLLECTIVES[MERGE_LSE] = _merge_lse
WEIGH_PART = define(
    "weigh_part(Tensor o, Tensor lse, Tensor every) -> (Tensor o, Tensor lse)",
    _weigh_part,
    lambda o, lse, every: (attention.empty(o, *o.shape), torch.empty_like(every)),
)

PACK_PART = define(
    "pack_part(Tensor o, Tensor lse) -> Tensor",
    lambda o, lse: torch.cat([o, lse.unsqueeze(-1)], -1),
    lambda o, lse: o.new_empty((*o.shape[:-1], o.shape[-1] + 1)),
)
MERGE_PARTS = define(
    "merge_parts(Tensor x, str[] axes) -> Tensor",
    partial(run_collective, _merge_parts),
    lambda x, axes: x.new_empty(x.shape),
)
COLLECTIVES[MERGE_PARTS] = _merge_parts
SPLIT_PARTS = define("split_parts(Tensor x) -> (Tensor o, Tensor lse)", _split_parts, _split_parts_fake)


def register_kernels(device: str, kernels: Kernels) -> None:
    """Compute tiles so on a kind of device."""
    implement("sdpa_part", partial(_sdpa_part, kernels), device)
    implement("sdpa_part_bwd", partial(_sdpa_part_bwd, kernels), device)


def _axes_of(*args: Any) -> list[str]:
    """Both axes of a call are lists of names, and all that is one."""
    return [name for value in args if isinstance(value, (list, tuple)) for name in value if isinstance(name, str)]


AXES_READ[SDPA_PART] = AXES_READ[SDPA_PART_BWD] = _axes_of


# ---------------------------------------------------------------------- what is asked for, on global tensors
def _sdpa_keys(*args: Any) -> tuple[Tensor, Tensor]:
    o, lse = attention.whole(attention.REFERENCE, *args[:7], *args[8:])
    return (o if o.dtype == lse.dtype else attention.empty(o, *o.shape, dtype=lse.dtype).copy_(o)), lse


SDPA_KEYS = define(
    "sdpa_keys(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float? scale, bool gqa, str[] axes,"
    " int[] window=[]) -> (Tensor o, Tensor lse)",
    _sdpa_keys,
    _sdpa_part_fake,
)
SDPA_KEYS_BWD = define(
    "sdpa_keys_bwd(Tensor g, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor o, Tensor lse, bool causal, "
    "float? scale, bool gqa, bool need_mask, str[] axes, int[] window=[])"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dmask)",
    lambda *args: attention.whole_backward(attention.REFERENCE, *args[:11], *args[12:]),
    lambda *args: attention.sdpa_bwd_fake(*args[:11]),
)
