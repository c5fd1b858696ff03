"""What one mesh axis may do to a call: the strategies that its rule allows, and the state in which each leaves a value.

Over one axis a value is whole on every rank, sharded along one of its atoms, or pending a sum. A call's strategies are
those of Alpa (Zheng et al. 2022, section 4.1) read off its rule: split one piece of its factors, or none, or, where it
is linear, run on pending sums.

    shardc.linear   s k, n k -> s n
    split n         x broadcast, w sharded along n     ->  y sharded along n     column-parallel
    split k         x sharded along k, w along k       ->  y pending             row-parallel
    split s         x sharded along s, w broadcast     ->  y sharded along s
    none            x whole, w whole                   ->  y whole

An operand that has not the piece is *broadcast*: whole, and its gradient is pending, since each rank has a term of it.
That is how the strategy of a forward call says what its backward does, so that forward alone is solved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import fx

from shardc.cost.flops import COUNTS
from shardc.ir.graph import Graph, info, op_name, operands, results
from shardc.passes.softmax.split_softmax import opened
from shardc.rules.projection import Projection, project
from shardc.rules.registry import find_rule

State = int  # the flat atom along which a value is sharded, or one of:
WHOLE, PENDING, BROADCAST = -1, -2, -3

Offered = Callable[[fx.Node, int], bool]  # (value, atom): may the axis shard it?


@dataclass(frozen=True, slots=True)
class Strategy:
    """What a call does over the axis: the state that each operand must have, and that each result then has.

    `piece` is what it splits; None: nothing, or it runs on pending sums. `reduced` results take an all-reduce of their
    own (a maximum, or the statistics of a softmax), which is no state that others may resolve.
    """

    piece: int | None
    needs: tuple[State, ...]
    makes: tuple[State, ...]
    reduced: bool = False


def strategies_of(
    graph: Graph, node: fx.Node, axis: str, offered: Offered, matrices: Collection[fx.Node] = ()
) -> list[Strategy]:
    """All strategies of a call. A product with one of the `matrices` does not split what that has not."""
    sources, outs = operands(node), results(node)
    none = Strategy(None, (WHOLE,) * len(sources), (WHOLE,) * len(outs))
    rule = find_rule(node.target)
    if rule is None:
        return [none]
    projection = project(node)
    found = [none]
    if _runs_on_sums(projection, [v for v in sources if not info(v).constant]):
        found.append(Strategy(None, (PENDING,) * len(sources), (PENDING,) * len(outs)))
    softmax = opened(node, projection)
    weights = [i for i, v in enumerate(sources) if v in matrices] if op_name(node.target) in COUNTS else []
    for piece, size in enumerate(projection.sizes):
        if size < 2 or (piece in projection.blocked and piece not in softmax):
            continue
        if rule.unfit is not None and piece in rule.unfit(node, projection, {piece: (axis,)}, graph.mesh):
            continue
        places = [
            (v, pieces.index(piece))
            for v, pieces in zip((*sources, *outs), (*projection.operands, *projection.results), strict=True)
            if v is not None and piece in pieces and not info(v).constant
        ]
        if not places or not all(offered(v, atom) for v, atom in places):
            continue
        if any(piece not in projection.operands[i] for i in weights):
            continue
        found.append(_splitting(projection, piece, reduced=piece in softmax))
    return found


def _splitting(projection: Projection, piece: int, *, reduced: bool) -> Strategy:
    needs = tuple(pieces.index(piece) if piece in pieces else BROADCAST for pieces in projection.operands)
    makes: list[State] = []
    for k, pieces in enumerate(projection.results):
        kinds = [kind for _, kind in projection.partial({piece: ("axis",)}, k)]
        if piece in pieces:
            makes.append(pieces.index(piece))
        elif kinds == ["sum"]:
            makes.append(PENDING)
        else:
            makes.append(WHOLE)
            reduced = reduced or bool(kinds)
    return Strategy(piece, needs, tuple(makes), reduced)


def _runs_on_sums(projection: Projection, sources: list[fx.Node]) -> bool:
    joint = projection.linear == "joint" or (len(projection.operands) == 1 and projection.linear == (0,))
    return joint and len(sources) == len(projection.operands) > 0
