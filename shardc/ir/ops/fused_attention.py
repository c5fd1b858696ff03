"""Which GPU kernel computes attention, chosen when a call first runs, from the local shapes that it has then.

    cuDNN        halves, no mask, Hopper and later: the fastest there
    flash        halves, no mask
    efficient    halves, a mask (made an additive bias), or value heads of another size
    reference    everything else: float32 and float64, odd shapes, the gradient of a mask

All of them give the same `o` and `lse`, so backward chooses for itself. torch's own public predicates say what each
kernel takes on this GPU, and which of them the user has switched off (`torch.nn.attention.sdpa_kernel`). They are asked
once for operands of one form and one setting of the switches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels_triton.base.library import implement
from shardc import torch_compat
from shardc.ir.ops import attention, attention_keys
from shardc.ir.ops.attention_rows import register_kernels
from shardc.ir.ops.attention_tiles import Kernels, Tile, square

Kernel = Literal["cudnn", "flash", "efficient", "reference"]
HALVES = (torch.bfloat16, torch.float16)
ALIGNED = 8  # halves: 16 bytes, what the kernels load at once
BIAS_ALIGNED = 16
LSE_ALIGNED = 32  # rows: how the efficient kernels store lse


_kernels: dict[tuple[Any, ...], Kernel] = {}
REMEMBERED = 4096  # choices


def kernel_for(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, lower_right: bool = False) -> Kernel:
    """The fastest kernel that takes these operands as they are; k and v may have fewer heads than q."""
    forms = [None if t is None else (t.shape, t.stride(), t.dtype, t.requires_grad) for t in (q, k, v, bias)]
    key = (q.device, *forms, causal, lower_right, torch_compat.attention_switches())
    kernel = _kernels.get(key)
    if kernel is None:
        if len(_kernels) >= REMEMBERED:
            _kernels.clear()
        kernel = _kernels[key] = _fastest(q, k, v, bias, causal, lower_right)
    return kernel


def _fastest(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, lower_right: bool) -> Kernel:
    if any(t.shape[-1] % ALIGNED or not t.numel() for t in (q, k, v)):
        return "reference"
    square = q.shape[2] == k.shape[2] or not causal
    # Of more keys than queries flash takes causal to be aligned lower right, cuDNN and efficient upper left, as we do
    # without `lower_right`. torch refuses to be asked about flash then, so it is asked about the shapes alone.
    fits = torch_compat.fused_kernels(q, k, v, bias, causal and square, gqa=q.shape[1] != k.shape[1])
    if bias is None and q.shape[-1] == v.shape[-1] and (square or lower_right):
        if square and fits.cudnn and torch.cuda.get_device_capability(q.device) >= (9, 0):
            return "cudnn"
        if fits.flash:
            return "flash"
    return "efficient" if fits.efficient and (square or not lower_right) else "reference"


def _bias(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask as the efficient kernels take it: additive, of q's dtype, rows aligned in memory, one row per query."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, float("-inf"))
    keys = k.shape[-2]
    bias = mask.to(q.dtype).expand(*mask.shape[:-1], keys)
    missing = -keys % BIAS_ALIGNED
    bias = (pad(bias, [0, missing]) if missing else bias.contiguous())[..., :keys]
    return bias.expand(*q.shape[:-1], keys)


def _aligned(t: Tensor) -> Tensor:
    """Itself, or where a view's rows do not begin where the kernels can load them, a copy."""
    *strides, last = t.stride()
    even = last == 1 and not t.storage_offset() % ALIGNED and not any(stride % ALIGNED for stride in strides)
    return t if even else t.clone(memory_format=torch.contiguous_format)


def _promised(t: Tensor) -> Tensor:
    """In the layout that `sdpa` promises, which is also what the kernels give, but for a few shapes."""
    rows = t.transpose(1, 2)
    return t if rows.is_contiguous() else rows.contiguous().transpose(1, 2)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, gqa: bool,
    lower_right: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    chosen = _chosen(q, k, v, mask, causal, lower_right)
    if chosen is None:
        return attention.reference(q, k, v, mask, causal, scale, gqa, lower_right)
    kernel, q, keys, values, bias = chosen
    match kernel:
        case "cudnn":
            o, lse = torch_compat.cudnn_attention(q, keys, values, causal, scale)
        case "flash":
            o, lse = torch_compat.flash_attention(q, keys, values, causal, scale)
        case _:
            o, lse = torch_compat.efficient_attention(q, keys, values, bias, causal, scale)
    lse = lse.reshape(*q.shape[:2], -1)[..., : q.shape[2]]
    if bias is not None:  # of a row without keys the kernel says 0; the sum of nothing is -inf
        lse = lse.masked_fill((lse == 0) & ~o.any(-1), float("-inf"))
    return _promised(o), lse.contiguous()


def _sdpa_bwd(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, o: Tensor, lse: Tensor,
    causal: bool, scale: float | None, gqa: bool, need_mask: bool, lower_right: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    chosen = None if need_mask and mask is not None else _chosen(q, k, v, mask, causal, lower_right)
    if chosen is None:
        return attention.reference_backward(g, q, k, v, mask, o, lse, causal, scale, gqa, need_mask, lower_right)
    kernel, q, keys, values, bias = chosen
    g, o = (_promised(t) for t in (g, o))
    match kernel:
        case "cudnn":
            rows = lse.unsqueeze(-1)
            dq, dk, dv = torch_compat.cudnn_attention_backward(g, q, keys, values, o, rows, causal, scale)
        case "flash":
            dq, dk, dv = torch_compat.flash_attention_backward(g, q, keys, values, o, lse, causal, scale)
        case _:
            # exp(score - inf) = 0: what padded rows, and rows that see no key, are to contribute.
            rows = pad(lse, [0, -lse.shape[-1] % LSE_ALIGNED], value=float("inf"))
            rows = rows.masked_fill(rows == float("-inf"), float("inf"))
            dq, dk, dv = torch_compat.efficient_attention_backward(g, q, keys, values, bias, o, rows, causal, scale)
    if dk.shape != k.shape:
        dk, dv = (t.unflatten(1, (k.shape[1], -1)).sum(2) for t in (dk, dv))
    return _promised(dq), _promised(dk), _promised(dv), q.new_empty(0)


def _chosen(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, lower_right: bool
) -> tuple[Kernel, Tensor, Tensor, Tensor, Tensor | None] | None:
    """The kernel, and its operands as it takes them; None for the reference."""
    if q.dtype not in HALVES or q.ndim != 4:
        return None
    q, k, v = (_aligned(t) for t in (q, k, v))
    bias = _bias(mask, q, k)
    kernel = kernel_for(q, k, v, bias, causal, lower_right)
    if kernel == "reference" and q.shape[1] != k.shape[1]:  # not all of them know grouped heads
        times = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        kernel = kernel_for(q, k, v, bias, causal, lower_right)
    return None if kernel == "reference" else (kernel, q, k, v, bias)


def _cut(q: Tensor, k: Tensor, mask: Tensor | None, todo: Sequence[Tile]) -> Sequence[Tile]:
    """Squares where cuDNN takes them: it is faster than flash by more than it costs to merge two parts."""
    if mask is not None or q.dtype not in HALVES or q.ndim != 4 or not any(tile.diagonal for tile in todo):
        return todo
    rows = min(tile.rows for tile in todo if tile.diagonal)
    queries, keys = (_aligned(t.narrow(2, 0, rows)) for t in (q, k))
    return square(todo) if kernel_for(queries, keys, keys, None, True) == "cudnn" else todo


FUSED = Kernels(_sdpa, _sdpa_bwd, _cut)
implement("sdpa", partial(attention.whole, FUSED), "CUDA")
implement("sdpa_bwd", partial(attention.whole_backward, FUSED), "CUDA")
register_kernels("CUDA", FUSED)
attention_keys.register_kernels("CUDA", FUSED)
