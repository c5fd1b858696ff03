"""gradients: what becomes of them between backward and the optimizer.

    total  = sum of all squares     one scalar reduction, over exactly the axes that some gradient is sharded on
    norm   = sqrt(total) / scale
    finite = total < inf
    g      = g * min(1, limit / norm) / scale

Gradients arrive as backward leaves them: of the loss times `scale`, where the loss was scaled. The scale is a power of
two, so that dividing by it loses nothing, and it rides on the factor that clipping multiplies by. Squares are summed in
float64, which holds those of every float32: the sum is not finite where an element is not, and nowhere else. So the
norm's collective also tells every rank the same of `finite`; the ranks that hold a value twice are taken to hold the
same value, here as everywhere.

The scale halves after a step with an overflow, and doubles after `growth_interval` steps in a row without.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from shardc.frontend.append import Append, module_of
from shardc.frontend.precision import HALF, Precision
from shardc.ir.graph import Port, type_of
from shardc.ir.microbatch import SCALE
from shardc.ir.ops.squares import SUM_OF_SQUARES
from shardc.ir.types import TensorType

aten = torch.ops.aten
EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s
GOOD_STEPS = "loss:good_steps"  # in a row, without an overflow
LARGEST_SCALE = 2.0**32
FITS = "experts:fits"  # the output that says whether experts dropped no row


@dataclass(frozen=True)
class Final:
    """The gradients that the optimizer gets, with their norm, whether all are finite, and the loss's scale."""

    gradients: dict[str, fx.Node]
    norm: fx.Node | None = None  # of all of them, before clipping
    finite: fx.Node | None = None  # whether all of them are, one bool
    fits: fx.Node | None = None  # whether experts dropped no row, where that fails a step
    allowed: fx.Node | None = None  # whether the step may change anything: both, as far as they are asked for
    state: tuple[tuple[Port, fx.Node], ...] = ()  # the loss's scale from now on
    fills: Mapping[str, float] | None = None  # what that starts from

    @property
    def outputs(self) -> list[tuple[Port, fx.Node]]:
        results = {"grad_norm": self.norm, "finite": self.finite, FITS: self.fits}
        return [(Port("output", name), node) for name, node in results.items() if node is not None]


def finish(
    append: Append,
    gradients: Mapping[str, fx.Node],
    *,
    limit: float | None = None,
    check: bool = False,
    precision: Precision | None = None,
    load: fx.Node | None = None,
) -> Final:
    """Clip by the global norm, as torch.nn.utils.clip_grad_norm_ does; `check` whether all is finite; unscale.

    Without `check`, a norm that is not finite goes through. A step whose `load` of experts has drops changes nothing.
    """
    scale = append.graph.input_nodes().get(SCALE)
    # Also of a norm that float32 cannot hold the factor is right.
    wide = any(type_of(g).dtype == torch.float64 for g in gradients.values())
    widest = torch.float64 if wide else torch.float32
    total = _squares(append, gradients) if gradients and (check or limit is not None) else None
    inverse = None if scale is None else append.call("opt.scale", "", aten.reciprocal.default, scale)
    norm = factor = finite = None
    if total is not None:
        norm = append.call("opt.norm", "", aten.sqrt.default, total)
        norm = norm if inverse is None else append.call("opt.norm", "", aten.mul.Tensor, norm, inverse)
        finite = append.call("opt.finite", "", aten.lt.Scalar, total, math.inf) if check else None
    if limit is not None and norm is not None:
        factor = _ratio(append, norm, limit)
    if inverse is not None:
        factor = inverse if factor is None else append.call("opt.clip", "", aten.mul.Tensor, factor, inverse)
    norm = None if norm is None else append.cast("opt.norm", "", norm, widest)
    scaled = dict(gradients)
    if factor is not None:
        factor = append.cast("opt.clip", "", factor, widest)
        scaled = {name: _times(append, name, g, factor) for name, g in gradients.items()}
    fits = None if load is None else _without_drops(append, load)
    allowed = finite if fits is None else fits
    if fits is not None and finite is not None:
        allowed = append.call("opt.allowed", "", aten.logical_and.default, finite, fits)
    if scale is None or finite is None or precision is None:
        return Final(scaled, norm, finite, fits, allowed)
    state = _adapted(append, scale, finite, precision, fits)
    return Final(scaled, norm, finite, fits, allowed, state, {SCALE: precision.loss_scale, GOOD_STEPS: 0.0})


def _without_drops(append: Append, load: fx.Node) -> fx.Node:
    """Whether the last column of the loads of experts, which counts what they dropped, is 0.

    It is compared before it is cut out: linear calls would make of the stages' sum another one.
    """
    last = type_of(load).shape[1] - 1
    some = append.call("opt.fits", "", aten.gt.Scalar, load, 0)
    dropped = append.call("opt.fits", "", aten.slice.Tensor, some, 1, last, last + 1)
    return append.call(
        "opt.fits", "", aten.eq.Scalar, append.call("opt.fits", "", aten.sum.dim_IntList, dropped, [0, 1]), 0
    )


def _squares(append: Append, gradients: Mapping[str, fx.Node]) -> fx.Node:
    """The sum of the squares of all elements, each counted once, in float64.

    It reads a gradient through an elementwise call, which can be placed as the update is: under ZeRO each rank then
    has its shard alone to look at. A scalar has no dims to place.
    """
    total: fx.Node | None = None
    for name, g in gradients.items():
        name_prefix, fqn = f"opt.{name}.norm", module_of(name)
        if type_of(g).dtype in HALF:
            size = append.cast(name_prefix, fqn, g, torch.float32)
        else:
            size = append.call(name_prefix, fqn, aten.abs.default, g)
        square = append.call(name_prefix, fqn, SUM_OF_SQUARES, size)
        total = square if total is None else append.call("opt.norm", "", aten.add.Tensor, total, square)
    assert total is not None
    return total


def _ratio(append: Append, norm: fx.Node, limit: float) -> fx.Node:
    """The factor by which gradients are multiplied, so that their norm is at most the limit."""
    inverse = append.call(
        "opt.clip", "", aten.reciprocal.default, append.call("opt.clip", "", aten.add.Tensor, norm, EPSILON)
    )
    ratio = append.call("opt.clip", "", aten.mul.Tensor, inverse, limit)
    return append.call("opt.clip", "", aten.clamp.default, ratio, None, 1.0)


def _times(append: Append, name: str, g: fx.Node, factor: fx.Node) -> fx.Node:
    type = type_of(g)
    # A 0-dim gradient would take the dtype of a wider factor.
    factor = factor if type.ndim else append.cast("opt.clip", "", factor, type.dtype)
    return append.call(f"opt.{name}.clip", module_of(name), aten.mul.Tensor, g, factor)


def _adapted(
    append: Append, scale: fx.Node, finite: fx.Node, precision: Precision, fits: fx.Node | None
) -> tuple[tuple[Port, fx.Node], ...]:
    """The scale of the next step, and the number of good ones before it; as they were in a step that is refused."""

    def call(target: object, *args: object) -> fx.Node:
        return append.call("opt.scale", "", target, *args)

    good = append.input(Port("state", GOOD_STEPS), TensorType.plain(torch.int64, ()))
    one_more = call(aten.add.Tensor, good, 1)
    enough = call(aten.ge.Scalar, one_more, precision.growth_interval)
    larger = call(aten.where.self, enough, call(aten.mul.Tensor, scale, 2.0), scale)
    adapted = call(aten.where.self, finite, larger, call(aten.mul.Tensor, scale, 0.5))
    bounded = call(aten.clamp.default, adapted, 1.0, LARGEST_SCALE)
    counted = call(aten.logical_and.default, finite, call(aten.logical_not.default, enough))
    count = call(aten.where.ScalarOther, counted, one_more, 0)
    if fits is not None:
        bounded, count = call(aten.where.self, fits, bounded, scale), call(aten.where.self, fits, count, good)
    return (Port("state", SCALE), bounded), (Port("state", GOOD_STEPS), count)
