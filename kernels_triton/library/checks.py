"""Checks of an op's operands. A kernel trusts its arguments, so every error must be reported before the launch.

`checked` covers what holds for every op: each argument has its annotated kind, each tensor is plain memory, and no
tensor requires a gradient, which no op here would propagate. Ops check everything else with the functions below. An
error names the op, the operand and the line that called the op.
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

from kernels_triton.base.diagnostic import error

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
NUMBERS = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
REGISTRY_HINT = "kernels_triton.ops.registry lists the shape and dtype of every operand"
LARGEST = torch.finfo(torch.float32).max  # the largest number that a kernel takes
DISPATCH = cast("Any", Tensor).__torch_dispatch__  # tensor wrappers replace this
PACKAGE_FOLDER = str(Path(__file__).parents[1]) + os.sep
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
    """Decorates an op: checks that each argument is as its annotation says, and that no gradient is lost.

    An op runs kernels and returns; autograd does not see it. Autograd would treat a result as a constant, and would
    ignore in-place writes. Both give wrong gradients silently.
    """
    op = function.__name__
    kinds = {p.name: KINDS[p.annotation] for p in inspect.signature(function).parameters.values()}
    names = tuple(kinds)

    @wraps(function)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        graded = torch.is_grad_enabled()
        first = [
            _checked_argument(op, name, value, kinds[name], graded) for name, value in zip(names, args, strict=False)
        ]
        more = {
            k: _checked_argument(op, k, value, kinds[k], graded) if k in kinds else value for k, value in kwargs.items()
        }
        return cast("Any", function)(*first, *args[len(names) :], **more)

    return called


def _checked_argument(op: str, name: str, value: Any, wanted: tuple[Any, str], graded: bool) -> Any:
    kind, told = wanted
    if isinstance(value, Tensor):
        if kind is Tensor:
            _expect_plain_memory(op, name, value, graded)
            return value
    elif value is None and told.endswith("None"):
        return None
    if not isinstance(value, kind):
        hint = REGISTRY_HINT if kind is Tensor else f"help(kernels_triton.ops.{op}) says what it takes"
        expect(False, op, f"{name} is of {type(value)}, expected {told}", hint)
    if kind is Real:
        return _finite_number(op, name, value)
    return integer_in_range(op, name, value) if kind is Integral else value


def _finite_number(op: str, name: str, value: Any) -> float:
    if not abs(value) <= LARGEST:  # also false for NaN
        expect(False, op, f"{name} is {value}, expected a finite number", "a kernel computes with it in float32")
    if name == "eps" and value < 0.0:  # its root would be NaN
        expect(False, op, f"eps is {value}, expected 0 or more", "1e-5 is usual")
    return float(value)


def _expect_plain_memory(op: str, name: str, x: Tensor, graded: bool) -> None:
    """A tensor that is plain memory, and that autograd does not track."""
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


def expect(condition: bool, op: str, message: str, hint: str = REGISTRY_HINT) -> None:
    if not condition:
        location, line = _call_site()
        raise error("SC530", f"{op}: {message}", location=location, source_text=line, hint=hint)


def _call_site() -> tuple[str | None, str | None]:
    """The line that called into this package, and its text."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE_FOLDER):
        frame = frame.f_back
    if frame is None:
        return None, None
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(file).name}:{number}", linecache.getline(file, number).strip() or None


def integer_in_range(op: str, name: str, value: Any, least: int = -(1 << 63), above: int = 1 << 63) -> int:
    """An integer of `least` or more, below `above`; by default any 64-bit integer."""
    if not isinstance(value, Integral):
        expect(False, op, f"{name} is of {type(value)}, expected a whole number", f"pass another {name}")
    if not least <= int(value) < above:
        expect(False, op, f"{name} is {value}, expected {least} or more, below {above}", f"pass another {name}")
    return int(value)


def expect_probability(op: str, p: float) -> None:
    expect(0.0 <= p <= 1.0, op, f"p is {p}, expected 0 to 1", "it is the part of the elements that are dropped")


def expect_shape(
    op: str, name: str, x: Tensor | None, shape: Sequence[int], like: Tensor, hint: str = REGISTRY_HINT
) -> None:
    """`x`, if given, has this shape and the device of `like`."""
    if x is None:
        return
    if tuple(x.shape) != tuple(shape):
        expect(False, op, f"{name} is {list(x.shape)}, expected {list(shape)}", hint)
    expect_device(op, like, **{name: x})


def expect_device(op: str, like: Tensor, **operands: Tensor | None) -> None:
    """Each operand is on the device of `like`."""
    for name, x in operands.items():
        if x is not None and x.device != like.device:
            where = str(like.device)
            expect(False, op, f"{name} is on {x.device}, the other tensors on {where}", f"pass {name}.to({where!r})")


def expect_floats(op: str, like: Tensor, **operands: Tensor | None) -> None:
    """Each operand has a floating-point dtype that kernels or references compute in, and is on the device of `like`."""
    for name, x in operands.items():
        if x is not None and x.dtype not in FLOATS:
            float_names = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
            expect(False, op, f"{name} is {x.dtype}, expected floating-point numbers", f"one of {float_names}")
    expect_device(op, like, **operands)


def expect_statistics(op: str, like: Tensor, **operands: Tensor) -> None:
    """Each operand is a statistic from a forward op: float32, or float64 if `like` is."""
    for name, x in operands.items():
        if x.dtype != torch.float32 and not x.dtype == like.dtype == torch.float64:
            expect(False, op, f"{name} is {x.dtype}, expected torch.float32", f"pass {name} as forward returned it")
    expect_device(op, like, **operands)


def expect_scalars(op: str, like: Tensor, **operands: Tensor | None) -> None:
    """Each operand is a 0-dim tensor on the device of `like`, so that a CUDA graph replays with new values."""
    for name, x in operands.items():
        if x is None:
            continue
        if x.dim():
            expect(False, op, f"{name} is {list(x.shape)}, expected a 0-dim tensor", f"pass {name}.reshape(())")
        if x.dtype not in NUMBERS and x.dtype != torch.bool:
            expect(False, op, f"{name} is {x.dtype}, expected a real number", f"pass {name}.to(torch.float32)")
    expect_device(op, like, **operands)


def expect_same_dtype(op: str, name: str, x: Tensor | None, like: Tensor) -> None:
    if x is not None:
        expect_dtype(op, name, x, like.dtype)


def expect_dtype(op: str, name: str, x: Tensor, dtype: torch.dtype) -> None:
    if x.dtype != dtype:
        expect(False, op, f"{name} is {x.dtype}, expected {dtype}", f"pass {name}.to({dtype})")


def expect_columns(op: str, **operands: Tensor | None) -> None:
    """Each operand has at least one dim."""
    for name, x in operands.items():
        if x is not None:
            expect(x.dim() > 0, op, f"{name} is [], expected [..., columns]", f"pass {name}.reshape(1, 1)")


def expect_no_overlap(op: str, name: str, x: Tensor) -> None:
    """`x` may be written in place: no two of its elements share memory."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride <= reach:
            told = f"{name} may overlap itself: sizes {list(x.shape)}, strides {list(x.stride())}"
            expect(False, op, told, f"pass in_place=False, or {name}.contiguous()")
        reach += stride * (size - 1)
    expect_writable(op, **{name: x})


def expect_writable(op: str, **operands: Tensor | None) -> None:
    """torch allows each operand to be written in place."""
    for name, x in operands.items():
        if x is not None and x.is_inference() and not torch.is_inference_mode_enabled():
            told = f"{name} was made in inference mode, and is to be written in place outside of it"
            expect(False, op, told, f"pass {name}.clone(), or call {op} under torch.inference_mode()")


def mark_written(*operands: Tensor | None) -> None:
    """Tells autograd that a kernel wrote into each operand. It then refuses a backward that saved the old values."""
    for x in operands:
        if x is not None and not x.is_inference():
            increment_version(x)
