"""The templates as plain functions on tensors: no compiler, no graph, no autograd.

A tensor on a GPU goes to Triton; on a CPU, in float64, or without Triton, the call runs `kernels_triton.reference`.

    with torch.no_grad():
        y, mean, rstd = ops.layer_norm(x, weight, bias, 1e-5)
        dx, dweight, dbias = ops.layer_norm_backward(dy, x, weight, mean, rstd)

Shapes and dtypes of every operand and result are `kernels_triton.registry.TEMPLATES[name].signature`. `rows` there may
be any number of leading dims, of any strides; columns should be contiguous: what is not is copied. Data is bfloat16,
float16 or float32; weights and biases may be of another of these than x, and their gradients are of theirs. Outputs are
new and contiguous (but for `in_place`), statistics and scratch are float32, sums are taken in float32 and rounded once,
and two runs are bitwise equal.

Every op raises `ShardcError` SC530, before anything is launched, for an operand of a shape, dtype, layout or device
that it does not take, for an argument of another kind (no tensor, no finite number, no whole number of 64 bits), for
one that is to be written in place and cannot be, and, where autograd is on, for one that requires a gradient: an op is
a forward or a backward, which autograd does not see, and its result would be a constant. The error names the op, the
operand, what was expected, and the line of the call. Autograd is told of what is written in place.

Of no rows or no columns the results are as empty. Kernels are in `kernels_triton/kernels`, in files named as here.
"""

from kernels_triton.ops.activation import (
    bias_gelu,
    bias_gelu_backward,
    gated,
    gated_backward,
    squared_relu,
    squared_relu_backward,
)
from kernels_triton.ops.adamw import adamw
from kernels_triton.ops.cross_entropy import (
    cross_entropy,
    cross_entropy_finish,
    cross_entropy_stats,
)
from kernels_triton.ops.dropout import bias_dropout_residual, bias_dropout_residual_backward
from kernels_triton.ops.group_norm import group_norm, group_norm_backward
from kernels_triton.ops.norm import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
)
from kernels_triton.ops.rope import rope
from kernels_triton.ops.softmax import softmax, softmax_backward

__all__ = [
    "adamw",
    "add_layer_norm",
    "add_rms_norm",
    "bias_dropout_residual",
    "bias_dropout_residual_backward",
    "bias_gelu",
    "bias_gelu_backward",
    "cross_entropy",
    "cross_entropy_finish",
    "cross_entropy_stats",
    "gated",
    "gated_backward",
    "group_norm",
    "group_norm_backward",
    "layer_norm",
    "layer_norm_backward",
    "rms_norm",
    "rms_norm_backward",
    "rope",
    "softmax",
    "softmax_backward",
    "squared_relu",
    "squared_relu_backward",
]
