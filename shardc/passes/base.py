"""What a pass is: a frozen dataclass with `run(graph) -> graph`, and the properties it leaves true.

The fields of a pass are its options. `ensures` lists checks that the verifier runs after it; each
returns a description of every violation, so a broken pass is caught where it broke.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from shardc.ir.graph import Graph, info
from shardc.ir.types import Axes
from shardc.rules.projection import Projection

Check = Callable[[Graph], list[str]]


@dataclass(frozen=True)
class Pass:
    """One transformation. It owns the graph it is given: edits are in place."""

    ensures: ClassVar[tuple[Check, ...]] = ()

    @property
    def name(self) -> str:
        """snake_case of the class name: `InsertReshards` is insert_reshards."""
        return "".join(f"_{c.lower()}" if c.isupper() else c for c in type(self).__name__).lstrip("_")

    def run(self, graph: Graph) -> Graph:
        raise AssertionError(f"{type(self).__name__} has no run")


def split_of(node: fx.Node, projection: Projection) -> dict[int, Axes]:
    """A call's assignment as piece index -> axes."""
    return {projection.names.index(name): axes for name, axes in info(node).assignment}
