"""Batch, rows, columns and depth of each product, from a call's arguments and the shape of its result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Shape = tuple[int, ...]
Product = tuple[int, int, int, int]  # batch, rows, columns, depth


def _convolution(a: Mapping[str, Any], rows_of: Shape, channels: int, depth_of: Shape) -> Product:
    """groups x [batch * positions, channels of a group's results] x [taps * channels of its operand]."""
    groups = a["groups"]
    return groups, rows_of[0] * math.prod(rows_of[2:]), max(1, channels // groups), math.prod(depth_of[1:])


PRODUCT_SHAPES: Mapping[str, Callable[[Mapping[str, Any], Shape], Product]] = {
    "mm": lambda a, y: (1, y[0], y[1], a["self"][1]),
    "bmm": lambda a, y: (y[0], y[1], y[2], a["self"][2]),
    "addmm": lambda a, y: (1, y[0], y[1], a["mat1"][1]),
    "baddbmm": lambda a, y: (y[0], y[1], y[2], a["batch1"][2]),
    "mv": lambda a, y: (1, a["self"][0], 1, a["self"][1]),
    "dot": lambda a, y: (1, 1, 1, a["self"][0]),
    "vdot": lambda a, y: (1, 1, 1, a["self"][0]),
    "shardc.linear": lambda a, y: (1, math.prod(y[:-1]), y[-1], a["x"][-1]),
    "shardc.linear_bias": lambda a, y: (1, math.prod(y[:-1]), y[-1], a["x"][-1]),
    "shardc.linear_dgrad": lambda a, y: (1, math.prod(y[:-1]), y[-1], a["g"][-1]),
    "shardc.linear_wgrad": lambda a, y: (1, a["g"][-1], a["x"][-1], math.prod(a["g"][:-1])),
    "shardc.scaled_linear": lambda a, y: (1, math.prod(y[:-1]), y[-1], a["x"][-1]),
    "shardc.scaled_linear_dgrad": lambda a, y: (1, math.prod(y[:-1]), y[-1], a["g"][-1]),
    "shardc.scaled_linear_wgrad": lambda a, y: (1, a["g"][-1], a["x"][-1], math.prod(a["g"][:-1])),
    "shardc.scaled_mm": lambda a, y: (1, y[0], y[1], a["a"][1]),
    "shardc.accumulate_wgrad": lambda a, y: (1, a["g"][-1], a["x"][-1], math.prod(a["g"][:-1])),
    "shardc.grouped_mm": lambda a, y: (1, math.prod(y[:-1]), y[-1], a["a"][-1]),
    "shardc.grouped_mm_wgrad": lambda a, y: (1, a["a"][-1], a["g"][-1], math.prod(a["a"][:-1])),
    "shardc.expert_mm": lambda a, y: (1, math.prod(y[:-1]), y[-1], a["a"][-1]),
    "shardc.expert_wgrad": lambda a, y: (1, a["a"][-1], a["g"][-1], math.prod(a["a"][:-1])),
    "convolution": lambda a, y: _convolution(a, a["input"] if a["transposed"] else y, a["weight"][0], a["weight"]),
    "convolution_backward": lambda a, y: _convolution(
        a, a["input"] if a["transposed"] else a["grad_output"], a["weight"][0], a["weight"]
    ),
}
