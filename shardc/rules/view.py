"""Ops that move no data, and those that only repeat it: each dim of the result is made of the operand's.

A reshape is the coarsest factorisation that nests in both shapes, group by group:

    view  f32[2, 16, 24] -> [32, 4, 6]        a b (c d) -> (a b) c d
    view  f32[6, 4]      -> [8, 3]            cuts at 4 and 3 do not nest: both dims must be whole
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from shardc.rules.local import LocalCall
from shardc.rules.notation import Dims, Notation
from shardc.rules.projection import refine
from shardc.rules.registry import by_block, rule

aten = torch.ops.aten


@by_block
def to_local_shape(call: LocalCall) -> Any:
    """Say the result's shape outright: a dim of size 1 on this rank need not be one in the whole tensor."""
    return aten.view.default, (call.args["self"], list(call.result_shape())), {}


# ---------------------------------------------------------------------------------------------------- reshapes
def reshape_notation(before: Sequence[int], after: Sequence[int]) -> Notation:
    """The rule of a reshape between two shapes of equal size."""
    left: list[str] = []
    right: list[str] = []
    whole: list[str] = []
    for index, (a, b) in enumerate(_groups(before, after)):
        common = refine([n for n in a if n > 1], [n for n in b if n > 1])
        if common is None:
            whole += [f"i{index}_{k}" for k in range(len(a))] + [f"o{index}_{k}" for k in range(len(b))]
            left += [f"i{index}_{k}" for k in range(len(a))]
            right += [f"o{index}_{k}" for k in range(len(b))]
        else:
            left += _spell(a, common, index)
            right += _spell(b, common, index)
    return Notation(f"{' '.join(left) or '()'} -> {' '.join(right) or '()'}", whole=" ".join(whole), linear="joint")


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The shortest runs of dims on both sides that hold the same number of elements."""
    if 0 in before:
        return [(list(before), list(after))]
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        a, b = list(before[i : i + 1]), list(after[j : j + 1])
        while math.prod(a) != math.prod(b):
            if math.prod(a) < math.prod(b):
                a.append(before[i + len(a)])
            else:
                b.append(after[j + len(b)])
        i, j = i + len(a), j + len(b)
        groups.append((a, b))
    return groups


def _spell(dims: Sequence[int], common: Sequence[int], index: int) -> list[str]:
    """Each dim as a compound of the common factors, which are named by their position."""
    spelled: list[str] = []
    k = 0
    for size in dims:
        names: list[str] = []
        product = 1
        while product < size:
            product *= common[k]
            names.append(f"f{index}_{k}")
            k += 1
        spelled.append("1" if not names else names[0] if len(names) == 1 else f"({' '.join(names)})")
    return spelled


RESHAPES = [((2, 6, 8), (12, 8)), ((12, 8), (3, 4, 8)), ((2, 3, 4), (6, 2, 2)), ((6, 4), (8, 3)), ((3, 1, 4), (12,))]


@rule(
    [aten.view.default, aten._unsafe_view.default],
    shape_arg="size",
    kind="view",
    examples=[*RESHAPES, ((2, 6, 8), (-1, 8)), ((4, 6), (2, 12))],
)
def view(self: Dims, size: Sequence[int]) -> Notation:
    known_size = math.prod(n for n in size if n != -1) or 1
    return reshape_notation(self.shape, [math.prod(self.shape) // known_size if n == -1 else n for n in size])


rule(aten.reshape.default, shape_arg="shape", kind="view", examples=RESHAPES)(view)


# ------------------------------------------------------------------------------------------------ order of dims
@rule(aten.permute.default, linear="joint", kind="view", examples=[((4, 6, 3), (2, 0, 1)), ((4, 6, 3), (0, -1, 1))])
def permute(self: Dims, dims: Sequence[int]) -> str:
    return f"{self} -> {self.permute(dims)}"


@rule(aten.transpose.int, linear="joint", kind="view", examples=[((4, 6, 3), 0, 2), ((4, 6, 3), -1, 1)])
def transpose(self: Dims, dim0: int, dim1: int) -> str:
    return f"{self} -> {self.swap(self.dim(dim0), self.dim(dim1))}"


@rule(aten.t.default, linear="joint", kind="view", examples=[((4, 6),), ((5,),)])
def t(self: Dims) -> str:
    return f"{self} -> {self.permute(range(self.ndim)[::-1])}"


# --------------------------------------------------------------------------------------------- dims of size one
@rule(aten.unsqueeze.default, linear="joint", kind="view", examples=[((4, 6), 0), ((4, 6), -1), ((), 0), ((4, 6), 1)])
def unsqueeze(self: Dims, dim: int) -> str:
    labels = list(self.labels)
    labels.insert(dim % (self.ndim + 1), "1")
    return f"{self if self.ndim else '()'} -> {' '.join(labels)}"


SQUEEZED = [((4, 1, 6), 1), ((4, 1, 6), 0), ((2, 1, 6), -2)]


@rule(aten.squeeze.dim, linear="joint", kind="view", localize=to_local_shape, examples=SQUEEZED)
def squeeze_dim(self: Dims, dim: int) -> str:
    return _squeezed(self, [dim])


@rule(
    aten.squeeze.dims,
    linear="joint",
    kind="view",
    localize=to_local_shape,
    examples=[((1, 3, 1), (0, 2)), ((2, 1), (0, 1))],
)
def squeeze_dims(self: Dims, dim: Sequence[int]) -> str:
    return _squeezed(self, dim)


@rule(aten.squeeze.default, linear="joint", kind="view", localize=to_local_shape, examples=[((1, 3, 1),), ((2, 1, 6),)])
def squeeze(self: Dims) -> str:
    return _squeezed(self, range(self.ndim))


def _squeezed(x: Dims, dims: Sequence[int]) -> str:
    squeezed = {x.dim(d) for d in dims if x.ndim and x.shape[d] == 1}
    return f"{x if x.ndim else '()'} -> {' '.join(x[d] for d in range(x.ndim) if d not in squeezed) or '()'}"


# ------------------------------------------------------------------------------------------------- repeated data
rule(
    aten.expand.default,
    "... -> ...",
    linear="joint",
    kind="view",
    shape_arg="size",
    examples=[((4, 1, 6), (4, 3, 6)), ((6,), (4, -1)), ((), (3, 2))],
)


@rule(
    aten.repeat.default, linear="joint", examples=[((4, 6), (2, 1)), ((4, 6), (3, 2, 2)), ((1, 5), (3, 1)), ((), (3,))]
)
def repeat(self: Dims, repeats: Sequence[int]) -> Notation:
    # Copies are whole: a dim of n copies of d is `(n d)`, and every shard repeats its own part of d.
    new = len(repeats) - self.ndim
    result = [f"(r{i} {self[i - new]})" if i >= new else f"r{i}" for i in range(len(repeats))]
    copies = " ".join(f"r{i}" for i in range(len(repeats)))
    return Notation(f"{self if self.ndim else '()'} -> {' '.join(result) or '()'}", whole=copies, linear="joint")


# ------------------------------------------------------------------------------------------------ other readings
rule(aten.view_as_real.default, "... -> ... 2", linear="joint", kind="view", examples=[((4, 3),)])
rule(aten.view_as_complex.default, "... 2 -> ...", linear="joint", kind="view", examples=[((4, 3, 2),)])


@rule(aten.diagonal.default, linear="joint", examples=[((4, 4, 3),), ((3, 4, 5), 1, 0, -1)])
def diagonal(self: Dims, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Notation:
    cut = {self.dim(dim1), self.dim(dim2)}
    kept_labels = [self[d] for d in range(self.ndim) if d not in cut]
    cut_labels = " ".join(self[d] for d in cut)
    return Notation(f"{self} -> {' '.join([*kept_labels, 'diagonal'])}", whole=f"{cut_labels} diagonal", linear="joint")


@rule(
    aten.diagonal_backward.default,
    linear="joint",
    shape_arg="input_sizes",
    examples=[((3, 4), (4, 4, 3), 0, 0, 1), ((4, 3), (3, 4, 5), 1, 0, -1)],
)
def diagonal_backward(grad_output: Dims, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> Notation:
    before = Dims("x", input_sizes)
    forward = diagonal(before, offset, dim1, dim2)
    after, _, reduced = forward.text.partition(" -> ")
    return Notation(f"{reduced} -> {after}", whole=forward.whole, linear="joint")


@rule(aten.diagonal_scatter.default, linear="joint", examples=[((4, 4, 3), (3, 4)), ((3, 4, 5), (4, 3), 1, 0, -1)])
def diagonal_scatter(self: Dims, src: Dims, offset: int, dim1: int, dim2: int) -> Notation:
    forward = diagonal(self, offset, dim1, dim2)
    whole, _, part = forward.text.partition(" -> ")
    return Notation(f"{whole}, {part} -> {whole}", whole=forward.whole, linear="joint")


@rule(
    aten.diag_embed.default, linear="joint", examples=[((4, 3),), ((4, 3), 1), ((2, 4, 3), -2, 0, 2), ((3,), 0, -1, 0)]
)
def diag_embed(self: Dims, offset: int, dim1: int, dim2: int) -> Notation:
    ndim = self.ndim + 1
    matrix = {dim1 % ndim: "row", dim2 % ndim: "column"}
    batch = iter(self.labels[:-1])
    result = " ".join(matrix[d] if d in matrix else next(batch) for d in range(ndim))
    return Notation(f"{self} -> {result}", whole=f"{self[-1]} row column", linear="joint")


rule(aten.trace.default, "m n -> ()", whole="m n", linear="joint", examples=[((4, 6),), ((3, 3),)])


@rule(aten.rot90.default, linear="joint", examples=[((4, 6, 3),), ((4, 6, 3), 2, (0, 2)), ((4, 6, 3), -1, (2, 1))])
def rot90(self: Dims, k: int, dims: Sequence[int]) -> Notation:
    a, b = (self.dim(d) for d in dims)
    turned = self.swap(a, b) if k % 2 else self
    return Notation(f"{self} -> {turned}", whole=f"{self[a]} {self[b]}", linear="joint")


@rule(aten.block_diag.default, linear="joint", examples=[([(4, 6), (2, 3)],), ([(4,), (2, 3), ()],)])
def block_diag(tensors: Sequence[Dims]) -> Notation:
    parts = [str(x) if x.ndim else "()" for x in tensors]
    named = " ".join(x for x in parts if x != "()")
    return Notation(f"{', '.join(parts)} -> rows columns", whole=f"{named} rows columns", linear="joint")


# ------------------------------------------------------------------------------------------------ channels and pixels
SHUFFLED = [((4, 12, 6, 2), 2), ((18, 2, 4), 3), ((2, 3, 4, 4), 1)]
rule(
    aten.pixel_shuffle.default,
    "... (c a b) h w -> ... c (h a) (w b)",
    whole="a b",
    linear="joint",
    examples=SHUFFLED,
)
rule(
    aten.pixel_unshuffle.default,
    "... c (h a) (w b) -> ... (c a b) h w",
    whole="a b",
    linear="joint",
    examples=[((4, 3, 6, 4), 2), ((2, 6, 9), 3), ((2, 3, 4, 4), 1)],
)


@rule(
    [aten.channel_shuffle.default, aten.native_channel_shuffle.default],
    linear="joint",
    examples=[((4, 12, 3), 3), ((2, 8, 3, 2), 2), ((2, 4, 3), 4), ((2, 4, 3), 1)],
)
def channel_shuffle(self: Dims, groups: int) -> Notation:
    before, after = self.replace(1, f"({groups} k)"), self.replace(1, f"(k {groups})")
    return Notation(f"{before} -> {after}", linear="joint")


# Strides speak of the whole tensor's memory: nothing of it can be cut.
@rule(aten.as_strided.default, linear="joint", examples=[((4, 6), (2, 3), (6, 2), 1)])
def as_strided(self: Dims, size: Sequence[int], *layout: Any) -> Notation:
    result = " ".join(f"o{i}" for i in range(len(size))) or "()"
    return Notation(f"{self if self.ndim else '()'} -> {result}", whole=f"{self} {result}", linear="joint")


@rule(aten.as_strided_scatter.default, linear="joint", examples=[((4, 6), (2, 3), (2, 3), (6, 2), 1)])
def as_strided_scatter(self: Dims, src: Dims, *layout: Any) -> Notation:
    return Notation(f"{self}, {src} -> {self}", whole=f"{self} {src}", linear="joint")
