"""Seconds of the collectives of candidates, each asked of the hardware once: thousands of candidates send the same."""

from __future__ import annotations

from functools import lru_cache

from shardc.ir.hardware import Group, Hardware
from shardc.planner.candidate import Candidate


class Network:
    """The hardware's answers, by what they depend on."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self._groups: dict[tuple[object, ...], Group | None] = {}
        self._seconds: dict[tuple[object, ...], float] = {}

    def group(self, c: Candidate, axes: tuple[str, ...]) -> Group | None:
        """Where the ranks along these axes are; None for a rank alone."""
        key = (c.sizes, axes)
        if key not in self._groups:
            several = tuple(axis for axis in axes if getattr(c, axis) > 1)
            self._groups[key] = self.hardware.on(c.mesh).group_of(c.mesh, several) if several else None
        return self._groups[key]

    def seconds(self, c: Candidate, kind: str, size: float, axes: tuple[str, ...], bucket: float = 0.0) -> float:
        """A collective of so many bytes, in pieces of at most `bucket` bytes each; 0: in one piece."""
        group = self.group(c, axes) if size else None
        if group is None:
            return 0.0
        pieces = max(1, -(-size // bucket)) if bucket else 1
        return pieces * self.of_group(kind, size / pieces, group)

    def of_group(self, kind: str, size: float, group: Group) -> float:
        key = (kind, size, group.extents)
        if key not in self._seconds:
            self._seconds[key] = self.hardware.collective_seconds(kind, size, group)
        return self._seconds[key]

    def transfer(self, c: Candidate, size: float) -> float:
        """What a stage sends to the next one: to another node, if stages fill nodes."""
        if (group := self.group(c, ("pp",))) is None:
            return 0.0
        pair = Group((2,)) if len(group.extents) == 1 else Group((1, 2))
        return self.of_group("permute", size, pair)


class Identity:
    """A value as the key of a cache, by identity: what is costly to hash, and never changed."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.value is other.value


def network_of(hardware: Hardware) -> Network:
    return _network(Identity(hardware))


@lru_cache(maxsize=16)
def _network(key: Identity) -> Network:
    assert isinstance(key.value, Hardware)
    return Network(key.value)
