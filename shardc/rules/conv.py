"""Convolution, windows as columns, sampling at points: batch and channels are free.

    convolution   n (g c) h w, (g o) c kh kw -> n (g o) p q        sum="c"

A spatial dim of a convolution is free where it has `stride` elements for each of the result, `(p s) -> p`, and of a
transposed one where the result has: `p -> (p s)`. What kernels read of the neighbours' rows is exchanged (see `halo`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardc.rules.halo import local_windows, tiled, unfit
from shardc.rules.local import LocalCall, fill_padding
from shardc.rules.notation import Dims, Notation
from shardc.rules.registry import by_block, rule

aten = torch.ops.aten


# ------------------------------------------------------------------------------------------------ convolution
class _Labels:
    """Labels of input, weight, output and bias. Groups are the major factor of both channel dims.

    `strides`: for each spatial dim, its stride if windows tile it, else 0.
    """

    def __init__(self, strides: Sequence[int], transposed: bool, groups: int) -> None:
        space = len(strides)

        def tensor(*dims: str, names: Sequence[str]) -> str:
            return " ".join([*dims, *names])

        ins, outs = ("(g c)", "(g o)") if groups > 1 else ("c", "o")
        elements = [f"(p{i} s{i})" if s > 1 else f"p{i}" if s else f"h{i}" for i, s in enumerate(strides)]
        taps, windows = ([f"{name}{i}" for i in range(space)] for name in "wp")
        self.x = tensor("n", ins, names=windows if transposed else elements)
        self.w = tensor(ins, "o", names=taps) if transposed else tensor(outs, "c", names=taps)
        self.y = tensor("n", outs, names=elements if transposed else windows)
        self.bias = outs
        self.whole = " ".join(
            [*taps, *(f"s{i}" if s > 1 else f"h{i} p{i}" for i, s in enumerate(strides) if s != 1)],
        )
        self.free = " ".join(f"p{i}" for i, s in enumerate(strides) if s)


_local_rows = by_block(local_windows)


CONVOLUTIONS = [
    # x, w, stride, padding, dilation, transposed, output_padding, groups, the result's shape
    ((4, 6, 5, 7), (8, 6, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0], 1, (4, 8, 5, 7)),
    ((4, 6, 5, 7), (8, 3, 3, 2), [2, 1], [0, 1], [1, 1], False, [0, 0], 2, (4, 8, 2, 8)),
    ((4, 6, 9), (6, 1, 3), [1], [2], [2], False, [0], 6, (4, 6, 9)),
    ((4, 6, 8, 6), (8, 6, 3, 5), [1, 1], [1, 2], [1, 1], False, [0, 0], 1, (4, 8, 8, 6)),
    ((4, 6, 8, 12), (8, 3, 3, 4), [2, 2], [1, 1], [1, 1], False, [0, 0], 2, (4, 8, 4, 6)),
    ((4, 6, 12), (8, 6, 3), [1], [2], [2], False, [0], 1, (4, 8, 12)),
    ((4, 6, 12), (8, 6, 2), [2], [0], [1], False, [0], 1, (4, 8, 6)),
    ((4, 6, 5, 4), (6, 4, 3, 3), [2, 2], [1, 1], [1, 1], True, [1, 0], 1, (4, 4, 10, 7)),
    ((4, 6, 5), (6, 4, 3), [2], [1], [1], True, [0], 3, (4, 12, 9)),
    ((4, 6, 4, 6), (6, 4, 4, 2), [2, 2], [1, 0], [1, 1], True, [0, 0], 1, (4, 4, 8, 12)),
    ((4, 6, 6), (6, 2, 3), [2], [1], [1], True, [1], 3, (4, 6, 12)),
    ((4, 6, 6), (6, 4, 3), [1], [2], [2], True, [0], 1, (4, 4, 6)),
]


@rule(
    aten.convolution.default,
    localize=_local_rows,
    unfit=unfit,
    examples=[(x, w, None, *rest) for x, w, *rest, _ in CONVOLUTIONS]
    + [((4, 6, 5, 7), (8, 6, 3, 3), (8,), [1, 1], [1, 1], [1, 1], False, [0, 0], 1)],
)
def convolution(
    input: Dims, weight: Dims, bias: Dims | None, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int,
) -> Notation:  # fmt: skip
    args = (input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    strides = tiled(aten.convolution.default, args)
    if transposed and bias is not None:  # both of two ranks that compute a row would add it
        strides = [0] * len(strides)
    labels = _Labels(strides, transposed, groups)
    if bias is not None:  # every shard of a sum over c would add it; normalize takes it out
        return Notation(f"{labels.x}, {labels.w}, {labels.bias} -> {labels.y}", whole=f"{labels.whole} c")
    return Notation(f"{labels.x}, {labels.w} -> {labels.y}", sum="c", whole=labels.whole, linear="each")


@rule(
    aten.convolution_backward.default,
    localize=_local_rows,
    unfit=unfit,
    examples=[
        (y, x, w, None, *rest, mask)
        for x, w, *rest, y in CONVOLUTIONS
        for mask in ([True, True, False], [False, True, False])
    ]
    + [((4, 8, 5, 7), (4, 6, 5, 7), (8, 6, 3, 3), [8], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True])],
)
def convolution_backward(
    grad_output: Dims, input: Dims, weight: Dims, bias_sizes: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, output_mask: Sequence[bool],
) -> Notation:  # fmt: skip
    args = (grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed)
    strides = tiled(aten.convolution_backward.default, (*args, output_padding, groups, output_mask))
    if transposed and output_mask[2]:  # it would sum over rows of neighbours too
        strides = [0] * len(strides)
    labels = _Labels(strides, transposed, groups)
    outs = [t for t, needed in zip((labels.x, labels.w, labels.bias), output_mask, strict=True) if needed]
    # A bias gradient does not have c, nor is it a sum over c.
    whole = f"{labels.whole} c" if output_mask[2] else labels.whole
    text = f"{labels.y}, {labels.x}, {labels.w} -> {', '.join(outs)}"
    return Notation(text, sum=f"n o {labels.free}", whole=whole, linear=(0,))


# ------------------------------------------------------------------------------------------------ windows as columns
@rule(
    aten.im2col.default,
    linear="joint",
    examples=[((4, 3, 5, 6), [2, 3], [1, 1], [0, 1], [1, 2]), ((3, 5, 6), [2, 2], [1, 2], [0, 0], [2, 1])],
)
def im2col(self: Dims, kernel_size: Sequence[int], *options: Any) -> Notation:
    batch = "n " if self.ndim == 4 else ""
    return Notation(f"{batch}c h w -> {batch}(c k) l", whole="h w k l", linear="joint")


@rule(
    aten.col2im.default,
    linear="joint",
    examples=[
        ((4, 18, 12), [5, 6], [2, 3], [1, 1], [0, 1], [1, 2]),
        ((12, 8), [5, 6], [2, 2], [1, 2], [0, 0], [2, 1]),
        ((4, 2, 4), [2, 2], [1, 1], [1, 1], [0, 0], [1, 1]),
    ],
)
def col2im(self: Dims, output_size: Sequence[int], kernel_size: Sequence[int], *options: Any) -> Notation:
    batch = "n " if self.ndim == 3 else ""
    return Notation(f"{batch}(c k) l -> {batch}c h w", whole="h w k l", linear="joint")


# ------------------------------------------------------------------------------------------------ sampled at points
def _sampled(sampler: Any, sampler_backward: Any, space: tuple[int, ...], points: tuple[int, ...]) -> None:
    """x at the points of a grid: its gradient in x is a sum over the points, that in the grid over channels."""
    positions, places = (" ".join(f"{name}{i}" for i in range(len(space))) for name in "ph")
    x, y, grid = f"n c {places}", f"n c {positions}", f"n {positions} {len(space)}"
    shapes = ((4, 3, *space), (4, *points, len(space)))

    def local(call: LocalCall) -> Any:  # some kernels read at a point that is no number
        return call.with_args(grid=fill_padding(call, call.args["grid"], 0.0))

    rule(
        sampler,
        f"{x}, {grid} -> {y}",
        localize=local,
        whole=places,
        linear=(0,),
        examples=[(*shapes, mode, padding, corners) for mode, padding, corners in ((0, 0, False), (1, 1, True))],
    )

    @rule(
        sampler_backward,
        localize=local,
        examples=[
            ((4, 3, *points), *shapes, mode, padding, corners, [needed, True])
            for mode, padding, corners, needed in ((0, 0, False, True), (0, 1, True, False), (1, 0, False, True))
        ],
    )
    def backward(g: Dims, x_: Dims, at: Dims, mode: int, padding: int, corners: bool, mask: Sequence[bool]) -> Notation:
        results = f"{x}, {grid}" if mask[0] else grid
        return Notation(f"{y}, {x}, {grid} -> {results}", sum=f"c {positions}", whole=places, linear=(0,))


_sampled(aten.grid_sampler_2d.default, aten.grid_sampler_2d_backward.default, (5, 6), (4, 3))
_sampled(aten.grid_sampler_3d.default, aten.grid_sampler_3d_backward.default, (2, 5, 6), (4, 3, 2))
