"""Attention in float32 on CPUs by ATen's flash kernel, which holds no scores of all rows and keys.

It takes four dims, heads of one size, no mask, and causal rows aligned top left; whatever else there is, and float64,
in which programs are compared, is left to the reference. Both give the same `o` and `lse`, so that backward chooses for
itself. Where heads of queries share keys and values, it reads these as they are, and sums their gradients itself; in
versions of torch whose kernel does not, they are repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kernels_triton.base.library import implement
from shardc import torch_compat
from shardc.ir.ops import attention, attention_keys, attention_rows
from shardc.ir.ops.attention_tiles import Kernels, Tile, square


def takes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, lower_right: bool) -> bool:
    """Whether the kernel computes this."""
    known = mask is None and q.dtype == k.dtype == v.dtype == torch.float32 and q.ndim == k.ndim == v.ndim == 4
    if not known or q.shape[-1] != v.shape[-1] or not all(t.numel() for t in (q, k, v)):
        return False
    return not (causal and lower_right) or q.shape[2] == k.shape[2]


def _rows(t: Tensor) -> Tensor:
    """With rows that products take as they lie; the kernel does not look."""
    return t if t.stride(-1) == 1 and t.stride(-2) >= t.shape[-1] else t.contiguous()


def _promised(t: Tensor, like: Tensor) -> Tensor:
    """In the layout of `sdpa`'s results: the kernel's lie as its operands do."""
    _, h, s, d = t.shape
    return t if t.stride() == (s * h * d, d, h * d, 1) else attention.laid_out(t, like)


def _operands(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    times = q.shape[1] // k.shape[1]
    if times > 1 and not torch_compat.flash_attention_on_cpu_takes_groups():
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    return _rows(q), _rows(k), _rows(v)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, gqa: bool,
    lower_right: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not takes(q, k, v, mask, causal, lower_right):
        return attention.reference(q, k, v, mask, causal, scale, gqa, lower_right)
    o, lse = torch_compat.flash_attention_on_cpu(*_operands(q, k, v), causal, scale)
    return _promised(o, q), lse.clone(memory_format=torch.contiguous_format)


def _sdpa_bwd(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, o: Tensor, lse: Tensor,
    causal: bool, scale: float | None, gqa: bool, need_mask: bool, lower_right: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if not takes(q, k, v, mask, causal, lower_right):
        return attention.reference_backward(g, q, k, v, mask, o, lse, causal, scale, gqa, need_mask, lower_right)
    dq, dk, dv = torch_compat.flash_attention_on_cpu_backward(
        _rows(g), *_operands(q, k, v), _rows(o), lse, causal, scale
    )
    if dk.shape != k.shape:
        dk, dv = (t.unflatten(1, (k.shape[1], -1)).sum(2) for t in (dk, dv))
    return _promised(dq, q), _promised(dk, k), _promised(dv, v), q.new_empty(0)


def _cut(q: Tensor, k: Tensor, mask: Tensor | None, todo: Sequence[Tile]) -> Sequence[Tile]:
    """Squares, where the kernel takes the rest: of more keys than rows on a diagonal it takes none."""
    return square(todo) if mask is None and q.dtype == torch.float32 and q.ndim == 4 else todo


FLASH = Kernels(_sdpa, _sdpa_bwd, _cut)
implement("sdpa", partial(attention.whole, FLASH), "CPU")
implement("sdpa_bwd", partial(attention.whole_backward, FLASH), "CPU")
attention_rows.register_kernels("CPU", FLASH)
attention_keys.register_kernels("CPU", FLASH)
