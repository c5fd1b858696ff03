"""What ATen's kernels do with memory: how often each reads an operand, how many it launches, of which kind they are.

They read some operands more than once, such as a softmax of long rows, which takes the maximum, the sum and the result
in three passes.
"""

from __future__ import annotations

from collections.abc import Mapping

# op -> argument -> how often its kernels read it
READS: Mapping[str, Mapping[str, int]] = {
    "native_layer_norm": {"input": 2},
    "native_layer_norm_backward": {"grad_out": 3, "input": 3},
    "native_group_norm": {"input": 2},
    "native_group_norm_backward": {"grad_out": 2, "input": 2},
    "native_batch_norm": {"input": 2},
    "native_batch_norm_backward": {"grad_out": 2, "input": 2},
    "_softmax": {"self": 3},
    "_log_softmax": {"self": 3},
    "_softmax_backward_data": {"grad_output": 2, "output": 2},
    "_log_softmax_backward_data": {"grad_output": 2, "output": 2},
}
ROW_HELD = {  # rows that are no longer are read once and held
    "_softmax": 1024,
    "_log_softmax": 1024,
    "_softmax_backward_data": 1024,
    "_log_softmax_backward_data": 1024,
}
# Op -> the share of the memory's rate that ATen's kernel reaches, and that of a cast to a wider dtype: measured on an
# H200 (benchmarks/README.md).
SHARES: Mapping[str, float] = {"sum": 0.65}
WIDENING = 0.6
# op -> the argument of which only what becomes the result is read
SELECTED: Mapping[str, str] = {
    "embedding": "weight",
    "index": "self",
    "index_select": "self",
    "gather": "self",
    "slice": "self",
    "select": "self",
    "view": "self",
    "narrow": "self",
    "shardc.shard_slice": "x",
    "shardc.slice_blocks": "x",
    "shardc.gather_rows": "x",
    "shardc.accumulate_more_rows": "total",
    "nll_loss_forward": "self",
    "nll_loss_backward": "self",
}
LAUNCHES: Mapping[str, int] = {
    "native_layer_norm_backward": 2,
    "native_group_norm": 2,
    "native_group_norm_backward": 3,
    "native_batch_norm_backward": 2,
    "embedding_dense_backward": 6,  # ids are sorted, and equal ones summed
    "shardc.accumulate_rows": 6,
    "shardc.accumulate_more_rows": 6,
    "nll_loss_backward": 2,
    "_unsafe_index_put": 2,
    "index_put": 2,
    "scatter": 2,
    "scatter_add": 2,
}
COPIES = frozenset(
    (
        *("_to_copy", "clone", "cat", "stack", "slice", "select", "view", "shardc.accumulate", "shardc.pack"),
        *("shardc.unpack", "shardc.shard_slice", "shardc.slice_blocks", "embedding", "index", "index_select", "gather"),
        *("expand", "repeat", "constant_pad_nd", "slice_scatter", "select_scatter", "shardc.gather_rows"),
        *("shardc.group_heads", "shardc.ungroup_heads", "shardc.repeat_heads"),
    )
)
REDUCTIONS = frozenset(
    (
        *("sum", "mean", "amax", "amin", "argmax", "argmin", "prod", "var", "var_mean", "std", "linalg_vector_norm"),
        *("native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward"),
        *("native_batch_norm", "native_batch_norm_backward", "_softmax", "_log_softmax", "_softmax_backward_data"),
        *("_log_softmax_backward_data", "any", "all", "logsumexp", "shardc.sum_of_squares", "embedding_dense_backward"),
        *("shardc.accumulate_rows", "shardc.accumulate_more_rows", "shardc.total_of_squares", "cumsum"),
        *("nll_loss_forward", "shardc.sum_heads"),
    )
)
