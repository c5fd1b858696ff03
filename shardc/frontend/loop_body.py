"""What the body of a loop over time holds and calls, while it runs once on stand-ins (`rolled_loops`).

It may store into tensors at the step's index, append to lists, and call torch's functions, modules of torch without
hooks, and plain Python functions. The lists that loops have filled are one tensor behind them (`Appended`).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from shardc.frontend import loop_operations, loop_shapes
from shardc.frontend.loop_source import plain_function
from shardc.frontend.loop_values import OPERATIONS, Index, Method, Recorder, Same, Step, Symbol, Value, refuse

_ = loop_operations  # it fills OPERATIONS
PURE_BUILTINS = (len, int, float, tuple, range, zip, enumerate, reversed)
MODULES = (
    nn.Linear, nn.Identity, nn.Tanh, nn.Sigmoid, nn.ReLU, nn.SiLU, nn.Softplus, nn.Dropout, nn.RNNCell, nn.GRUCell,
    nn.LSTMCell,
)  # fmt: skip
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_foreign(module: str) -> bool:
    """Does a module belong to torch, to Python or to us?"""
    return module.partition(".")[0] in ("torch", "builtins", "shardc", "abc", "typing", "collections")


# ------------------------------------------------------------------ what a body holds
class Store:
    """A tensor that steps store into, each at its index. Its values cannot be read."""

    def __init__(self, recorder: Recorder, tensor: Tensor) -> None:
        self._recorder, self._tensor = recorder, tensor
        self.dtype, self.device, self.shape = tensor.dtype, tensor.device, tensor.shape
        self.stored: tuple[Tensor, tuple[int, int, int | None], Symbol] | None = None

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.stored is not None:
            refuse()
        recorder, shape = self._recorder, self._tensor.shape
        entries = loop_shapes.full_key(key, len(shape))
        places = [d for d, e in enumerate(entries) if not (type(e) is slice and e.start is e.stop is e.step is None)]
        if len(places) != 1 or len(entries) != len(shape):
            refuse()
        (place,) = places
        wide = loop_shapes.window(recorder, entries[place], shape[place])
        if wide is not None:
            where = (place, *wide)
            part = [*shape[:place], wide[1], *shape[place + 1 :]]
        elif type(entries[place]) is Index:
            where = (place, loop_shapes.position(recorder, entries[place], shape[place]), None)
            part = [*shape[:place], *shape[place + 1 :]]
        else:
            refuse()
        symbol = (
            value if isinstance(value, Symbol) else Same(recorder, value) if isinstance(value, Tensor) else refuse()
        )
        if list(symbol.shape) != part:
            refuse()
        self.stored = (self._tensor, where, symbol)


class Appends:
    """A list that steps append to."""

    def __init__(self) -> None:
        self.values: list[Symbol] = []

    def append(self, value: Any) -> None:
        if self.values or not isinstance(value, (Value, Step)):
            refuse()
        self.values.append(value)


class Appended(Sequence[Tensor]):
    """What the steps of a loop have appended: one tensor, with the steps along a dim."""

    def __init__(self, tensor: Tensor, dim: int) -> None:
        self.tensor, self.dim = tensor, dim

    def __len__(self) -> int:
        return self.tensor.shape[self.dim]

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        return (
            list(self.tensor.unbind(self.dim))[index]
            if isinstance(index, slice)
            else self.tensor.select(self.dim, index)
        )


def joined(function: Callable[..., Any], parts: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.stack` or `torch.cat` of a list, which a loop may have filled."""
    if not isinstance(parts, Appended):
        return function(parts, *args, **kwargs)
    dim = kwargs.get("dim", args[0] if args else 0)
    if function is torch.stack:
        dim %= parts.tensor.ndim
        return parts.tensor if dim == parts.dim else parts.tensor.movedim(parts.dim, dim).contiguous()
    if function is torch.cat:
        dim %= parts.tensor.ndim - 1
        return parts.tensor.movedim(parts.dim, dim).flatten(dim, dim + 1)
    return function(list(parts), *args, **kwargs)


# ------------------------------------------------------------------ calls in a body
def called(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A call in the body of a loop: of torch, of a module of torch without hooks, or of a plain Python function."""
    if isinstance(function, Method):
        return function(*args, **kwargs)
    if any(function is pure for pure in PURE_BUILTINS):
        return function(*args, **kwargs)
    if kwargs.get("out") is not None or kwargs.get("inplace"):
        refuse()
    leaves = [*args, *kwargs.values()]
    symbolic = any(isinstance(x, Symbol) for arg in leaves for x in (arg if isinstance(arg, (tuple, list)) else [arg]))
    if isinstance(function, nn.Module):
        return _module(function, args, kwargs)
    if isinstance(function, types.MethodType) and not is_foreign(function.__func__.__module__ or ""):
        return _plain(function.__func__)(function.__self__, *args, **kwargs)
    if isinstance(function, types.FunctionType) and not is_foreign(function.__module__ or ""):
        return _plain(function)(*args, **kwargs)
    name = getattr(function, "__name__", "")
    of_tensor = isinstance(getattr(function, "__self__", None), Tensor)
    if name not in OPERATIONS or not (of_tensor or _is_of_torch(function)) or (name == "dropout" and not symbolic):
        refuse()
    return function(*args, **kwargs)


def unshared(value: Any) -> Any:
    """What `x += y` in the body of a loop adds to: of a tensor or a list, others would see it."""
    return value if type(value) in (int, float, str, tuple, Index) else refuse()


def _is_of_torch(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    home = (getattr(function, "__module__", None) or "").partition(".")[0]
    return home == "torch" or any(getattr(of, name, None) is function for of in (torch, torch.special))


def _plain(function: types.FunctionType) -> Callable[..., Any]:
    return plain_function(function) or refuse()


def _module(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    is_called_otherwise = type(module).__call__ is not nn.Module.__call__
    if any(getattr(module, hooks) for hooks in HOOKS) or "forward" in vars(module) or is_called_otherwise:
        refuse()
    if type(module) in MODULES:
        return module.forward(*args, **kwargs)
    forward = type(module).forward
    if is_foreign(type(module).__module__) or not isinstance(forward, types.FunctionType):
        refuse()
    return _plain(forward)(module, *args, **kwargs)
