"""Collectives that the next product waits for: no merge may put other work before them.

    a = silu(x)      g = all_gather(a)      y = g @ w      b = gelu(z)

`b` may run while the gather does. In one kernel with `a` it would run before the gather. A collective is *critical* if
no product runs between it and the first reader of its result. Others, mostly reductions of gradients, have slack.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from torch import fx

from shardc.ir.collectives import KINDS
from shardc.ir.graph import op_name, operands, results
from shardc.passes.fusion.clustering.fusion_graph import FusionGraph

NO_COLLECTIVES = frozenset[int]()


@dataclass(frozen=True)
class CriticalCollectives:
    """The critical collectives, as barrier numbers, by the values that they read; and for each barrier the number of
    collectives that start there in a row, without a product between them."""

    by_operand: dict[fx.Node, frozenset[int]]
    run_length: tuple[int, ...]

    @staticmethod
    def of(graph: FusionGraph) -> CriticalCollectives:
        number = {call: n for n, call in enumerate(graph.barriers)}
        run_length = [0] * (len(graph.barriers) + 1)
        for n, call in reversed(list(enumerate(graph.barriers))):
            run_length[n] = 1 + run_length[n + 1] if op_name(graph.calls[call].target) in KINDS else 0
        by_operand: dict[fx.Node, set[int]] = {}
        for n, call in enumerate(graph.barriers):
            if not run_length[n]:
                continue
            readers = {
                i for value in results(graph.calls[call]) if value is not None for i in graph.readers.get(value, ())
            }
            epochs = (number.get(i, graph.barrier_epoch[i]) for i in readers if i < graph.call_count)
            if min(epochs, default=len(run_length)) <= n + run_length[n]:
                for value in operands(graph.calls[call]):
                    by_operand.setdefault(graph.views.of[value].base, set()).add(n)
        frozen = {value: frozenset(collectives) for value, collectives in by_operand.items()}
        return CriticalCollectives(frozen, tuple(run_length))

    def waiting_on(self, values: Set[fx.Node], epoch: int) -> frozenset[int]:
        """The critical collectives that read values computed in `epoch`, with no product before them."""
        if self.by_operand.keys().isdisjoint(values):
            return NO_COLLECTIVES
        readers = frozenset(n for value in values if value in self.by_operand for n in self.by_operand[value])
        return frozenset(n for n in readers if n < epoch + self.run_length[epoch])
