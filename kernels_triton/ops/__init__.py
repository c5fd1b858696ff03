"""The templates as plain functions on tensors: no compiler, no graph, no autograd.

Tensors on a GPU are computed by Triton. On a CPU, in float64, or without Triton, a call runs
`kernels_triton.library.reference`.

    with torch.no_grad():
        y, mean, rstd = ops.layer_norm(x, weight, bias, 1e-5)
        dx, dweight, dbias = ops.layer_norm_backward(dy, x, weight, mean, rstd)

`kernels_triton.ops.registry.TEMPLATES[name].signature` has the shapes and dtypes of all operands and results. `rows`
there stands for any number of leading dims, with any strides. Columns should be contiguous; other tensors are copied
first. Data is bfloat16, float16 or float32. Weights and biases may have another of these dtypes than x; their gradients
have the dtype of the parameter. Outputs are new and contiguous (except with `in_place`). Statistics and scratch are
float32. Sums are taken in float32 and rounded once. Two runs are bitwise equal.

Every op raises SC530, a `kernels_triton.base.diagnostic.ShardcError`, before any launch: for an operand of a shape,
dtype, layout or device that it does not take; for an argument of another kind (not a tensor, not a finite number, not a
64-bit integer); for an operand that must be written in place and cannot be; and, with autograd enabled, for an operand
that requires a gradient. An op is a forward or a backward that autograd does not see, so its result would be a
constant. The error names the op, the operand, what was expected, and the line of the call. In-place writes are reported
to autograd.

With no rows or no columns, the results are empty too. The kernels are in `kernels_triton/library/kernels`, in files of
the same names.
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
from kernels_triton.ops.embedding import embedding_backward
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
    "embedding_backward",
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
