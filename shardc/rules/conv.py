"""Convolution, pooling, resizing, padding by reflection: batch and channels are free, space is whole.

    convolution   n (g c) h w, (g o) c kh kw -> n (g o) p q        sum="c"

But a spatial dim of a convolution is free where it has `stride` elements for each of the result: `(p s) -> p`. What
kernels read of the neighbours' rows is exchanged (see `halo`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardc.rules.halo import FIRST_SPATIAL, local_convolution, unfit, windows
from shardc.rules.local import LocalCall, fill_padding
from shardc.rules.notation import Dims, Notation
from shardc.rules.registry import by_block, example, rule

aten = torch.ops.aten


# ------------------------------------------------------------------------------------------------ convolution
class _Labels:
    """Labels of input, weight, output and bias. Groups are the major factor of both channel dims.

    `tiled`: for each spatial dim, its stride if it has as many elements for each of the result, else 0.
    """

    def __init__(self, tiled: Sequence[int], transposed: bool, groups: int) -> None:
        space = len(tiled)

        def tensor(*dims: str, names: Sequence[str]) -> str:
            return " ".join([*dims, *names])

        ins, outs = ("(g c)", "(g o)") if groups > 1 else ("c", "o")
        before = [f"(p{i} s{i})" if s > 1 else f"p{i}" if s else f"h{i}" for i, s in enumerate(tiled)]
        taps, after = ([f"{name}{i}" for i in range(space)] for name in "wp")
        self.x = tensor("n", ins, names=before)
        self.w = tensor(ins, "o", names=taps) if transposed else tensor(outs, "c", names=taps)
        self.y = tensor("n", outs, names=after)
        self.bias = outs
        self.whole = " ".join(
            [*taps, *(f"s{i}" if s > 1 else f"h{i} p{i}" for i, s in enumerate(tiled) if s != 1)],
        )
        self.free = " ".join(f"p{i}" for i, s in enumerate(tiled) if s)

    @staticmethod
    def of(input: Dims, weight: Dims, stride: Any, padding: Any, dilation: Any, transposed: bool, groups: int) -> Any:
        space, taps = input.shape[FIRST_SPATIAL:], weight.shape[FIRST_SPATIAL:]
        tiled = [0] * len(space)
        if not transposed:
            tiled = [w.stride if w.tiles else 0 for w in windows(space, taps, stride, padding, dilation)]
        return _Labels(tiled, transposed, groups)


_local_rows = by_block(local_convolution)


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
    labels = _Labels.of(input, weight, stride, padding, dilation, transposed, groups)
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
    labels = _Labels.of(input, weight, stride, padding, dilation, transposed, groups)
    outs = [t for t, needed in zip((labels.x, labels.w, labels.bias), output_mask, strict=True) if needed]
    # A bias gradient does not have c, nor is it a sum over c.
    whole = f"{labels.whole} c" if output_mask[2] else labels.whole
    text = f"{labels.y}, {labels.x}, {labels.w} -> {', '.join(outs)}"
    return Notation(text, sum=f"n o {labels.free}", whole=whole, linear=(0,))


# ------------------------------------------------------------------------------------------------ windows
def _windowed(x: Dims, space: int) -> tuple[str, str, str]:
    """Before and after an op that works on the last `space` dims, and those dims."""
    lead = x.labels[: x.ndim - space]
    before, after = x.labels[x.ndim - space :], [f"p{i}" for i in range(space)]
    return " ".join(lead + before), " ".join(lead + after), " ".join(before + after)


def _max_window(ops: Any, space: int, examples: Sequence[tuple[Any, ...]]) -> None:
    """x -> the maxima and where they were, counted within the window op's own space."""

    @rule(ops, examples=examples)
    def forward(x: Dims, *options: Any) -> Notation:
        before, after, whole = _windowed(x, space)
        return Notation(f"{before} -> {after}, {after}", whole=whole)


def _max_window_backward(ops: Any, space: int, examples: Sequence[Any]) -> None:
    """(g, x, ..., indices) -> the gradient of x."""

    @rule(ops, examples=examples)
    def backward(g: Dims, x: Dims, *options: Any) -> Notation:
        before, after, whole = _windowed(x, space)
        return Notation(f"{after}, {before}, {after} -> {before}", whole=whole, linear=(0,))


def _linear_window(ops: Any, space: int, examples: Sequence[tuple[Any, ...]]) -> None:
    """x -> y, linear in x: averages, interpolation, padding."""

    @rule(ops, examples=examples)
    def forward(x: Dims, *options: Any) -> Notation:
        before, after, whole = _windowed(x, space)
        return Notation(f"{before} -> {after}", whole=whole, linear="joint")


def _linear_window_backward(ops: Any, space: int, examples: Sequence[tuple[Any, ...]]) -> None:
    """(g, x, ...) -> the gradient of x, of which only the shape counts."""

    @rule(ops, examples=examples)
    def backward(g: Dims, x: Dims, *options: Any) -> Notation:
        before, after, whole = _windowed(x, space)
        return Notation(f"{after}, {before} -> {before}", whole=whole, linear=(0,))


def _resize_backward(ops: Any, space: int, examples: Sequence[tuple[Any, ...]]) -> None:
    """(g, output_size, input_size, ...) -> the gradient of the input."""

    @rule(ops, examples=examples, shape_arg="input_size")
    def backward(g: Dims, *options: Any) -> Notation:
        after, before, whole = _windowed(g, space)
        return Notation(f"{after} -> {before}", whole=whole, linear="joint")


def _antialiased(suffix: str) -> list[Any]:
    """Resizing of images with antialiasing; `lanczos` is new in torch 2.13."""
    names = [f"_upsample_{kind}2d_aa{suffix}" for kind in ("bilinear", "bicubic", "lanczos")]
    return [getattr(aten, name).default for name in names if hasattr(aten, name)]


_max_window(
    aten.max_pool2d_with_indices.default,
    2,
    [((4, 3, 6, 6), [2, 2], [2, 2]), ((3, 7, 6), [3, 3], [2, 2], [1, 1], [1, 1], True)],
)
_max_window(aten.max_pool3d_with_indices.default, 3, [((2, 3, 4, 6, 6), [2, 2, 2], [2, 2, 2])])
_max_window(aten.adaptive_max_pool2d.default, 2, [((4, 3, 6, 6), [2, 3])])
_max_window(aten.adaptive_max_pool3d.default, 3, [((4, 3, 4, 6, 6), [2, 3, 2])])
_max_window_backward(
    aten.adaptive_max_pool3d_backward.default,
    3,
    [example((4, 3, 2, 3, 2), (4, 3, 4, 6, 6), (4, 3, 2, 3, 2), ints={"indices": 144})],
)
_max_window_backward(
    aten.max_pool2d_with_indices_backward.default,
    2,
    [example((4, 3, 3, 3), (4, 3, 6, 6), [2, 2], [2, 2], [0, 0], [1, 1], False, (4, 3, 3, 3), ints={"indices": 36})],
)
_max_window_backward(
    aten.max_pool3d_with_indices_backward.default,
    3,
    [
        example(
            *((2, 3, 2, 3, 3), (2, 3, 4, 6, 6), [2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False, (2, 3, 2, 3, 3)),
            ints={"indices": 144},
        )
    ],
)
_max_window_backward(
    aten.adaptive_max_pool2d_backward.default,
    2,
    [example((4, 3, 2, 3), (4, 3, 6, 6), (4, 3, 2, 3), ints={"indices": 36})],
)
_linear_window(aten.avg_pool2d.default, 2, [((4, 3, 6, 6), [2, 2]), ((3, 7, 6), [3, 3], [2, 2], [1, 1], True, False)])
_linear_window(aten.avg_pool3d.default, 3, [((2, 3, 4, 6, 6), [2, 2, 2])])
_linear_window(aten._adaptive_avg_pool2d.default, 2, [((4, 3, 6, 6), [2, 3]), ((3, 5, 7), [2, 2])])
_linear_window(aten._adaptive_avg_pool3d.default, 3, [((2, 3, 4, 6, 6), [2, 3, 2])])
_linear_window([aten.upsample_nearest1d.default, aten._upsample_nearest_exact1d.default], 1, [((4, 3, 6), [12])])
_linear_window(aten.upsample_linear1d.default, 1, [((4, 3, 6), [12], False)])
_linear_window([aten.upsample_nearest2d.default, aten._upsample_nearest_exact2d.default], 2, [((4, 3, 5, 6), [10, 12])])
_linear_window(
    [aten.upsample_nearest3d.default, aten._upsample_nearest_exact3d.default], 3, [((4, 3, 2, 5, 6), [4, 7, 12])]
)
_linear_window(aten.upsample_trilinear3d.default, 3, [((4, 3, 2, 5, 6), [4, 7, 12], False)])
_linear_window(
    [aten.upsample_bilinear2d.default, aten.upsample_bicubic2d.default] + _antialiased(""),
    2,
    [((4, 3, 5, 6), [10, 12], False), ((4, 3, 5, 6), [7, 8], True)],
)
_linear_window([aten.reflection_pad1d.default, aten.replication_pad1d.default], 1, [((4, 3, 6), [1, 2])])
_linear_window([aten.reflection_pad2d.default, aten.replication_pad2d.default], 2, [((4, 3, 5, 6), [1, 2, 0, 1])])
_linear_window(
    [aten.reflection_pad3d.default, aten.replication_pad3d.default], 3, [((4, 3, 2, 5, 6), [1, 2, 0, 1, 1, 0])]
)
_linear_window_backward(
    aten.avg_pool2d_backward.default, 2, [((4, 3, 3, 3), (4, 3, 6, 6), [2, 2], [2, 2], [0, 0], False, True, None)]
)
_linear_window_backward(
    aten.avg_pool3d_backward.default,
    3,
    [((2, 3, 2, 3, 3), (2, 3, 4, 6, 6), [2, 2, 2], [2, 2, 2], [0, 0, 0], False, True, None)],
)
_linear_window_backward(aten._adaptive_avg_pool2d_backward.default, 2, [((4, 3, 2, 3), (4, 3, 6, 6))])
_linear_window_backward(aten._adaptive_avg_pool3d_backward.default, 3, [((2, 3, 2, 3, 2), (2, 3, 4, 6, 6))])
_linear_window_backward(
    [aten.reflection_pad1d_backward.default, aten.replication_pad1d_backward.default],
    1,
    [((4, 3, 9), (4, 3, 6), [1, 2])],
)
_linear_window_backward(
    [aten.reflection_pad2d_backward.default, aten.replication_pad2d_backward.default],
    2,
    [((4, 3, 6, 9), (4, 3, 5, 6), [1, 2, 0, 1])],
)
_linear_window_backward(
    [aten.reflection_pad3d_backward.default, aten.replication_pad3d_backward.default],
    3,
    [((4, 3, 3, 6, 9), (4, 3, 2, 5, 6), [1, 2, 0, 1, 1, 0])],
)
_resize_backward(
    [aten.upsample_nearest1d_backward.default, aten._upsample_nearest_exact1d_backward.default],
    1,
    [((4, 3, 12), [12], [4, 3, 6])],
)
_resize_backward(aten.upsample_linear1d_backward.default, 1, [((4, 3, 12), [12], [4, 3, 6], False)])
_resize_backward(
    [aten.upsample_nearest2d_backward.default, aten._upsample_nearest_exact2d_backward.default],
    2,
    [((4, 3, 10, 12), [10, 12], [4, 3, 5, 6])],
)
_resize_backward(
    [aten.upsample_nearest3d_backward.default, aten._upsample_nearest_exact3d_backward.default],
    3,
    [((4, 3, 4, 7, 12), [4, 7, 12], [4, 3, 2, 5, 6])],
)
_resize_backward(
    aten.upsample_trilinear3d_backward.default, 3, [((4, 3, 4, 7, 12), [4, 7, 12], [4, 3, 2, 5, 6], False)]
)
_resize_backward(
    [aten.upsample_bilinear2d_backward.default, aten.upsample_bicubic2d_backward.default] + _antialiased("_backward"),
    2,
    [((4, 3, 10, 12), [10, 12], [4, 3, 5, 6], False)],
)


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


def _unpool(op: Any, space: int, examples: Sequence[Any]) -> None:
    """Maxima back to where they were, which is counted within the space of the result."""

    def local(call: LocalCall) -> Any:
        return call.with_args(indices=fill_padding(call, call.args["indices"], 0.0))

    @rule(op, localize=local, examples=examples)
    def unpool(x: Dims, indices: Dims, *options: Any) -> Notation:
        before, after, whole = _windowed(x, space)
        return Notation(f"{before}, {before} -> {after}", whole=whole, linear=(0,))


_unpool(
    aten.max_unpool2d.default,
    2,
    [
        example((4, 3, 1, 2), (4, 3, 1, 2), [4, 6], ints={"indices": range(5, 6)}),
        example((3, 1, 1), (3, 1, 1), [4, 6], ints={"indices": 24}),
    ],
)
_unpool(
    aten.max_unpool3d.default,
    3,
    [example((4, 3, 1, 1, 1), (4, 3, 1, 1, 1), [2, 4, 6], [2, 2, 2], [0, 0, 0], ints={"indices": 48})],
)


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
