"""Norms and softmax: rows are free, what is normalised over is whole. Batch norm is `normalize`'s business."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from shardc.rules.local import LocalCall
from shardc.rules.notation import Dims, Notation
from shardc.rules.registry import by_block, example, rule

aten = torch.ops.aten


def _joined(*tensors: str | None) -> str:
    """Tensors that the call has, with commas between; a tensor without dims is `()`."""
    return ", ".join(t or "()" for t in tensors if t is not None)


# ------------------------------------------------------------------------------------------------ layer norm
def _parts(x: Dims, normalized: Sequence[int]) -> tuple[str, str, str]:
    """The labels of a whole tensor, of its normalised dims, and of its statistics."""
    rows = x.ndim - len(normalized)
    inner = " ".join(x.labels[rows:])
    return str(x), inner, " ".join([*x.labels[:rows], *("1" for _ in normalized)])


@rule(
    aten.native_layer_norm.default,
    examples=[
        ((4, 3, 6), (6,), (6,), (6,), 1e-5),
        ((4, 3, 6), (3, 6), (3, 6), None, 1e-5),
        ((4, 6), (6,), None, None, 1e-5),
    ],
)
def layer_norm(
    input: Dims, normalized_shape: Sequence[int], weight: Dims | None, bias: Dims | None, eps: float
) -> Notation:
    x, inner, stats = _parts(input, normalized_shape)
    ins = _joined(x, inner if weight else None, inner if bias else None)
    return Notation(f"{ins} -> {x}, {stats}, {stats}", whole=inner)


@rule(
    aten.native_layer_norm_backward.default,
    examples=[
        ((4, 3, 6), (4, 3, 6), (6,), (4, 3, 1), (4, 3, 1), (6,), (6,), (True, True, True)),
        ((4, 3, 6), (4, 3, 6), (6,), (4, 3, 1), (4, 3, 1), (6,), None, (True, True, False)),
        ((4, 3, 6), (4, 3, 6), (3, 6), (4, 1, 1), (4, 1, 1), None, None, (True, False, False)),
    ],
)
def layer_norm_backward(
    grad_out: Dims, input: Dims, normalized_shape: Sequence[int], mean: Dims, rstd: Dims,
    weight: Dims | None, bias: Dims | None, output_mask: Sequence[bool],
) -> Notation:  # fmt: skip
    x, inner, stats = _parts(input, normalized_shape)
    ins = _joined(x, x, stats, stats, inner if weight else None, inner if bias else None)
    outs = _joined(*(t for t, needed in zip((x, inner, inner), output_mask, strict=True) if needed))
    rows = " ".join(input.labels[: input.ndim - len(normalized_shape)])
    return Notation(f"{ins} -> {outs}", sum=rows, whole=inner, linear=(0,))


# ------------------------------------------------------------------------------------------------ group norm
def _group_dims(x: Dims, groups: int) -> tuple[str, str, str]:
    """x as batch, (groups, channels of a group), space; the channels alone; the names of what must be whole."""
    channels = "(g c)" if x.shape[1] != groups else "g"
    space = [x[d] for d in range(2, x.ndim)]
    return " ".join(["n", channels, *space]), channels, " ".join(["c", *space])


@by_block
def _group_arguments(call: LocalCall) -> Any:
    """N, C, HxW and the number of groups, counted on this rank."""
    shape = call.operand_shape(0)
    return call.with_args(N=shape[0], C=shape[1], HxW=math.prod(shape[2:]), group=call.size("g"))


@rule(
    aten.native_group_norm.default,
    localize=_group_arguments,
    examples=[((4, 6, 5, 2), (6,), (6,), 4, 6, 10, 2, 1e-5), ((4, 6, 5), None, None, 4, 6, 5, 6, 1e-5)],
)
def group_norm(
    input: Dims, weight: Dims | None, bias: Dims | None, n: int, c: int, hw: int, group: int, eps: float
) -> Notation:
    x, channels, whole = _group_dims(input, group)
    ins = _joined(x, channels if weight else None, channels if bias else None)
    return Notation(f"{ins} -> {x}, n g, n g", whole=whole)


@rule(
    aten.native_group_norm_backward.default,
    localize=_group_arguments,
    examples=[
        ((4, 6, 5, 2), (4, 6, 5, 2), (4, 2), (4, 2), (6,), 4, 6, 10, 2, (True, True, True)),
        ((4, 6, 5), (4, 6, 5), (4, 3), (4, 3), None, 4, 6, 5, 3, (True, False, False)),
    ],
)
def group_norm_backward(
    grad_out: Dims, input: Dims, mean: Dims, rstd: Dims, weight: Dims | None,
    n: int, c: int, hw: int, group: int, output_mask: Sequence[bool],
) -> Notation:  # fmt: skip
    x, channels, whole = _group_dims(input, group)
    ins = _joined(x, x, "n g", "n g", channels if weight else None)
    outs = _joined(*(t for t, needed in zip((x, channels, channels), output_mask, strict=True) if needed))
    return Notation(f"{ins} -> {outs}", sum="n", whole=whole, linear=(0,))


# ------------------------------------------------------------------------------------------------ softmax
@rule(aten._softmax.default, examples=[((4, 3, 6), -1, False), ((4, 3, 6), 1, False)])
def softmax(self: Dims, dim: int, half_to_float: bool) -> Notation:
    return Notation(f"{self} -> {self}", whole=self[self.dim(dim)] if self.ndim else "")


@rule(aten._safe_softmax.default, examples=[((4, 3, 6), -1), ((4, 3, 6), 1)])
def safe_softmax(self: Dims, dim: int, dtype: torch.dtype | None) -> Notation:
    return softmax(self, dim, False)


@rule(
    aten._softmax_backward_data.default,
    examples=[((4, 3, 6), (4, 3, 6), dim, torch.float64) for dim in (-1, 1)],
)
def softmax_backward(grad_output: Dims, output: Dims, dim: int, input_dtype: torch.dtype) -> Notation:
    whole = output[output.dim(dim)] if output.ndim else ""
    return Notation(_joined(str(output), str(output)) + f" -> {output}", whole=whole, linear=(0,))


# Softmax taken apart by `normalize` leaves none of these, but a graph that skips it may hold them.
rule(aten._log_softmax.default, examples=[((4, 3, 6), -1, False)])(softmax)
rule(
    aten._log_softmax_backward_data.default,
    examples=[example((4, 3, 6), (4, 3, 6), -1, torch.float64)],
)(softmax_backward)
