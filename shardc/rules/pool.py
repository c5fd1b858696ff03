"""Pooling, resizing and padding by reflection: batch and channels are free, and space is where windows tile it.

    a pooling of 8 rows, kernel 3, stride 2, padding 1     (p s) -> p       a row of the rank before is exchanged
    a mean to 4 rows of 8                                  (p s) -> p
    twice as many rows, each the nearest                   p -> (p s)

Other spatial dims are whole. Positions of maxima count in the whole plane: those of a rank are shifted there, and in
backward back (`shardc.ir.ops.windows`). At the outer ends a mean is of fewer elements, which a rank cannot see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardc.rules.halo import local_windows, tiled, unfit
from shardc.rules.local import LocalCall, fill_padding
from shardc.rules.notation import Dims, Notation
from shardc.rules.registry import by_block, example, rule

aten = torch.ops.aten


def _space(x: Dims, strides: Sequence[int]) -> tuple[str, str, str]:
    """Before and after an op on the last dims, and which are whole. `strides`: for each, how many elements of x one of
    the result has, and 0 where that is no whole number."""
    lead, space = x.labels[: x.ndim - len(strides)], x.labels[x.ndim - len(strides) :]
    before = [f"(p{i} s{i})" if s > 1 else f"p{i}" if s else space[i] for i, s in enumerate(strides)]
    after = [f"p{i}" for i in range(len(strides))]
    whole = [f"s{i}" if s > 1 else f"{space[i]} p{i}" for i, s in enumerate(strides) if s != 1]
    return " ".join([*lead, *before]), " ".join([*lead, *after]), " ".join(whole)


# ------------------------------------------------------------------------------------------------ pooling
def _pools(op: Any, examples: Sequence[Any]) -> None:
    """x -> means; or the maxima and where they were."""

    @rule(op, localize=local_windows, unfit=unfit, examples=examples)
    def forward(self: Dims, *options: Any) -> Notation:
        before, after, whole = _space(self, tiled(op, (self, *options)))
        if len(op._schema.returns) == 2:
            return Notation(f"{before} -> {after}, {after}", whole=whole)
        return Notation(f"{before} -> {after}", whole=whole, linear="joint")


def _pools_backward(op: Any, examples: Sequence[Any]) -> None:
    """(g, x, ...) -> the gradient of x, of which only the shape counts; of maxima, (g, x, ..., positions)."""

    @rule(op, localize=local_windows, unfit=unfit, examples=examples)
    def backward(grad_output: Dims, self: Dims, *options: Any) -> Notation:
        before, after, whole = _space(self, tiled(op, (grad_output, self, *options)))
        positions = f", {after}" if any(isinstance(option, Dims) for option in options) else ""
        return Notation(f"{after}, {before}{positions} -> {before}", whole=whole, linear=(0,))


POOLED: list[tuple[Any, ...]] = [  # shape, kernel, stride, padding, dilation, ceil_mode, the result's space
    ((4, 3, 6, 6), [2, 2], [2, 2], [0, 0], [1, 1], False, (3, 3)),
    ((3, 7, 6), [3, 3], [2, 2], [1, 1], [1, 1], True, (4, 4)),
    ((2, 3, 8, 12), [3, 3], [2, 2], [1, 1], [1, 1], False, (4, 6)),
    ((2, 3, 8, 6), [3, 2], [2, 1], [0, 0], [1, 1], True, (4, 5)),
    ((2, 6, 9), [3, 3], [1, 3], [1, 0], [1, 1], False, (6, 3)),
]
DILATED: list[tuple[Any, ...]] = [((2, 3, 8, 6), [3, 3], [1, 2], [1, 1], [1, 2], False, (8, 2))]
DEEP: list[tuple[Any, ...]] = [
    ((2, 3, 4, 6, 6), [2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False, (2, 3, 3)),
    ((3, 4, 6, 8), [3, 3, 3], [1, 2, 2], [1, 1, 1], [1, 1, 1], False, (4, 3, 4)),
]


def _positions(x: Sequence[int], options: Sequence[Any]) -> Callable[[Sequence[int]], Tensor]:
    """Where the maxima of some image are: each within its own window."""
    pool = torch.nn.functional.max_pool2d if len(options[0]) == 2 else torch.nn.functional.max_pool3d
    return lambda _: pool(torch.rand(x), *options, return_indices=True)[1]


def _result(shape: Sequence[int], space: Sequence[int]) -> tuple[int, ...]:
    return (*shape[: -len(space)], *space)


for _op, _cases in (
    (aten.max_pool2d_with_indices.default, POOLED + DILATED),
    (aten.max_pool3d_with_indices.default, DEEP),
):
    _pools(_op, [case[:-1] for case in _cases])
for _op, _cases in (
    (aten.max_pool2d_with_indices_backward.default, POOLED + DILATED),
    (aten.max_pool3d_with_indices_backward.default, DEEP),
):
    _pools_backward(
        _op,
        [
            example(y, x, *options, y, ints={"indices": _positions(x, options)})
            for x, *options, space in _cases
            for y in [_result(x, space)]
        ],
    )
for _op, _cases in ((aten.avg_pool2d.default, POOLED), (aten.avg_pool3d.default, DEEP)):
    _pools(
        _op,
        [
            (x, k, s, p, ceil, counts, over)
            for x, k, s, p, _, ceil, _ in _cases
            for counts, over in ((True, None), (False, None), (False, 5))
        ],
    )
for _op, _cases in ((aten.avg_pool2d_backward.default, POOLED), (aten.avg_pool3d_backward.default, DEEP)):
    _pools_backward(
        _op,
        [
            (_result(x, space), x, k, s, p, ceil, counts, None)
            for x, k, s, p, _, ceil, space in _cases
            for counts in (True, False)
        ],
    )


# ------------------------------------------------------------------------------------------------ by a whole number
def _local_sizes(call: LocalCall) -> Any:
    """Sizes of the result, and of what is named after an operand or a gradient."""
    x, y = call.operand_shape(0), call.result_shape()
    space = len(call.args["output_size"])
    if "input_size" in call.args:
        return call.with_args(output_size=list(x[-space:]), input_size=list(y))
    return call.with_args(output_size=list(y[-space:]))


def _means_to(op: Any, examples: Sequence[tuple[Any, ...]]) -> None:
    """x -> means of as many equal parts, where it has such."""

    @rule(op, localize=by_block(_local_sizes), examples=examples)
    def forward(self: Dims, output_size: Sequence[int]) -> Notation:
        sizes = zip(self.shape[-len(output_size) :], output_size, strict=True)
        before, after, whole = _space(self, [n // m if m and n % m == 0 else 0 for n, m in sizes])
        return Notation(f"{before} -> {after}", whole=whole, linear="joint")


def _means_to_backward(op: Any, space: int, examples: Sequence[tuple[Any, ...]]) -> None:
    @rule(op, examples=examples)
    def backward(grad_output: Dims, self: Dims) -> Notation:
        sizes = zip(self.shape[-space:], grad_output.shape[-space:], strict=True)
        before, after, whole = _space(self, [n // m if m and n % m == 0 else 0 for n, m in sizes])
        return Notation(f"{after}, {before} -> {before}", whole=whole, linear=(0,))


def _nearest(
    x: Dims, small: Sequence[int], large: Sequence[int], scales: Sequence[float | None]
) -> tuple[str, str, str]:
    """Each element `n` times, where n is a power of two: with others, which is the nearest is a matter of rounding."""
    times = [m // n if n and m % n == 0 else 0 for n, m in zip(small, large, strict=True)]
    exact = [n if n & (n - 1) == 0 and scale in (None, float(n)) else 0 for n, scale in zip(times, scales, strict=True)]
    return _space(x, exact)


def _repeats(ops: Any, space: int, examples: Sequence[tuple[Any, ...]]) -> None:
    @rule(ops, localize=by_block(_local_sizes), examples=examples)
    def forward(self: Dims, output_size: Sequence[int], *scales: float | None) -> Notation:
        many, few, whole = _nearest(self, self.shape[-space:], output_size, scales)
        return Notation(f"{few} -> {many}", whole=whole, linear="joint")


def _repeats_backward(ops: Any, space: int, examples: Sequence[tuple[Any, ...]]) -> None:
    @rule(ops, localize=by_block(_local_sizes), examples=examples)
    def backward(
        grad_output: Dims, output_size: Sequence[int], input_size: Sequence[int], *scales: float | None
    ) -> Notation:
        many, few, whole = _nearest(grad_output, input_size[-space:], output_size, scales)
        return Notation(f"{many} -> {few}", whole=whole, linear="joint")


_means_to(aten._adaptive_avg_pool2d.default, [((4, 3, 6, 6), [2, 3]), ((3, 5, 7), [2, 2]), ((3, 8, 6), [4, 4])])
_means_to(aten._adaptive_avg_pool3d.default, [((2, 3, 4, 6, 6), [2, 3, 2])])
_means_to_backward(
    aten._adaptive_avg_pool2d_backward.default, 2, [((4, 3, 2, 3), (4, 3, 6, 6)), ((3, 4, 4), (3, 8, 6))]
)
_means_to_backward(aten._adaptive_avg_pool3d_backward.default, 3, [((2, 3, 2, 3, 2), (2, 3, 4, 6, 6))])
_repeats(
    [aten.upsample_nearest1d.default, aten._upsample_nearest_exact1d.default],
    1,
    [((4, 3, 6), [12]), ((4, 3, 6), [18]), ((4, 3, 6), [12], 2.1)],
)
_repeats(
    [aten.upsample_nearest2d.default, aten._upsample_nearest_exact2d.default],
    2,
    [((4, 3, 5, 6), [10, 12]), ((4, 3, 4, 6), [16, 9])],
)
_repeats(
    [aten.upsample_nearest3d.default, aten._upsample_nearest_exact3d.default],
    3,
    [((4, 3, 2, 5, 6), [4, 7, 12])],
)
_repeats_backward(
    [aten.upsample_nearest1d_backward.default, aten._upsample_nearest_exact1d_backward.default],
    1,
    [((4, 3, 12), [12], [4, 3, 6]), ((4, 3, 18), [18], [4, 3, 6])],
)
_repeats_backward(
    [aten.upsample_nearest2d_backward.default, aten._upsample_nearest_exact2d_backward.default],
    2,
    [((4, 3, 10, 12), [10, 12], [4, 3, 5, 6])],
)
_repeats_backward(
    [aten.upsample_nearest3d_backward.default, aten._upsample_nearest_exact3d_backward.default],
    3,
    [((4, 3, 4, 7, 12), [4, 7, 12], [4, 3, 2, 5, 6])],
)


# ------------------------------------------------------------------------------------------------ space as a whole
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


_max_window(aten.adaptive_max_pool2d.default, 2, [((4, 3, 6, 6), [2, 3])])
_max_window(aten.adaptive_max_pool3d.default, 3, [((4, 3, 4, 6, 6), [2, 3, 2])])
_max_window_backward(
    aten.adaptive_max_pool3d_backward.default,
    3,
    [example((4, 3, 2, 3, 2), (4, 3, 4, 6, 6), (4, 3, 2, 3, 2), ints={"indices": 144})],
)
_max_window_backward(
    aten.adaptive_max_pool2d_backward.default,
    2,
    [example((4, 3, 2, 3), (4, 3, 6, 6), (4, 3, 2, 3), ints={"indices": 36})],
)
_linear_window(aten.upsample_linear1d.default, 1, [((4, 3, 6), [12], False)])
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
_resize_backward(aten.upsample_linear1d_backward.default, 1, [((4, 3, 12), [12], [4, 3, 6], False)])
_resize_backward(
    aten.upsample_trilinear3d_backward.default, 3, [((4, 3, 4, 7, 12), [4, 7, 12], [4, 3, 2, 5, 6], False)]
)
_resize_backward(
    [aten.upsample_bilinear2d_backward.default, aten.upsample_bicubic2d_backward.default] + _antialiased("_backward"),
    2,
    [((4, 3, 10, 12), [10, 12], [4, 3, 5, 6], False)],
)


# ------------------------------------------------------------------------------------------------ maxima put back
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
