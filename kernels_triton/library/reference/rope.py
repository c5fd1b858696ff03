"""Rotary position embedding of heads: pairs of a head's dims turned by the angle of their position."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton.library.reference.wide import wide


def rope(
    x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False, interleaved: bool = False, in_place: bool = False
) -> Tensor:
    """x [batch, sequence, heads, dim]; cos and sin [sequence, turned / 2], or [batch or 1, sequence, turned / 2].

    Su et al. 2021, section 3.4.

    Dim i is paired with i + turned/2, or with its neighbour if `interleaved`; dims past `turned` stay. `inverse` turns
    back, which is also the gradient. Each pair depends on itself alone, so `in_place` is legal on any view of x, the
    query and key heads of a packed QKV among them. Raises what torch does for an x that overlaps itself, in place.
    """
    half = cos.shape[-1]
    c, s = (wide(t).unsqueeze(-2) for t in (cos, sin))
    s = -s if inverse else s
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    a, b = wide(a), wide(b)
    u, v = a * c - b * s, b * c + a * s
    out = torch.stack((u, v), -1).flatten(-2) if interleaved else torch.cat((u, v), -1)
    out = torch.cat((out.to(x.dtype), rest), -1)
    return x.copy_(out) if in_place else out
