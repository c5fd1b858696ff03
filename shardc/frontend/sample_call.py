"""The sample batch as a flat list of named tensors, and the call of the model that it stands for.

A batch is a tensor, a tuple of positional arguments or a dict of keyword arguments, each nested as deep as the model
likes. Its tensors are named by forward's own parameters, so `(x, {"key": y})` for `forward(self, pair)` given as
`{"pair": ...}` is "pair.0" and "pair.1.key". Leaves that are no tensors are part of the program.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from shardc import torch_compat
from shardc.ir.diagnostic import error
from shardc.ir.trees import flatten


class Call:
    """The leaves of one batch."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        if isinstance(batch, Mapping):  # a BatchEncoding, say, is not a tree to torch
            batch = dict(cast("Mapping[str, Any]", batch))
        self.leaves, self.structure = flatten(batch)
        self.is_tensor = [isinstance(leaf, Tensor) for leaf in self.leaves]
        if self.leaves and not any(self.is_tensor):
            kind = type(self.leaves[0]).__name__
            hint = "give tensors, such as torch.from_numpy(array); a meta tensor of the right shape will do"
            raise error("SC103", f"the batch holds no tensor: its first value is of type {kind}", hint=hint)
        self.tensors: list[Tensor] = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.paths = self._names(inspect.signature(model.forward))  # of all leaves
        self.names = [path for path, fits in zip(self.paths, self.is_tensor, strict=True) if fits]

    def batch(self, tensors: tuple[Tensor, ...]) -> Any:
        """The batch as the user shaped it, with these tensors."""
        remaining = iter(tensors)
        leaves = [next(remaining) if fits else leaf for fits, leaf in zip(self.is_tensor, self.leaves, strict=True)]
        return torch_compat.unflatten(leaves, self.structure)

    @staticmethod
    def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(batch, dict):
            return (), batch
        return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}

    def _names(self, signature: inspect.Signature) -> list[str]:
        """Paths of the batch's leaves, beginning with the names of forward's parameters."""
        numbers = torch_compat.unflatten(range(len(self.leaves)), self.structure)
        args, kwargs = self.arguments(numbers)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as problem:
            hint = "give a tensor, a tuple of positional arguments or a dict of keyword arguments"
            if "unexpected keyword" in str(problem) or "too many positional" in str(problem):
                hint = "leave it out; or, where `loss` reads it from the batch, let forward take it too and ignore it"
            raise error("SC103", f"the batch does not fit forward{signature}: {problem}", hint=hint) from None
        arguments: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                arguments.update(value)
            else:
                arguments[name] = value
        by_number = {number: path for path, number in torch_compat.flatten_with_paths(arguments)}
        return [by_number[number] for number in range(len(self.leaves))]
