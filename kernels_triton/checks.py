"""What an op asks of its operands. A kernel trusts its arguments: what is wrong must be said before the launch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from shardc.ir.diagnostic import error

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
LISTED = "kernels_triton.registry lists the shape and dtype of every operand"
KINDS: dict[str, tuple[type[Any] | tuple[type[Any], ...], str]] = {
    "Tensor": (Tensor, "a tensor"),
    "Tensor | None": (Tensor, "a tensor or None"),
    "float": (Real, "a number"),
    "int": (Integral, "a whole number"),
    "tuple[float, float]": ((tuple, list), "two numbers"),
}
Given = ParamSpec("Given")
Result = TypeVar("Result")


def checked(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """An op, once each argument is what its annotation says and no epsilon is negative: a root would be NaN."""
    op, kinds = function.__name__, {p.name: p.annotation for p in inspect.signature(function).parameters.values()}
    names = tuple(kinds)

    @wraps(function)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            kind, told = KINDS.get(kinds.get(name, ""), (object, ""))
            fits = isinstance(value, kind) or (value is None and told.endswith("None"))
            expect(fits, op, f"{name} is of {type(value)}, expected {told}", LISTED)
            if name == "eps":
                expect(value >= 0.0, op, f"eps is {value}, expected 0 or more", "1e-5 is usual")  # type: ignore[operator]
        return function(*args, **kwargs)

    return called


def expect(condition: bool, op: str, message: str, hint: str = LISTED) -> None:
    if not condition:
        raise error("SC530", f"{op}: {message}", hint=hint)


def shaped(op: str, name: str, x: Tensor | None, shape: Sequence[int], like: Tensor) -> None:
    """`x`, if given, has this shape and the device of `like`."""
    if x is None:
        return
    expect(tuple(x.shape) == tuple(shape), op, f"{name} is {list(x.shape)}, expected {list(shape)}", LISTED)
    placed(op, like, **{name: x})


def placed(op: str, like: Tensor, **operands: Tensor | None) -> None:
    """Each is on the device of `like`."""
    for name, x in operands.items():
        if x is not None and x.device != like.device:
            where = str(like.device)
            expect(False, op, f"{name} is on {x.device}, the other tensors on {where}", f"pass {name}.to({where!r})")


def floats(op: str, like: Tensor, **operands: Tensor | None) -> None:
    """Each is of a floating-point dtype that kernels or references compute in, on the device of `like`."""
    for name, x in operands.items():
        if x is not None and x.dtype not in FLOATS:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
            expect(False, op, f"{name} is {x.dtype}, expected floating-point numbers", f"one of {known}")
    placed(op, like, **operands)


def scalars(op: str, like: Tensor, **operands: Tensor | None) -> None:
    """Each is a 0-dim tensor on the device of `like`: a CUDA graph replays with new values."""
    for name, x in operands.items():
        if x is not None:
            expect(x.dim() == 0, op, f"{name} is {list(x.shape)}, expected a 0-dim tensor", f"pass {name}.reshape(())")
    placed(op, like, **operands)


def same_dtype(op: str, name: str, x: Tensor | None, like: Tensor) -> None:
    if x is not None:
        expect(
            x.dtype == like.dtype, op, f"{name} is {x.dtype}, expected {like.dtype}", f"pass {name}.to({like.dtype})"
        )


def typed(op: str, name: str, x: Tensor, dtype: torch.dtype) -> None:
    expect(x.dtype == dtype, op, f"{name} is {x.dtype}, expected {dtype}", f"pass {name}.to({dtype})")


def rowed(op: str, **operands: Tensor | None) -> None:
    """Each has columns."""
    for name, x in operands.items():
        if x is not None:
            expect(x.dim() > 0, op, f"{name} is [], expected [..., columns]", f"pass {name}.reshape(1, 1)")


def apart(op: str, name: str, x: Tensor) -> None:
    """Each element has a place of its own in memory: what is written in place must not be read again as another."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        told = f"{name} may overlap itself: sizes {list(x.shape)}, strides {list(x.stride())}"
        expect(stride > reach, op, told, f"pass in_place=False, or {name}.contiguous()")
        reach += stride * (size - 1)
