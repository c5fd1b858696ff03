"""The name of a fused kernel, from the ops that it computes: `fused_add_native_layer_norm_gelu`, not `kernel_17`."""

from __future__ import annotations

import re
from collections.abc import Iterable

LONGEST = 48
# Ops that say little about what a kernel computes.
SMALL = ("view", "clone", "convert", "expand", "to_copy", "unsqueeze", "cast", "reciprocal", "t", "neg")
SHORT = {"native_layer_norm": "layer_norm", "native_layer_norm_backward": "layer_norm_backward", "_softmax": "softmax"}


def fused_kernel_name(ops: Iterable[str]) -> str:
    """`["add.Tensor", "mul.Tensor", "mul.Scalar", "exp"]` -> `fused_add_mul_exp`: in order, each op once."""
    words: list[str] = []
    for op in ops:
        plain = op.removeprefix("shardc.").removeprefix("aten.").partition(".")[0]
        word = re.sub(r"\W", "_", SHORT.get(plain, plain)).strip("_")
        if word and word not in words and word not in SMALL:
            words.append(word)
    name = "fused"
    for word in words or ["cast"]:
        if len(name) + 1 + len(word) > LONGEST:
            return name + "_etc"
        name += "_" + word
    return name
