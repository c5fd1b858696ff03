"""What an op asks of its operands. A kernel trusts its arguments: what is wrong must be said before the launch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shardc.ir.diagnostic import error


def expect(condition: bool, op: str, message: str, hint: str | None = None) -> None:
    if not condition:
        raise error("SC530", f"{op}: {message}", hint=hint)


def shaped(op: str, name: str, x: Tensor | None, shape: Sequence[int], like: Tensor) -> None:
    """`x`, if given, has this shape and the device of `like`."""
    if x is None:
        return
    expect(tuple(x.shape) == tuple(shape), op, f"{name} is {list(x.shape)}, expected {list(shape)}")
    expect(x.device == like.device, op, f"{name} is on {x.device}, the other tensors on {like.device}")


def same_dtype(op: str, name: str, x: Tensor | None, like: Tensor) -> None:
    if x is not None:
        expect(x.dtype == like.dtype, op, f"{name} is {x.dtype}, expected {like.dtype}")
