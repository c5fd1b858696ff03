"""The plain-torch reference of every template: the same arguments and results, on any device and dtype.

References trust their arguments, which `kernels_triton.ops` has checked; the errors they document are torch's or
Python's own. Most can be differentiated; the ops cannot.

Low precisions are computed in float32, as in the kernels. float64 is computed in float64, with which kernels are
compared. Outputs are rounded once, at the end.
"""

from kernels_triton.library.reference.activation import (
    bias_gelu,
    bias_gelu_backward,
    gated,
    gated_backward,
    squared_relu,
    squared_relu_backward,
)
from kernels_triton.library.reference.adamw import adamw
from kernels_triton.library.reference.cross_entropy import (
    cross_entropy,
    cross_entropy_finish,
    cross_entropy_stats,
)
from kernels_triton.library.reference.dropout import bias_dropout_residual, bias_dropout_residual_backward
from kernels_triton.library.reference.embedding import embedding_backward
from kernels_triton.library.reference.group_norm import group_norm, group_norm_backward
from kernels_triton.library.reference.norm import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
)
from kernels_triton.library.reference.rope import rope
from kernels_triton.library.reference.softmax import softmax, softmax_backward

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
