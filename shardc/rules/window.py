"""Windows: along a spatial dim, of which elements a convolution or a pooling makes each of its results.

    size 8, kernel 3, stride 1, padding 1     (p: 8)     a row from the rank before, one from that behind
    size 8, kernel 3, stride 2, padding 1     (p: 4 2)   a row from the rank before
    size 8, kernel 2, stride 2                (p: 4 2)   none: kernels lie side by side

A dim *tiles* where it has `stride` elements for each window. Its `p` is then a factor of both, and free. Of a
transposed convolution the result has the elements, and the input one for each window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten
Shape = Sequence[int]


@dataclass(frozen=True)
class Window:
    """What an op does along one spatial dim: `extent` is from the first element that a kernel reads to the last."""

    size: int
    extent: int
    stride: int
    padding: int
    ceil: bool = False  # a window may reach beyond the padding
    dilation: int = 1
    count: int | None = None  # how many windows there are, if that does not follow from the others

    @property
    def results(self) -> int:
        span = self.size + 2 * self.padding - self.extent
        if not self.ceil:
            return span // self.stride + 1
        found = -(-span // self.stride) + 1
        return found - ((found - 1) * self.stride >= self.size + self.padding)  # the last begins within the elements

    @property
    def tiles(self) -> bool:
        """Has the dim `stride` elements for each window?"""
        results = self.results
        return self.count in (None, results) and results * self.stride == self.size and self.padding < self.extent

    @property
    def before(self) -> int:
        """How many rows before its own a rank reads."""
        return self.padding

    @property
    def behind(self) -> int:
        return max(0, self.extent - self.padding - self.stride)

    @property
    def alone(self) -> bool:
        """A rank reads its own rows only."""
        return not (self.before or self.behind)


@dataclass(frozen=True)
class Windowed:
    """The windows of a call, and which of its tensors have their elements."""

    windows: tuple[Window, ...]
    first: int  # of the spatial dims
    reads: str = ""  # the operand whose elements kernels read
    fill: float = 0.0  # what they read beyond its ends
    shaped: str = ""  # an operand of which only the shape counts
    gives: bool = False  # the first result has the elements, each a sum over the windows that it is in
    by_window: str = ""  # then: the operand that has an element for each window
    positions: str = ""  # the operand that holds positions of elements; "result": the second result does
    means: str = ""  # what is a mean over a window's elements: "result" is, or is the gradient of one, an operand
    output_padding: bool = False  # the call says how many elements no window has

    @property
    def always_runs(self) -> bool:
        """Ranks' rows must lie one behind the other even where no kernel reaches beyond them."""
        return bool(self.positions)


def _along(values: Sequence[int], i: int) -> int:
    return int(values[i if len(values) > 1 else 0])


def windows(space: Shape, kernel: Shape, stride: Shape, padding: Shape, dilation: Shape) -> tuple[Window, ...]:
    """One for each spatial dim, of the shapes of input and weight behind the first two dims."""
    return tuple(
        Window(size, (taps - 1) * _along(dilation, i) + 1, _along(stride, i), _along(padding, i))
        for i, (size, taps) in enumerate(zip(space, kernel, strict=True))
    )


ShapeOf = Callable[[Any], Shape]
Arguments = Mapping[str, Any]
FIRST_OF_IMAGES = 2  # dims before it are the batch and the channels


def _transposed(args: Arguments, shape: ShapeOf) -> tuple[Window, ...]:
    """Those that are read where the result of a transposed convolution is the input."""
    space, kernel = (shape(args[name])[FIRST_OF_IMAGES:] for name in ("input", "weight"))
    found: list[Window] = []
    for i, (count, taps) in enumerate(zip(space, kernel, strict=True)):
        stride, padding, dilation = (_along(args[name], i) for name in ("stride", "padding", "dilation"))
        extent = (taps - 1) * dilation + 1
        size = (count - 1) * stride - 2 * padding + extent + _along(args["output_padding"], i)
        found.append(Window(size, extent, stride, padding, count=count))
    return tuple(found)


def _convolution(args: Arguments, shape: ShapeOf) -> Windowed:
    if args["transposed"]:
        return Windowed(_transposed(args, shape), FIRST_OF_IMAGES, gives=True, by_window="input", output_padding=True)
    return Windowed(_plain(args, shape), FIRST_OF_IMAGES, reads="input")


def _convolution_backward(args: Arguments, shape: ShapeOf) -> Windowed:
    if args["transposed"]:
        return Windowed(_transposed(args, shape), FIRST_OF_IMAGES, reads="grad_output", output_padding=True)
    given_back = bool(args["output_mask"][0])
    return Windowed(_plain(args, shape), FIRST_OF_IMAGES, reads="input", gives=given_back, by_window="grad_output")


def _plain(args: Arguments, shape: ShapeOf) -> tuple[Window, ...]:
    space, kernel = (shape(args[name])[FIRST_OF_IMAGES:] for name in ("input", "weight"))
    return windows(space, kernel, args["stride"], args["padding"], args["dilation"])


def _pooled(args: Arguments, shape: ShapeOf, space: int) -> tuple[tuple[Window, ...], int]:
    sizes, taps = shape(args["self"]), args["kernel_size"]
    stride, padding, dilation = (args.get(n) or d for n, d in (("stride", taps), ("padding", [0]), ("dilation", [1])))
    found = tuple(
        Window(
            size,
            (_along(taps, i) - 1) * _along(dilation, i) + 1,
            _along(stride, i),
            _along(padding, i),
            bool(args.get("ceil_mode")),
            _along(dilation, i),
        )
        for i, size in enumerate(sizes[len(sizes) - space :])
    )
    return found, len(sizes) - space


def _maxima(space: int) -> Callable[[Arguments, ShapeOf], Windowed]:
    def form(args: Arguments, shape: ShapeOf) -> Windowed:
        return Windowed(*_pooled(args, shape, space), reads="self", fill=-math.inf, positions="result")

    return form


def _maxima_backward(space: int) -> Callable[[Arguments, ShapeOf], Windowed]:
    def form(args: Arguments, shape: ShapeOf) -> Windowed:
        found = _pooled(args, shape, space)
        return Windowed(*found, shaped="self", gives=True, by_window="grad_output", positions="indices")

    return form


def _means(space: int) -> Callable[[Arguments, ShapeOf], Windowed]:
    def form(args: Arguments, shape: ShapeOf) -> Windowed:
        return Windowed(*_pooled(args, shape, space), reads="self", means="result")

    return form


def _means_backward(space: int) -> Callable[[Arguments, ShapeOf], Windowed]:
    def form(args: Arguments, shape: ShapeOf) -> Windowed:
        found = _pooled(args, shape, space)
        return Windowed(*found, shaped="self", gives=True, by_window="grad_output", means="grad_output")

    return form


WINDOWED: dict[Any, Callable[[Arguments, ShapeOf], Windowed]] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.max_pool2d_with_indices.default: _maxima(2),
    aten.max_pool3d_with_indices.default: _maxima(3),
    aten.max_pool2d_with_indices_backward.default: _maxima_backward(2),
    aten.max_pool3d_with_indices_backward.default: _maxima_backward(3),
    aten.avg_pool2d.default: _means(2),
    aten.avg_pool3d.default: _means(3),
    aten.avg_pool2d_backward.default: _means_backward(2),
    aten.avg_pool3d_backward.default: _means_backward(3),
}


def uncounted(window: Window, counts_padding: bool) -> bool:
    """Has some window of a mean fewer elements than the kernel, so that its divisor is another?"""
    last = window.results * window.stride - window.stride - window.padding + window.extent
    within = window.size + (window.padding if counts_padding else 0)
    return last > within or (window.padding > 0 and not counts_padding)
