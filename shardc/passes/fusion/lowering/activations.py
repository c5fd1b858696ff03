"""Lowerings of activations and their gradients, with the ops that kernels have already.

Each computes what ATen does, special values included: where ATen selects, so does the kernel.
"""

from __future__ import annotations

import torch

from shardc.passes.fusion.lowering.lowered_op import LoweringBuilder, Operand, Temporary, lower

aten = torch.ops.aten


def _between(m: LoweringBuilder, x: Operand, low: float, high: float) -> Temporary:
    return m("and", m.greater(x, low), m.less(x, high), dtype=torch.bool)


@lower(aten.hardtanh.default)
def hardtanh(m: LoweringBuilder, x: Operand, low: float = -1.0, high: float = 1.0) -> Operand:
    m.require_floats(x)
    return m.clamp(x, low, high)


@lower(aten.hardtanh_backward.default)
def hardtanh_backward(m: LoweringBuilder, g: Operand, x: Operand, low: float, high: float) -> Operand:
    m.require_floats(g, x)
    outside = m("or", m.less_equal(x, low), m("ge", x, high, dtype=torch.bool), dtype=torch.bool)
    return m.where(outside, 0.0, g)


@lower(aten.relu6.default)
def relu6(m: LoweringBuilder, x: Operand) -> Operand:
    m.require_floats(x)
    return m.clamp(x, 0.0, 6.0)


ONE_SIXTH = 0.16666667163372040  # of float32: torch's constant for hardsigmoid's gradient, in float64 too


def _gate(m: LoweringBuilder, x: Operand) -> Temporary:
    """min(max(x + 3, 0), 6)"""
    return m.clamp(m.add(x, 3.0), 0.0, 6.0)


@lower(aten.hardsigmoid.default)
def hardsigmoid(m: LoweringBuilder, x: Operand) -> Operand:
    m.require_floats(x)
    return m.div(_gate(m, x), 6.0)


@lower(aten.hardsigmoid_backward.default)
def hardsigmoid_backward(m: LoweringBuilder, g: Operand, x: Operand) -> Operand:
    m.require_floats(g, x)
    return m.where(_between(m, x, -3.0, 3.0), m.mul(g, ONE_SIXTH), 0.0)


@lower(aten.hardswish.default)
def hardswish(m: LoweringBuilder, x: Operand) -> Operand:
    m.require_floats(x)
    return m.div(m.mul(x, _gate(m, x)), 6.0)


@lower(aten.hardswish_backward.default)
def hardswish_backward(m: LoweringBuilder, g: Operand, x: Operand) -> Operand:
    m.require_floats(g, x)
    between = m.mul(g, m.add(m.div(x, 3.0), 0.5))
    return m.where(m.less_equal(x, -3.0), 0.0, m.where(m.less(x, 3.0), between, g))


@lower(aten.leaky_relu.default)
def leaky_relu(m: LoweringBuilder, x: Operand, slope: float = 0.01) -> Operand:
    m.require_floats(x)
    return m.where(m.greater(x, 0.0), x, m.mul(x, float(slope)))


@lower(aten.leaky_relu_backward.default)
def leaky_relu_backward(m: LoweringBuilder, g: Operand, x: Operand, slope: float, is_result: bool) -> Operand:
    m.require_floats(g, x)
    return m.where(m.greater(x, 0.0), g, m.mul(g, float(slope)))


@lower(aten._prelu_kernel.default)
def prelu(m: LoweringBuilder, x: Operand, weight: Operand) -> Operand:
    m.require_floats(x, weight)
    return m.where(m.greater(x, 0.0), x, m.mul(weight, x))


@lower(aten._prelu_kernel_backward.default)
def prelu_backward(m: LoweringBuilder, g: Operand, x: Operand, weight: Operand) -> tuple[Operand, Operand]:
    m.require_floats(g, x, weight)
    above = m.greater(x, 0.0)
    return m.where(above, g, m.mul(weight, g)), m.where(above, 0.0, m.mul(x, g))


@lower(aten.threshold.default)
def threshold(m: LoweringBuilder, x: Operand, least: float, value: float) -> Operand:
    m.require_floats(x)
    return m.where(m.less_equal(x, least), float(value), x)


@lower(aten.elu.default)
def elu(m: LoweringBuilder, x: Operand, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Operand:
    return _elu(m, x, alpha, scale, input_scale)


def _elu(m: LoweringBuilder, x: Operand, alpha: float, scale: float, input_scale: float) -> Temporary:
    m.require_floats(x)
    low = m.mul(m("expm1", m.mul(x, float(input_scale))), float(alpha * scale))
    return m.where(m.less_equal(x, 0.0), low, m.mul(x, float(scale)))


@lower(aten.celu.default)
def celu(m: LoweringBuilder, x: Operand, alpha: float = 1) -> Operand:
    return _elu(m, x, alpha, 1, 1 / alpha)


@lower(aten.elu_backward.default)
def elu_backward(
    m: LoweringBuilder, g: Operand, alpha: float, scale: float, input_scale: float, is_result: bool, x: Operand
) -> Operand:
    """`x` is the input, or the result."""
    m.require_floats(g, x)
    least = float(alpha * scale)
    if is_result:
        low = m.mul(m.mul(g, float(input_scale)), m.add(x, least))
    else:
        low = m.mul(m.mul(g, float(input_scale * least)), m("exp", m.mul(x, float(input_scale))))
    return m.where(m.less_equal(x, 0.0), low, m.mul(g, float(scale)))


@lower(aten.softplus.default)
def softplus(m: LoweringBuilder, x: Operand, beta: float = 1, most: float = 20) -> Operand:
    m.require_floats(x)
    scaled = m.mul(x, float(beta))
    curved = m.div(m("log1p", m("exp", scaled)), float(beta))
    return m.where(m.greater(scaled, float(most)), x, curved)


@lower(aten.softplus_backward.default)
def softplus_backward(m: LoweringBuilder, g: Operand, x: Operand, beta: float, most: float) -> Operand:
    m.require_floats(g, x)
    scaled = m.mul(x, float(beta))
    z = m("exp", scaled)
    return m.where(m.greater(scaled, float(most)), g, m.div(m.mul(g, z), m.add(z, 1.0)))


@lower(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(m: LoweringBuilder, g: Operand, x: Operand, buffer: Operand) -> Operand:
    m.require_floats(g, x)
    return m.mul(g, m("sigmoid", m("neg", x)))


@lower(aten.mish.default)
def mish(m: LoweringBuilder, x: Operand) -> Operand:
    m.require_floats(x)
    return m.mul(x, m("tanh", m("log1p", m("exp", x))))


@lower(aten.mish_backward.default)
def mish_backward(m: LoweringBuilder, g: Operand, x: Operand) -> Operand:
    m.require_floats(g, x)
    t = m("tanh", m("log1p", m("exp", x)))
    slope = m.mul(m.mul(x, m("sigmoid", x)), m.sub(1.0, m("square", t)))
    return m.mul(g, m.add(t, slope))
