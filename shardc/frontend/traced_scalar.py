"""A float that is being traced: what an optimizer does with its learning rate and its step count becomes tensor ops.

torch's optimizers hold those as Python numbers (`step_t.item()`, `param.add_(grad, alpha=-lr)`), which a trace would
bake into the graph. A `Number` is a float to whoever looks at it, but computes with a 0-dim float64 tensor, so the
arithmetic keeps Python's precision; while `traced_numbers` is on, `Tensor.item()` returns one, and an op that is given
one runs with its tensor instead:

    x.add_(y, alpha=n)          ->  x.add_(y * n.tensor)
    x.addcdiv_(a, b, value=n)   ->  x.add_(a * n.tensor / b)
    x.mul_(n), n / x, ...       ->  the same with n.tensor
    min(n, m), max(n, 0.1)      ->  minimum, clamp of tensors, where `traced_extremes` is on

Its value as a float is NaN: where one leaks through (into `math.sqrt`, say), the result is not a number and the
comparison with the real optimizer finds it. Asking for its value, as a comparison does, raises `ValueNeededError`.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial, reduce
from inspect import unwrap
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class ValueNeededError(Exception):
    """A decision depends on the value of a traced number."""


class Number(float):
    """A Python number whose value is that of `tensor` when the graph runs."""

    tensor: Tensor

    def __new__(cls, tensor: Tensor) -> Number:
        number = super().__new__(cls, math.nan)
        number.tensor = tensor.to(torch.float64)
        return number

    def __neg__(self) -> Number:
        return Number(-self.tensor)

    def __pos__(self) -> Number:
        return self

    def __abs__(self) -> Number:
        return Number(self.tensor.abs())

    def _refuse(self, *_: object) -> NoReturn:
        raise ValueNeededError("it decides by the value of its learning rate or step")

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse  # type: ignore[assignment]
    __int__ = __float__ = __round__ = __trunc__ = __floor__ = __ceil__ = _refuse  # type: ignore[assignment]
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = _refuse  # type: ignore[assignment]
    __hash__ = float.__hash__


def _arithmetic(name: str) -> None:
    """Give Number one binary operator: with a tensor it is the tensor's, with a number a Number again."""
    ahead: Callable[[Any, Any], Any] = getattr(Tensor, f"__{name}__")
    behind: Callable[[Any, Any], Any] = getattr(Tensor, f"__r{name}__")

    def forward(self: Number, other: Any) -> Any:
        if isinstance(other, Tensor):
            return NotImplemented  # the tensor's own operator knows its dtype
        return Number(ahead(self.tensor, other.tensor if isinstance(other, Number) else other))

    def reflected(self: Number, other: Any) -> Any:
        if isinstance(other, Tensor):
            return NotImplemented
        return Number(behind(self.tensor, other))

    setattr(Number, f"__{name}__", forward)
    setattr(Number, f"__r{name}__", reflected)


for _name in ("add", "sub", "mul", "truediv", "pow"):
    _arithmetic(_name)


class traced_numbers(TorchFunctionMode):  # noqa: N801 (used as a context manager)
    """Make numbers out of `item()`, and let tensor ops take numbers."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name: str = getattr(func, "__name__", "")
        if name == "item":
            return Number(args[0])
        if name == "square_":  # which torch cannot trace without its mutation
            return args[0].mul_(args[0])
        if name in ("__float__", "__int__", "__bool__", "__index__", "tolist"):
            raise ValueNeededError("it reads the value of a tensor")
        numbers = any(isinstance(value, Number) for value in (*args, *kwargs.values()))
        if not numbers and not any(isinstance(kwargs.get(key), Tensor) for key in ("alpha", "value")):
            return func(*args, **kwargs)
        if name in ("tensor", "as_tensor", "scalar_tensor"):
            return args[0].tensor.to(kwargs.get("dtype") or torch.get_default_dtype())
        return _with_tensors(func, name, args, kwargs)


def _with_tensors(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = next((value for value in args if isinstance(value, Tensor)), None)

    def plain(value: Any) -> Any:
        if not isinstance(value, Number):
            return value
        # Between two tensors without dims the wider dtype would win, which a number's never does.
        return value.tensor.to(x.dtype) if x is not None and _yields(x, name) else value.tensor

    args, kwargs = tuple(plain(value) for value in args), {key: plain(value) for key, value in kwargs.items()}
    put = cast("Callable[..., Tensor]", Tensor.add_ if name.endswith("_") else Tensor.add)
    match name.rstrip("_"), kwargs:
        case "add", {"alpha": Tensor() as alpha}:
            return put(args[0], _widened(args[1], args[0]) * alpha)
        case "sub", {"alpha": Tensor() as alpha}:
            return put(args[0], _widened(args[1], args[0]) * -alpha)
        case "addcmul", {"value": Tensor() as value}:
            return put(args[0], args[1] * value * args[2])
        case "addcdiv", {"value": Tensor() as value}:
            return put(args[0], args[1] * value / args[2])
        case _:
            return func(*args, **kwargs)


def _widened(term: Tensor, x: Tensor) -> Tensor:
    """A term in the dtype of the sum with `x`: torch scales it in that, and not in its own."""
    return term.to(torch.promote_types(term.dtype, x.dtype)) if term.dim() else term


@contextmanager
def traced_extremes(kind: type) -> Generator[None]:
    """Let Python's `min` and `max` take numbers that are traced, in the modules in which a class has its `step`."""
    steps = [unwrap(vars(base)["step"]) for base in kind.__mro__ if "step" in vars(base)]
    modules: list[dict[str, Any]] = [step.__globals__ for step in steps if hasattr(step, "__globals__")]
    shadowed: list[tuple[dict[str, Any], str]] = []
    try:
        for module in modules:
            for name in ("min", "max"):
                if name not in module:
                    module[name] = partial(_extreme, getattr(builtins, name), name == "min")
                    shadowed.append((module, name))
        yield
    finally:
        for module, name in shadowed:
            del module[name]


def _extreme(function: Callable[..., Any], least: bool, *values: Any, **options: Any) -> Any:
    if options or len(values) < 2 or not any(isinstance(value, Number) for value in values):
        return function(*values, **options)
    numbers = [value.tensor for value in values if isinstance(value, Number)]
    result = reduce(torch.minimum if least else torch.maximum, numbers)
    for limit in (value for value in values if not isinstance(value, Number)):
        result = result.clamp(max=limit) if least else result.clamp(min=limit)
    return Number(result)


def _yields(x: Tensor, name: str) -> bool:
    """Must a number be of the dtype of `x` before it meets it?"""
    return x.is_floating_point() and (x.dim() == 0 or name.startswith("lerp"))
