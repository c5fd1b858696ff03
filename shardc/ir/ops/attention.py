"""Attention as one op forward and one backward: `sdpa` and `sdpa_bwd`.

The graph says only what is computed; which kernel computes it is chosen at run time from local shapes: on GPUs in
`fused_attention`. The reference here is the definition: softmax(scale q k^T + mask) v, in float32, or in float64 if
the operands are. Rows that see no key yield 0, not NaN. `lse`, the log of each row's sum, is what backward
needs to rebuild the probabilities, and what ring attention merges blocks with. A call may have a `window`, which says
what rows see by where keys are (`attention_window`). What it hides is not computed (`attention_tiles`).

Results of rank 4 are laid out as [B, S, H, D] in memory, as real kernels give them: merging the heads
afterwards is then a view. There is no dropout in the op: a model that asks for it gets `with_dropout`, which is
made of ordinary ops, so that masks are the counter-based ones of `random`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels_triton.base.library import define
from shardc.ir.ops.attention_sums import wide
from shardc.ir.ops.attention_tiles import Kernels, attend, attend_backward, empty, tiles
from shardc.ir.ops.local import Run


def laid_out(value: Tensor, like: Tensor) -> Tensor:
    """In the dtype of another, and the layout promised above."""
    return empty(like, *value.shape).copy_(value)


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()


def _default_scale(scale: float | None, q: Tensor) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _repeated(q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> tuple[Tensor, Tensor]:
    """Keys and values once per query head, wide."""
    k, v = _wide(k), _wide(v)
    if not gqa or q.shape[-3] == k.shape[-3]:
        return k, v
    times = q.shape[-3] // k.shape[-3]
    return k.repeat_interleave(times, -3), v.repeat_interleave(times, -3)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, lower_right: bool = False) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) * scale
    if causal:
        # Aligned top left, as torch does it: query i sees keys 0..i whatever the number of keys.
        first = 1 + (k.shape[-2] - q.shape[-2] if lower_right else 0)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(first)
        scores = scores.masked_fill(future, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores


def reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, gqa: bool,
    lower_right: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`lower_right`: the last query sees the last key, as where the queries are the last rows of a sequence."""
    keys, values = _repeated(q, k, v, gqa)
    scores = _scores(_wide(q), keys, mask, causal, _default_scale(scale, q), lower_right)
    lse = torch.logsumexp(scores, -1)
    # Not from lse: where all scores of a row are about -1e38, that is no more exact than they are.
    probs = scores.softmax(-1).masked_fill(lse.unsqueeze(-1) == float("-inf"), 0.0)
    return laid_out(probs @ values, q), lse.contiguous()


def _finite(lse: Tensor) -> Tensor:
    """lse as a column; a row without keys has -inf, and -inf - -inf would be NaN where exp(-inf) = 0 is meant."""
    return lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)


def sdpa_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    gqa: bool,
    window: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    return empty(q, *q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=wide(q.dtype))


def reference_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, o: Tensor, lse: Tensor,
    causal: bool, scale: float | None, gqa: bool, need_mask: bool, lower_right: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    factor = _default_scale(scale, q)
    queries, grad = _wide(q), _wide(g)
    keys, values = _repeated(q, k, v, gqa)
    probs = (_scores(queries, keys, mask, causal, factor, lower_right) - _finite(lse)).exp()
    dv = probs.transpose(-2, -1) @ grad
    # sum_j dp_ij p_ij = g_i . o_i: the row term needs no second pass over the keys.
    row = (grad * _wide(o)).sum(-1, keepdim=True)
    ds = probs * (grad @ values.transpose(-2, -1) - row)
    dq, dk = factor * (ds @ keys), factor * (ds.transpose(-2, -1) @ queries)
    if dk.shape != k.shape:
        dk, dv = (t.unflatten(-3, (k.shape[-3], -1)).sum(-3) for t in (dk, dv))
    dmask = ds.sum_to_size(mask.shape).to(mask.dtype).contiguous() if need_mask and mask is not None else q.new_empty(0)
    return laid_out(dq, q), laid_out(dk, k), laid_out(dv, v), dmask


def sdpa_bwd_fake(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, o: Tensor, lse: Tensor,
    causal: bool, scale: float | None, gqa: bool, need_mask: bool, window: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dmask = mask.new_empty(mask.shape) if need_mask and mask is not None else q.new_empty(0)
    return empty(q, *q.shape), empty(k, *k.shape), empty(v, *v.shape), dmask


def whole(
    kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None,
    gqa: bool, window: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`sdpa` by kernels for its parts: of a window, those that rows see."""
    if not window:
        return kernels.forward(q, k, v, mask, causal, scale, gqa)
    todo = tiles([Run(0, q.shape[-2], 0)], [Run(0, k.shape[-2], 0)], causal, window)
    return attend(kernels, todo, q, k, v, mask, None, scale, gqa, q.dtype)


def whole_backward(
    kernels: Kernels, g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, o: Tensor, lse: Tensor,
    causal: bool, scale: float | None, gqa: bool, need_mask: bool, window: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`sdpa_bwd` likewise."""
    if not window:
        return kernels.backward(g, q, k, v, mask, o, lse, causal, scale, gqa, need_mask)
    todo = tiles([Run(0, q.shape[-2], 0)], [Run(0, k.shape[-2], 0)], causal, window)
    *results, none = sdpa_bwd_fake(g, q, k, v, mask, o, lse, causal, scale, gqa, need_mask)
    dmask = torch.zeros_like(mask, dtype=wide(q.dtype)) if need_mask and mask is not None else None
    dq, dk, dv = attend_backward(
        kernels, todo, g, q, k, v, mask, o, lse, results, (None, None, None), dmask, scale, gqa
    )
    return dq, dk, dv, none if dmask is None else dmask.to(none.dtype)


REFERENCE = Kernels(reference, reference_backward)
SDPA = define(
    "sdpa(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float? scale, bool gqa, int[] window=[])"
    " -> (Tensor o, Tensor lse)",
    partial(whole, REFERENCE),
    sdpa_fake,
)
SDPA_BWD = define(
    "sdpa_bwd(Tensor g, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor o, Tensor lse, bool causal, float? scale, "
    "bool gqa, bool need_mask, int[] window=[]) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dmask)",
    partial(whole_backward, REFERENCE),
    sdpa_bwd_fake,
)


def differentiable_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
    causal: bool, scale: float, gqa: bool, *, need_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The gradients of attention in ordinary ops, from its operands alone: autograd follows them to any order.

    With p = softmax(s): dv = p^T g, ds = p (dp - sum_j dp p), dp = g v^T. Rows that see no key have p = 0.
    """
    queries, grad = _wide(q), _wide(g)
    keys, values = _repeated(q, k, v, gqa)
    scores = _scores(queries, keys, mask, causal, scale)
    dead = scores.amax(-1, keepdim=True) == float("-inf")
    probs = torch.softmax(scores.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    dv = probs.transpose(-2, -1) @ grad
    dp = grad @ values.transpose(-2, -1)
    ds = probs * (dp - (dp * probs).sum(-1, keepdim=True))
    dq, dk = scale * (ds @ keys), scale * (ds.transpose(-2, -1) @ queries)
    if dk.shape != k.shape:
        dk, dv = (t.unflatten(-3, (k.shape[-3], -1)).sum(-3) for t in (dk, dv))
    dmask = ds.sum_to_size(mask.shape).to(mask.dtype) if need_mask and mask is not None else None
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dmask


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, gqa: bool
    ) -> Tensor:
        o, lse = SDPA(q, k, v, mask, causal, scale, gqa)
        ctx.save_for_backward(q, k, v, mask, o, lse)
        ctx.options = (causal, scale, gqa)
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        need_mask = bool(ctx.needs_input_grad[3])
        q, k, v, mask, o, lse = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: these gradients will be differentiated
            dq, dk, dv, dmask = differentiable_backward(grads[0], q, k, v, mask, *ctx.options, need_mask=need_mask)
            return dq, dk, dv, dmask, None, None, None
        dq, dk, dv, dmask = SDPA_BWD(grads[0], q, k, v, mask, o, lse, *ctx.options, need_mask)
        return dq, dk, dv, dmask if need_mask else None, None, None, None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Differentiable stand-in for `F.scaled_dot_product_attention`; what a trace sees in its place."""
    scale = _default_scale(scale, query)  # made a number now: later, the dim may be sharded
    gqa = enable_gqa and query.shape[-3] != key.shape[-3]
    if not gqa:  # torch broadcasts leading dims; the op's rule wants them equal
        lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
        query, key, value = (t if t.shape[:-2] == lead else t.expand(*lead, *t.shape[-2:]) for t in (query, key, value))
    if dropout_p > 0.0:
        return with_dropout(query, key, value, attn_mask, dropout_p, is_causal, scale, gqa)
    return _Attention.apply(query, key, value, attn_mask, is_causal, scale, gqa)  # type: ignore[return-value]


def with_dropout(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool, scale: float, gqa: bool
) -> Tensor:
    """Attention with dropout on its probabilities, spelled out in ordinary ops."""
    if gqa:
        times = q.shape[-3] // k.shape[-3]
        k, v = (
            t.unsqueeze(-3).expand(*t.shape[:-2], times, *t.shape[-2:]).reshape(*q.shape[:-2], *t.shape[-2:])
            for t in (k, v)
        )
    scores = _scores(q, k, mask, causal, scale)
    dead = None
    if mask is not None:  # a row without keys: softmax would be NaN, forward and backward
        dead = scores.amax(-1, keepdim=True) == float("-inf")
        scores = scores.masked_fill(dead, 0.0)
    probs = torch.softmax(scores, -1)
    if dead is not None:
        probs = probs.masked_fill(dead, 0.0)
    return torch.dropout(probs, p, True) @ v
