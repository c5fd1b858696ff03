"""What an op asks of its operands. A kernel trusts its arguments: what is wrong must be said before the launch.

`checked` asks what holds for every op: each argument is of its kind, each tensor is plain memory, and none of them
needs a gradient, which no op here would pass on. What an op asks beyond that, it asks itself by the functions below.
A refusal names the op, the operand and the line that called the op.
"""

from __future__ import annotations

import inspect
import linecache
import os
from collections.abc import Callable, Sequence
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.autograd.graph import increment_version

from shardc.ir.diagnostic import error

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
NUMBERS = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
LISTED = "kernels_triton.registry lists the shape and dtype of every operand"
LARGEST = torch.finfo(torch.float32).max  # what a kernel takes as a number
DISPATCH = cast("Any", Tensor).__torch_dispatch__  # which those replace that wrap tensors
HERE = str(Path(__file__).parent) + os.sep
KINDS: dict[str, tuple[type[Any] | tuple[type[Any], ...], str]] = {
    "Tensor": (Tensor, "a tensor"),
    "Tensor | None": (Tensor, "a tensor or None"),
    "float": (Real, "a number"),
    "int": (Integral, "a whole number"),
    "bool": (bool, "True or False"),
    "str": (str, "a string"),
    "tuple[float, float]": ((tuple, list), "two numbers"),
    "Sequence[int] | None": ((tuple, list), "whole numbers or None"),
}
Given = ParamSpec("Given")
Result = TypeVar("Result")


def checked(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """An op, once each argument is what its annotation says, and no gradient would be lost.

    An op runs kernels and returns; autograd does not see it. A result would be a constant to it, and what is written
    in place would be differentiated as if it had not been: both are wrong gradients that nobody is told of.
    """
    op = function.__name__
    kinds = {p.name: KINDS[p.annotation] for p in inspect.signature(function).parameters.values()}
    names = tuple(kinds)

    @wraps(function)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        graded = torch.is_grad_enabled()
        first = [_fit(op, name, value, kinds[name], graded) for name, value in zip(names, args, strict=False)]
        more = {k: _fit(op, k, value, kinds[k], graded) if k in kinds else value for k, value in kwargs.items()}
        return cast("Any", function)(*first, *args[len(names) :], **more)

    return called


def _fit(op: str, name: str, value: Any, wanted: tuple[Any, str], graded: bool) -> Any:
    kind, told = wanted
    if isinstance(value, Tensor):
        if kind is Tensor:
            _plain(op, name, value, graded)
            return value
    elif value is None and told.endswith("None"):
        return None
    if not isinstance(value, kind):
        hint = LISTED if kind is Tensor else f"help(kernels_triton.ops.{op}) says what it takes"
        expect(False, op, f"{name} is of {type(value)}, expected {told}", hint)
    if kind is Real:
        return _number(op, name, value)
    return whole(op, name, value) if kind is Integral else value


def _number(op: str, name: str, value: Any) -> float:
    if not abs(value) <= LARGEST:  # nor is NaN
        expect(False, op, f"{name} is {value}, expected a finite number", "a kernel computes with it in float32")
    if name == "eps" and value < 0.0:  # of which the root would be NaN
        expect(False, op, f"eps is {value}, expected 0 or more", "1e-5 is usual")
    return float(value)


def _plain(op: str, name: str, x: Tensor, graded: bool) -> None:
    """A tensor that is its memory, whatever autograd thinks of it."""
    if graded and x.requires_grad:
        told = f"{name} requires a gradient, which would be lost: autograd does not see {op}"
        inside = "in a model that shardc.compile takes, write torch's own function: gradients come by themselves"
        expect(False, op, told, f"call {op} under torch.no_grad(), or on {name}.detach(); {inside}")
    if unpack_dual(x).tangent is not None:
        told = f"{name} carries a tangent, which would be lost: forward-mode autograd does not see {op}"
        expect(False, op, told, f"pass torch.autograd.forward_ad.unpack_dual({name}).primal")
    if x.layout != torch.strided:
        expect(False, op, f"{name} is of layout {x.layout}, expected torch.strided", f"pass {name}.to_dense()")
    kind: Any = type(x)
    if kind.__torch_dispatch__ is not DISPATCH:
        told = f"{name} is of {kind}, which is no plain memory, expected a tensor"
        expect(False, op, told, f"pass the tensor that it wraps: {name}.to_local(), say, of a DTensor")
    if x.is_neg():
        expect(False, op, f"{name} is a view whose memory holds the negated numbers", f"pass {name}.resolve_neg()")


def expect(condition: bool, op: str, message: str, hint: str = LISTED) -> None:
    if not condition:
        location, line = _calling()
        raise error("SC530", f"{op}: {message}", location=location, source_text=line, hint=hint)


def _calling() -> tuple[str | None, str | None]:
    """The line that called into this package, and its text."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(HERE):
        frame = frame.f_back
    if frame is None:
        return None, None
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(file).name}:{number}", linecache.getline(file, number).strip() or None


def whole(op: str, name: str, value: Any, least: int = -(1 << 63), above: int = 1 << 63) -> int:
    """A whole number of `least` or more, below `above`; by default one of 64 bits."""
    if not isinstance(value, Integral):
        expect(False, op, f"{name} is of {type(value)}, expected a whole number", f"pass another {name}")
    if not least <= int(value) < above:
        expect(False, op, f"{name} is {value}, expected {least} or more, below {above}", f"pass another {name}")
    return int(value)


def probability(op: str, p: float) -> None:
    expect(0.0 <= p <= 1.0, op, f"p is {p}, expected 0 to 1", "it is the part of the elements that are dropped")


def shaped(op: str, name: str, x: Tensor | None, shape: Sequence[int], like: Tensor, hint: str = LISTED) -> None:
    """`x`, if given, has this shape and the device of `like`."""
    if x is None:
        return
    if tuple(x.shape) != tuple(shape):
        expect(False, op, f"{name} is {list(x.shape)}, expected {list(shape)}", hint)
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


def statistics(op: str, like: Tensor, **operands: Tensor) -> None:
    """Each is what a forward op returned beside its result: float32, or float64 where `like` is."""
    for name, x in operands.items():
        if x.dtype != torch.float32 and not x.dtype == like.dtype == torch.float64:
            expect(False, op, f"{name} is {x.dtype}, expected torch.float32", f"pass {name} as forward returned it")
    placed(op, like, **operands)


def scalars(op: str, like: Tensor, **operands: Tensor | None) -> None:
    """Each is a 0-dim tensor on the device of `like`: a CUDA graph replays with new values."""
    for name, x in operands.items():
        if x is None:
            continue
        if x.dim():
            expect(False, op, f"{name} is {list(x.shape)}, expected a 0-dim tensor", f"pass {name}.reshape(())")
        if x.dtype not in NUMBERS and x.dtype != torch.bool:
            expect(False, op, f"{name} is {x.dtype}, expected a real number", f"pass {name}.to(torch.float32)")
    placed(op, like, **operands)


def same_dtype(op: str, name: str, x: Tensor | None, like: Tensor) -> None:
    if x is not None:
        typed(op, name, x, like.dtype)


def typed(op: str, name: str, x: Tensor, dtype: torch.dtype) -> None:
    if x.dtype != dtype:
        expect(False, op, f"{name} is {x.dtype}, expected {dtype}", f"pass {name}.to({dtype})")


def rowed(op: str, **operands: Tensor | None) -> None:
    """Each has columns."""
    for name, x in operands.items():
        if x is not None:
            expect(x.dim() > 0, op, f"{name} is [], expected [..., columns]", f"pass {name}.reshape(1, 1)")


def apart(op: str, name: str, x: Tensor) -> None:
    """`x` may be written in place: each element has a place of its own in memory, and is not read again as another."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride <= reach:
            told = f"{name} may overlap itself: sizes {list(x.shape)}, strides {list(x.stride())}"
            expect(False, op, told, f"pass in_place=False, or {name}.contiguous()")
        reach += stride * (size - 1)
    writable(op, **{name: x})


def writable(op: str, **operands: Tensor | None) -> None:
    """Each may be written in place, as torch sees it."""
    for name, x in operands.items():
        if x is not None and x.is_inference() and not torch.is_inference_mode_enabled():
            told = f"{name} was made in inference mode, and is to be written in place outside of it"
            expect(False, op, told, f"pass {name}.clone(), or call {op} under torch.inference_mode()")


def written(*operands: Tensor | None) -> None:
    """A kernel wrote into each: autograd, which kept one for a backward, then refuses to use it."""
    for x in operands:
        if x is not None and not x.is_inference():
            increment_version(x)
