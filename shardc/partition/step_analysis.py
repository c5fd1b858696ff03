"""Analyses where a step's body may be cut: groups the calls of one microbatch into units, forward and backward.

    units      wte | wpe | transformer | h.0 | h.1 | ... | ln_f | lm_head | loss      in the order in which they run
    backward   of a unit: the calls that read the values of its forward, or its parameters

A unit is a run of forward calls of one layer (`ir/layers.py`) or, outside of lists, of one module. A layer that is
`divided` consists of the layers inside of it. Forward calls read only their own and earlier units, so any cut between
two units is sound. An assignment of backward calls to units is sound if gradients only flow to the same or an earlier
unit. The choice among sound cuts changes how much is sent, never what is computed.

A value that every stage can compute is not sent. A call is *replicable* if its operands depend on weights alone (casts
and views of weights, the gather of a stored weight), or on the batch alone without GEMMs and collectives (masks,
positions). Replicable calls belong to no unit: each stage that reads one computes it itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from shardc.cost.flops import node_flops
from shardc.ir.diagnostic import error
from shardc.ir.graph import Graph, info, operands, producer
from shardc.ir.layers import layer_or_module, layers_of
from shardc.ir.microbatch import GIVEN, MADE
from shardc.ir.ops.accumulate import ACCUMULATE, ADDS
from shardc.ir.ops.collectives import COLLECTIVES
from shardc.partition.stage_recompute import original_of, recomputed_calls


@dataclass(frozen=True)
class CutUnit:
    """A run of forward calls, which no cut divides."""

    name: str
    calls: tuple[fx.Node, ...]


@dataclass(frozen=True, eq=False)
class StepAnalysis:
    """Lazy analyses of a body whose sums over microbatches are explicit. The body must not change afterwards."""

    body: Graph
    divided: frozenset[str] = frozenset()  # layers that the cut may go through

    def __post_init__(self) -> None:
        hidden = [call for call in self.body.calls() if call.target in ADDS]
        assert not hidden, f"{info(hidden[0]).name} adds to its sum itself: `separate_terms` first"

    @cached_property
    def microbatch_nodes(self) -> set[fx.Node]:
        """Calls that run once a microbatch, and the inputs that they read. The sums themselves are excluded."""
        sums = [node for node in self.body.calls() if node.target is ACCUMULATE]
        after_sums = _reachable(sums, backwards=False)
        outputs = [value for role, value in self._outputs if role in MADE and value not in after_sums]
        return _reachable([*sums, *outputs], backwards=True) - set(sums)

    @cached_property
    def calls(self) -> list[fx.Node]:
        """The calls among `microbatch_nodes`, in order."""
        return [node for node in self.body.calls() if node in self.microbatch_nodes]

    @cached_property
    def buffer_updates(self) -> dict[fx.Node, fx.Node]:
        """A changed buffer's input -> the value that the next microbatch reads instead."""
        inputs = self.body.input_nodes()
        pairs = zip(self.body.outputs, self.body.output_values, strict=True)
        updates = {inputs[port.name]: v for port, v in pairs if port.role == "buffer" and v in self.microbatch_nodes}
        return {old: new for old, new in updates.items() if old is not new}

    @cached_property
    def available_inputs(self) -> set[fx.Node]:
        """Inputs that are available to every reader from the start: all but changed buffers."""
        return {node for node in self.body.placeholders if node not in self.buffer_updates}

    @cached_property
    def replicable(self) -> dict[fx.Node, bool]:
        """Replicable calls. True for cheap ones, without GEMMs and collectives: backward rematerializes them."""
        ports = list(zip(self.body.placeholders, self.body.inputs, strict=True))
        of_batch = {node for node, port in ports if port.role in GIVEN}
        of_weights = {node for node, port in ports if port.role not in GIVEN}
        returned = {_producing_call(v) for role, v in self._outputs if role in MADE}
        returned |= {_producing_call(v) for c in self.body.calls() if c.target is ACCUMULATE for v in operands(c)}
        replicable: dict[fx.Node, bool] = {}
        for call in self.calls:
            read_calls = [_producing_call(v) for v in operands(call)]
            if call in returned or not all(
                read_call in replicable or read_call in self.available_inputs for read_call in read_calls
            ):
                continue
            inexpensive = call.target not in COLLECTIVES and not node_flops(self.body, call)
            cheap = inexpensive and all(replicable.get(read_call, True) for read_call in read_calls)
            batch, weights = (any(read_call in source for read_call in read_calls) for source in (of_batch, of_weights))
            if not batch or (cheap and not weights):
                replicable[call] = cheap
                of_batch |= {call} if batch else set()
                of_weights |= {call} if weights else set()
        return replicable

    @cached_property
    def backward(self) -> set[fx.Node]:
        """Calls of backward: by their phase, or because they read a result of one. None of them is replicable."""
        backward: set[fx.Node] = set()
        for call in self.calls:
            read_calls = (producer(v)[0] for v in operands(call))
            if call not in self.replicable and (
                info(call).phase == "bwd" or any(call_read in backward for call_read in read_calls)
            ):
                backward.add(call)
        return backward

    @cached_property
    def units(self) -> list[CutUnit]:
        runs: list[tuple[str, list[fx.Node]]] = []
        for call in self.calls:
            if call in self.replicable or call in self.backward:
                continue
            name = self._unit_name(call)
            if not runs or runs[-1][0] != name:
                runs.append((name, []))
            runs[-1][1].append(call)
        if not runs:
            raise error("SC221", "the step has no forward to cut into stages", hint="leave out `pipeline`")
        return [CutUnit(name, tuple(calls)) for name, calls in runs]

    @cached_property
    def unit_of(self) -> dict[fx.Node, int]:
        """The unit of every call of a microbatch that is not replicable."""
        unit_of = {call: index for index, unit in enumerate(self.units) for call in unit.calls}
        readers = self._forward_readers(unit_of)
        units_of_name: dict[str, list[int]] = {}
        for index, unit in enumerate(self.units):
            units_of_name.setdefault(unit.name, []).append(index)
        for call in self.calls:
            if call in self.recomputed:
                unit_of[call] = unit_of[self.recomputed[call]]
            elif call in self.backward:
                unit_of[call] = self._backward_unit(
                    call, unit_of, readers, units_of_name.get(self._unit_name(call), [])
                )
        self._move_to_readers(unit_of)
        self._move_to_kept_values(unit_of)
        return unit_of

    @cached_property
    def recomputed(self) -> dict[fx.Node, fx.Node]:
        """Recomputed calls of backward -> their originals, whose unit they get (stage_recompute.py)."""
        elsewhere = {*self.backward, *self.replicable}
        originals = recomputed_calls(self.calls)
        return {copy: first for copy, first in originals.items() if copy in self.backward and first not in elsewhere}

    def _backward_unit(
        self, call: fx.Node, unit_of: dict[fx.Node, int], readers: dict[fx.Node, set[int]], hint: Sequence[int]
    ) -> int:
        """The unit of a backward call: the latest one that has all its operands, if possible one of its own module."""
        gradients = [
            source
            for source in map(_producing_call, operands(call))
            if source in self.backward and source not in self.recomputed
        ]
        last = min((unit_of[source] for source in gradients), default=len(self.units) - 1)
        candidates: set[int] | None = None
        for read in operands(call):
            value = original_of(read, self.recomputed) or read
            if _producing_call(value) not in self.backward and (units := readers.get(value)):
                candidates = set(units) if candidates is None else candidates & units or candidates
        choices = [unit for unit in (range(last + 1) if candidates is None else candidates) if unit <= last]
        same_module = [unit for unit in choices if unit in hint]
        return max(same_module or (choices if candidates is not None else ()) or [last])

    def _forward_readers(self, unit_of: dict[fx.Node, int]) -> dict[fx.Node, set[int]]:
        """The units that have a value in forward: its producer and readers; derived values share a weight's units."""
        readers: dict[fx.Node, set[int]] = {}
        for call, unit in unit_of.items():
            for value in (*operands(call), *result_values(call)):
                for source in self.weight_sources.get(value, (value,)):
                    readers.setdefault(source, set()).add(unit)
        for value, sources in self.weight_sources.items():
            joined = {unit for source in sources for unit in readers.get(source, ())}
            readers[value] = joined
        return readers

    @cached_property
    def weight_sources(self) -> dict[fx.Node, tuple[fx.Node, ...]]:
        """The parameters and buffers that a replicable value depends on. An input depends on itself."""
        state = {"param", "buffer", "state"}
        sources: dict[fx.Node, tuple[fx.Node, ...]] = {
            node: (node,) if port.role in state else ()
            for node, port in zip(self.body.placeholders, self.body.inputs, strict=True)
            if node in self.available_inputs
        }
        for call in self.calls:
            if call in self.replicable:
                call_sources = tuple(dict.fromkeys(s for v in operands(call) for s in sources[v]))
                sources |= dict.fromkeys(result_values(call), call_sources)
        return sources

    def _move_to_readers(self, unit_of: dict[fx.Node, int]) -> None:
        """Move a backward call to the unit of its readers, if it reads gradients alone, its module is not that of its
        unit, and its results are no smaller than its operands.

        A call that only sums read stays: its result is accumulated where it is made.
        """
        size = self.bytes_of
        for call in reversed(self.calls):
            if call not in self.backward or call in self.recomputed:
                continue
            read = operands(call)
            users = {user for value in result_values(call) for user in value.users if user in unit_of}
            only_gradients = all(
                _producing_call(v) in self.backward and _producing_call(v) not in self.recomputed for v in read
            ) and bool(users)
            target = max((unit_of[user] for user in users), default=0)
            elsewhere = target < unit_of[call] and self._unit_name(call) != self.units[unit_of[call]].name
            if (
                only_gradients
                and elsewhere
                and sum(map(size, dict.fromkeys(read))) <= sum(map(size, result_values(call)))
            ):
                unit_of[call] = target

    def _move_to_kept_values(self, unit_of: dict[fx.Node, int]) -> None:
        """Move backward calls that depend on no gradient to the unit of their readers, if other calls of backward there
        read the same values of forward: keys that a ring moves, neighbours' rows. A later unit may have these values
        too, and would send what it makes of them.
        """
        sources: dict[fx.Node, set[fx.Node]] = {}  # by such a call: the values of forward that it depends on
        for call in self.calls:
            if call in self.backward and call not in self.recomputed:
                read = [(value, _producing_call(value)) for value in operands(call)]
                # The gradient of the loss by itself is a constant of backward.
                if all(info(source).phase != "bwd" or source in sources for _, source in read):
                    sources[call] = {value for v, source in read for value in sources.get(source, {v})}
        gradients = self.backward - sources.keys()
        for call in reversed(sources):
            users = {user for value in result_values(call) for user in value.users if user in unit_of}
            target = max((unit_of[user] for user in users), default=unit_of[call])
            kept = (any(unit_of.get(u) == target for u in value.users if u in gradients) for value in sources[call])
            if target < unit_of[call] and all(kept):
                unit_of[call] = target

    def _unit_name(self, call: fx.Node) -> str:
        return layer_or_module(info(call).fqn, self.divided)

    def bytes_of(self, value: fx.Node) -> int:
        type = info(value).type
        return 0 if type is None else type.local_bytes(self.body.mesh)

    @property
    def _outputs(self) -> list[tuple[str, fx.Node]]:
        pairs = zip(self.body.outputs, self.body.output_values, strict=True)
        return [(port.role, value) for port, value in pairs]


def finest_analysis(body: Graph) -> StepAnalysis:
    """The analysis in which every layer is divided into the layers inside of it."""
    return StepAnalysis(body, divisible_layers(body))


def divisible_layers(body: Graph) -> frozenset[str]:
    """The layers that contain other layers."""
    return frozenset(layer for call in body.calls() for layer in layers_of(info(call).fqn)[:-1])


def result_values(call: fx.Node) -> list[fx.Node]:
    """The tensor results of a call that are read."""
    return [call] if info(call).type is not None else list(call.users)


def _producing_call(value: fx.Node) -> fx.Node:
    return producer(value)[0]


def _reachable(start: Iterable[fx.Node], *, backwards: bool) -> set[fx.Node]:
    reached: set[fx.Node] = set()
    todo = list(start)
    while todo:
        node = todo.pop()
        if node not in reached and node.op != "output":
            reached.add(node)
            todo.extend(node.all_input_nodes if backwards else node.users)
    return reached
