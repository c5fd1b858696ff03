"""Whether a model is still what a program was compiled from: its modes, its numbers, and what of it is trained.

A program has built in what Python knew when it was compiled: `train()` and `requires_grad`, hooks, the numbers on
modules (`dropout.p`, `self.temperature`), the variables that a loss function reads, and tensors that are neither
parameters nor buffers. Set anew between steps, they would be ignored without a word. Parameters and buffers are not
built in: a trainer has values of its own from the launch on, and what is written to the model's is said once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from shardc.frontend.evaluation_mode import training_flags
from shardc.frontend.model_tree import named_modules, named_tensors
from shardc.frontend.python_state import Snapshot
from shardc.frontend.state_holders import Variables
from shardc.ir.caller import warn
from shardc.ir.diagnostic import ShardcError, error
from shardc.torch_compat import gradient_hooks, version_of

HINT = "put it back as it was; or trainer.recompile(), which goes on with the model as it is now and keeps all state"
GENERATION = "generation_config"  # of a model of transformers: no step reads how it generates
_PLAIN = frozenset((bool, int, float, complex, str, type(None)))
_CONTAINERS = frozenset((list, tuple, set, deque, dict))
HOOKS = frozenset(("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"))


@dataclass(frozen=True)
class _Values:
    """Items of a dictionary: the keys, a function that reads them all at once, and their recorded values."""

    prefix: str
    items: Mapping[str, Any]
    keys: tuple[str, ...]
    read: Callable[[Any], Any]
    before: Any


class CompiledModel:
    """A model and a loss function at the time when they were compiled.

    `constants` are the tensors that the program has for its own; `changed_attributes` names those that forward
    itself changes. A program for evaluation (`trains` is false) is the same whatever is trained, and in both modes.
    Whoever has a `snapshot` of both gives it: to take one is most of what this takes.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: object = None,
        constants: Mapping[str, Tensor] | None = None,
        changed_attributes: Collection[str] = (),
        *,
        trains: bool = True,
        snapshot: Snapshot | None = None,
    ) -> None:
        changed_attributes = changed_attributes if trains else {*changed_attributes, *training_flags(model)}
        params, buffers = named_tensors(model)
        self._changed_attributes = changed_attributes
        self._snapshot = Snapshot(model, loss) if snapshot is None else snapshot
        self._names, self._params = (list(params), list(params.values())) if trains else ([], [])
        self._trained = [p.requires_grad for p in self._params]
        self._hooks = [gradient_hooks(p) for p in self._params]
        self._constants = list((constants or {}).values())
        self._versions = [version_of(t) for t in self._constants]
        self._variables = [Variables(function) for function in _functions(loss)]
        self._variables_before = [_comparable(variables.items()) for variables in self._variables]
        modules = named_modules(model)
        attributes: list[tuple[str, Mapping[str, Any]]] = [(f"{n}." if n else "", vars(m)) for n, m in modules]
        attributes += [("loss.", vars(loss))] if isinstance(loss, nn.Module) else []
        recorded = (_plain_of(prefix, items, changed_attributes) for prefix, items in attributes)
        self._values = [record for record in recorded if record is not None]
        self._before = [record.before for record in self._values]
        self._unhooked = [d for _, m in modules for key in HOOKS if not (d := vars(m).get(key))]
        self._state_names, self._state = [*params, *buffers], [*params.values(), *buffers.values()]
        self._state_versions = [version_of(t) for t in self._state]

    def changes(self) -> list[str]:
        """What differs now of what a training loop may set from step to step, in words. Costs 0.1 ms at 400 modules."""
        changes: list[str] = []
        try:
            same = [record.read(record.items) for record in self._values] == self._before
        except KeyError:  # an attribute was removed
            same = False
        if any(self._unhooked):
            changes.append("hooks on modules that had none")
        if not same:
            changes += [line for record in self._values for line in _differences(record)]
        if [p.requires_grad for p in self._params] != self._trained:
            trained = zip(self._names, self._params, self._trained, strict=True)
            changes += [
                f"{name} {'frozen' if old else 'trained'}" for name, p, old in trained if p.requires_grad != old
            ]
        for variables, recorded in zip(self._variables, self._variables_before, strict=True):
            current = _comparable(variables.items())
            changes += [
                f"another {name}, which the loss reads" for name in recorded if current.get(name) != recorded[name]
            ]
        if [version_of(t) for t in self._constants] != self._versions:
            pairs = zip(self._constants, self._versions, strict=True)
            written = [t for t, version in pairs if version_of(t) != version]
            changes += [f"other values in a tensor of {list(t.shape)} that is no buffer" for t in written]
        return changes

    def all_changes(self) -> list[str]:
        """The same, and every other attribute of the model that has changed. It walks the whole model."""
        if changes := self.changes():
            return changes
        names = (c.attribute for c in self._snapshot.changes())
        changed_names = dict.fromkeys(
            name for name in names if name not in self._changed_attributes and GENERATION not in name.split(".")
        )
        pairs = zip(self._names, self._params, self._hooks, strict=True)
        hooked = [name for name, p, hooks in pairs if gradient_hooks(p) != hooks]
        return [*(f"another {name}" for name in changed_names), *(f"other hooks on {name}" for name in hooked)]

    def refuse_changes(self) -> None:
        """Raise ShardcError (SC124) where something that is built into the program is not as it was.

        Warns, once each time, where values were written to the model's parameters and buffers, which no trainer reads.
        """
        if changes := self.changes():
            raise changed(changes)
        versions = [version_of(t) for t in self._state]
        if versions != self._state_versions:
            names = zip(self._state_names, versions, self._state_versions, strict=True)
            written = [name for name, now, before in names if now != before]
            shown = ", ".join(written[:3]) + (f" and {len(written) - 3} more" if len(written) > 3 else "")
            message = f"values were written to the model's {shown}: a trainer goes on with its own; to hand them on"
            warn(f"{message}, launch again with state=model.state_dict()")
            self._state_versions = versions

    def accept_values(self) -> None:
        """Record the model's present values as those that a trainer starts from."""
        self._state_versions = [version_of(t) for t in self._state]

    def put_back(self) -> None:
        """Record that tensors were written to temporarily and are now restored."""
        self.accept_values()
        self._versions = [version_of(t) for t in self._constants]


def changed(changes: list[str]) -> ShardcError:
    """The error for a model that is no longer as it was compiled."""
    shown = "; ".join(changes[:3]) + (f"; and {len(changes) - 3} more" if len(changes) > 3 else "")
    return error("SC124", f"the model was changed since it was compiled, it now has: {shown}", hint=HINT)


def _plain_of(prefix: str, items: Mapping[str, Any], changed_attributes: Collection[str]) -> _Values | None:
    keys = tuple(
        key
        for key, value in items.items()
        if (value if key in HOOKS else (kind := type(value)) in _PLAIN or (kind in _CONTAINERS and _is_plain(value)))
        and not (changed_attributes and f"{prefix}{key}" in changed_attributes)
    )
    if not keys:
        return None
    read = itemgetter(*keys)
    copies = tuple(_copied(items[key]) for key in keys)
    return _Values(prefix, items, keys, read, copies if len(keys) > 1 else copies[0])


def _differences(record: _Values) -> Iterator[str]:
    recorded = record.before if len(record.keys) > 1 else (record.before,)
    for key, before in zip(record.keys, recorded, strict=True):
        current = record.items.get(key)
        if key in HOOKS and current != before:
            yield f"other hooks on {record.prefix.rstrip('.') or 'the model itself'}"
        elif current != before:
            yield f"{record.prefix}{key} = {current!r}, not {before!r}"


def _functions(value: object) -> Iterator[FunctionType]:
    """The Python functions that calling a value begins with."""
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, MethodType):
        yield from _functions(value.__func__)
    elif isinstance(value, partial):
        yield from _functions(value.func)


def _is_plain(value: Any) -> bool:
    """A number, a text, or a container of nothing else."""
    kind = type(value)
    if kind not in _CONTAINERS:
        return kind in _PLAIN
    return all(type(item) in _PLAIN for item in (value.values() if kind is dict else value))


def _copied(value: Any) -> Any:
    return value if type(value) in _PLAIN else copy(value)


def _comparable(items: Mapping[object, Any]) -> dict[object, Any]:
    """Plain values by content, tensors by identity. Everything else may be changed by a step, and is left out."""
    copies = {name: _copied(value) for name, value in items.items() if _is_plain(value)}
    return copies | {name: id(value) for name, value in items.items() if isinstance(value, Tensor)}
