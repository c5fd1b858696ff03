"""Rotary position embedding, out of place or in place on any view: the heads of a packed QKV, say."""

from __future__ import annotations

from torch import Tensor

from kernels_triton import launch, reference, rows
from kernels_triton.checks import LISTED, apart, checked, expect, floats


@checked
def rope(
    x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False, interleaved: bool = False, in_place: bool = False
) -> Tensor:
    """x [batch, sequence, heads, dim]; cos and sin [sequence, turned / 2] or [batch, sequence, turned / 2].

    Dim i is paired with i + turned/2, or with its neighbour if `interleaved`; dims past `turned` stay. `inverse` turns
    back, which is also the gradient. Each pair depends on itself alone, so `in_place` is legal on any view of x.
    """
    floats("rope", x, x=x, cos=cos, sin=sin)
    expect(x.dim() == 4, "rope", f"x is {list(x.shape)}, expected [batch, sequence, heads, dim]")
    batch, sequence, heads, dim = x.shape
    half = cos.shape[-1] if cos.dim() else 0
    fits = half > 0 and tuple(cos.shape) in ((sequence, half), (batch, sequence, half), (1, sequence, half))
    told = f"cos {list(cos.shape)}, sin {list(sin.shape)}, x {list(x.shape)}"
    expect(fits and cos.shape == sin.shape, "rope", told, LISTED)
    expect(2 * half <= dim, "rope", f"{half} angles turn {2 * half} dims; a head has {dim}")
    if in_place:
        apart("rope", "x", x)
    if not launch.on_triton(x):
        return reference.rope(x, cos, sin, inverse, interleaved, in_place)
    if x.stride(-1) != 1:
        expect(not in_place, "rope", "in_place needs heads with contiguous dims", hint="pass in_place=False")
        x = x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    y = x if in_place else launch.empty(x.shape, x.dtype, x)
    rest = 0 if in_place else dim - 2 * half
    block = rows.power_of_two(half)
    schedule = rows.head_schedule("rope", x, heads, block)
    count = schedule.rows
    launch.run(
        "rope.rope",
        (sequence, -(-heads // count), batch),
        *(x, cos, sin, y, heads, *x.stride()[:3], *y.stride()[:3]),
        *(0 if cos.dim() == 2 or cos.shape[0] == 1 else sequence * half, half, -1.0 if inverse else 1.0),
        HALF=half,
        REST=rest,
        INTERLEAVED=interleaved,
        IN_PLACE=in_place,
        BLOCK=block,
        REST_BLOCK=rows.power_of_two(max(rest, 1)),
        HEADS=count,
        warps=schedule.warps,
    )
    return y
