"""A trainer's tensors under the names of its model: `state_dict()`, what is saved, and `sync_to`.

    trainer.state_dict()        the keys, order, shapes and dtypes of model.state_dict()
    trainer.sync_to(model)      the values, in the model's own tensors, buffers that no file holds included

A trainer may hold parameters in a wider dtype than the model's (the master of a bfloat16 model is float32). Checkpoints
keep what it holds; the two above give the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardc.frontend.own_values import computed_buffers
from shardc.frontend.saved_state import Entry
from shardc.ir.diagnostic import Diagnostic, ShardcError, error, suggest
from shardc.ir.graph import Port
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
    model: nn.Module, state: ModelState, kept: Kept, fetch: Callable[[str], Tensor], agreed: Callable[..., Any]
) -> None:
    """Write the trainer's values into the tensors of a model; one on the meta device gets memory on the CPU.

    Raises ShardcError (SC563) on every rank, and changes nothing, where names or shapes are others.
    """
    targets = agreed(lambda: _targets(model, state, kept))
    with torch.no_grad():
        for name, (_, type) in kept.items():
            if name not in targets:
                continue
            whole = fetch(name)  # all ranks take part
            for t in targets[name]:
                _write(t, whole.reshape(type.shape))
        for t, value in targets.get("", ()):
            _write(t, value)


def _targets(model: nn.Module, state: ModelState, kept: Kept) -> dict[str, Any]:
    """By name in the program: the model's tensors of that name. Under "", those that its own code computes."""
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise error("SC563", f"sync_to takes an nn.Module, not a {model.__class__.__name__}", hint="pass the model")
    names = {alias: name for name, (port, _) in kept.items() if port.role in ("param", "buffer")
             for alias in (name, *port.aliases)}  # fmt: skip
    names |= {key: name for key, name, _ in state.entries if name}
    computed = computed_buffers(model)
    unsaved = {id(dict(model.named_buffers())[name]) for name in (*computed.values, *computed.reasons)}
    result: dict[str, Any] = {}
    seen: dict[int, str] = {}
    unknown: list[str] = []
    shapes: list[str] = []
    for key, t in _tensors(model):
        name = names.get(key)
        if name is None and id(t) in unsaved:
            if t.is_meta and id(t) not in seen:
                if key not in computed.values:
                    shapes.append(f"{key}: {computed.reasons.get(key, 'no value')}")
                else:
                    result.setdefault("", []).append((t, computed.values[key]))
            seen[id(t)] = ""
            continue
        if name is None:
            if id(t) not in seen:
                unknown.append(key)
            continue
        type = kept[name][1]
        if tuple(t.shape) != type.shape:
            shapes.append(f"{key}: {list(t.shape)} in the model, {list(type.shape)} in the program")
        if seen.setdefault(id(t), name) == name:
            held = result.setdefault(name, [])
            held.extend([t] if all(t is not other for other in held) else [])
        else:
            shapes.append(f"{key}: one tensor with '{seen[id(t)]}' in the model, another in the program")
    absent = [name for _, name, _ in state.entries if name and name not in result]
    _refuse(list(dict.fromkeys(absent)), unknown, shapes)
    return result


def _refuse(absent: Sequence[str], unknown: Sequence[str], shapes: Sequence[str]) -> None:
    problems: list[Diagnostic] = []
    for lines, what in (
        (absent, "of the program's tensors are not the model's"),
        (unknown, "of the model's tensors are not the program's"),
        (shapes, "of the model's tensors do not fit"),
    ):
        if lines:
            shown = "\n".join([*lines[:SHOWN], *(["..."] if lines[SHOWN:] else [])])
            guess = suggest(absent[0], list(unknown)) if absent and unknown else None
            hint = f"did you mean '{guess}'?" if guess else "pass a model of the class and sizes that was compiled"
            problems.append(
                Diagnostic("SC563", f"{len(lines)} {what}", tensor=lines[0].partition(":")[0], cause=shown, hint=hint)
            )
    if problems:
        raise ShardcError(*problems)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _write(t: Tensor, value: Tensor) -> None:
    """The value in the tensor's memory. One on the meta device stays the same object, which an optimizer may hold."""
    if not t.is_meta:
        t.copy_(value)
        return
    real = value.to(device="cpu", dtype=t.dtype, copy=True)
    if isinstance(t, nn.Parameter):
        real = nn.Parameter(real, requires_grad=t.requires_grad)
    real.__dict__.update(t.__dict__)
    torch.utils.swap_tensors(t, real)
