"""The sample batch as a flat list of named tensors, and the call of the model that it stands for.

A batch is a tensor, a tuple of positional arguments or a dict of keyword arguments, each nested as deep as the model
likes. Its tensors are named by forward's own parameters, so `(x, {"key": y})` for `forward(self, pair)` given as
`{"pair": ...}` is "pair.0" and "pair.1.key". Leaves that are no tensors are part of the program.

Where a loss function is given, the batch may hold tensors for it that forward does not take: keys of a dict, named as
they are, and what a tuple has beyond forward's arguments, named by its position, "batch.1".

    forward(self, tokens), loss(logits, batch)    {"tokens": x, "labels": y}: tokens, labels    (x, y): tokens, batch.1
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

from shardc import torch_compat
from shardc.ir.diagnostic import ShardcError, did_you_mean, error, suggest
from shardc.ir.trees import flatten

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Call:
    """The leaves of one batch. The tensors that forward does not take, for `loss` alone, are `loss_only`."""

    def __init__(self, model: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor] | None = None) -> None:
        if isinstance(batch, Mapping):  # a BatchEncoding, say, is not a tree to torch
            batch = dict(cast("Mapping[str, Any]", batch))
        self.leaves, self.structure = flatten(batch)
        self.is_tensor = [isinstance(leaf, Tensor) for leaf in self.leaves]
        if self.leaves and not any(self.is_tensor):
            kind = type(self.leaves[0]).__name__
            hint = "give tensors, such as torch.from_numpy(array); a meta tensor of the right shape will do"
            raise error("SC103", f"the batch holds no tensor: its first value is of type {kind}", hint=hint)
        self.tensors: list[Tensor] = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.signature = inspect.signature(model.forward)
        self._has_loss = loss is not None
        self.paths, beyond = self._names()  # of all leaves
        self.names = [path for path, fits in zip(self.paths, self.is_tensor, strict=True) if fits]
        self.loss_only = tuple(name for name in self.names if name in beyond)

    def batch(self, tensors: tuple[Tensor, ...]) -> Any:
        """The batch as the user shaped it, with these tensors."""
        remaining = iter(tensors)
        leaves = [next(remaining) if fits else leaf for fits, leaf in zip(self.is_tensor, self.leaves, strict=True)]
        return torch_compat.unflatten(leaves, self.structure)

    def arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What forward takes of a batch."""
        args, kwargs = _all_arguments(batch)
        return _taken(self.signature, args, kwargs) if self._has_loss else (args, kwargs)

    def refuse_unread(self, read: Collection[str]) -> None:
        """Raise ShardcError for a tensor that forward does not take, if the loss did not read it either: a wrong name
        would leave an argument of forward at its default."""
        for name in self.loss_only:
            if name not in read:
                message = f"neither forward nor the loss reads '{name}' of the batch"
                hint = f"leave it out; {did_you_mean(name, self._parameters(), 'arguments of forward')}"
                raise error("SC103", message, tensor=name, hint=hint)

    def lacking(self, problem: BaseException, otherwise: ShardcError, *, trained: bool) -> ShardcError:
        """The error (SC103) for a loss function that looked for what the batch does not have; `otherwise` for another
        problem of its."""
        batch = self.batch(tuple(self.tensors))
        if isinstance(problem, KeyError) and isinstance(batch, Mapping) and problem.args[:1]:
            key: object = problem.args[0]
            missing = None if key in batch else f"'{key}'"
        else:
            beyond = isinstance(problem, IndexError) and isinstance(batch, tuple | list) and "range" in str(problem)
            missing = f"entry {len(self.leaves)} or a later one" if beyond else None
            key = None
        if missing is None:
            return otherwise
        hint = f"the batch has {', '.join(self.names)}"
        if isinstance(key, str) and (near := suggest(key, self.names)) is not None:
            hint += f" (did you mean '{near}'?)"
        hint += ": give what the loss reads"
        if not trained:
            hint += "; trainer.predict(batch), and mode='eval' without loss=, return the outputs without it"
        diagnostic = replace(otherwise.diagnostics[0], code="SC103", hint=hint, cause=None, fqn=None)
        return ShardcError(replace(diagnostic, message=f"the loss reads {missing} of the batch, which is not there"))

    def _parameters(self) -> list[str]:
        return [name for name, p in self.signature.parameters.items() if p.kind not in VARIADIC]

    def _names(self) -> tuple[list[str], set[str]]:
        """Paths of the batch's leaves, beginning with the names of forward's parameters; those that forward does not
        take."""
        numbers = torch_compat.unflatten(range(len(self.leaves)), self.structure)
        args, kwargs = self.arguments(numbers)
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as problem:
            hint = "give a tensor, a tuple of positional arguments or a dict of keyword arguments"
            if "unexpected keyword" in str(problem) or "too many positional" in str(problem):
                hint = (
                    "leave it out; or, where only a loss needs it, pass `loss=`, a function (output, batch) -> scalar"
                )
            raise error("SC103", f"the batch does not fit forward{self.signature}: {problem}", hint=hint) from None
        arguments: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            if self.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                arguments.update(value)
            else:
                arguments[name] = value
        by_number = {number: path for path, number in torch_compat.flatten_with_paths(arguments)}
        all_args, all_kwargs = _all_arguments(numbers)
        beyond: dict[str, Any] = {f"batch.{i}": all_args[i] for i in range(len(args), len(all_args))}
        beyond |= {key: value for key, value in all_kwargs.items() if key not in kwargs}
        for_loss = {number: path for path, number in torch_compat.flatten_with_paths(beyond)}
        for number, path in for_loss.items():
            if not self.is_tensor[number]:
                message = f"'{path}' of the batch is no tensor, and forward{self.signature} does not take it"
                hint = "leave it out, give a tensor, or let the loss function have it from elsewhere"
                raise error("SC103", message, tensor=path, hint=hint)
            if path in by_number.values():
                message = f"'{path}' is an argument of forward, and a tensor of the batch for the loss alone"
                raise error("SC103", message, tensor=path, hint="give the batch as a dict, by name")
        by_number |= for_loss
        return [by_number[number] for number in range(len(self.leaves))], set(for_loss.values())


def forward_part(model: nn.Module, batch: Any) -> Any:
    """What forward takes of a batch, in the batch's own form: without tensors for the loss alone."""
    args, kwargs = _taken(inspect.signature(model.forward), *_all_arguments(batch))
    if isinstance(batch, Mapping):
        return kwargs
    return args if isinstance(batch, (tuple, list)) else batch


def forward_arguments(model: nn.Module, batch: Any, has_loss: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What forward takes of a batch: without a loss function, all of it."""
    args, kwargs = _all_arguments(batch)
    return _taken(inspect.signature(model.forward), args, kwargs) if has_loss else (args, kwargs)


def _all_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, dict):
        return (), cast("dict[str, Any]", batch)
    return (tuple(cast("list[Any]", batch)) if isinstance(batch, tuple | list) else (batch,)), {}


def _taken(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that a function takes, without those beyond."""
    kinds = [p.kind for p in signature.parameters.values()]
    positional = sum(
        kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds
    )
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        args = args[:positional]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        kwargs = {key: value for key, value in kwargs.items() if key in signature.parameters}
    return args, kwargs
