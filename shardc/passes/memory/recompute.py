"""recompute: run parts of the forward again in backward instead of keeping what they made.

Needs: lowered collectives. Ensures: nothing but the order of liveness changes: a call that runs again has the
operands, assignment and types of the first, so every number is bit for bit the same (random draws count by
element, so they replay).

A value that backward reads is kept, or made again by `r.<name>`, a copy of its call just before backward first wants
it. Kept are in any case inputs, outputs, and what passes from one segment to another: a segment is a layer
(`ir/layers.py`), and all that is in no layer is one more.

    full        a layer keeps its inputs; all else is made again (without layers, the whole forward)
    selective   products with weights are kept, cheap calls run again: pointwise, norms, softmax, dropout, and
                attention where recomputing it is bound by memory, not arithmetic
    budget      what takes the least time to run again, by the hardware's account (`rerun_cost`), and brings the peak of
                live activations under so many bytes a rank; what `offload` moves to the host counts as it does there

A collective runs again only under `collectives`, and so does attention in a ring, which passes keys on. But where
backward gathers the same value anyway (ZeRO-3's weights, sequence parallelism), that gather serves both. In all modes a
minimum cut says which values are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import fx

from shardc.cost.flops import PRODUCTS
from shardc.cost.memory import memory
from shardc.ir.collectives import collective, human_bytes
from shardc.ir.diagnostic import Diagnostic
from shardc.ir.graph import (
    Graph,
    info,
    op_name,
    operands,
    producer,
    replace_operands,
    results,
    set_info,
    type_of,
    update,
)
from shardc.ir.hardware import DEFAULT, Hardware
from shardc.ir.ops.attention_keys import SDPA_KEYS
from shardc.ir.ops.attention_rows import SDPA_RING
from shardc.ir.ops.collectives import COLLECTIVES
from shardc.ir.provenance import Derivation
from shardc.ir.schema import schema_of
from shardc.passes.base import Pass
from shardc.passes.memory.offload import Offload, made_of_weights, read_last, second_layer
from shardc.passes.memory.recompute_choice import Call, Choice, Storage, Tradeoff, fewest_bytes, within
from shardc.passes.memory.recompute_liveness import Step, activation_bytes, is_view, kept_anyway, live_bytes, owners
from shardc.passes.memory.rerun_cost import attention_is_light, rerun_cost

Mode = Literal["none", "full", "selective", "budget"]

ATTENTION = {"bmm", "shardc.sdpa", "shardc.sdpa_keys"}  # products of activations alone; all others have a weight


@dataclass(frozen=True)
class Recompute(Pass):
    """Trade arithmetic for memory. `budget` is in bytes a rank, for the `halves` that are under way at once. `offload`
    will move up to so many bytes of activations to the host."""

    mode: Mode = "none"
    budget: int = 0
    collectives: bool = False
    hardware: Hardware = DEFAULT
    halves: int = 1
    offload: Offload = field(default_factory=Offload)

    def run(self, graph: Graph) -> Graph:
        if self.mode == "none":
            return graph
        forward = _Forward(graph)
        moved = self._moved(forward) if self.mode == "budget" else set[fx.Node]()
        segments = [self._tradeoff(forward, name, moved) for name in forward.segments]
        tradeoffs = [t for t, _ in segments]

        def dropped(choices: Sequence[Choice]) -> set[fx.Node]:
            return {
                storage_values[position]
                for (_, storage_values), c in zip(segments, choices, strict=True)
                for position in c.dropped
            }

        if self.mode == "budget":
            each = self.budget // self.halves
            selected, peak = within(tradeoffs, each, lambda choices: forward.peak(dropped(choices), moved))
            if peak > each:
                graph.diagnostics.append(self._too_much(peak * self.halves))
        else:
            selected = [fewest_bytes(t) for t in tradeoffs]
        _rewrite(graph, forward, dropped(selected))
        graph.erase_dead()
        return graph

    def settle(self, body: Graph) -> None:
        """Report SC214, or withdraw it, for a body as ranks run it, by the activations that `cost.memory` counts.

        The choice itself leaves memory for temporaries, live at the same time. Without a budget nothing is reported.
        """
        if self.mode != "budget":
            return
        body.diagnostics = [d for d in body.diagnostics if d.code != "SC214"]
        activations = memory(body, overlap=True).row("activations").most
        if activations > self.budget:
            body.diagnostics.append(self._too_much(activations))

    def _moved(self, forward: _Forward) -> set[fx.Node]:
        """The storages that will lie on the host if they are kept."""
        most = self.offload.activations
        return forward.movable(self.offload.least, most if most == "all" else most // self.halves)

    def _tradeoff(self, forward: _Forward, segment: str, moved: set[fx.Node]) -> tuple[Tradeoff, list[fx.Node]]:
        """The tradeoff of a segment, and the values for which its storages were allocated. What is `moved` is kept for
        nothing."""
        calls = [c for c in forward.segments[segment] if not is_view(c.target)]
        call_results = [[v for v in results(c) if v is not None and v not in forward.given] for c in calls]
        storage_values = [v for values in call_results for v in values]
        position = {v: i for i, v in enumerate(storage_values)}
        priced_calls: list[Call] = []
        for call, values in zip(calls, call_results, strict=True):
            reads = dict.fromkeys(position[o] for v in operands(call) if (o := forward.owner[v]) in position)
            priced_calls.append(
                Call(self._price(forward, call, segment), tuple(reads), tuple(position[v] for v in values))
            )
        mesh = forward.graph.mesh
        sizes = [0 if v in moved else type_of(v).local_bytes(mesh) for v in storage_values]
        storages = tuple(Storage(n, v in forward.needed) for n, v in zip(sizes, storage_values, strict=True))
        return Tradeoff(tuple(priced_calls), storages), storage_values

    def _price(self, forward: _Forward, call: fx.Node, segment: str) -> int | None:
        """What running a call again costs (`rerun_cost`); None if it may not."""
        if call in forward.twins:
            return 0
        if torch.Tag.nondeterministic_seeded in call.target.tags or schema_of(call.target).is_mutable:  # type: ignore[union-attr]
            return None
        sends = call.target in COLLECTIVES or call.target in (SDPA_RING, SDPA_KEYS)  # log-sums of keys are gathered
        if sends and (not self.collectives or (call.target in COLLECTIVES and not collective(forward.graph, call))):
            return None
        if call.target in COLLECTIVES:
            return rerun_cost(forward.graph, call, self.hardware)
        if self.mode == "full" and not segment and len(forward.segments) > 1:
            return None
        if self.mode == "selective" and call.target is not SDPA_RING and not self._cheap(forward.graph, call):
            return None
        return rerun_cost(forward.graph, call, self.hardware)

    def _cheap(self, graph: Graph, call: fx.Node) -> bool:
        """Is running a call again bound by memory? Products with weights count as dear, whatever their size."""
        op = op_name(call.target)
        return attention_is_light(graph, call, self.hardware) if op in ATTENTION else op not in PRODUCTS

    def _too_much(self, peak: int) -> Diagnostic:
        message = (
            f"activations take {human_bytes(peak)} a rank with all recomputation that is allowed; "
            f"the budget is {human_bytes(self.budget)}"
        )
        more = "" if self.collectives else ", or allow collectives to be recomputed (recompute: {collectives: true})"
        hint = f"use smaller batches, shard activations over more axes{more}"
        return Diagnostic("SC214", message, "warning", hint=hint)


@dataclass
class _Forward:
    """Inputs of the choice: the storage of each value, those kept in any case, and those that backward reads."""

    graph: Graph
    segments: dict[str, list[fx.Node]] = field(default_factory=dict[str, list[fx.Node]])  # forward calls, by layer
    given: set[fx.Node] = field(default_factory=set[fx.Node])  # storages that are kept in any case
    needed: set[fx.Node] = field(default_factory=set[fx.Node])  # storages that backward reads
    twins: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])  # collective -> backward's equal one

    def __post_init__(self) -> None:
        owner = self.owner
        self.given |= kept_anyway(self.graph, owner)
        backward: dict[tuple[object, str, str], fx.Node] = {}
        for call in self.calls:
            layer = info(call).layer
            if is_forward(call):
                self.segments.setdefault(layer, []).append(call)
            elif call.target in COLLECTIVES:
                backward.setdefault(_same(call), call)
            for value in operands(call):
                storage = owner[value]
                if not is_forward(call):
                    self.needed.add(storage)
                elif info(storage).layer != layer:
                    self.given.add(storage)
        for call in self.calls:
            if is_forward(call) and call.target in COLLECTIVES and _same(call) in backward:
                self.twins[call] = backward[_same(call)]

    @cached_property
    def calls(self) -> list[fx.Node]:
        return list(self.graph.calls())

    @cached_property
    def owner(self) -> dict[fx.Node, fx.Node]:
        return owners(self.graph)

    @cached_property
    def sizes(self) -> dict[Hashable, int]:
        storage_bytes = activation_bytes(self.graph, self.owner)
        return {**storage_bytes, **{(v, "again"): size for v, size in storage_bytes.items()}}

    def schedule(self, dropped: set[fx.Node]) -> list[tuple[list[fx.Node], fx.Node]]:
        """All calls in order, each with the forward calls that must run again right before it."""
        order = {call: i for i, call in enumerate(self.calls)}
        serves = {twin: call for call, twin in self.twins.items()}
        finished: set[fx.Node] = set()
        steps: list[tuple[list[fx.Node], fx.Node]] = []
        for call in self.calls:
            if is_forward(call):
                steps.append(([], call))
            elif serves.get(call) not in finished:  # else it ran earlier, in place of the forward's
                steps.append((sorted(self._missing(call, dropped, finished), key=order.__getitem__), call))
                if call in serves:
                    finished.add(serves[call])
        return steps

    def _missing(self, call: fx.Node, dropped: set[fx.Node], finished: set[fx.Node]) -> list[fx.Node]:
        """The forward calls that must run again before this one can; they count as done."""
        missing: list[fx.Node] = []
        todo = [call]
        while todo:
            for value in operands(todo.pop()):
                source = producer(value)[0]
                if self.owner[value] in dropped and is_forward(source) and source not in finished:
                    finished.add(source)
                    missing.append(source)
                    todo.append(source)
        return missing

    def movable(self, least: int, most: int | Literal["all"]) -> set[fx.Node]:
        """The storages that `offload` moves to the host if all are kept."""
        weights = made_of_weights(self.graph)
        backward = [i for i, call in enumerate(self.calls) if not is_forward(call) and call not in weights]
        if not backward or most == 0:
            return set()
        read: dict[fx.Node, int] = {}
        for index in backward:
            for value in operands(self.calls[index]):
                read.setdefault(self.owner[value], index)
        second = second_layer(self.calls, backward)
        late = {v: index for v, index in read.items() if index >= second and v not in weights}
        fitting = {v: self.sizes[v] for v in late if self.sizes.get(v, 0) >= least and info(v).phase == "fwd"}
        return read_last({v: (late[v], size) for v, size in fitting.items() if v not in self.twins}, most)

    def peak(self, dropped: set[fx.Node], moved: Collection[fx.Node] = ()) -> int:
        """The peak of live activation bytes if these storages are not kept for backward, and those lie on the host."""
        on_host = {*moved} - dropped
        again, waiting = dropped | on_host, {*on_host}

        def keys(values: Iterable[fx.Node | None], late: bool) -> list[Hashable]:
            return [self._key(self.owner[v], late and self.owner[v] in again) for v in values if v is not None]

        def step(call: fx.Node, late: bool) -> Step:
            return Step(keys(operands(call), late), keys(results(call), late))

        steps: list[Step] = []
        for first, call in self.schedule(dropped):
            late = not is_forward(call)
            if late and waiting:
                back = {self.owner[v] for each in (*first, call) for v in operands(each)} & waiting
                steps += [Step((), [(storage, "again")]) for storage in back]
                waiting -= back
            steps += [step(self.twins.get(recomputed, recomputed), True) for recomputed in first]
            steps.append(step(call, late))
        return max(live_bytes(steps, self.sizes), default=0)

    def _key(self, storage: fx.Node, recomputed: bool) -> Hashable:
        twin = self.twins.get(storage)
        return storage if not recomputed else (storage, "again") if twin is None else twin


def is_forward(call: fx.Node) -> bool:
    return call.op == "call_function" and info(call).phase == "fwd"


def _same(call: fx.Node) -> tuple[object, str, str]:
    return call.target, repr(call.args), repr(call.kwargs)


def _rewrite(graph: Graph, forward: _Forward, dropped: set[fx.Node]) -> None:
    """Insert the recomputed calls: a copy of each before the first backward call that reads it."""
    new: dict[fx.Node, fx.Node] = {}
    for first, call in forward.schedule(dropped):
        for recomputed in first:
            twin = forward.twins.get(recomputed)
            if twin is None:
                with graph.fx.inserting_before(call):
                    _run_again(graph, recomputed, new)
            else:
                call.prepend(twin)
                update(twin, origin=Derivation("recomputed", info(recomputed).name))
                _read(twin, new)
                new[recomputed] = twin
        if not is_forward(call):
            _read(call, new)


def _read(call: fx.Node, new: Mapping[fx.Node, fx.Node]) -> None:
    replace_operands(call, [new.get(v, v) for v in operands(call)])


def _run_again(graph: Graph, call: fx.Node, new: dict[fx.Node, fx.Node]) -> None:
    """Copy a forward call, and the getitems of its results, into backward."""
    for node in (call, *(v for v in results(call) if v is not None and v is not call)):
        copy = graph.fx.node_copy(node, lambda n: new.get(n, n))
        about = info(node)
        origin = Derivation("recomputed", about.name)
        set_info(copy, replace(about, name=graph.unique(f"r.{about.name}"), phase="bwd", origin=origin))
        new[node] = copy
