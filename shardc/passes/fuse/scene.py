"""A localized body as the fusion pass sees it: its calls in order, which of them kernels may do, and who reads what.

unit      a call that a kernel can do; it reads memory of values, through any views
barrier   a product, an attention, a collective: what has a place in time
free      views, constants, and small calls that no kernel can do: they go where they are needed
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import fx

from shardc.ir.collectives import KINDS
from shardc.ir.graph import Graph, info, op_name, operands, producer, results, type_of
from shardc.ir.microbatch import in_microbatch
from shardc.ir.ops import check_index, local
from shardc.ir.ops.buckets import UNPACK
from shardc.passes.fuse.alike import Lowered
from shardc.passes.fuse.jumps import Jumps
from shardc.passes.fuse.memory_of import VIEWS, Memories
from shardc.passes.fuse.spaces import Blocks, Prim, Read, Value, demand, space
from shardc.passes.fuse.through import read_through
from shardc.passes.fuse.units import LOWERINGS, Inner, Unit
from shardc.rules.registry import find_rule

aten = torch.ops.aten
FREE = {
    *VIEWS,
    *(aten.full.default, aten.arange.default, aten.arange.start, aten.arange.start_step, aten.scalar_tensor.default),
    *(local.axis_offset, local.shard_slice, local.mask_pad, check_index.check_index, UNPACK),
}
FEW = 4  # operations that are done again rather than read


@dataclass
class Scene:
    """`calls` in the order that they run in; everything else goes by a call's index there."""

    graph: Graph
    calls: list[fx.Node]
    units: dict[int, Unit]
    barriers: list[int]
    edges: list[tuple[int, int]]
    readers: dict[fx.Node, set[int]]  # value -> calls that read its memory, the number of calls for an output
    home: list[int]  # barriers before each call
    inside: list[bool]  # does it run once a microbatch?
    memories: Memories
    jumps: Jumps  # what may be made by several kernels
    bytes: dict[Value, int] = field(default_factory=dict[Value, int])

    @property
    def end(self) -> int:
        return len(self.calls)


def scene(graph: Graph, exclude: frozenset[str] = frozenset(), through: bool = True) -> Scene:
    """Look at a graph; `exclude` are ops, by name, and values that stay calls. With `through`, as `read_through`."""
    inside = in_microbatch(graph)
    calls = sorted(graph.calls(), key=lambda node: node not in inside)
    memories = Memories(graph, lambda node: node.target in LOWERINGS)
    at = {node: i for i, node in enumerate(calls)}
    units: dict[int, Unit] = {}
    cheap: dict[fx.Node, Unit] = {}
    lowered = Lowered(memories)
    for i, node in enumerate(calls):
        if exclude and (op_name(node.target) in exclude or info(node).name in exclude):
            continue
        found = lowered.of(node)
        if found is not None:
            units[i] = found
    jumps = Jumps(memories, calls, units)
    twice = jumps.run_twice()
    units = {i: found for i, one in units.items() if i not in twice and (found := jumps.rounded(one)) is not None}
    for i, one in units.items():
        units[i] = found = _with_cheap_operands(one, cheap)
        if jumps.repeatable(one.prims) and _cheap(graph, found):
            cheap[found.node] = found
    if through:
        units = read_through(graph, memories, calls, units, inside, jumps)
    jumps = Jumps(memories, calls, units)
    readers: dict[fx.Node, set[int]] = {}
    for value in graph.output_values:
        readers.setdefault(memories.of[value].base, set()).add(len(calls))
    edges: set[tuple[int, int]] = set()
    unneeded: set[int] = set()
    for i, node in reversed(list(enumerate(calls))):
        if i in units and not any(value in readers for value in results(node)):
            del units[i]  # its readers make it themselves
            unneeded.add(i)
            continue
        bases = units[i].reads if i in units else operands(node)
        if node.target not in VIEWS or i in units:
            for value in bases:
                readers.setdefault(memories.of[value].base, set()).add(i)
        sources = (at.get(producer(value)[0]) for value in bases)
        edges.update((source, i) for source in sources if source is not None)
    barriers = [i for i, node in enumerate(calls) if i not in units and i not in unneeded and not _free(node)]
    home, count = [], 0
    fixed = set(barriers)
    for i in range(len(calls)):
        home.append(count)
        count += i in fixed
    sizes: dict[Value, int] = {value: type_of(value).local_bytes(graph.mesh) for value in graph.values()}
    inner = [node in inside for node in calls]
    return Scene(graph, calls, units, barriers, sorted(edges), readers, home, inner, memories, jumps, sizes)


def _free(node: fx.Node) -> bool:
    if node.target in FREE:
        return True
    if op_name(node.target) in KINDS:
        return False
    rule = find_rule(node.target)
    return rule is not None and rule.kind == "pointwise" and op_name(node.target) != "shardc.accumulate"


def _with_cheap_operands(user: Unit, cheap: dict[fx.Node, Unit]) -> Unit:
    """Operands that cost less to make again than to read are made by the unit itself: masks, positions, constants.

    Once for each way in which they are read: a position is that of a row and of a column.
    """
    if user.reads.isdisjoint(cheap):
        return user
    prims: list[Prim] = []
    made: dict[tuple[Value, Blocks, int], Value] = {}

    def inlined(read: Read, size: int) -> Read:
        found = cheap.get(read.value) if isinstance(read.value, fx.Node) else None
        if found is None or found.double != user.double:
            return read
        key = (read.value, read.blocks, size)
        if key not in made:
            names: dict[Value, Value] = {}
            for prim in found.prims:
                names[prim.out] = Inner(user.node, -1 - len(prims))
                prims.append(_renamed(prim, names))
            made[key] = names[read.value]
        return read._replace(value=made[key])

    own = [
        replace(p, args=tuple([inlined(a, p.size) if isinstance(a, Read) else a for a in p.args]))
        if any(read.value in cheap for read in p.reads)
        else p
        for p in user.prims
    ]
    every = (*prims, *own)
    wanted = demand(every) if made else None
    return user if wanted is None or space(every, wanted) is None else Unit(user.node, every, wanted)


def _renamed(prim: Prim, names: dict[Value, Value]) -> Prim:
    args = tuple(a._replace(value=names.get(a.value, a.value)) if isinstance(a, Read) else a for a in prim.args)
    return replace(prim, out=names.get(prim.out, prim.out), args=args)


def _cheap(graph: Graph, one: Unit) -> bool:
    count = sum(prim.op != "iota" for prim in one.prims)
    if count > FEW or info(one.node).type is None or any(prim.over != "point" for prim in one.prims):
        return False
    bases = one.reads
    read = sum(type_of(value).local_bytes(graph.mesh) for value in bases)
    mask = type_of(one.node).dtype == torch.bool and not any(type_of(v).dtype.is_floating_point for v in bases)
    return 2 * read <= type_of(one.node).local_bytes(graph.mesh) or (mask and len(bases) == 1)
