"""Tensors made from no data. A constant may be cut anywhere: say the local shape; a counting one is whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardc.rules.notation import Dims, Notation
from shardc.rules.registry import example, rule

aten = torch.ops.aten


def _dims(size: Sequence[int]) -> str:
    return " ".join(f"d{i}" for i in range(len(size))) or "()"


@rule(
    [aten.zeros.default, aten.ones.default, aten.empty.memory_format],
    shape_arg="size",
    kind="create",
    examples=[((4, 6),), ((),)],
)
def constant(size: Sequence[int], *options: Any) -> str:
    return f"-> {_dims(size)}"


@rule(aten.full.default, shape_arg="size", kind="create", examples=[((4, 6), 2.5), ((), 1.0)])
def full(size: Sequence[int], *options: Any) -> str:
    return f"-> {_dims(size)}"


@rule(
    [aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default],
    shape_arg="size",
    examples=[((4, 6), (4, 6)), ((4, 6), (3,)), ((4,), ())],
)
def new_constant(self: Dims, size: Sequence[int], *options: Any) -> Notation:
    return _new(self, size)


@rule(aten.new_full.default, shape_arg="size", examples=[((4, 6), (4, 6), 2.5), ((4, 6), (3,), 2.5)])
def new_full(self: Dims, size: Sequence[int], *options: Any) -> Notation:
    return _new(self, size)


def _new(like: Dims, size: Sequence[int]) -> Notation:
    """Of the operand only dtype and device count; with its shape, the result follows its placement."""
    if tuple(size) == like.shape:
        return Notation(f"{like if like.ndim else '()'} -> {like if like.ndim else '()'}")
    return Notation(f"{like if like.ndim else '()'} -> {_dims(size)}", whole=str(like))


@rule([aten.empty_strided.default], kind="create", examples=[((4, 6), (6, 1))])
def empty_strided(size: Sequence[int], *options: Any) -> Notation:
    return Notation(f"-> {_dims(size)}", whole=_dims(size))


@rule(aten.new_empty_strided.default, examples=[((4, 6), (4, 6), (6, 1))])
def new_empty_strided(self: Dims, size: Sequence[int], *options: Any) -> Notation:
    return Notation(f"{self if self.ndim else '()'} -> {_dims(size)}", whole=f"{self} {_dims(size)}")


rule(aten.scalar_tensor.default, "-> ()", kind="create", examples=[(2.5,)])
rule(aten.arange.default, "-> n", whole="n", kind="create", examples=[(6,)])
rule(aten.arange.start, "-> n", whole="n", kind="create", examples=[(2, 6)])
rule(aten.arange.start_step, "-> n", whole="n", kind="create", examples=[(2, 9, 3)])
rule(aten.linspace.default, "-> n", whole="n", kind="create", examples=[(0.0, 1.0, 6)])
rule(aten.eye.default, "-> n m", whole="n m", kind="create", examples=[(4,)])
rule(aten.eye.m, "-> n m", whole="n m", kind="create", examples=[(4, 6)])
rule([aten.tril_indices.default, aten.triu_indices.default], "-> 2 n", whole="n", kind="create", examples=[(4, 4)])

# Which side of the diagonal an element lies on is a matter of global indices.
TRIANGLES = [((4, 6),), ((2, 3, 4), 1), example((4, 4), -1)]
rule([aten.tril.default, aten.triu.default], "... m n -> ... m n", whole="m n", linear="joint", examples=TRIANGLES)
