"""Lowerings of activations and their gradients, in the words that kernels have already.

Each is what ATen computes, special values included: where ATen chooses, so does the kernel.
"""

from __future__ import annotations

import torch

from shardc.passes.fuse.units import Inner, Make, Operand, lower

aten = torch.ops.aten


def _between(m: Make, x: Operand, low: float, high: float) -> Inner:
    return m("and", m.more(x, low), m.less(x, high), dtype=torch.bool)


@lower(aten.hardtanh.default)
def hardtanh(m: Make, x: Operand, low: float = -1.0, high: float = 1.0) -> Operand:
    m.floating(x)
    return m.limited(x, low, high)


@lower(aten.hardtanh_backward.default)
def hardtanh_backward(m: Make, g: Operand, x: Operand, low: float, high: float) -> Operand:
    m.floating(g, x)
    outside = m("or", m.at_most(x, low), m("ge", x, high, dtype=torch.bool), dtype=torch.bool)
    return m.choose(outside, 0.0, g)


@lower(aten.relu6.default)
def relu6(m: Make, x: Operand) -> Operand:
    m.floating(x)
    return m.limited(x, 0.0, 6.0)


ONE_SIXTH = 0.16666667163372040  # of float32: torch's constant for hardsigmoid's gradient, in float64 too


def _gate(m: Make, x: Operand) -> Inner:
    """min(max(x + 3, 0), 6)"""
    return m.limited(m.add(x, 3.0), 0.0, 6.0)


@lower(aten.hardsigmoid.default)
def hardsigmoid(m: Make, x: Operand) -> Operand:
    m.floating(x)
    return m.div(_gate(m, x), 6.0)


@lower(aten.hardsigmoid_backward.default)
def hardsigmoid_backward(m: Make, g: Operand, x: Operand) -> Operand:
    m.floating(g, x)
    return m.choose(_between(m, x, -3.0, 3.0), m.mul(g, ONE_SIXTH), 0.0)


@lower(aten.hardswish.default)
def hardswish(m: Make, x: Operand) -> Operand:
    m.floating(x)
    return m.div(m.mul(x, _gate(m, x)), 6.0)


@lower(aten.hardswish_backward.default)
def hardswish_backward(m: Make, g: Operand, x: Operand) -> Operand:
    m.floating(g, x)
    between = m.mul(g, m.add(m.div(x, 3.0), 0.5))
    return m.choose(m.at_most(x, -3.0), 0.0, m.choose(m.less(x, 3.0), between, g))


@lower(aten.leaky_relu.default)
def leaky_relu(m: Make, x: Operand, slope: float = 0.01) -> Operand:
    m.floating(x)
    return m.choose(m.more(x, 0.0), x, m.mul(x, float(slope)))


@lower(aten.leaky_relu_backward.default)
def leaky_relu_backward(m: Make, g: Operand, x: Operand, slope: float, is_result: bool) -> Operand:
    m.floating(g, x)
    return m.choose(m.more(x, 0.0), g, m.mul(g, float(slope)))


@lower(aten._prelu_kernel.default)
def prelu(m: Make, x: Operand, weight: Operand) -> Operand:
    m.floating(x, weight)
    return m.choose(m.more(x, 0.0), x, m.mul(weight, x))


@lower(aten._prelu_kernel_backward.default)
def prelu_backward(m: Make, g: Operand, x: Operand, weight: Operand) -> tuple[Operand, Operand]:
    m.floating(g, x, weight)
    above = m.more(x, 0.0)
    return m.choose(above, g, m.mul(weight, g)), m.choose(above, 0.0, m.mul(x, g))


@lower(aten.threshold.default)
def threshold(m: Make, x: Operand, least: float, value: float) -> Operand:
    m.floating(x)
    return m.choose(m.at_most(x, least), float(value), x)


@lower(aten.elu.default)
def elu(m: Make, x: Operand, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Operand:
    return _elu(m, x, alpha, scale, input_scale)


def _elu(m: Make, x: Operand, alpha: float, scale: float, input_scale: float) -> Inner:
    m.floating(x)
    low = m.mul(m("expm1", m.mul(x, float(input_scale))), float(alpha * scale))
    return m.choose(m.at_most(x, 0.0), low, m.mul(x, float(scale)))


@lower(aten.celu.default)
def celu(m: Make, x: Operand, alpha: float = 1) -> Operand:
    return _elu(m, x, alpha, 1, 1 / alpha)


@lower(aten.elu_backward.default)
def elu_backward(
    m: Make, g: Operand, alpha: float, scale: float, input_scale: float, is_result: bool, x: Operand
) -> Operand:
    """`x` is the input, or the result."""
    m.floating(g, x)
    least = float(alpha * scale)
    if is_result:
        low = m.mul(m.mul(g, float(input_scale)), m.add(x, least))
    else:
        low = m.mul(m.mul(g, float(input_scale * least)), m("exp", m.mul(x, float(input_scale))))
    return m.choose(m.at_most(x, 0.0), low, m.mul(g, float(scale)))


@lower(aten.softplus.default)
def softplus(m: Make, x: Operand, beta: float = 1, most: float = 20) -> Operand:
    m.floating(x)
    scaled = m.mul(x, float(beta))
    curved = m.div(m("log1p", m("exp", scaled)), float(beta))
    return m.choose(m.more(scaled, float(most)), x, curved)


@lower(aten.softplus_backward.default)
def softplus_backward(m: Make, g: Operand, x: Operand, beta: float, most: float) -> Operand:
    m.floating(g, x)
    scaled = m.mul(x, float(beta))
    z = m("exp", scaled)
    return m.choose(m.more(scaled, float(most)), g, m.div(m.mul(g, z), m.add(z, 1.0)))


@lower(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(m: Make, g: Operand, x: Operand, buffer: Operand) -> Operand:
    m.floating(g, x)
    return m.mul(g, m("sigmoid", m("neg", x)))


@lower(aten.mish.default)
def mish(m: Make, x: Operand) -> Operand:
    m.floating(x)
    return m.mul(x, m("tanh", m("log1p", m("exp", x))))


@lower(aten.mish_backward.default)
def mish_backward(m: Make, g: Operand, x: Operand) -> Operand:
    m.floating(g, x)
    t = m("tanh", m("log1p", m("exp", x)))
    slope = m.mul(m.mul(x, m("sigmoid", x)), m.sub(1.0, m("square", t)))
    return m.mul(g, m.add(t, slope))
