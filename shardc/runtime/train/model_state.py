"""A trainer's tensors under the names of its model: `state_dict()`, what is saved, and `sync_to`.

    trainer.state_dict()        the keys, order, shapes and dtypes of model.state_dict()
    trainer.sync_to(model)      the values, in the model's own tensors, buffers that no file holds included

A trainer may hold parameters in a wider dtype than the model's (the master of a bfloat16 model is float32). Checkpoints
keep what it holds; the two above give the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardc.frontend.own_values import computed_buffers, non_persistent_buffers
from shardc.frontend.saved_state import Entry
from shardc.ir.diagnostic import Diagnostic, ShardcError, error, suggest
from shardc.ir.graph import Port
from shardc.ir.program import CONSTANT
from shardc.ir.types import DTYPES, TensorType

Kept = Mapping[str, tuple[Port, TensorType]]
SHOWN = 5  # names in a message


@dataclass(frozen=True)
class ModelState:
    """The entries of the model's `state_dict`, and the buffers that have none."""

    entries: Sequence[Entry]
    unsaved: frozenset[str]

    @classmethod
    def of(cls, recorded: Sequence[Sequence[str]] | None, kept: Kept, constants: Collection[str]) -> ModelState:
        """As `compile` recorded it. Without a record, every parameter and buffer under all its names."""
        if recorded is None:
            entries = [
                (key, name, "")
                for name, (port, _) in kept.items()
                if port.role in ("param", "buffer") and name not in constants
                for key in (name, *port.aliases)
            ]
            buffers = {name for name, (port, _) in kept.items() if port.role == "buffer"}
            return cls(entries, frozenset(buffers & set(constants)))
        entries = [(key, name, dtype) for key, name, dtype in recorded if not name or name in kept]
        names = {name for _, name, _ in entries}
        return cls(entries, frozenset(n for n, (port, _) in kept.items() if port.role == "buffer" and n not in names))

    def names(self) -> list[str]:
        """The parameters and buffers that are saved, in the order of the model's `state_dict`. Raises ShardcError
        (SC562) for an entry that the program cannot have."""
        for key, name, dtype in self.entries:
            if not name and dtype and not key.endswith("_extra_state"):
                raise _hooked(key)
        return list(dict.fromkeys(name for _, name, _ in self.entries if name))

    def dtypes(self) -> dict[str, torch.dtype]:
        known = {name: DTYPES.get(dtype) for _, name, dtype in self.entries if name}
        return {name: dtype for name, dtype in known.items() if dtype is not None}

    def state_dict(
        self, kept: Kept, roles: Collection[str], fetch: Callable[[str], Tensor], model: nn.Module | None
    ) -> dict[str, Any]:
        """The entries of these roles; `fetch` gives a whole tensor that is the caller's own."""
        result: dict[str, Any] = {}
        self.names()
        dtypes, wholes = self.dtypes(), {}
        own: Mapping[str, Any] = {}
        if model is not None and any(not name for _, name, _ in self.entries):
            own = model.state_dict()
        for key, name, _ in self.entries:
            if not name:
                if key in own:  # extra state: no tensor of the program
                    result[key] = own[key]
            elif kept[name][0].role in roles:
                if name not in wholes:
                    wholes[name] = fetch(name).to(dtypes.get(name, kept[name][1].dtype))
                result[key] = wholes[name]
        return result


def _hooked(key: str) -> ShardcError:
    message = f"'{key}' of the model's state_dict is neither a parameter nor a buffer: a hook computes it"
    hint = "trainer.sync_to(model) puts the values back; model.state_dict() is right then"
    return error("SC562", message, tensor=key, hint=hint)


# ---------------------------------------------------------------------- into a model
def sync(
    model: nn.Module | None, state: ModelState, kept: Kept, fetch: Callable[[str], Tensor], agreed: Callable[..., Any]
) -> None:
    """Write the trainer's values into the tensors of a model; one on the meta device gets memory on the CPU.

    Raises ShardcError (SC563) on every rank, and changes nothing, where names or shapes are others.
    """
    targets: _Targets = agreed(lambda: _targets(model, state, kept))
    with torch.no_grad():
        for name in _names(kept):
            whole = fetch(name)  # all ranks take part
            for t in targets.of.get(name, ()):
                _write(t, whole)
        for t, value in targets.computed:
            _write(t, value)


@dataclass
class _Targets:
    """The tensors of a model by their name in the program, and those that the model's own code computes."""

    of: dict[str, list[Tensor]] = field(default_factory=dict[str, list[Tensor]])
    computed: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]])


def _names(kept: Kept) -> list[str]:
    """What a program holds of its model."""
    return [n for n, (port, _) in kept.items() if port.role in ("param", "buffer") and not n.startswith(CONSTANT)]


def _targets(model: nn.Module | None, state: ModelState, kept: Kept) -> _Targets:
    targets = _Targets()
    if model is None:
        return targets
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise error("SC563", f"sync_to takes an nn.Module, not a {type(model).__name__}", hint="pass the model")
    names = {key: name for key, name, _ in state.entries if name}
    names |= {alias: name for name in _names(kept) for alias in (name, *kept[name][0].aliases)}
    of_code = computed_buffers(model)
    unsaved = {id(t) for t in non_persistent_buffers(model).values()}
    keys: dict[int, tuple[Tensor, list[str]]] = {}  # of a tensor, by its identity
    for key, t in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        keys.setdefault(id(t), (t, []))[1].append(key)
    unknown: list[str] = []
    misfits: list[str] = []
    for t, (key, *others) in keys.values():
        owners = {names[k]: k for k in (key, *others) if k in names}
        for name, known in owners.items():
            if len(owners) > 1:
                misfits.append(f"{known}: in the model one tensor with {' and '.join({*owners.values()} - {known})}")
            elif tuple(t.shape) != kept[name][1].shape:
                misfits.append(f"{known}: {list(t.shape)} in the model, {list(kept[name][1].shape)} in the program")
            targets.of.setdefault(name, []).append(t)
        if owners or (id(t) in unsaved and not t.is_meta):
            continue
        if id(t) not in unsaved:
            unknown.append(key)
        elif key in of_code.values:
            targets.computed.append((t, of_code.values[key]))
        else:
            misfits.append(f"{key}: {of_code.reasons.get(key, 'it has no value')}")
    absent = [name for name in _names(kept) if name not in targets.of]
    _refuse(absent, unknown, misfits)
    return targets


def _refuse(absent: Sequence[str], unknown: Sequence[str], misfits: Sequence[str]) -> None:
    problems: list[Diagnostic] = []
    guess = suggest(absent[0], list(unknown)) if absent and unknown else None
    for lines, what, hint in (
        (absent, "of the program: the model has none of that name", f"did you mean '{guess}'?" if guess else None),
        (unknown, "of the model: the program has none of that name", None),
        (misfits, "of the model cannot take the program's values", None),
    ):
        if lines:
            shown = "\n".join([*lines[:SHOWN], *(["..."] if lines[SHOWN:] else [])])
            message = f"{len(lines)} tensor{'s' if len(lines) > 1 else ''} {what}"
            hint = hint or "pass a model of the class, and of the sizes, that was compiled"
            problems.append(Diagnostic("SC563", message, tensor=lines[0].partition(":")[0], cause=shown, hint=hint))
    if problems:
        raise ShardcError(*problems)


def _write(t: Tensor, value: Tensor) -> None:
    """The value in the tensor's memory. One on the meta device stays the same object, which an optimizer may hold."""
    if not t.is_meta:
        t.copy_(value)
        return
    real = value.to(device="cpu", dtype=t.dtype, copy=True).reshape(t.shape)
    if isinstance(t, nn.Parameter):
        real = nn.Parameter(real, requires_grad=t.requires_grad)
    vars(real).update(vars(t))
    try:
        torch.utils.swap_tensors(t, real)
    except RuntimeError:
        message = "a tensor of the model lies on the meta device, and is held elsewhere too: by a view, or by a hook"
        hint = "give the model memory first, model.to_empty(device='cpu'), or pass one that has values"
        raise error("SC563", message, hint=hint) from None
