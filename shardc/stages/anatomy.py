"""What of a step's body may be cut where: its calls of one microbatch, in forward order, as units; backward by unit.

    units      wte | wpe | transformer | h.0 | h.1 | ... | ln_f | lm_head | loss      in the order in which they run
    backward   of a unit: the calls that read what its forward made, or its parameters

A unit is a run of forward calls of one layer (a module up to the last list index in its name) or, outside of lists, of
one module. A prefix of the units is closed under what forward reads, so any cut between two units is sound, and so is
any assignment of backward calls in which gradients only flow to the same unit or an earlier one. Which of those is
chosen decides how much is sent, and never what is computed.

Nobody sends what everybody can make. A call is *free* if all that it reads is made of weights alone (casts and views of
them, the gather of a stored one), or of the batch alone, without products and collectives (masks, positions). Free
calls belong to no unit: each stage that reads one makes it itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from shardc.cost.flops import node_flops
from shardc.ir.diagnostic import error
from shardc.ir.graph import Graph, info, operands, producer
from shardc.ir.microbatch import GIVEN, MADE
from shardc.ir.ops.accumulate import ACCUMULATE
from shardc.ir.ops.collectives import COLLECTIVES
from shardc.stages.again import original_of, originals


@dataclass(frozen=True)
class Unit:
    """A run of forward calls, which a cut does not divide."""

    name: str
    calls: tuple[fx.Node, ...]


@dataclass(frozen=True, eq=False)
class Anatomy:
    """A body whose sums over microbatches are explicit (sums.py), looked at once; the body must not change after."""

    body: Graph

    @cached_property
    def inside(self) -> set[fx.Node]:
        """Calls that run once a microbatch, and the inputs they read; the sums themselves are not among them."""
        sums = [node for node in self.body.calls() if node.target is ACCUMULATE]
        after = _reached(sums, backwards=False)
        own = [value for role, value in self._outputs if role in MADE and value not in after]
        return _reached([*sums, *own], backwards=True) - set(sums)

    @cached_property
    def calls(self) -> list[fx.Node]:
        """Those of `inside`, in order."""
        return [node for node in self.body.calls() if node in self.inside]

    @cached_property
    def carried(self) -> dict[fx.Node, fx.Node]:
        """A buffer's input -> what the microbatch after finds in its place, where that is another value."""
        inputs = self.body.input_nodes()
        pairs = zip(self.body.outputs, self.body.output_values, strict=True)
        found = {inputs[port.name]: v for port, v in pairs if port.role == "buffer" and v in self.inside}
        return {old: new for old, new in found.items() if old is not new}

    @cached_property
    def given(self) -> set[fx.Node]:
        """Inputs that are there from the start wherever they are read."""
        return {node for node in self.body.placeholders if node not in self.carried}

    @cached_property
    def free(self) -> dict[fx.Node, bool]:
        """Free calls; True for those that are rather made twice than kept: neither products nor collectives."""
        named = list(zip(self.body.placeholders, self.body.inputs, strict=True))
        of_batch = {node for node, port in named if port.role in GIVEN}
        of_weights = {node for node, port in named if port.role not in GIVEN}
        returned = {_call(v) for role, v in self._outputs if role in MADE}
        returned |= {_call(v) for c in self.body.calls() if c.target is ACCUMULATE for v in operands(c)}
        found: dict[fx.Node, bool] = {}
        for call in self.calls:
            made = [_call(v) for v in operands(call)]
            if call in returned or not all(one in found or one in self.given for one in made):
                continue
            light = call.target not in COLLECTIVES and not node_flops(self.body, call)
            cheap = light and all(found.get(one, True) for one in made)
            batch, weights = (any(one in source for one in made) for source in (of_batch, of_weights))
            if not batch or (cheap and not weights):
                found[call] = cheap
                of_batch |= {call} if batch else set()
                of_weights |= {call} if weights else set()
        return found

    @cached_property
    def backward(self) -> set[fx.Node]:
        """Calls of backward: by their phase, or because they read what one of those made. None of them is free."""
        found: set[fx.Node] = set()
        for call in self.calls:
            made = (producer(v)[0] for v in operands(call))
            if call not in self.free and (info(call).phase == "bwd" or any(one in found for one in made)):
                found.add(call)
        return found

    @cached_property
    def units(self) -> list[Unit]:
        found: list[tuple[str, list[fx.Node]]] = []
        for call in self.calls:
            if call in self.free or call in self.backward:
                continue
            name = unit_name(info(call).fqn)
            if not found or found[-1][0] != name:
                found.append((name, []))
            found[-1][1].append(call)
        if not found:
            raise error("SC221", "the step has no forward to cut into stages", hint="leave out `pipeline`")
        return [Unit(name, tuple(calls)) for name, calls in found]

    @cached_property
    def unit_of(self) -> dict[fx.Node, int]:
        """The unit of every call of a microbatch that is not free."""
        found = {call: at for at, unit in enumerate(self.units) for call in unit.calls}
        readers = self._forward_readers(found)
        named: dict[str, list[int]] = {}
        for at, unit in enumerate(self.units):
            named.setdefault(unit.name, []).append(at)
        for call in self.calls:
            if call in self.again:
                found[call] = found[self.again[call]]
            elif call in self.backward:
                found[call] = self._home(call, found, readers, named.get(unit_name(info(call).fqn), []))
        self._lower(found)
        return found

    @cached_property
    def again(self) -> dict[fx.Node, fx.Node]:
        """Forward that backward runs again, and what it repeats: it goes where that is (again.py)."""
        elsewhere = {*self.backward, *self.free}
        found = originals(self.calls)
        return {copy: first for copy, first in found.items() if copy in self.backward and first not in elsewhere}

    def _home(
        self, call: fx.Node, found: dict[fx.Node, int], readers: dict[fx.Node, set[int]], hint: Sequence[int]
    ) -> int:
        """As the module's name says, among the units where all that the call reads is at hand: as late as may be."""
        gradients = [made for made in map(_call, operands(call)) if made in self.backward and made not in self.again]
        last = min((found[made] for made in gradients), default=len(self.units) - 1)
        there: set[int] | None = None
        for read in operands(call):
            value = original_of(read, self.again) or read
            if _call(value) not in self.backward and (at := readers.get(value)):
                there = set(at) if there is None else there & at or there
        choices = [at for at in (range(last + 1) if there is None else there) if at <= last]
        named = [at for at in choices if at in hint]
        return max(named or (choices if there is not None else ()) or [last])

    def _forward_readers(self, found: dict[fx.Node, int]) -> dict[fx.Node, set[int]]:
        """Where forward has a value at hand: its maker, its readers; of what is made of a weight, the weight's."""
        readers: dict[fx.Node, set[int]] = {}
        for call, at in found.items():
            for value in (*operands(call), *values_of(call)):
                for source in self.sources.get(value, (value,)):
                    readers.setdefault(source, set()).add(at)
        for value, sources in self.sources.items():
            joined = {at for source in sources for at in readers.get(source, ())}
            readers[value] = joined
        return readers

    @cached_property
    def sources(self) -> dict[fx.Node, tuple[fx.Node, ...]]:
        """The parameters and buffers that a free value is made of; an input is made of itself."""
        state = {"param", "buffer", "state"}
        found: dict[fx.Node, tuple[fx.Node, ...]] = {
            node: (node,) if port.role in state else ()
            for node, port in zip(self.body.placeholders, self.body.inputs, strict=True)
            if node in self.given
        }
        for call in self.calls:
            if call in self.free:
                made = tuple(dict.fromkeys(s for v in operands(call) for s in found[v]))
                found |= dict.fromkeys(values_of(call), made)
        return found

    def _lower(self, found: dict[fx.Node, int]) -> None:
        """Move to its readers what reads gradients alone, is named for no other unit, and makes no less than it reads.

        What only the sums read stays: they are summed where they are made.
        """
        size = self.bytes_of
        for call in reversed(self.calls):
            if call not in self.backward or call in self.again:
                continue
            read = operands(call)
            users = {user for value in values_of(call) for user in value.users if user in found}
            alone = all(_call(v) in self.backward and _call(v) not in self.again for v in read) and bool(users)
            target = max((found[user] for user in users), default=0)
            elsewhere = target < found[call] and unit_name(info(call).fqn) != self.units[found[call]].name
            if alone and elsewhere and sum(map(size, dict.fromkeys(read))) <= sum(map(size, values_of(call))):
                found[call] = target

    def bytes_of(self, value: fx.Node) -> int:
        about = info(value).type
        return 0 if about is None else about.local_bytes(self.body.mesh)

    @property
    def _outputs(self) -> list[tuple[str, fx.Node]]:
        pairs = zip(self.body.outputs, self.body.output_values, strict=True)
        return [(port.role, value) for port, value in pairs]


def unit_name(fqn: str) -> str:
    """`h.0.attn.c_attn` is of `h.0`; outside of lists, a module is its own."""
    parts = fqn.split(".")
    last = next((i for i in reversed(range(len(parts))) if parts[i].isdigit()), len(parts) - 1)
    return ".".join(parts[: last + 1])


def values_of(call: fx.Node) -> list[fx.Node]:
    """The tensors of a call that something reads."""
    return [call] if info(call).type is not None else list(call.users)


def _call(value: fx.Node) -> fx.Node:
    return producer(value)[0]


def _reached(start: Iterable[fx.Node], *, backwards: bool) -> set[fx.Node]:
    found: set[fx.Node] = set()
    todo = list(start)
    while todo:
        node = todo.pop()
        if node not in found and node.op != "output":
            found.add(node)
            todo.extend(node.all_input_nodes if backwards else node.users)
    return found
