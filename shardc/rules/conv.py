"""Convolution, pooling, resizing, padding by reflection: batch and channels are free, space is whole.

    convolution   n (g c) h w, (g o) c kh kw -> n (g o) p q        sum="c"

Sharding space would need halos; it is refused where it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardc.rules.local import LocalCall
from shardc.rules.notation import Dims, Notation
from shardc.rules.registry import example, rule

aten = torch.ops.aten


# ------------------------------------------------------------------------------------------------ convolution
class _Labels:
    """Labels of input, weight, output and bias. Groups are the major factor of both channel dims."""

    def __init__(self, space: int, transposed: bool, groups: int) -> None:
        def tensor(*dims: str, names: str) -> str:
            return " ".join([*dims, *(f"{names}{i}" for i in range(space))])

        ins, outs = ("(g c)", "(g o)") if groups > 1 else ("c", "o")
        self.x = tensor("n", ins, names="h")
        self.w = tensor(ins, "o", names="w") if transposed else tensor(outs, "c", names="w")
        self.y = tensor("n", outs, names="p")
        self.bias = outs
        self.whole = " ".join(f"{name}{i}" for name in "hwp" for i in range(space))


def _local_groups(call: LocalCall) -> Any:
    return call.with_args(groups=call.size("g") if call.args["groups"] > 1 else 1)


CONVOLUTIONS = [
    # x, w, stride, padding, dilation, transposed, output_padding, groups, the result's shape
    ((4, 6, 5, 7), (8, 6, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0], 1, (4, 8, 5, 7)),
    ((4, 6, 5, 7), (8, 3, 3, 2), [2, 1], [0, 1], [1, 1], False, [0, 0], 2, (4, 8, 2, 8)),
    ((4, 6, 9), (6, 1, 3), [1], [2], [2], False, [0], 6, (4, 6, 9)),
    ((4, 6, 5, 4), (6, 4, 3, 3), [2, 2], [1, 1], [1, 1], True, [1, 0], 1, (4, 4, 10, 7)),
    ((4, 6, 5), (6, 4, 3), [2], [1], [1], True, [0], 3, (4, 12, 9)),
]


@rule(
    aten.convolution.default,
    localize=_local_groups,
    examples=[(x, w, None, *rest) for x, w, *rest, _ in CONVOLUTIONS]
    + [((4, 6, 5, 7), (8, 6, 3, 3), (8,), [1, 1], [1, 1], [1, 1], False, [0, 0], 1)],
)
def convolution(
    input: Dims, weight: Dims, bias: Dims | None, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int,
) -> Notation:  # fmt: skip
    labels = _Labels(weight.ndim - 2, transposed, groups)
    if bias is not None:  # every shard of a sum over c would add it; normalize takes it out
        return Notation(f"{labels.x}, {labels.w}, {labels.bias} -> {labels.y}", whole=f"{labels.whole} c")
    return Notation(f"{labels.x}, {labels.w} -> {labels.y}", sum="c", whole=labels.whole, linear="each")


@rule(
    aten.convolution_backward.default,
    localize=_local_groups,
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
    labels = _Labels(weight.ndim - 2, transposed, groups)
    outs = [t for t, needed in zip((labels.x, labels.w, labels.bias), output_mask, strict=True) if needed]
    # A bias gradient does not have c, nor is it a sum over c.
    whole = f"{labels.whole} c" if output_mask[2] else labels.whole
    return Notation(f"{labels.y}, {labels.x}, {labels.w} -> {', '.join(outs)}", sum="n o", whole=whole, linear=(0,))


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


_max_window(
    aten.max_pool2d_with_indices.default,
    2,
    [((4, 3, 6, 6), [2, 2], [2, 2]), ((3, 7, 6), [3, 3], [2, 2], [1, 1], [1, 1], True)],
)
_max_window(aten.max_pool3d_with_indices.default, 3, [((2, 3, 4, 6, 6), [2, 2, 2], [2, 2, 2])])
_max_window(aten.adaptive_max_pool2d.default, 2, [((4, 3, 6, 6), [2, 3])])
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
_linear_window(aten.upsample_nearest1d.default, 1, [((4, 3, 6), [12])])
_linear_window(aten.upsample_linear1d.default, 1, [((4, 3, 6), [12], False)])
_linear_window(aten.upsample_nearest2d.default, 2, [((4, 3, 5, 6), [10, 12])])
_linear_window(
    [aten.upsample_bilinear2d.default, aten.upsample_bicubic2d.default],
    2,
    [((4, 3, 5, 6), [10, 12], False), ((4, 3, 5, 6), [7, 8], True)],
)
_linear_window([aten.reflection_pad1d.default, aten.replication_pad1d.default], 1, [((4, 3, 6), [1, 2])])
_linear_window([aten.reflection_pad2d.default, aten.replication_pad2d.default], 2, [((4, 3, 5, 6), [1, 2, 0, 1])])
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
_resize_backward(aten.upsample_nearest1d_backward.default, 1, [((4, 3, 12), [12], [4, 3, 6])])
_resize_backward(aten.upsample_linear1d_backward.default, 1, [((4, 3, 12), [12], [4, 3, 6], False)])
_resize_backward(aten.upsample_nearest2d_backward.default, 2, [((4, 3, 10, 12), [10, 12], [4, 3, 5, 6])])
_resize_backward(
    [aten.upsample_bilinear2d_backward.default, aten.upsample_bicubic2d_backward.default],
    2,
    [((4, 3, 10, 12), [10, 12], [4, 3, 5, 6], False)],
)
