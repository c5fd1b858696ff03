"""Ops that take or place a section of a dim. The section decides what an axis may do with that dim:

    the whole dim                       d -> d         a factor like any other
    the i-th of n equal sections        (3 d) -> d     the selector `3` is whole, `d` is free
    the i-th of every n                 (d 2) -> d     the same: interleaved, as RoPE's pairs are
    anything else                       s -> r         both whole, unless s is an atom of blocks of which r has some

Equal sections are what a fused QKV weight, a gated MLP and RoPE's rotate-half are made of, so none of
them needs communication when `d` is sharded: each shard takes the same section of its own part.

Longer than 400 lines: each op that takes, places or joins sections is one rule here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from shardc.ir.blocks import Blocks
from shardc.ir.mesh import Mesh
from shardc.ir.types import Dim, TensorType
from shardc.rules.local import LocalCall
from shardc.rules.notation import Dims, Linear, Notation, Sections
from shardc.rules.registry import by_block, rule

aten = torch.ops.aten
# The ops that take sections of a dim or join them.
SECTION_OPS = frozenset(
    (
        aten.slice.Tensor,
        aten.slice_backward.default,
        aten.slice_scatter.default,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.cat.default,
    )
)


@dataclass(frozen=True)
class Section:
    """Elements [start, end) of a dim of `size`, every `step`-th."""

    size: int
    start: int
    end: int
    step: int = 1
    of_blocks: bool = False  # sections of this dim are blocks of its own, even where they are equal

    @staticmethod
    def of(size: int, start: int | None, end: int | None, step: int = 1, of_blocks: bool = False) -> Section:
        """As Python reads the slice: from the back when negative, cut off at the ends."""
        first, last, _ = slice(start, end, step).indices(size)
        return Section(size, first, max(first, last), step, of_blocks)

    @staticmethod
    def taken(call: LocalCall, dim: int, type: TensorType) -> Section:
        """What a slicing call takes of a dim of `type`."""
        args = call.args
        return Section.of(type.shape[dim], args["start"], args["end"], args["step"], dim in type.in_blocks)

    @property
    def length(self) -> int:
        return -(-(self.end - self.start) // self.step)

    @property
    def full(self) -> bool:
        return self.length == self.size

    @property
    def equal(self) -> bool:
        """Is the dim made of sections of this one's length, this one among them?"""
        n = self.length
        return self.step == 1 and not self.of_blocks and n > 0 and self.size % n == 0 and self.start % n == 0

    @property
    def interleaved(self) -> bool:
        """Is it one element of each group of `step` neighbours, from all groups that the dim is made of?"""
        return self.step > 1 and not self.of_blocks and self.size == self.length * self.step and self.start < self.step

    def labels(self, label: str) -> tuple[str, str, str]:
        """How the whole dim is spelled, how the section is, and which of these names are whole."""
        if self.full:
            return label, label, ""
        if self.equal:
            return f"(of_{label} {label})", label, f"of_{label}"
        if self.interleaved:
            return f"({label} of_{label})", label, f"of_{label}"
        return label, f"part_{label}", f"{label} part_{label}"

    def sections(self, label: str) -> Sections:
        """The same of one that is neither: a run of what the dim holds."""
        plain = not (self.full or self.equal or self.interleaved) and self.step == 1 and self.length > 0
        return ((label, self.start, f"part_{label}"),) if plain else ()

    def local(self, size: int) -> Section:
        """The same section of a dim of which this rank holds `size` elements."""
        if self.full:
            return Section(size, 0, size)
        if self.equal:
            n = size * self.length // self.size
            return Section(size, self.start // self.length * n, (self.start // self.length + 1) * n)
        if self.interleaved:
            return Section(size, self.start, size, self.step)
        return self

    def held(self, dim: Dim, mesh: Mesh) -> Section:
        """The same section of a dim that lies like this."""
        size = math.prod(atom.local(mesh) for atom in dim)
        if not (self.full or self.equal or self.interleaved) and dim and dim[0].axes:
            blocks, trailing = dim[0].size, math.prod(atom.size for atom in dim[1:])
            assert isinstance(blocks, Blocks), f"a section of {dim}, which an axis shards"
            before, inner = (
                blocks.between(a // trailing, b // trailing) for a, b in ((0, self.start), (self.start, self.end))
            )
            assert before is not None, f"{self} begins inside of a block of {blocks}"
            assert inner is not None, f"{self} ends inside of a block of {blocks}"
            start = Blocks(before).local(dim[0].axes, mesh) * trailing
            return Section(size, start, start + Blocks(inner).local(dim[0].axes, mesh) * trailing)
        return self.local(size)


def _taking(x: Dims, dim: int, section: Section) -> Notation:
    """`x -> its section`."""
    label = x[x.dim(dim)]
    big, small, whole = section.labels(label)
    text = f"{x.replace(dim, big)} -> {x.replace(dim, small)}"
    return Notation(text, whole=whole, linear="joint", sections=section.sections(label))


# ------------------------------------------------------------------------------------------------------- slices
@by_block
def localize_slice(call: LocalCall) -> Any:
    dim = call.args["dim"] % call.operands[0].ndim
    section = Section.taken(call, dim, call.operands[0])
    local = section.held(call.operands[0].dims[dim], call.graph.mesh)
    return call.with_args(dim=dim, start=local.start, end=local.end)


SLICES = [
    ((4, 6), 1, 2, 4),
    ((4, 6), 1, 3),
    ((4, 6), 1, -2, 10**9),
    ((4, 7), 1, 2, 5),
    ((4, 6), 0, 0, None),
    ((6, 4), 0, 0, 6, 2),
    ((4, 12), -1, 1, None, 2),
    ((4, 12), 1, 2, 11, 3),
    ((4, 12), 1, 3, None, 3),
]


@rule(aten.slice.Tensor, linear="joint", localize=localize_slice, examples=[*SLICES, ((4, 6), 1, 5), ((4, 6), 1, 3, 3)])
def slice_(self: Dims, dim: int, start: int | None, end: int | None, step: int) -> Notation:
    of_blocks = self.dim(dim) in self.in_blocks
    return _taking(self, dim, Section.of(self.shape[self.dim(dim)], start, end, step, of_blocks))


@by_block
def localize_slice_backward(call: LocalCall) -> Any:
    dim = call.args["dim"] % call.results[0].ndim
    section = Section.taken(call, dim, call.results[0])
    sizes = list(call.result_shape())
    local = section.held(call.results[0].dims[dim], call.graph.mesh)
    return call.with_args(input_sizes=sizes, dim=dim, start=local.start, end=local.end)


@rule(
    aten.slice_backward.default,
    linear="joint",
    localize=localize_slice_backward,
    examples=[
        ((4, 2), (4, 6), 1, 2, 4, 1),
        ((4, 6), (4, 6), 1, 0, 10**9, 1),
        ((4, 3), (4, 7), 1, 2, 5, 1),
        ((2, 4), (6, 4), 0, 0, 6, 3),
        ((4, 6), (4, 12), 1, 1, 10**9, 2),
    ],
)
def slice_backward(
    grad_output: Dims, input_sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Notation:
    dim = dim % len(input_sizes)
    section = Section.of(input_sizes[dim], start, end, step, dim in grad_output.made_in_blocks)
    label = grad_output[dim]
    big, small, whole = section.labels(label)
    text = f"{grad_output.replace(dim, small)} -> {grad_output.replace(dim, big)}"
    return Notation(text, whole=whole, linear="joint", sections=section.sections(label))


@by_block
def localize_slice_scatter(call: LocalCall) -> Any:
    dim = call.args["dim"] % call.operands[0].ndim
    section = Section.taken(call, dim, call.operands[0])
    local = section.held(call.operands[0].dims[dim], call.graph.mesh)
    return call.with_args(dim=dim, start=local.start, end=local.end)


@rule(
    aten.slice_scatter.default,
    linear="joint",
    localize=localize_slice_scatter,
    examples=[
        ((4, 6), (4, 2), 1, 2, 4),
        ((4, 6), (4, 6), 1),
        ((4, 7), (4, 3), 1, 2, 5),
        ((6, 4), (2, 4), 0, 1, 6, 3),
        ((4, 12), (4, 6), 1, 0, 12, 2),
    ],
)
def slice_scatter(self: Dims, src: Dims, dim: int, start: int | None, end: int | None, step: int) -> Notation:
    of_blocks = self.dim(dim) in self.in_blocks
    section, label = Section.of(self.shape[self.dim(dim)], start, end, step, of_blocks), self[self.dim(dim)]
    big, small, whole = section.labels(label)
    x = self.replace(dim, big)
    text = f"{x}, {self.replace(dim, small)} -> {x}"
    return Notation(text, whole=whole, linear="joint", sections=section.sections(label))


# ------------------------------------------------------------------------------------------- one index of a dim
@rule(aten.select.int, linear="joint", examples=[((4, 6, 3), 1, 2), ((4, 6), -1, -1), ((4, 1), 1, 0)])
def select(self: Dims, dim: int, index: int) -> Notation:
    result = self.replace(dim, None)
    return Notation(f"{self} -> {result if result.ndim else '()'}", whole=self[self.dim(dim)], linear="joint")


@by_block
def local_input_sizes(call: LocalCall) -> Any:
    return call.with_args(input_sizes=list(call.result_shape()))


@rule(
    aten.select_backward.default,
    linear="joint",
    localize=local_input_sizes,
    examples=[((4, 3), (4, 6, 3), 1, 2), ((4,), (4, 6), -1, -1), ((), (5,), 0, 1)],
)
def select_backward(grad_output: Dims, input_sizes: Sequence[int], dim: int, index: int) -> Notation:
    labels = list(grad_output.labels)
    labels.insert(dim % len(input_sizes), "s")
    return Notation(f"{grad_output if grad_output.ndim else '()'} -> {' '.join(labels)}", whole="s", linear="joint")


@rule(aten.select_scatter.default, linear="joint", examples=[((4, 6, 3), (4, 3), 1, 2), ((5,), (), 0, 1)])
def select_scatter(self: Dims, src: Dims, dim: int, index: int) -> Notation:
    part = self.replace(dim, None)
    return Notation(f"{self}, {part if part.ndim else '()'} -> {self}", whole=self[self.dim(dim)], linear="joint")


@rule([aten.unbind.int, aten.unbind_copy.int], linear="joint", examples=[((4, 3), 1), ((2, 4, 3),), ((3,),)])
def unbind(self: Dims, dim: int) -> Notation:
    part = self.replace(dim, None)
    parts = ", ".join([str(part) if part.ndim else "()"] * self.shape[self.dim(dim)])
    return Notation(f"{self} -> {parts}", whole=self[self.dim(dim)], linear="joint")


# ------------------------------------------------------------------------------------------------ split and join
def _splitting(x: Dims, dim: int, sizes: Sequence[int]) -> Notation:
    label = x[x.dim(dim)]
    if len(sizes) == 1:
        return Notation(f"{x} -> {x}", linear="joint")
    if len(set(sizes)) == 1 and sizes[0] > 0 and x.dim(dim) not in x.in_blocks:
        parts = ", ".join([str(x)] * len(sizes))
        return Notation(f"{x.replace(dim, f'({len(sizes)} {label})')} -> {parts}", linear="joint")
    names = [f"part{i}_{label}" for i in range(len(sizes))]
    parts = ", ".join(str(x.replace(dim, name)) for name in names)
    whole = " ".join([label, *names])
    return Notation(f"{x} -> {parts}", whole=whole, linear="joint", sections=_joined(label, names, sizes))


def _joined(label: str, names: Sequence[str], sizes: Sequence[int]) -> Sections:
    """Parts side by side."""
    starts = accumulate(sizes, initial=0)
    return tuple((label, start, name) for start, name, size in zip(starts, names, sizes, strict=False) if size)


def _held_sizes(call: LocalCall, dim: int, sizes: Sequence[int]) -> list[int]:
    """Of each section, what a rank has of it."""
    whole, mesh = call.operands[0], call.graph.mesh
    starts = accumulate(sizes, initial=0)
    sections = [
        Section(whole.shape[dim], start, start + n, of_blocks=dim in whole.in_blocks)
        for start, n in zip(starts, sizes, strict=False)
    ]
    return [section.held(whole.dims[dim], mesh).length for section in sections]


@by_block
def localize_split(call: LocalCall) -> Any:
    dim = call.args["dim"] % call.operands[0].ndim
    local_size, size = call.operand_shape(0)[dim], call.operands[0].shape[dim]
    if (
        size % call.args["split_size"] or dim in call.operands[0].in_blocks
    ):  # of unequal sections each is held in its own measure
        held = _held_sizes(call, dim, _chunks(size, call.args["split_size"]))
        return aten.split_with_sizes.default, (call.args["self"], held, dim), {}
    # Sections are equal and divide what is held, or the dim is whole and nothing changes.
    return call.with_args(dim=dim, split_size=call.args["split_size"] * local_size // size)


@rule(
    [aten.split.Tensor, aten.unsafe_split.Tensor, aten.split_copy.Tensor],
    linear="joint",
    localize=localize_split,
    examples=[((4, 6), 2, 1), ((4, 6), 6, 1), ((7, 2), 3), ((4, 6), 4, -1), ((4, 6), 1, 0), ((2, 15), 5, 1)],
)
def split(self: Dims, split_size: int, dim: int) -> Notation:
    size = self.shape[self.dim(dim)]
    split_size = max(split_size, 1)
    return _splitting(self, dim, _chunks(size, split_size))


def _chunks(size: int, split_size: int) -> list[int]:
    return [min(split_size, size - start) for start in range(0, size, split_size)] or [0]


@by_block
def localize_split_with_sizes(call: LocalCall) -> Any:
    dim = call.args["dim"] % call.operands[0].ndim
    return call.with_args(dim=dim, split_sizes=_held_sizes(call, dim, call.args["split_sizes"]))


@rule(
    [aten.split_with_sizes.default, aten.split_with_sizes_copy.default],
    linear="joint",
    localize=localize_split_with_sizes,
    examples=[((4, 6), (2, 2, 2), 1), ((4, 6), (6,), 1), ((4, 6), (4, 1, 1), -1), ((5, 4), (2, 3))],
)
def split_with_sizes(self: Dims, split_sizes: Sequence[int], dim: int) -> Notation:
    return _splitting(self, dim, split_sizes)


@rule(
    aten.cat.default,
    linear="joint",
    examples=[
        ([(4, 6), (4, 6)], 1),
        ([(4, 2), (4, 3)], -1),
        ([(4, 6)],),
        ([(3, 2)] * 3,),
        ([(0,), (4, 6)], -1),
        ([(4, 1), (4, 1)], 1),
    ],
)
def cat(tensors: Sequence[Dims], dim: int) -> Notation:
    # A 1-d tensor without elements joins anything: the cache of a model that has seen no token.
    real = [x for x in tensors if x.shape != (0,)] or list(tensors[:1])
    first = real[0]
    dim = first.dim(dim)
    sizes = [x.shape[dim] for x in real]
    label = first[dim]
    if len(set(sizes)) == 1 and sizes[0] > 0 and dim not in first.made_in_blocks:
        names = [label] * len(real)
        joined, whole = label if len(real) == 1 else f"({len(real)} {label})", ""
        sections = ()
    else:
        names = [f"part{i}_{label}" for i in range(len(real))]
        joined, whole = label, " ".join([label, *names])
        sections = _joined(label, names, sizes)
    spelled = dict(zip(map(id, real), names, strict=True))
    parts = ", ".join(
        str(first.replace(dim, spelled[id(x)])) if id(x) in spelled else f"none{i}" for i, x in enumerate(tensors)
    )
    return Notation(f"{parts} -> {first.replace(dim, joined)}", whole=whole, linear="joint", sections=sections)


@rule(aten.stack.default, linear="joint", examples=[([(4, 6), (4, 6)], 1), ([(4, 6)] * 3, -1), ([(), ()],)])
def stack(tensors: Sequence[Dims], dim: int) -> Notation:
    first = tensors[0]
    labels = list(first.labels)
    labels.insert(dim % (first.ndim + 1), "s")
    part = str(first) if first.ndim else "()"
    return Notation(f"{', '.join([part] * len(tensors))} -> {' '.join(labels)}", whole="s", linear="joint")


# ------------------------------------------------------------------------- a half of a dim gated by the other one
GATED = [((4, 6),), ((4, 6), 0), ((3, 2, 5), 1), ((3, 8, 5), -2)]


@rule(aten.glu.default, examples=GATED)
def glu(self: Dims, dim: int) -> str:
    return f"{self.replace(dim, f'(2 {self[self.dim(dim)]})')} -> {self}"


@rule(
    aten.glu_backward.default,
    linear=(0,),
    examples=[((4, 3), (4, 6), -1), ((2, 6), (4, 6), 0), ((3, 1, 5), (3, 2, 5), 1)],
)
def glu_backward(grad_output: Dims, self: Dims, dim: int) -> str:
    whole = grad_output.replace(dim, f"(2 {grad_output[grad_output.dim(dim)]})")
    return f"{grad_output}, {whole} -> {whole}"


# ------------------------------------------------------------------------------------------- moved within a dim
@rule(
    aten.constant_pad_nd.default,
    examples=[((4, 6), (1, 0)), ((4, 6), (0, -2), 1.5), ((4, 6), (0, 0, 1, 2)), ((4, 6), (0, 0))],
)
def constant_pad_nd(self: Dims, pad: Sequence[int], value: float) -> Notation:
    result = self
    for i in range(0, len(pad), 2):
        if pad[i] or pad[i + 1]:
            dim = self.ndim - 1 - i // 2
            result = result.replace(dim, f"padded{dim}")
    changed = [n for a, b in zip(self.labels, result.labels, strict=True) if a != b for n in (a, b)]
    linear: Linear = "joint" if value == 0 or not changed else ()
    return Notation(f"{self} -> {result}", whole=" ".join(changed), linear=linear)


@rule(aten.roll.default, linear="joint", examples=[((4, 6), (1,), (1,)), ((4, 6), (2, -1), (0, 1)), ((4, 6), (1,))])
def roll(self: Dims, shifts: Sequence[int], dims: Sequence[int]) -> Notation:
    moved = [self[self.dim(d)] for d in dims] or self.labels
    return Notation(f"{self} -> {self}", whole=" ".join(moved), linear="joint")


@rule(aten.flip.default, linear="joint", examples=[((4, 6), (1,)), ((4, 6, 3), (0, -1))])
def flip(self: Dims, dims: Sequence[int]) -> Notation:
    return Notation(f"{self} -> {self}", whole=" ".join(self[self.dim(d)] for d in dims), linear="joint")


@rule(aten.unfold.default, linear="joint", examples=[((4, 6), 1, 3, 2)])
def unfold(self: Dims, dimension: int, size: int, step: int) -> Notation:
    label = self[self.dim(dimension)]
    result = f"{self.replace(dimension, 'windows')} {label}_in"
    return Notation(f"{self} -> {result}", whole=f"{label} windows {label}_in", linear="joint")


@rule(
    aten.unfold_backward.default,
    linear="joint",
    localize=local_input_sizes,
    examples=[((4, 2, 3), (4, 6), 1, 3, 2), ((2, 6, 3), (5, 6), 0, 3, 1)],
)
def unfold_backward(grad_in: Dims, input_sizes: Sequence[int], dim: int, size: int, step: int) -> Notation:
    source = Dims("x", input_sizes)
    label = source[source.dim(dim)]
    return Notation(
        f"{source.replace(dim, 'windows')} {label}_in -> {source}", whole=f"{label} windows {label}_in", linear="joint"
    )
