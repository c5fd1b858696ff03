"""Every op that 21 traced models contain has a rule, or is one that `normalize` removes; and so has every pointwise op,
reduction and backward formula of torch, or it is in one table with the reason why not."""

from __future__ import annotations

import operator
import re

import pytest
import torch
from torch._ops import OpOverload

from shardc.passes.normalize.decompositions import REMOVED
from shardc.rules import find_rule
from tests.aten_ops import TAGS, backward_formulas, composite, short, tagged

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


def op_of(name: str) -> OpOverload:
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


# ------------------------------------------------------------------------------------------------- all of torch's
# A call without a rule runs whole on every rank, which SC301 says. Of ops that are pointwise, reductions or the
# backward of another one, these have none:
DEVICE = "a kernel of one kind of device, or of a mode that traces are not in: a trace on a CPU has others"
LAYOUT = "of sparse, nested or quantized tensors, which a trace of dense ones has not"
NEIGHBOURS = "reads neighbours at random places; its forward has no rule either"
DISTANCES = "of every pair of rows"
DATA = "what belongs to which result depends on the data"
BAGS = "sums and means are taken apart; what is left are maxima, and gradients that count how often a row occurs"
LOSSES = "a loss over classes that no model of ours has had: its forward has no rule either"
REASONS: dict[str, str] = {  # reason -> names, as patterns
    "it yields a bool and no tensor": "equal",
    "it is DTensor's, of a norm of shards": "linalg__powsum",
    "of complex numbers that are marked as conjugates, which tracing makes at once": "_conj_physical",
    "tracing refuses the draw of its noise (SC104)": "rrelu_with_noise_backward",
    "a derivative forwards": "glu_backward_jvp",
    "one opaque call, of CPUs only, for a recurrence over the sequence": "mkldnn_rnn_layer_backward",
    DISTANCES: "_pdist_backward",
    BAGS: "_embedding_bag(_dense|_per_sample_weights)?_backward",
    LOSSES: "_ctc_loss_backward multi_margin_loss_backward multilabel_margin_loss_backward",
    LAYOUT: "_nested_.* _sparse_.* _fake_quantize_.*",
    DEVICE: """
        _?(cudnn|miopen|mps|mkldnn)_(?!rnn_layer_backward).* .*_mps_backward _(efficient|flash)_attention_backward
        _scaled_dot_product_.* (linear|matmul|max_pool2d)_backward batch_norm_backward(_elemt|_reduce)?
        _fused_rms_norm_backward _thnn_fused_(gru_cell_backward|lstm_cell_backward_impl) _masked_softmax_backward
        _slow_conv2d_backward convolution_backward_overrideable _grid_sampler_2d_cpu_fallback_backward
    """,
    NEIGHBOURS: """
        fractional_max_pool[23]d_backward
    """,
}
PATTERNS = [pattern for names in REASONS.values() for pattern in names.split()]


def reasons(op: OpOverload) -> list[str]:
    """The patterns that say why an op has none."""
    return [pattern for pattern in PATTERNS if re.fullmatch(pattern, short(op))]


def known(op: OpOverload) -> bool:
    return find_rule(op) is not None or op in REMOVED


KINDS = {**{str(tag): list(tagged(tag)) for tag in TAGS}, "backward": list(backward_formulas())}


@pytest.mark.parametrize("kind", KINDS)
def test_each_has_a_rule_or_a_reason_why_not(kind: str) -> None:
    assert len(KINDS[kind]) > 20
    for op in KINDS[kind]:
        if known(op):
            assert not reasons(op), f"{op} has a rule, and a reason why not"
        else:
            assert composite(op) or len(reasons(op)) == 1, (
                f"{op}: no sharding rule, and of reasons why not {reasons(op)}"
            )


def test_a_reason_is_of_an_op() -> None:
    used = {pattern for ops in KINDS.values() for op in ops if not known(op) for pattern in reasons(op)}
    assert set(PATTERNS) - used <= {"_conj_physical", "linalg__powsum"}, "that older versions of torch have not"
