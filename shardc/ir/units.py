"""Groups of layers that a graph has fewer of than the step that it stands for; see `equal_layers.py`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


class UnequalError(Exception):
    """Layers do not say the same, or something outside of them reads several."""


@dataclass(frozen=True)
class Units:
    """The elements of the list of modules `path` in groups of `period`: of 2, unit 1 is the elements 2 and 3.

    All from `first` to `last` say the same, and a shortened graph is without those between the two. `steps` are by what
    counting numbers grow from one unit to the next.
    """

    path: str
    period: int
    first: int
    last: int
    steps: frozenset[int] = frozenset()

    @property
    def removed(self) -> range:
        return range(self.first + 1, self.last)

    def within(self, name: str) -> tuple[int | None, str]:
        """The unit of a module, or of a tensor by its name, and what it is called in each; None for those outside."""
        start = len(self.path) + 1
        index, _, rest = name[start:].partition(".")
        if not name.startswith(f"{self.path}.") or not (index.isascii() and index.isdecimal()):
            return None, name
        return int(index) // self.period, f"<{int(index) % self.period}>.{rest}"

    def renamed(self, name: str, unit: int) -> str:
        """What a module is called in another unit."""
        index, _, rest = name[len(self.path) + 1 :].partition(".")
        return ".".join(filter(None, (self.path, f"{unit * self.period + int(index) % self.period}", rest)))

    def slot(self, unit: int) -> int:
        """The place of a unit among those of a shortened graph."""
        return unit if unit <= self.first else unit - len(self.removed)

    def at(self, slot: int) -> int:
        """The unit in a place of a shortened graph."""
        return slot if slot <= self.first else slot + len(self.removed)

    def narrowed(self, before: int, behind: int) -> Units:
        """Those that a graph lacks that has so many more of them at either end."""
        return replace(self, first=self.first + before, last=self.last - behind)


def refuse_several(all_units: Iterable[Units], names: Iterable[str]) -> None:
    """Raise UnequalError where modules or tensors that one decision is about lie in several of the equal layers: with
    more layers it could be another one."""
    named = list(names)
    for units in all_units:
        touched = {units.within(name)[0] for name in named}
        if len(touched) > 2 and touched & {units.first, units.last}:
            raise UnequalError(f"{units.path}: one decision is about {len(touched)} units")
