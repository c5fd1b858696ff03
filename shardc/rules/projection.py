"""An op's factors laid over the atoms of its tensors: the one view through which placements pass.

A rule speaks of factors, tensors of atoms; a factor may span several atoms (`v` of an embedding whose
rows are `(4 16)`). A projection splits the rule's factors into *pieces*, one an atom, so that moving a
placement between tensors is an index lookup:

    linear  s k, n k -> s n       x: f32[10, 64]   w: f32[(3 8 64), 64]
    pieces  s:10 k:64 n.0:3 n.1:8 n.2:64
    x = [s, k]   w = [n.0, n.1, n.2, k]   y = [s, n.0, n.1, n.2]

It is a pure function of the op and its tensors' atoms, so the verifier can derive it again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from torch import fx

from shardc.ir.blocks import Block, Blocks, aligned
from shardc.ir.graph import derived, info, operands, results, type_of
from shardc.ir.types import Axes, TensorType
from shardc.rules.notation import FactorRule, Labels, Linear
from shardc.rules.registry import rule_of
from shardc.torch_compat import args_of, kwargs_of

Piece = int  # an index into Projection.sizes
AtomSizes = tuple[tuple[int, ...], ...]  # of one tensor, a dim each


@dataclass(frozen=True, slots=True)
class Projection:
    """The pieces of one call. `operands[i]` and `results[j]` list a piece for each flat atom."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    operands: tuple[tuple[Piece, ...], ...]
    results: tuple[tuple[Piece, ...], ...]
    blocked: frozenset[Piece]  # no axis may split these
    reduces: dict[Piece, str]  # how shards of a result combine when the piece is missing from it
    linear: Linear
    tied: frozenset[Piece] = frozenset()  # atoms of blocks, which stand for an atom of one block in other tensors
    merged: tuple[int, ...] = ()  # results whose shards the local call puts together itself
    followed: frozenset[Piece] = frozenset()  # these stand for shorter atoms in other tensors

    @property
    def operand_pieces(self) -> frozenset[Piece]:
        return frozenset(p for tensor in self.operands for p in tensor)

    def partial(self, split: dict[Piece, Axes], result: int) -> list[tuple[str, str]]:
        """Pending reductions of a result when the pieces are split so."""
        if result in self.merged:
            return []
        present = self.results[result]
        inputs = self.operand_pieces
        return [
            (axis, self.reduces[piece])
            for piece, axes in split.items()
            if piece not in present and piece in inputs and piece not in self.tied
            for axis in axes
        ]


@dataclass(frozen=True, slots=True)
class _Known:
    """A projection and all that it was derived from."""

    target: object
    args: object
    kwargs: object
    sizes: tuple[AtomSizes, ...]
    operands: list[fx.Node]
    projection: Projection


def project(node: fx.Node) -> Projection:
    """The projection of a call. KeyError when its op has no rule.

    Every pass and every check asks for it, so it is kept for as long as the call and its tensors' atoms are the same.
    """
    known = derived(node)
    cached: _Known | None = known.get("projection")
    unchanged = (
        cached is not None
        and cached.target is node.target
        and cached.args is args_of(node)
        and cached.kwargs is kwargs_of(node)
    )
    ins = cached.operands if cached is not None and unchanged else operands(node)
    sizes = tuple([t.sizes for t in (*map(type_of, ins), *result_types(node))])
    if cached is not None and unchanged and cached.sizes == sizes:
        return cached.projection
    projection = _overlay(rule_of(node), sizes)
    known["projection"] = _Known(node.target, args_of(node), kwargs_of(node), sizes, ins, projection)
    return projection


def result_types(node: fx.Node) -> list[TensorType]:
    """Types of all results, in the order of the rule."""
    about = info(node)
    if about.type is not None:
        return [about.type]
    declared = [t for t in about.results if t is not None]
    return [declared[i] if v is None else type_of(v) for i, v in enumerate(results(node))]


def overlay(rule: FactorRule, ins: Sequence[TensorType], outs: Sequence[TensorType]) -> Projection:
    """Lay a fitted rule over tensors. A dim whose atoms straddle its factors blocks those factors."""
    return _overlay(rule, tuple([t.sizes for t in (*ins, *outs)]))


@lru_cache(maxsize=65536)
def _overlay(rule: FactorRule, atom_sizes: tuple[AtomSizes, ...]) -> Projection:
    tensors = list(zip((*rule.operands, *rule.results), atom_sizes, strict=True))
    split: dict[str, tuple[int, ...]] = {}
    blocked: set[str] = set(rule.whole)
    for labels, dims in tensors:
        for dim, atoms in zip(labels, dims, strict=True):
            groups = group(atoms, [rule.sizes[f] for f in dim])
            for i, f in enumerate(dim):
                if groups is None or split.setdefault(f, groups[i]) != groups[i]:
                    blocked.add(f)
    blocked |= {f for f, run in split.items() if any(isinstance(n, Blocks) and _blocks_fail(rule, f, n) for n in run)}
    following = [pair for pair in rule.following if all(name in split for name in pair)]
    for pair in following:
        runs = [split[name] for name in pair]
        if blocked.intersection(pair) or any(len(run) != 1 or _in_parts(rule, run[0]) for run in runs):
            blocked.update(pair)
    names: list[str] = []
    sizes: list[int] = []
    of_factor: dict[str, tuple[Piece, ...]] = {}
    for f, parts in split.items():
        of_factor[f] = tuple(range(len(names), len(names) + len(parts)))
        names += [f] if len(parts) == 1 else [f"{f}.{i}" for i in range(len(parts))]
        sizes += parts
    opaque: set[Piece] = set()
    tied = _tied(rule, tensors, split, of_factor)
    follow = {b: (0, of_factor[a][0]) for a, b in following if a not in blocked}

    def lay(labels: Labels, dims: AtomSizes) -> tuple[Piece, ...]:
        pieces: list[Piece] = []
        for dim, atoms in zip(labels, dims, strict=True):
            runs = group(atoms, [rule.sizes[f] for f in dim])
            # Factor by factor: one that is cut differently elsewhere does not take its neighbours in the dim along.
            for run, f in zip(runs, dim, strict=True) if runs is not None else [(atoms, None)]:
                run_pieces = of_factor.get(f, ()) if f is not None else ()
                if f is not None and (of_block := tied.get(f) or follow.get(f)) is not None:
                    atom, piece = of_block
                    run_pieces = tuple(piece if i == atom else p for i, p in enumerate(run_pieces))
                elif tuple(sizes[p] for p in run_pieces) != run:
                    run_pieces = tuple(range(len(names), len(names) + len(run)))
                    names.extend(f"?{p}" for p in run_pieces)
                    sizes.extend(run)
                    opaque.update(run_pieces)
                pieces += run_pieces
        return tuple(pieces)

    laid = [lay(labels, dims) for labels, dims in tensors]
    count = len(rule.operands)
    shared = frozenset(piece for _, piece in tied.values())
    closed = (frozenset(p for f in blocked for p in of_factor.get(f, ())) | opaque) - shared
    reduces = {p: kind for f, kind in rule.reduces.items() for p in of_factor.get(f, ())}
    return Projection(
        tuple(names), tuple(sizes), tuple(laid[:count]), tuple(laid[count:]), closed, reduces, rule.linear, shared,
        rule.merged, frozenset(piece for _, piece in follow.values()),
    )  # fmt: skip


def _blocks_fail(rule: FactorRule, factor: str, blocks: Blocks) -> bool:
    """Must an atom of blocks be whole where another one need not?

    So it must where the op counts positions. Of a block that every rank has all but one rank's copy is left out of a
    sum: a result that has the factor would then miss it.
    """
    results = [any(factor in dim for dim in labels) for labels in rule.results]
    return rule.counted(factor) or (blocks.copied and factor in rule.reduces and any(results))


def _in_parts(rule: FactorRule, size: int) -> bool:
    """Is an atom made of blocks, of which ranks of another atom with the same axes need not have the same share?"""
    return isinstance(size, Blocks) and (size.copied or not rule.by_block)


def _tied(
    rule: FactorRule,
    tensors: Sequence[tuple[Labels, AtomSizes]],
    split: dict[str, tuple[int, ...]],
    of_factor: dict[str, tuple[Piece, ...]],
) -> dict[str, tuple[int, Piece]]:
    """Factors that are sections of an atom of blocks: which of their atoms lies as that one does, and its piece.

    None where a section ends inside of a block, or a tensor's atoms are not those of the blocks.
    """
    tied: dict[str, tuple[int, Piece]] = {}
    for a, b in rule.aligned:
        ours, theirs = split.get(a, ()), split.get(b, ())
        if len(ours) == len(theirs) == 1 and rule.by_block and aligned(ours[0], theirs[0]):
            tied[a] = tied[b] = (0, of_factor[a][0])
    ruled = {n for n, _, _ in rule.sections}
    for whole in ruled:
        run = split.get(whole, ())
        if not run or not isinstance(blocks := run[0], Blocks) or not rule.by_block:
            continue
        trailing = math.prod(run[1:])
        of_whole: dict[str, tuple[int, Piece]] = {whole: (0, of_factor[whole][0])}
        for name, start, section in rule.sections:
            size = rule.sizes.get(section, 1)
            if name != whole:
                continue
            inner = blocks.between(start // trailing, (start + size) // trailing)
            atom = None
            if inner is not None and start % trailing == 0 and size % trailing == 0:
                atom = _atom_of(split.get(section, ()), inner, trailing)
            if atom is None:
                of_whole = {}
                break
            if atom >= 0:
                of_whole[section] = (atom, of_factor[whole][0])
        consistent = all(
            group(atoms, [rule.sizes[f] for f in dim]) is not None
            for labels, dims in tensors
            for dim, atoms in zip(labels, dims, strict=True)
            if any(f in of_whole for f in dim)
        )
        tied.update(of_whole if consistent else {})
    return tied


def _atom_of(atoms: Sequence[int], blocks: Sequence[Block], trailing: int) -> int | None:
    """Which of a section's atoms lies as its blocks: -1 if none does, since they are whole; None if they do not fit."""
    if not any(block.cut for block in blocks):
        return -1
    if atoms and isinstance(atoms[0], Blocks):
        inner, own = atoms[0], math.prod(atoms[1:])
        same = [replace(b, unit=b.unit * own) for b in inner.parts]
        return 0 if same == [replace(b, unit=b.unit * trailing) for b in blocks] else None
    if len(set(blocks)) > 1 or blocks[0].reverse or blocks[0].room:
        return None
    product, unit = 1, blocks[0].unit * trailing
    for i, n in enumerate(atoms):
        if product == len(blocks) and n == blocks[0].count and math.prod(atoms[i + 1 :]) == unit:
            return i
        product *= n
    return -1 if blocks[0].count == 1 else None


def group(atoms: Sequence[int], factors: Sequence[int]) -> list[tuple[int, ...]] | None:
    """Cut a dim's atom sizes into runs whose products are the factor sizes; None when they do not nest."""
    runs: list[tuple[int, ...]] = []
    index = 0
    for size in factors:
        run: list[int] = []
        product = 1
        while product < size and index < len(atoms):
            run.append(atoms[index])
            product *= atoms[index]
            index += 1
        if product != size:
            return None
        runs.append(tuple(run))
    return runs if index == len(atoms) else None


def refine(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...] | None:
    """The coarsest factorisation of a dim that nests in both; None when their cuts do not divide each other.

    >>> refine((6, 4), (3, 8))
    >>> refine((12,), (3, 4))
    (3, 4)
    >>> refine((6, 4), (2, 12))
    (2, 3, 4)
    """
    if tuple(a) == tuple(b):
        return tuple(a)
    if 0 in a or 0 in b:  # an empty dim stays whole
        return None
    cuts = sorted(_strides(a) | _strides(b), reverse=True)
    if any(x % y for x, y in pairwise(cuts)):
        return None
    return tuple(x // y for x, y in pairwise(cuts))


def _strides(sizes: Sequence[int]) -> set[int]:
    strides = {1}
    product = 1
    for size in reversed(sizes):
        product *= size
        strides.add(product)
    return strides
