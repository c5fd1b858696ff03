"""assign: decide what each op computes locally: for every op and mesh axis, at most one piece to split.

Needs: the wishes of `propagate` (types) and their priorities. Ensures: `info.assignment` of every call;
types say what each op produces, pending sums included; constants are computed replicated.

One topological walk. For each axis the candidates are the pieces that some operand or result wishes to
have split; the earliest priority wins, then the least communication for the operands as they are now.
A view, and a cast that narrows a stored parameter, follow the layout that their input really has; what reads
rows in the order of their experts follows their grouping, as they are never resharded. That is whole over an axis that
divides each expert, where it is less to gather tokens than experts. An op that is linear in operands which are all
pending sums over the axis is left to run on them: `settle_partials` decides whether to resolve first, and then the op
takes the piece kept in `info.fallback`.
Ops on a parameter that is copied over an axis are not split over it, whatever their operands wish.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import fx

from shardc.ir.diagnostic import Diagnostic
from shardc.ir.graph import Graph, info, operands, producer, results, type_of, update
from shardc.ir.hardware import DEFAULT, Hardware
from shardc.ir.ops.expert_capacity import LIMIT_ROWS
from shardc.ir.ops.experts import EXPERT_MM, GROUP_ROWS
from shardc.ir.types import Atom, Axes, Dim, TensorType
from shardc.passes.base import Pass
from shardc.passes.exchanged_rows import misfit
from shardc.passes.sharding.casts import carriers, gradients, narrows, rounds_stored
from shardc.passes.sharding.dispatch import Choice, Sent, bytes_of_forms, calls_at_experts
from shardc.passes.sharding.expert_modules import STACK, refused_axes, weights_apart
from shardc.passes.sharding.seed import copied_axes
from shardc.passes.sharding.settle_partials import linear_in
from shardc.rules.projection import Projection, project
from shardc.rules.registry import find_rule

_NEVER = 99
WAITED = 2
Dispatch = Literal["auto", "all_to_all", "all_gather"]


@dataclass(frozen=True)
class Assign(Pass):
    """Choose the pieces that each op splits. `dispatch` says how rows come to experts over an axis of theirs; `chosen`
    is then what was chosen for each layer, under `auto` by what is sent and by the host's read."""

    dispatch: Dispatch = "auto"
    hardware: Hardware = DEFAULT
    chosen: list[Choice] = field(default_factory=list[Choice], compare=False)

    def run(self, graph: Graph) -> Graph:
        graph.diagnostics += refused_axes(graph)
        walk = _Walk(graph, self.dispatch, self.hardware)
        for node in list(graph.calls()):
            walk.visit(node)
        for value, type in walk.now.items():
            update(value, type=type)
        self.chosen[:] = walk.chosen.values()
        if self.dispatch == "all_to_all" and not walk.sent and not walk.gathered:
            graph.diagnostics.append(_nothing_sent(graph))
        return graph


def _nothing_sent(graph: Graph) -> Diagnostic:
    """Of a plan that asks for rows to be sent, where no experts lie over an axis of tokens."""
    groupings = [node for node in graph.calls() if node.target is GROUP_ROWS]
    if not groupings:
        why = "no rows are grouped by expert"
        hint = "leave the key out; experts are seen where rows are sorted, and multiplied in groups"
    else:
        why = "no experts lie over an axis of their tokens"
        hint = "put dim 0 of all weights of experts, and the inputs, over one axis; or leave the key out"
        if any(weights_apart(product) for product in _products(groupings[0])):
            why = "experts are modules with weights of their own, which no axis divides by expert"
            hint = f"{STACK}; or leave the key out"
    about = info(groupings[0]) if groupings else None
    return Diagnostic(
        "SC229",
        f"the plan says experts: all_to_all, and no rows are sent: {why}",
        "warning",
        location=(about.source or None) if about else None,
        source_text=(about.source_text or None) if about else None,
        fqn=(about.fqn or None) if about else None,
        hint=hint,
    )


class _Walk:
    def __init__(self, graph: Graph, dispatch: Dispatch = "auto", hardware: Hardware = DEFAULT) -> None:
        self.graph, self.dispatch, self.hardware = graph, dispatch, hardware
        self.chosen: dict[fx.Node, Choice] = {}  # by grouping
        self.sent: dict[fx.Node, Sent] = {}  # by value: where its rows lie, if they are sent to experts
        self.gathered: set[fx.Node] = set()  # groupings whose rows cannot be sent
        self.sizes = dict(graph.mesh.axes)
        self.order = list(self.sizes)
        self.copied = copied_axes(graph)
        self.waits = _waiting(graph, self.copied)
        self.carriers = {call for gradient in gradients(graph).values() for call in carriers(gradient)}
        self.wish: dict[fx.Node, TensorType] = {v: type_of(v) for v in graph.values()}
        self.now: dict[fx.Node, TensorType] = {
            v: self.wish[v].place(graph.stored.get(v, self.wish[v].placement)) for v in graph.placeholders
        }

    def visit(self, node: fx.Node) -> None:
        sources, outs = operands(node), results(node)
        if node.target is LIMIT_ROWS:  # the rows of a rank are a group
            node.args = (*node.args[:3], [])
        if find_rule(node.target) is None or all(info(v).constant for v in sources):
            for v in outs:
                if v is not None:
                    self.now[v] = self.wish[v].replicated()
            return
        projection = project(node)
        split: dict[int, Axes] = {}
        delayed: dict[str, int] = {}
        carried: list[str] = []
        barred = {axis for v in (*sources, *outs) if v is not None for axis in self.copied.get(v, ())}
        view = find_rule(node.target).kind == "view"  # type: ignore[union-attr]
        # A stored parameter is cast where it lies: what is then gathered is less.
        view = view or (narrows(node) and sources[0] in self.graph.stored)
        view = view or (rounds_stored(node) and not self.now[sources[0]].partial)
        if view:
            for atom, piece in enumerate(projection.operands[0]):
                axes = self.now[sources[0]].placement[atom]
                if axes and piece not in projection.blocked:
                    split[piece] = axes
        bound = self._bound(node, sources, projection)
        split = {piece: axes for piece, axes in split.items() if piece not in bound}
        split.update({piece: axes for piece, axes in bound.items() if axes})
        exchanged = self._exchanged(node, outs, projection, barred) if node.target is GROUP_ROWS else ()
        for axis in self.order:
            if any(axis in axes for axes in split.values()):
                continue
            candidates = self._candidates(sources, outs, projection, axis) if axis not in barred else {}
            candidates = {piece: rank for piece, rank in candidates.items() if piece not in bound}
            candidates = self._fitting(node, projection, candidates, split, axis)
            if node.target is GROUP_ROWS and axis not in (*barred, *exchanged) and self._shards_experts(node, axis):
                candidates = dict.fromkeys((p for p in projection.results[1] if p not in projection.operands[0]), 0)
            if axis in exchanged:
                candidates = {p: rank for p, rank in candidates.items() if p in projection.operands[0]}
            elif node.target is GROUP_ROWS and self._gathers_weights(node, axis, exchanged):
                candidates = {}
            if not candidates:
                if axis in self.waits.get(node, ()):
                    summed = [dict(self.now[v].partial).get(axis) == "sum" for v in sources]
                    carried += [axis] if linear_in(sources, summed, projection) else []
                continue
            pending = dict(self.now[sources[0]].partial).get(axis) if sources else None
            if view and pending is None and any(p in projection.operands[0] for p in candidates):
                continue
            piece = min(
                candidates,
                key=lambda p: (candidates[p], self._cost(sources, outs, projection, axis, p), projection.names[p]),
            )
            if self._may_wait(node, sources, projection, axis, piece):
                delayed[axis] = piece
            else:
                split[piece] = self._ordered((*split.get(piece, ()), axis), piece, [*sources, *outs], projection)
        update(
            node,
            assignment=tuple((projection.names[p], axes) for p, axes in split.items()),
            fallback=tuple((axis, projection.names[p]) for axis, p in delayed.items()),
        )
        for k, v in enumerate(outs):
            if v is not None:
                partial = [*projection.partial(split, k), *((axis, "sum") for axis in (*delayed, *carried))]
                self.now[v] = self.wish[v].place([split.get(p, ()) for p in projection.results[k]], partial)
        if exchanged and not self._sends(node, projection, split, exchanged):
            self.visit(node)
        elif sent := next((self.sent[v] for v in sources if v in self.sent), None):
            self.sent.update({v: sent for v in outs if v is not None and self.now[v].ragged})

    def _bound(self, node: fx.Node, sources: list[fx.Node], projection: Projection) -> dict[int, Axes]:
        """The pieces of rows and ragged dims: these lie as their grouping has chosen, whoever reads them."""
        bound: dict[int, Axes] = {}
        for value, pieces in zip(sources, projection.operands, strict=True):
            type = self.now[value]
            if value in self.sent:
                type = self.sent[value].needed(node, value, type)
            bound.update({pieces[atom]: type.placement[atom] for atom in type.bound_atoms})
        return bound

    def _exchanged(
        self, grouping: fx.Node, outs: list[fx.Node | None], projection: Projection, barred: set[str]
    ) -> Axes:
        """The axes over which rows are sent to their experts: those of tokens and of experts."""
        tokens = {
            axis
            for axis in self.order
            if axis not in barred
            and any(p in projection.operands[0] for p in self._candidates(operands(grouping), outs, projection, axis))
        }
        experts = {axis for axis in self.order if self._shards_experts(grouping, axis)}
        if grouping in self.gathered or not tokens & experts:
            return ()
        placements = [self.wish[operands(product)[1]].dims[0] for product in _products(grouping)]
        axes = placements[0][0].axes if placements[0] else ()
        one_piece = all(not atom.axes for dim in placements for atom in dim[1:])
        size = math.prod(self.sizes[axis] for axis in tokens)
        costs = bytes_of_forms(grouping, size, tuple(tokens & experts), self.graph.mesh)
        self.chosen[grouping] = Choice(info(grouping).fqn, "all_gather", *costs)
        if self.dispatch == "all_gather":
            return ()
        if not one_piece or any(dim[0].axes != axes for dim in placements) or set(axes) != tokens & experts:
            lie = " and ".join(sorted({" ".join(map(str, dim)) for dim in placements}))
            self._gathers(grouping, f"experts lie as {lie}, and tokens over {', '.join(sorted(tokens))}")
            return ()
        if self.dispatch == "auto" and not self._sends_less(grouping, axes):
            return ()
        return axes

    def _sends_less(self, grouping: fx.Node, axes: Axes) -> bool:
        """Whether an all-to-all takes less time than gathering: the host's read, of exact counts, as long as starting a
        collective does."""
        read = 0.0 if operands(grouping)[0].target is LIMIT_ROWS else self.hardware.collective_start_seconds
        choice, mesh = self.chosen[grouping], self.graph.mesh
        group, hardware = self.hardware.group_of(mesh, axes), self.hardware
        held = group.size / max(1, group.size - 1)  # for each byte that is sent
        sent = hardware.collective_seconds("all_to_all", choice.sent * held, group)
        return sent + read < hardware.collective_seconds("all_gather", choice.gathered * held, group)

    def _sends(self, grouping: fx.Node, projection: Projection, split: dict[int, Axes], axes: Axes) -> bool:
        """Note what is sent of a grouping, unless its rows do not fit."""
        rows = self._placed(projection, projection.operands[0], split)
        experts = self._placed(projection, projection.results[1], split)[: -len(rows)]
        if (why := misfit(rows, experts, axes, self.graph.mesh)) is not None:
            self._gathers(grouping, why)
            return False
        self.chosen[grouping] = self.chosen[grouping]._replace(form="all_to_all")
        sent = Sent(rows, experts, axes, frozenset(calls_at_experts(grouping)), results(grouping)[1])
        self.sent.update({value: sent for value in results(grouping) if value is not None})
        return True

    @staticmethod
    def _placed(projection: Projection, pieces: Sequence[int], split: dict[int, Axes]) -> Dim:
        return tuple(Atom(projection.sizes[p], split.get(p, ())) for p in pieces)

    def _gathers(self, grouping: fx.Node, why: str) -> None:
        """Say that tokens are gathered where the plan asks for rows to be sent."""
        self.gathered.add(grouping)
        if self.dispatch == "auto":
            return  # it does as well as it can
        about = info(grouping)
        self.graph.diagnostics.append(
            Diagnostic(
                "SC229",
                f"tokens are gathered for the experts of {about.fqn or 'the model'}, not sent: {why}",
                "warning",
                location=about.source or None,
                source_text=about.source_text or None,
                fqn=about.fqn or None,
                hint="put dim 0 of all weights of experts over the axis of tokens alone, in sizes that divide by it",
            )
        )

    def _shards_experts(self, grouping: fx.Node, axis: str) -> bool:
        """The weights of the experts that rows are grouped for lie over the axis: rows come to them."""
        weights = [self.wish[operands(product)[1]] for product in _products(grouping)]
        return any(axis in atom.axes for type in weights for atom in type.dims[0])

    def _gathers_weights(self, grouping: fx.Node, axis: str, exchanged: Axes) -> bool:
        """Each expert is divided over the axis, and it would take more to gather experts than tokens, and to send rows
        from all ranks of the axis: as between layers whose sequence is sharded over it. Gathers of weights are hidden
        behind other work, those of tokens are waited for: so these count `WAITED` times."""
        mesh, weights = self.graph.mesh, [self.wish[operands(product)[1]] for product in _products(grouping)]
        inside = [t for t in weights if any(axis in atom.axes for dim in t.dims[1:] for atom in dim)]
        if not inside:
            return False
        sent = sum(t.local_bytes(mesh) for t in inside) * (self.sizes[axis] - 1)
        tokens = math.prod(self.sizes[a] for a in {axis, *self.wish[operands(grouping)[0]].axes})
        rows = bytes_of_forms(grouping, tokens, (axis,), mesh)[1]
        rows += bytes_of_forms(grouping, tokens, exchanged, mesh)[0] * (self.sizes[axis] - 1) if exchanged else 0
        return WAITED * rows <= sent

    def _candidates(
        self, sources: list[fx.Node], outs: list[fx.Node | None], projection: Projection, axis: str
    ) -> dict[int, int]:
        """Pieces that someone wishes split over the axis, each with the earliest priority of such a wish."""
        priority_of: dict[int, int] = {}
        for value, pieces in zip((*sources, *outs), (*projection.operands, *projection.results), strict=True):
            if value is None or info(value).constant:
                continue
            ranks = self.graph.priorities.get(value, {})
            for atom, axes in enumerate(self.wish[value].placement):
                if axis in axes and pieces[atom] not in projection.blocked:
                    piece = pieces[atom]
                    priority_of[piece] = min(priority_of.get(piece, _NEVER), ranks.get((atom, axis), _NEVER))
        return priority_of

    def _fitting(
        self, node: fx.Node, projection: Projection, candidates: dict[int, int], split: dict[int, Axes], axis: str
    ) -> dict[int, int]:
        """The candidates whose shards the call can run with the axis added to what is split already."""
        rule = find_rule(node.target)
        if rule is None or (unfit := rule.unfit) is None:
            return candidates

        def fits(piece: int) -> bool:
            return not unfit(node, projection, {**split, piece: (*split.get(piece, ()), axis)}, self.graph.mesh)

        return {piece: rank for piece, rank in candidates.items() if fits(piece)}

    def _cost(
        self, sources: list[fx.Node], outs: list[fx.Node | None], projection: Projection, axis: str, piece: int
    ) -> float:
        """Bytes that a rank would move to split this piece: operands as they lie now, results as they are wished."""
        cost = 0.0
        k = self.sizes[axis]
        for value, pieces in zip(sources, projection.operands, strict=True):
            type = self.now[value]
            size = type.local_bytes(self.graph.mesh)
            current = next((i for i, axes in enumerate(type.placement) if axis in axes), None)
            need = pieces.index(piece) if piece in pieces else None
            if axis in type.partial_axes:
                cost += size if need is not None else 2 * size
            elif current is not None and need is None:
                cost += size * k
            elif current is not None and current != need:
                cost += size
        for value, pieces in zip(outs, projection.results, strict=True):
            if value is None:
                continue
            type = self.wish[value]
            size = type.local_bytes(self.graph.mesh)
            want = next((i for i, axes in enumerate(type.placement) if axis in axes), None)
            get = pieces.index(piece) if piece in pieces else None
            if get is None and piece in projection.operand_pieces:
                cost += size if want is not None else 2 * size
            elif get is not None and want is None:
                cost += size
            elif get is not None and want != get:
                cost += size / 2
        return cost

    def _may_wait(self, node: fx.Node, sources: list[fx.Node], projection: Projection, axis: str, piece: int) -> bool:
        linear = projection.linear == "joint" or (len(sources) == 1 and projection.linear == (0,))
        if not linear or any(piece not in r for r in projection.results):
            return False
        if node in self.carriers and not any(axis in self.now[v].axes for v in sources):
            return True  # what it carries may come to be pending, through an op that has nothing to split
        return all(dict(self.now[v].partial).get(axis) == "sum" for v in sources)

    def _ordered(self, axes: Axes, piece: int, values: list[fx.Node | None], projection: Projection) -> Axes:
        """Several axes on one piece: in the order in which a tensor already has them, else in mesh order."""
        if len(axes) == 1:
            return axes
        for value, pieces in zip(values, (*projection.operands, *projection.results), strict=True):
            if value is not None and piece in pieces:
                has = self.wish[value].placement[pieces.index(piece)]
                if set(axes) <= set(has):
                    return tuple(a for a in has if a in axes)
        return tuple(sorted(axes, key=self.order.index))


def _products(grouping: fx.Node) -> list[fx.Node]:
    offs = results(grouping)[1]
    return [user for user in (offs.users if offs is not None else ()) if user.target is EXPERT_MM]


def _waiting(graph: Graph, copied: dict[fx.Node, Axes]) -> dict[fx.Node, set[str]]:
    """Backward's calls from attention to the weights of heads that ranks share: they had better run on pending sums.

    What attention's heads leave pending is smallest as the gradient of the weight, and as a term of the input's.
    """
    waiting: dict[fx.Node, set[str]] = {}
    for node in list(graph.calls()):
        axes = {axis for v in (*operands(node), *results(node)) if v is not None for axis in copied.get(v, ())}
        todo = [node] if axes and info(node).phase == "bwd" else []
        while todo:
            call = todo.pop()
            if axes <= waiting.get(call, set()):
                continue
            waiting.setdefault(call, set()).update(axes)
            for source in (producer(v)[0] for v in operands(call)):
                rule = find_rule(source.target)
                alone = rule is not None and (rule.kind in ("view", "pointwise") or len(operands(source)) == 1)
                todo += [source] if alone and info(source).phase == "bwd" else []
    return waiting
