"""Every op that 21 traced models contain has a rule, or is one that `normalize` removes."""

import operator

import pytest
import torch

from shardc.passes.decompositions import REMOVED
from shardc.rules import find_rule

# The union over GPT-2, Llama, Qwen3, Gemma 3, Mixtral, Qwen3-MoE, DeepSeek-V3, gpt-oss, BERT, T5, ViT, Swin, ResNet,
# ConvNeXt, Mamba, Mamba-2, Whisper, CLIP, a UNet, nn.TransformerEncoder and an LSTM, forward and backward.
TRACED = """
    view mul.Tensor add.Tensor transpose.int sum.dim_IntList unsqueeze clone shardc.linear shardc.linear_wgrad
    shardc.linear_dgrad pow.Tensor_Scalar expand slice.Tensor select.int mul.Scalar squeeze.dim permute select_backward
    bmm cat div.Scalar mean.dim rsqrt full slice_backward neg index.Tensor arange native_layer_norm
    native_layer_norm_backward native_dropout native_dropout_backward div.Tensor convolution convolution_backward
    shardc.sdpa shardc.sdpa_bwd constant_pad_nd index_put silu silu_backward where.self sub.Tensor _to_copy mm
    shardc.grouped_mm scalar_tensor full_like cumsum embedding bitwise_and.Tensor embedding_dense_backward exp
    _log_softmax _log_softmax_backward_data nll_loss_forward nll_loss_backward gelu gelu_backward relu
    threshold_backward copy topk shardc.grouped_mm_wgrad split.Tensor split_with_sizes
    _native_batch_norm_legit_functional native_batch_norm_backward _softmax _softmax_backward_data histc flip
    native_group_norm native_group_norm_backward slice_scatter le.Tensor bitwise_not ne.Scalar ge.Scalar eq.Tensor cos
    sin sort floor_divide empty_like scatter.src sigmoid sigmoid_backward tril new_empty_strided clamp le.Scalar
    gt.Scalar logical_and eq.Scalar roll softplus sum new_empty gather minimum rand floor as_strided mean tanh
    tanh_backward gt.Tensor scatter.value scatter_add max.dim lt.Scalar log fill.Tensor select_scatter
    masked_fill.Scalar ge.Tensor unbind.int abs as_strided_scatter max_pool2d_with_indices
    max_pool2d_with_indices_backward repeat argmax _unsafe_index.Tensor _unsafe_index_put
"""

# Tracing writes these in terms of `shardc.random_uniform`.
RANDOM = {"native_dropout", "native_dropout_backward", "rand"}
# A recurrence over the sequence in one opaque call, on CPUs only. It runs replicated.
UNSUPPORTED = {"mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"}


def op_of(name: str) -> torch._ops.OpOverload:
    """`mul.Tensor` is aten's, `shardc.linear` is ours."""
    namespace, name = ("shardc", name[7:]) if name.startswith("shardc.") else ("aten", name)
    path = name if "." in name else f"{name}.default"
    return operator.attrgetter(path)(getattr(torch.ops, namespace))


@pytest.mark.parametrize("name", TRACED.split())
def test_a_traced_op_has_a_rule_or_is_normalised_away(name: str) -> None:
    op = op_of(name)
    assert find_rule(op) is not None or op in REMOVED or name in RANDOM


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_what_we_say_is_unsupported_is(name: str) -> None:
    assert find_rule(op_of(name)) is None
    assert op_of(name) not in REMOVED
