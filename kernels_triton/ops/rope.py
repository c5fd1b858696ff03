"""Rotary position embedding, out of place or in place on any view: the heads of a packed QKV, say."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kernels_triton import launch, reference, rows
from kernels_triton.checks import apart, checked, expect, floats, shaped, written

SAMPLES = 65535  # programs of a grid in its second dim, at most
THREADS = 32  # of a warp


@checked
def rope(
    x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False, interleaved: bool = False, in_place: bool = False
) -> Tensor:
    """x turned by the angles of its positions (Su et al. 2021, "RoFormer", section 3.4): of its shape and dtype.

    x [batch, sequence, heads, dim]; cos and sin [sequence, turned / 2], [1, sequence, turned / 2], which is that too,
    or [batch, sequence, turned / 2], of floating point. Dim i is paired with i + turned/2, or with its neighbour, as in
    the paper, if `interleaved`; dims past `turned` stay. `inverse` turns back, which is also the gradient. Each pair
    depends on itself alone, so `in_place` is legal on any view of x whose elements do not overlap: x itself is
    returned.

    Raises SC530 for a wrong operand (see `kernels_triton.ops`), for more angles than pairs, for 2**31 heads of tokens,
    and in place for an x that overlaps itself or whose dims lie apart.
    """
    floats("rope", x, x=x, cos=cos, sin=sin)
    expect(x.dim() == 4, "rope", f"x is {list(x.shape)}, expected [batch, sequence, heads, dim]")
    batch, sequence, heads, dim = x.shape
    half = cos.shape[-1] if cos.dim() else 0
    fits = half > 0 and tuple(cos.shape) in ((sequence, half), (batch, sequence, half), (1, sequence, half))
    told = f"cos is {list(cos.shape)}, expected [{sequence}, angles] or [{batch}, {sequence}, angles]"
    expect(fits, "rope", told, "pass the cosines of x's own positions")
    shaped("rope", "sin", sin, cos.shape, x)
    told = f"cos is {list(cos.shape)}: {half} angles turn {2 * half} dims; a head has {dim}"
    expect(2 * half <= dim, "rope", told, f"one angle a pair: pass cos[..., :{dim // 2}], and sin alike")
    few = sequence * heads < (1 << 31) - (1 << 12)  # the kernel counts them, and a tile past the last, in 32 bits
    expect(few, "rope", f"x is {list(x.shape)}: 2**31 heads of tokens", "turn a part of the sequence at a time")
    if in_place:
        apart("rope", "x", x)
    if not launch.on_triton(x):
        return reference.rope(x, cos, sin, inverse, interleaved, in_place)
    if x.stride(-1) != 1:
        expect(not in_place, "rope", f"x is of strides {list(x.stride())}: its dims lie apart", "pass in_place=False")
        x = x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    y = x if in_place else launch.empty(x.shape, x.dtype, x)
    rest = 0 if in_place else dim - 2 * half
    block = rows.power_of_two(half)
    schedule = rows.head_schedule("rope", x, heads, block)
    # Halves that begin at other multiples of 16 bytes may lie in other threads; of few elements each thread has all.
    narrow = schedule.rows * 2 * block * x.element_size() < schedule.warps * THREADS * 16
    shared = in_place and (narrow or not interleaved)
    for source, to, c, s in _parts(x, y, cos, sin):
        launch.run(
            "rope.rope",
            (-(-sequence * heads // schedule.rows), source.shape[0]),
            *(source, c, s, to, sequence * heads, *x.stride()[:3], *y.stride()[:3]),
            *(0 if cos.dim() == 2 or cos.shape[0] == 1 else sequence * half, -1.0 if inverse else 1.0),
            COUNT=heads,
            HALF=half,
            REST=rest,
            INTERLEAVED=interleaved,
            SHARED=shared,
            BLOCK=block,
            REST_BLOCK=rows.power_of_two(max(rest, 1)),
            ROWS=schedule.rows,
            warps=schedule.warps,
        )
    if in_place:
        written(x)
    return y


def _parts(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The four, of as many samples as one launch turns."""
    if x.shape[0] <= SAMPLES:
        yield x, y, cos, sin
        return
    for at in range(0, x.shape[0], SAMPLES):
        here = slice(at, at + SAMPLES)
        c, s = (t[here] if t.dim() == 3 and t.shape[0] > 1 else t for t in (cos, sin))
        yield x[here], y[here], c, s
