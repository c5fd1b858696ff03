"""Values that are only read in parts, or in another order, are made where they are read: a kernel has one walk a value.

    m = mul(g, sin)                                    n = neg of what mul makes of g[..., 32:] and sin[..., 32:]
    n = neg(m[..., 32:])               ->              m is stored nowhere
    c = view(transpose(add(a, b)))     ->              c adds a and b, read as transposed, and is no copy

A read by blocks is composed with the reads of what makes the value. A value is made so for all its readers or for none,
only where no more bytes move, and for several of them only where no jump tells their makings apart (`jumps`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import fx

from shardc.ir.graph import Graph, info, operands, results, type_of
from shardc.passes.fuse.jumps import Jumps
from shardc.passes.fuse.memory_of import VIEWS, Memories
from shardc.passes.fuse.spaces import Blocks, Prim, Read, Value, blocks, demand, space, whole
from shardc.passes.fuse.units import Inner, Unit

MOST = 24  # operations that one value takes


def read_through(
    graph: Graph,
    memories: Memories,
    calls: Sequence[fx.Node],
    units: Mapping[int, Unit],
    inside: Collection[fx.Node],
    jumps: Jumps,
) -> dict[int, Unit]:
    """The units, some of which make what they read. Nobody reads those values any more."""
    found = dict(units)
    readers = _readers(graph, memories, calls, found)
    for i in sorted(found, reverse=True):
        one = found[i]
        value = one.node
        if info(value).type is None or len(one.prims) > MOST or not _pointwise(one):
            continue
        who = readers.get(value, set())
        if not who or not who <= found.keys():
            continue
        users = {j: found[j] for j in who}
        if any(_when(user.node, inside) != _when(value, inside) for user in users.values()):
            continue
        changed = _made_where_read(graph, one, users, jumps)
        if changed is None:
            continue
        found.update(changed)
        for base in one.reads:
            readers[base] = readers.get(base, set()) - {i} | who
        del readers[value]
    return found


def _when(node: fx.Node, inside: Collection[fx.Node]) -> tuple[bool, bool]:
    """Calls of the update, and those of a microbatch, run another number of times than others."""
    return node in inside, info(node).phase == "opt"


def composed(inner: Blocks, start: int, outer: Blocks, offset: int) -> tuple[Blocks, int] | None:
    """What is read of a memory by element `offset + outer` of what reads it by `start + inner`; None if no strides say.

    >>> composed(((4, 100), (64, 1)), 0, ((4, 64), (32, 1)), 32)  # the second half of each row
    (((4, 100), (32, 1)), 32)
    """
    digits: list[tuple[int, int, int, int]] = []  # elements inside of it, size, stride, and where the offset is
    inside = 1
    for size, stride in reversed(inner):
        digits.append((inside, size, stride, offset // inside % size))
        inside *= size
    reach = [at for *_, at in digits]
    shape: list[int] = []
    strides: list[int] = []
    for size, stride in reversed(outer):
        rest = size
        while rest > 1 and stride:
            k = next((k for k, (low, count, _, _) in enumerate(digits) if low <= stride < low * count), None)
            if k is None or stride % digits[k][0]:
                return None
            low, count, step, _ = digits[k]
            jump = stride // low
            here = rest
            if jump * rest > count:
                here = count // jump
                if count % jump or rest % here:
                    return None
            reach[k] += jump * (here - 1)
            shape.append(here)
            strides.append(jump * step)
            rest, stride = rest // here, low * count
        if rest > 1:
            shape.append(rest)
            strides.append(0)
    if any(at >= size for at, (_, size, _, _) in zip(reach, digits, strict=True)) or offset >= inside:
        return None
    return blocks(tuple(reversed(shape)), tuple(reversed(strides))), start + sum(s * at for _, _, s, at in digits)


def _readers(
    graph: Graph, memories: Memories, calls: Sequence[fx.Node], units: Mapping[int, Unit]
) -> dict[fx.Node, set[int]]:
    """Who reads a value's memory, through any views, and is needed itself; an output is read by no unit."""
    readers: dict[fx.Node, set[int]] = {}
    for value in graph.output_values:
        readers.setdefault(memories.of[value].base, set()).add(-1)
    for i, node in reversed(list(enumerate(calls))):
        if i in units and not any(value in readers for value in results(node)):
            continue
        if i not in units and node.target in VIEWS:
            continue
        for value in units[i].reads if i in units else operands(node):
            readers.setdefault(memories.of[value].base, set()).add(i)
    return readers


def _pointwise(one: Unit) -> bool:
    return all(prim.over == "point" and prim.op != "cat" for prim in one.prims)


def _made_where_read(graph: Graph, one: Unit, users: Mapping[int, Unit], jumps: Jumps) -> dict[int, Unit] | None:
    """The readers of a unit's value, each of which makes what it reads of it."""
    value = one.node
    size = next(prim.size for prim in one.prims if prim.out is value)
    reads = {(j, r) for j, user in users.items() for p in user.prims for r in p.reads if r.value is value}
    if any(_in_order(read, size) for _, read in reads) or any(user.double != one.double for user in users.values()):
        return None
    if len(reads) > 1 and not jumps.repeatable(one.prims):
        return None
    share = sum(math.prod(n for n, stride in read.blocks if stride) for _, read in reads) / size
    bytes = {base: type_of(base).local_bytes(graph.mesh) for base in one.reads}
    own, inputs = type_of(value).local_bytes(graph.mesh), sum(bytes.values())
    held = sum(n for base, n in bytes.items() if base.op != "placeholder")
    if share * inputs > (1 + share) * own + inputs:
        return None
    if held > own and any(info(user.node).phase != info(value).phase for user in users.values()):
        return None
    changed: dict[int, Unit] = {}
    for j, user in users.items():
        made = _Through(one, user).unit()
        if made is None:
            return None
        changed[j] = made
    return changed


def _in_order(read: Read, size: int) -> bool:
    """Is a value read whole and in order, each element perhaps several times in a row?"""
    kept = [(n, stride) for n, stride in read.blocks if stride]
    return not read.offset and blocks(tuple(n for n, _ in kept), tuple(s for _, s in kept)) == whole(size)


class _Through:
    """A unit that makes itself what it reads of another's value."""

    def __init__(self, maker: Unit, user: Unit) -> None:
        self.maker = {prim.out: prim for prim in maker.prims}
        self.value, self.user = maker.node, user
        self.prims: list[Prim] = []
        self.known: dict[tuple[Value, Blocks, int], Value] = {}
        self.next = 1 + max((p.out.at for p in user.prims if isinstance(p.out, Inner)), default=-1)

    def unit(self) -> Unit | None:
        for prim in self.user.prims:
            args: list[object] = []
            for arg in prim.args:
                if isinstance(arg, Read) and arg.value is self.value:
                    arg = self._read(arg.value, arg.blocks, arg.offset)
                    if arg is None:
                        return None
                args.append(arg)
            self.prims.append(replace(prim, args=tuple(args)))
        wanted = demand(self.prims)
        if wanted is None or len(self.prims) > 2 * MOST or space(self.prims, wanted) is None:
            return None
        return Unit(self.user.node, tuple(self.prims), wanted)

    def _read(self, value: Value, order: Blocks, offset: int) -> Read | None:
        """The elements of a value of the maker's, made here."""
        key = (value, order, offset)
        size = math.prod(n for n, _ in order)
        if key not in self.known:
            made = self._make(self.maker[value], order, offset, size)
            if made is None:
                return None
            self.known[key] = made
        return Read(self.known[key], whole(size))

    def _make(self, prim: Prim, order: Blocks, offset: int, size: int) -> Value | None:
        args: list[object] = []
        for arg in prim.args:
            if isinstance(arg, Read):
                found = composed(arg.blocks, arg.offset, order, offset)
                if found is None:
                    return None
                if arg.value in self.maker:
                    arg = self._read(arg.value, *found)
                    if arg is None:
                        return None
                else:
                    if found[0][-1][1] not in (0, 1):  # neighbours far apart are slow to read
                        return None
                    arg = Read(arg.value, *found)
            args.append(arg)
        index = prim.index
        if index:
            found = composed(index, 0, order, offset)
            if found is None or found[1] or not any(stride for _, stride in found[0]):
                return None
            index = found[0]
        out = Inner(self.user.node, self.next)
        self.next += 1
        self.prims.append(replace(prim, out=out, args=tuple(args), size=size, index=index))
        return out
