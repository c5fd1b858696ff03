"""Why a call is no part of a kernel: what the fusion pass was asked, what it can do, and what kept two calls apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardc.ir.collectives import KINDS
from shardc.ir.graph import info, op_name
from shardc.passes.fuse.again import Part
from shardc.passes.fuse.clusters import Clustering, apart, saved
from shardc.passes.fuse.memory_of import VIEWS
from shardc.passes.fuse.scene import Scene
from shardc.passes.fuse.traffic import PRODUCTS
from shardc.passes.fuse.unfused import UNFUSED
from shardc.passes.fuse.units import LOWERINGS

SHOWN = 3  # neighbours


@dataclass(frozen=True)
class Alone:
    """Why, in a line; and what keeps it from the calls beside it that kernels do."""

    why: str
    beside: tuple[tuple[str, str], ...] = ()  # a call's name, and what keeps the two apart


def alone(found: Clustering, todo: Sequence[Part], by_plan: Mapping[str, str]) -> dict[str, Alone]:
    """By name, all calls that are in none of the kernels to be made. `by_plan`: of the calls that the plan leaves
    alone, the pattern that does it."""
    scene = found.scene
    taken = {i for part in todo for i in part.calls}
    linked: dict[int, set[int]] = {}
    for a, b in scene.edges:
        linked.setdefault(a, set()).add(b)
        linked.setdefault(b, set()).add(a)
    rest = ((i, info(node).name) for i, node in enumerate(scene.calls) if i not in taken)
    return {name: _alone(found, i, linked.get(i, set()), by_plan) for i, name in rest}


def _alone(found: Clustering, i: int, linked: set[int], by_plan: Mapping[str, str]) -> Alone:
    scene, free = found.scene, found.free
    node = scene.calls[i]
    name, op = info(node).name, op_name(node.target)
    if name in by_plan:
        return Alone(f"the plan leaves it alone: fuse: {{exclude: ['{by_plan[name]}']}}")
    if name in free.excluded:
        return Alone("as a kernel, it held more at the peak of memory")
    if op in KINDS:
        return Alone("it communicates: kernels run before it and after it")
    if op in PRODUCTS:
        return Alone("it is a product or an attention: kernels run before it and after it")
    if i in scene.units:
        return _unit_alone(found, i, linked)
    if node.target in VIEWS and node not in scene.memories.copies:
        return Alone("it is a view: kernels read through it")
    if node.target in LOWERINGS:
        return Alone(f"kernels know {op}, but not on operands of this layout, dtype or size")
    reason = UNFUSED.get(op.partition(".")[0])
    return Alone(f"kernels do not know {op}" + (f": {reason}" if reason else ""))


def _unit_alone(found: Clustering, i: int, linked: set[int]) -> Alone:
    if found.order.of(i) not in found.groups:
        return Alone("its rows and columns are none that a kernel could walk")
    beside = _beside(found, i, linked)
    if not beside:
        return Alone("one kernel as it is, and nothing beside it is one: a generated kernel would move the same bytes")
    return Alone("one kernel as it is; alone, a generated kernel would move the same bytes", tuple(beside))


def _beside(found: Clustering, i: int, linked: set[int]) -> list[tuple[str, str]]:
    """What keeps it from the kernels that it shares values with, those first with which most would be saved."""
    scene, here = found.scene, found.order.of(i)
    near: dict[int, int] = {}  # a group -> the call in it that is next to this one
    for j in _neighbours(scene, i, linked):
        group = found.order.of(j)
        if group in found.groups and group != here:
            near.setdefault(group, j)
    own = found.groups[here]
    first = sorted(near, key=lambda group: (-saved(scene, own, found.groups[group]), group))
    return [(info(scene.calls[near[group]]).name, _apart(found, here, group)) for group in first[:SHOWN]]


def _neighbours(scene: Scene, i: int, linked: set[int]) -> list[int]:
    """The calls that make what it reads, that read what it makes, and that read what it reads."""
    beside = {reader for value in scene.units[i].reads for reader in scene.readers.get(value, ())}
    return sorted((linked | beside) & scene.units.keys() - {i})


def _apart(found: Clustering, a: int, b: int) -> str:
    third = "what one makes reaches the other through a third, which would have to run between them"
    return apart(found, a, b) or (
        third if found.order.cycles(a, b) else "nothing forbids it, and the search did not come to the two"
    )
