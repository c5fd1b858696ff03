"""Bytes and seconds of one element of the weights, which a step multiplies by how many a rank has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Numbers:
    """Bytes of an element: of a weight as it is stored, as it is computed with, of its gradient and of its state; and
    the seconds of its update, by the optimizer's own calls. `launched` are the seconds in which the update of one
    tensor is launched, however small it is."""

    stored: float = 4
    computed: float = 4
    gradient: float = 4
    state: float = 8
    update: float = 0.0
    launched: float = 0.0

    @property
    def mixed(self) -> bool:
        return self.stored != self.computed
