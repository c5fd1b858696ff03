"""How one layer is placed, and how a microbatch runs through it: what a small program is compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from shardc.ir.mesh import Mesh


@dataclass(frozen=True)
class Inner:
    """How a layer is placed and a microbatch runs. `rows` are those of a microbatch on one data-parallel replica."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    sequence: bool = False  # sequence parallelism: between products, tp shards the sequence
    recompute: str = "none"
    rows: int = 1

    @property
    def mesh(self) -> Mesh:
        return Mesh((("dp", 1), ("ep", self.ep), ("cp", self.cp), ("tp", self.tp)))
