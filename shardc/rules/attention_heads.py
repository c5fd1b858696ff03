"""Heads in other groups (`shardc.ir.ops.attention_heads`): an axis on groups stays where they divide by it, before
and after.

    group_heads     s (k 4) d -> s (h 2) d      repeat_heads    k t d -> h t d      sum_heads    h t d -> k t d

So a rank that has some heads of keys, and the query heads that read them, has the groups that these are cut into.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from shardc.ir.graph import operands, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.attention_heads import GROUP_HEADS, REPEAT_HEADS, SUM_HEADS, UNGROUP_HEADS
from shardc.ir.types import Atom, Axes
from shardc.rules.notation import Dims, Notation
from shardc.rules.projection import Projection, result_types
from shardc.rules.registry import rule


def unfit(node: fx.Node, projection: Projection, split: Mapping[int, Axes], mesh: Mesh) -> set[int]:
    """Groups that axes do not divide evenly: a rank's would not be those of its heads."""
    tensors = zip(
        (*map(type_of, operands(node)), *result_types(node)), (*projection.operands, *projection.results), strict=True
    )
    return {
        piece
        for type, pieces in tensors
        for atom, piece in zip(type.atoms, pieces, strict=True)
        if piece in projection.followed and Atom(atom.size, split.get(piece, ())).uneven(mesh)
    }


def _groups(x: Dims, dim: int, each: int, times: int) -> tuple[str, str]:
    return f"{x.replace(dim, f'(k {each})')}", f"{x.replace(dim, f'(h {-(-each // times)})')}"


@rule(GROUP_HEADS, unfit=unfit, examples=[((2, 8, 3, 5), 1, 4, 2), ((2, 8, 3), 1, 4, 4), ((9, 3, 4), 0, 3, 2)])
def group_heads(x: Dims, dim: int, each: int, times: int) -> Notation:
    before, after = _groups(x, dim, each, times)
    return Notation(f"{before} -> {after}", sum="k", linear="joint", following=(("k", "h"),))


@rule(UNGROUP_HEADS, unfit=unfit, examples=[((2, 8, 3, 5), 1, 4, 2), ((2, 8, 3), 1, 4, 4), ((12, 3, 4), 0, 3, 2)])
def ungroup_heads(x: Dims, dim: int, each: int, times: int) -> Notation:
    after, before = _groups(x, dim, each, times)
    return Notation(f"{before} -> {after}", sum="h", linear="joint", following=(("h", "k"),))


@rule(REPEAT_HEADS, unfit=unfit, examples=[((2, 4, 3, 5), 2), ((2, 3, 4), 3), ((2, 1, 3, 5), 4)])
def repeat_heads(x: Dims, times: int) -> Notation:
    text = f"{x.replace(-3, 'k')} -> {x.replace(-3, 'h')}"
    return Notation(text, sum="k", whole=_alone(x.shape[-3]), linear="joint", following=(("k", "h"),))


@rule(SUM_HEADS, unfit=unfit, examples=[((2, 8, 3, 5), 2), ((6, 3, 4), 3), ((2, 4, 3, 5), 4)])
def sum_heads(x: Dims, times: int) -> Notation:
    text = f"{x.replace(-3, 'h')} -> {x.replace(-3, 'k')}"
    return Notation(text, sum="h", whole=_alone(x.shape[-3] // times), linear="joint", following=(("h", "k"),))


def _alone(heads: int) -> str:
    """The copies of a single head of keys: no axis cuts it, and so none cuts what is made of it."""
    return "h" if heads == 1 else ""
