"""What an op asks of its operands. A kernel trusts its arguments: what is wrong must be said before the launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardc.ir.diagnostic import error

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
LISTED = "kernels_triton.registry lists the shape and dtype of every operand"


def expect(condition: bool, op: str, message: str, hint: str | None = None) -> None:
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
