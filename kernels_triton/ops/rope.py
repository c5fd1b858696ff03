"""Rotary position embedding, out of place, or in place on any view, such as the heads of a packed QKV."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kernels_triton.launch import launch, row_schedule
from kernels_triton.library import reference
from kernels_triton.library.checks import checked, expect, expect_floats, expect_no_overlap, expect_shape, mark_written

SAMPLES = 65535  # the most programs in a grid's second dim
THREADS = 32  # of a warp


@checked
def rope(
    x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False, interleaved: bool = False, in_place: bool = False
) -> Tensor:
    """x rotated by the angles of its positions (Su et al. 2021, "RoFormer", section 3.4), in x's shape and dtype.

    x [batch, sequence, heads, dim]; cos and sin [sequence, turned / 2], [1, sequence, turned / 2] or
    [batch, sequence, turned / 2], of floating point. Dim i is paired with i + turned/2, or, if `interleaved`, with its
    neighbour, as in the paper. Dims past `turned` are unchanged. `inverse` rotates back, which is also the gradient.
    Pairs are independent, so `in_place` is legal on any view of x whose elements do not overlap; x itself is returned.

    Raises SC530 for a wrong operand (see `kernels_triton.ops`), for more angles than pairs, for 2**31 heads of tokens,
    and in place for an x that overlaps itself or whose dims lie apart.
    """
    expect_floats("rope", x, x=x, cos=cos, sin=sin)
    expect(x.dim() == 4, "rope", f"x is {list(x.shape)}, expected [batch, sequence, heads, dim]")
    batch, sequence, heads, dim = x.shape
    half = cos.shape[-1] if cos.dim() else 0
    fits = half > 0 and tuple(cos.shape) in ((sequence, half), (batch, sequence, half), (1, sequence, half))
    message = f"cos is {list(cos.shape)}, expected [{sequence}, angles] or [{batch}, {sequence}, angles]"
    expect(fits, "rope", message, "pass the cosines of x's own positions")
    expect_shape("rope", "sin", sin, cos.shape, x)
    message = f"cos is {list(cos.shape)}: {half} angles turn {2 * half} dims; a head has {dim}"
    expect(2 * half <= dim, "rope", message, f"one angle a pair: pass cos[..., :{dim // 2}], and sin alike")
    few = sequence * heads < (1 << 31) - (
        1 << 12
    )  # the kernel's indices, including a tile past the last, are 32 bits wide
    expect(few, "rope", f"x is {list(x.shape)}: 2**31 heads of tokens", "turn a part of the sequence at a time")
    if in_place:
        expect_no_overlap("rope", "x", x)
    if not launch.runs_on_triton(x):
        return reference.rope(x, cos, sin, inverse, interleaved, in_place)
    if x.stride(-1) != 1:
        expect(not in_place, "rope", f"x is of strides {list(x.stride())}: its dims lie apart", "pass in_place=False")
        x = x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    y = x if in_place else launch.empty(x.shape, x.dtype, x)
    rest = 0 if in_place else dim - 2 * half
    block = row_schedule.power_of_two(half)
    schedule = row_schedule.head_schedule("rope", x, heads, block)
    # Halves at other multiples of 16 bytes may lie in other threads. With few elements, each thread has all of them.
    narrow = schedule.rows * 2 * block * x.element_size() < schedule.warps * THREADS * 16
    shared = in_place and (narrow or not interleaved)
    for source, to, c, s in _sample_slices(x, y, cos, sin):
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
            REST_BLOCK=row_schedule.power_of_two(max(rest, 1)),
            ROWS=schedule.rows,
            warps=schedule.warps,
        )
    if in_place:
        mark_written(x)
    return y


def _sample_slices(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The four tensors, cut into as many samples as one launch takes."""
    if x.shape[0] <= SAMPLES:
        yield x, y, cos, sin
        return
    for start in range(0, x.shape[0], SAMPLES):
        samples = slice(start, start + SAMPLES)
        c, s = (t[samples] if t.dim() == 3 and t.shape[0] > 1 else t for t in (cos, sin))
        yield x[samples], y[samples], c, s
