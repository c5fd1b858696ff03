"""Work that would keep a collective waiting, where the next product waits for that.

    a = silu(x)      g = all_gather(a)      y = g @ w      b = gelu(z)

`b` may run while the gather does. In one kernel with `a` it would run before. A collective is *urgent* if no product
runs between it and who first reads its result: others, gradients' reductions mostly, have time.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from torch import fx

from shardc.ir.collectives import KINDS
from shardc.ir.graph import op_name, operands, results
from shardc.passes.fuse.scene import Scene

NONE = frozenset[int]()
LAUNCH = 4 << 20  # bytes that a GPU moves while it launches a kernel: to be so late costs no more than is saved


@dataclass(frozen=True)
class Urgent:
    """The urgent collectives: by each value that they read, their numbers among the barriers; and how many collectives
    without a product between them begin at each barrier."""

    reading: dict[fx.Node, frozenset[int]]
    run: tuple[int, ...]

    @staticmethod
    def of(scene: Scene) -> Urgent:
        number = {at: n for n, at in enumerate(scene.barriers)}
        run = [0] * (len(scene.barriers) + 1)
        for n, at in reversed(list(enumerate(scene.barriers))):
            run[n] = 1 + run[n + 1] if op_name(scene.calls[at].target) in KINDS else 0
        reading: dict[fx.Node, set[int]] = {}
        for n, at in enumerate(scene.barriers):
            if not run[n]:
                continue
            readers = {
                i for value in results(scene.calls[at]) if value is not None for i in scene.readers.get(value, ())
            }
            first = min((number.get(i, scene.home[i]) for i in readers if i < scene.end), default=len(run))
            if first <= n + run[n]:
                for value in operands(scene.calls[at]):
                    reading.setdefault(scene.memories.of[value].base, set()).add(n)
        return Urgent({value: frozenset(found) for value, found in reading.items()}, tuple(run))

    def soon(self, makes: Set[fx.Node], home: int) -> frozenset[int]:
        """Those that read what is made at `home`, with no product before them."""
        if self.reading.keys().isdisjoint(makes):
            return NONE
        found = frozenset(n for value in makes if value in self.reading for n in self.reading[value])
        return frozenset(n for n in found if n < home + self.run[home])
