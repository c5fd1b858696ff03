"""What calls of torch in equal layers say alike: their forms.

    layers.3    y = linear(x, layers.3.up.weight)      linear, (result 7 of the layer before, its own up.weight)
    layers.4    y = linear(x, layers.4.up.weight)      the same form

A form speaks of a tensor by the layer that made or owns it, counted from the one at hand, or by its identity; of
numbers by type and value; of what a call returned by its geometry, or as the argument that it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardc import torch_compat
from shardc.ir.units import UnequalError

_PLAIN = frozenset(
    (int, bool, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)
)


class Call(NamedTuple):
    """A call of a layer: its form, the tensors that it made, and those that the form speaks of by their identity. Or
    that a module returned, which some do without a call. `draws`: how many random numbers the layer had drawn before
    it, and how many it draws."""

    form: Any
    tensors: list[Tensor]
    held: list[Tensor]
    draws: tuple[int, int]


class CallForms:
    """Of the tensors of one forward, where they are from: list and number of the layer, and what of it they are."""

    def __init__(self) -> None:
        self._roles: dict[int, tuple[Any, ...]] = {}  # by identity
        self._objects: dict[tuple[Any, ...], Tensor] = {}  # the same the other way around

    def assign(self, t: Tensor, path: str, index: int, *what: object) -> None:
        """`t` is of the layer `index` of the list `path`."""
        role = (path, index, *what)
        self._roles[id(t)] = role
        self._objects[role] = t

    def knows(self, t: Tensor) -> bool:
        return id(t) in self._roles

    def forget(self, call: Call) -> None:
        """No later call may speak of what this one made."""
        for t in call.tensors:
            self._objects.pop(self._roles.pop(id(t)))

    def of(self, path: str, index: int, value: Any, held: list[Tensor]) -> Any:
        """The form of an argument of a call of a layer; to `held` go tensors of which it knows the identity alone.

        Raises UnequalError for values of which that is not all."""
        kind = type(value)
        if isinstance(value, Tensor):
            role = self._roles.get(id(value))
            if role is None or role[0] != path:
                held.append(value)
                return "same", id(value)
            return "layer", role[1] - index, *role[2:]
        if kind in _PLAIN:
            return kind, value
        if kind in (float, complex):
            return kind, repr(value)  # 0.0 == -0.0
        if kind in (tuple, list, torch.Size):
            return kind, tuple([self.of(path, index, item, held) for item in value])
        if kind is dict:
            return kind, tuple([(key, self.of(path, index, item, held)) for key, item in value.items()])
        if kind is slice:
            return kind, *(self.of(path, index, part, held) for part in (value.start, value.stop, value.step))
        raise UnequalError(f"an argument that is a {kind.__name__}")

    def returned(
        self, path: str, index: int, function: Any, result: Any, made: list[Tensor], held: list[Tensor]
    ) -> Any:
        """The form of what a call of `function` returned; new tensors of it go to `made`. Raises UnequalError."""
        if isinstance(result, Tensor):
            if id(result) in self._roles or any(result is t for t in held):
                return self.of(path, index, result, held)
            geometry = torch_compat.Geometry.of(result)
            if geometry is None:
                raise UnequalError("what it returns is more than its geometry")
            made.append(result)
            return "new", geometry
        if result is None and function is Tensor.__setitem__:
            return (type(None),)
        if isinstance(result, tuple | list) and result and not hasattr(result, "_fields"):
            items = [
                (type(None),) if item is None else self.returned(path, index, None, item, made, held) for item in result
            ]
            return type(result), tuple(items)
        raise UnequalError("it returns no tensor")

    def rebuilt(self, path: str, index: int, form: Any, held: list[Tensor], made: Iterator[Tensor]) -> Any:
        """What a call of this layer returns, by the form of what another returned, of which `held` are; with new
        tensors from `made`."""
        match form[0]:
            case "new":
                return next(made)
            case "same":
                return next(t for t in held if id(t) == form[1])
            case "layer":
                return self._objects[path, index + form[1], *form[2:]]
            case kind if form[1:]:
                return kind([self.rebuilt(path, index, item, held, made) for item in form[1]])
            case _:
                return None


def new_in(returned: Any) -> Iterator[torch_compat.Geometry]:
    """The geometries of the new tensors that a call returned, by the form of that."""
    if returned[0] == "new":
        yield returned[1]
    elif isinstance(returned[0], type) and returned[1:]:
        for item in returned[1]:
            yield from new_in(item)
