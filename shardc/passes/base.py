"""What a pass is: a frozen dataclass with `run(graph) -> graph`.

The fields of a pass are its options. What it leaves true is listed under its name in `passes/verify.py`, and checked
after each run, so that a broken pass is caught where it broke.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import fx

from shardc.ir.graph import Graph, info
from shardc.ir.types import Axes
from shardc.rules.projection import Projection

Check = Callable[[Graph], list[str]]  # what is wrong with a graph, a line a violation


@dataclass(frozen=True)
class Pass:
    """One transformation. It owns the graph it is given: it edits in place, or returns another one."""

    @property
    def name(self) -> str:
        """snake_case of the class name: `InsertReshards` is insert_reshards."""
        return "".join(f"_{c.lower()}" if c.isupper() else c for c in type(self).__name__).lstrip("_")

    def run(self, graph: Graph) -> Graph:
        raise AssertionError(f"{type(self).__name__} has no run")


def split_of(node: fx.Node, projection: Projection) -> dict[int, Axes]:
    """A call's assignment as piece index -> axes."""
    return {projection.names.index(name): axes for name, axes in info(node).assignment}


def firsts(calls: Iterable[fx.Node]) -> dict[fx.Node, str]:
    """Of each call its name, or that of the first call that it repeats: what the half of a batch computes may be
    recomputed, too."""
    names = {call: info(call).name for call in calls}
    repeats = {names[call]: origin.of for call in names if (origin := info(call).origin) and info(call).is_repeated}
    for call, name in names.items():
        while name in repeats:
            name = repeats[name]
        names[call] = name
    return names
