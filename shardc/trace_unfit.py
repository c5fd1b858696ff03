"""Models and batches that no program can be made of, found before anything is traced."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from shardc.ir.diagnostic import error
from shardc.trace_origin import Origin, Origins


def refuse_unfit(model: nn.Module, batch: Mapping[str, Tensor]) -> None:
    """Raise ShardcError for tensors that have no shape yet, no elements, or no plain memory: of the model SC112, of the
    batch SC103."""
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(t):
            hint = "run the model once on a batch before it is compiled: that gives a lazy module its shapes"
            raise error(
                "SC112", f"'{name}' is not initialized yet: it belongs to a lazy module", tensor=name, hint=hint
            )
        if (kind := _kind(t)) is not None:
            hint = "keep it as a plain tensor, and convert it in forward"
            raise error("SC112", f"'{name}' is a {kind} tensor", tensor=name, hint=hint)
    for name, p in model.named_parameters():
        if not p.numel():
            hint = "leave it out where its size is 0"
            raise error("SC112", f"parameter '{name}' of {list(p.shape)} has no elements", tensor=name, hint=hint)
    for name, t in batch.items():
        if (kind := _kind(t)) is not None:
            hint = (
                "dequantize it first"
                if t.is_quantized
                else "give a dense one (to_dense(), to_padded_tensor()) and masks"
            )
            raise error("SC103", f"input '{name}' is a {kind} tensor", tensor=name, hint=hint)


def refuse_sparse(node: fx.Node, origins: Origins) -> None:
    """Raise ShardcError (SC112) for an op of a trace that yields a sparse tensor, as `Embedding(sparse=True)` has one
    for its gradient."""
    value = node.meta.get("val")
    if isinstance(value, Tensor) and (kind := _kind(value)) is not None:
        origin = origins.of.get(node, Origin())
        raise error(
            "SC112",
            f"{node.target} makes a {kind} tensor",
            location=origin.source or None,
            source_text=origin.source_text or None,
            fqn=origin.fqn or None,
            hint="leave out sparse=True: the gradient is the same, and dense",
        )


def _kind(t: Tensor) -> str | None:
    """What a tensor is if it is no plain one."""
    if t.is_nested:
        return "nested"
    if t.is_quantized:
        return "quantized"
    return None if t.layout == torch.strided else "sparse"
