"""The collectives that a step of a model needs at least, in the form that its placements give it.

    row-parallel product (a weight's inputs are split)       1, forward: its output is a sum
    column-parallel products of one input                    1, backward: the gradient of that input is a sum
    table of embeddings, rows split                          1, forward
    logits split by words, and a loss of them                1: maxima and sums of each token
    experts split among ranks                                1, forward; 2, backward: of tokens and routing weights
    experts whose width is split                             1, forward; 1, backward
    batch norm over dp                                       1, forward; 1, backward
    gradient of each parameter                               1 over dp
    loss                                                     1 over dp; 1 more for the count of its tokens

A forward of the eager model shows which modules are called, how often, and which of them read the same input.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from shardc.ir.graph import Graph, type_of

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def ideal_collectives(model: nn.Module, batch: Mapping[str, Tensor], program: Graph, *, has_loss: bool) -> int:
    """Of a step that is compiled to `program`, whose parameters have their final placements."""
    axes = placed(program)
    calls = Calls(model, axes)
    with calls, torch.enable_grad():
        model(**batch)
    gradients = sum(port.role == "grad" for port in program.outputs)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    split_words = has_loss and head is not None and is_split(axes, model, head, 0)
    labels = batch.get("labels")
    counts = has_loss and labels is not None and labels.dtype == torch.long
    return calls.count() + int(split_words) + gradients + 1 + int(counts)


def placed(program: Graph) -> dict[str, tuple[str, ...]]:
    """By parameter, the axis that splits each dim: tp or ep, or none."""
    found: dict[str, tuple[str, ...]] = {}
    for port, node in zip(program.inputs, program.placeholders, strict=True):
        if port.role == "param":
            dims = tuple(_axis_of(dim) for dim in str(type_of(node)).partition("[")[2].split(","))
            found |= dict.fromkeys((port.name, *port.aliases), dims)
    return found


def is_split(axes: Mapping[str, tuple[str, ...]], model: nn.Module, module: nn.Module, dim: int) -> bool:
    weight = getattr(module, "weight", None)
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if p is weight]
    return any(name in axes and bool(axes[name][dim]) for name in names)


class Calls:
    """While it is entered: counts calls of modules whose weights are split, by the form of each."""

    def __init__(self, model: nn.Module, axes: Mapping[str, tuple[str, ...]]) -> None:
        self.forward, self.backward = 0, 0
        self._read: dict[int, Tensor] = {}  # inputs of column-parallel products: kept, so that none takes its memory
        self._hooks: list[Any] = []
        for name, module in model.named_modules(remove_duplicate=True):
            own = {n: axes.get(f"{name}.{n}" if name else n, ()) for n, _ in module.named_parameters(recurse=False)}
            if any(any(dims) for dims in own.values()) or isinstance(module, _BATCH_NORMS):
                self._hooks.append(module.register_forward_hook(self._hook(module, own), with_kwargs=True))

    def __enter__(self) -> Calls:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def count(self) -> int:
        return self.forward + self.backward + len(self._read)

    def _hook(self, module: nn.Module, own: Mapping[str, tuple[str, ...]]) -> Any:
        weight = own.get("weight", ())
        column, row = (1, 0) if isinstance(module, Conv1D) else (0, 1)
        stacked = [dims for dims in own.values() if len(dims) == 3 and any(dims)]

        def called(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], __: Any) -> None:
            tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
            if isinstance(module, _BATCH_NORMS):
                self.forward += 1
                self.backward += 1
            elif isinstance(module, nn.Embedding):
                self.forward += bool(weight[0])
            elif stacked and "weight" not in own:  # experts
                self.forward += 1
                self.backward += 2 if any(dims[0] for dims in stacked) else 1
            elif len(weight) >= 2 and weight[row]:
                self.forward += 1
            elif len(weight) >= 2 and weight[column] and tensors and tensors[0].requires_grad:
                self._read[tensors[0].data_ptr()] = tensors[0]

        return called


def _axis_of(dim: str) -> str:
    """Of a dim of a type's text, as in `96@tp` and `(2 2@tp 4)`."""
    return ".".join(axis for axis in ("tp", "ep") if f"@{axis}" in dim or f".{axis}" in dim)
