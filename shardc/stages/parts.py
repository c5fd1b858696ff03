"""What each part of each stage runs, reads and makes, given the stage of every call.

    forward    the stage's calls of forward, and the free calls that they need
    dgrad      what a gradient that leaves the stage is made of      } both with the free calls that they need, cheap
    wgrad      the rest of backward                                  } ones made again, dear ones kept of forward's

A value is made by one part and read by others, of the same stage or of another. What no other stage reads goes by a
name that it shares with all that lives as long: `kept1.d` from forward to dgrad, `kept1.w` to wgrad, `kept1` to both,
`dkept1` from dgrad to wgrad. Gathers of weights are in none of these parts (see hoist.py): `params1` is a part too,
which runs once for many microbatches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from torch import fx

from shardc.ir.diagnostic import error
from shardc.ir.graph import Graph, Port, info, operands, producer
from shardc.ir.microbatch import MADE
from shardc.stages.anatomy import Anatomy
from shardc.stages.carried import in_two_stages
from shardc.stages.hoist import gathering, grouped
from shardc.stages.pipeline import PARTS
from shardc.stages.split_backward import split_backward
from shardc.stages.sums import Sum

Place = tuple[int, str]  # a part of a stage, or a name of what it gathers


class Parts:
    """The tables that describe a cut, each made of those before it.

    `stage_of` says where each call of a microbatch runs that is not free. Raises ShardcError (SC221) where that is no
    pipeline of forward and backward.
    """

    def __init__(
        self,
        graph: Graph,
        count: int,
        stage_of: dict[fx.Node, int],
        sums: tuple[Sum, ...],
        kept: frozenset[fx.Node] = frozenset(),
    ) -> None:
        self.graph, self.count, self.stage_of, self.sums = graph, count, stage_of, sums
        self.anatomy = Anatomy(graph)
        self.order = {call: at for at, call in enumerate(self.anatomy.calls)}
        for call in self.anatomy.calls:
            if call not in self.anatomy.free:  # what a sum reads directly may have been free before
                stage_of.setdefault(call, 0)
        self.carried_by = {old: stage_of.get(producer(new)[0], 0) for old, new in self.anatomy.carried.items()}
        self.calls: dict[Place, list[fx.Node]] = {}
        self.backward: list[list[fx.Node]] = []
        self.hoisted = gathering(self.anatomy)
        self.gathers: list[tuple[str, ...]] = []  # by stage
        self.gathered_by: list[dict[fx.Node, str]] = []
        for stage in range(count):
            self._share_out(stage)
            self._gather(stage, kept)
        self.outputs = self._given_to_step()
        self.readers = self._readers()

    # ------------------------------------------------------------------ what runs where
    def _share_out(self, stage: int) -> None:
        own = [call for call in self.anatomy.calls if self.stage_of.get(call) == stage]
        ahead = [call for call in own if call not in self.anatomy.backward]
        back = [call for call in own if call in self.anatomy.backward]
        free = self._free(ahead, set())
        # Backward makes again what is cheap, and keeps of forward's what is not: gathered parameters.
        again = self._free(back, {call for call in free if not self.anatomy.free[call]})
        self.calls[stage, "forward"] = sorted({*ahead, *free}, key=self.order.__getitem__)
        self.backward.append(sorted({*back, *again}, key=self.order.__getitem__))
        self.calls[stage, "dgrad"], self.calls[stage, "wgrad"] = split_backward(self.backward[-1], self._leaves)

    def _free(self, calls: Sequence[fx.Node], there: set[fx.Node]) -> set[fx.Node]:
        """The free calls that some calls need, and that are not there or gathered."""
        found: set[fx.Node] = set()
        todo = list(calls)
        while todo:
            for value in operands(todo.pop()):
                call = producer(value)[0]
                if call in self.anatomy.free and call not in found and call not in there and call not in self.hoisted:
                    found.add(call)
                    todo.append(call)
        return found

    def _gather(self, stage: int, kept: frozenset[fx.Node]) -> None:
        """What the parts of a stage read of hoisted calls becomes parts of its own."""
        readers = {which: self.calls[stage, which] for which in PARTS}
        groups = grouped(f"params{stage}", readers, self.hoisted, kept)
        self.gathers.append(tuple(groups))
        self.gathered_by.append({call: name for name, calls in groups.items() for call in calls})
        for name, calls in groups.items():
            self.calls[stage, name] = sorted(calls, key=self.order.__getitem__)

    def _leaves(self, value: fx.Node) -> bool:
        """Does a value of backward go to another stage?"""
        home = self.stage_of.get(producer(value)[0])
        return home is not None and any(self.stage_of.get(user, home) != home for user in value.users)

    def _maker(self, value: fx.Node, reader: Place) -> Place | None:
        """The part that makes a value for one that reads it; None if that has it from the start, or makes it itself."""
        call, (stage, part) = producer(value)[0], reader
        if value in self.anatomy.given or call in self._own[reader]:
            return None
        if call in self.hoisted:
            return stage, self.gathered_by[stage][call]
        if value in self.carried_by:
            if self.carried_by[value] != stage:
                raise in_two_stages(self.anatomy, value, self.stage_of)
            return None if part == "forward" else (stage, "forward")
        if call in self.anatomy.free:
            return (stage, "dgrad") if call in self._own[stage, "dgrad"] else (stage, "forward")
        home = self.stage_of[call]
        if call not in self.anatomy.backward:
            return (home, "forward")
        return (home, "dgrad") if call in self._own[home, "dgrad"] else (home, "wgrad")

    @cached_property
    def _own(self) -> dict[Place, set[fx.Node]]:
        return {place: set(calls) for place, calls in self.calls.items()}

    def _given_to_step(self) -> dict[Place, list[tuple[Port, fx.Node]]]:
        """What each part gives to the step: terms of its sums, and what each microbatch has of its own."""
        found: dict[Place, list[tuple[Port, fx.Node]]] = {place: [] for place in self.calls}
        for one in self.sums:
            for stage, node in one.parts.items():
                (value,) = operands(node)
                found[self._home(value, stage)].append((Port("sum", one.name), value))
        for port, value in zip(self.graph.outputs, self.graph.output_values, strict=True):
            if port.role in MADE and value in self.anatomy.inside:
                found[self._home(value, self.carried_by.get(value, 0))].append((port, value))
        return found

    def _home(self, value: fx.Node, stage: int) -> Place:
        """The part that makes a value; an input's is the forward of `stage`."""
        call = producer(value)[0]
        stage = self.stage_of.get(call, stage)
        for part in PARTS:
            if call in self._own[stage, part]:
                return stage, part
        return stage, "forward"

    def _readers(self) -> dict[tuple[Place, fx.Node], list[Place]]:
        """Of each value that passes between parts, and its maker: those that read it."""
        found: dict[tuple[Place, fx.Node], list[Place]] = {}
        for place, calls in self.calls.items():
            read = [v for call in calls for v in operands(call)] + [v for _, v in self.outputs[place]]
            for value in dict.fromkeys(read):
                maker = self._maker(value, place)
                if maker is not None:
                    found.setdefault((maker, value), []).append(place)
        for (maker, value), readers in found.items():
            if maker[1] in ("dgrad", "wgrad") and any(part == "forward" for _, part in readers):
                raise error(
                    "SC221",
                    f"forward reads a gradient, {info(value).name}: such a step is no pipeline of forward and backward",
                    hint="compile it without `pipeline`",
                )
        return found

    # ------------------------------------------------------------------ what that is called
    @cached_property
    def names(self) -> dict[tuple[Place, fx.Node], str]:
        """A value's own name if it leaves its stage, else that of all values that live as long."""
        found: dict[tuple[Place, fx.Node], str] = {}
        for (maker, value), readers in self.readers.items():
            stage, part = maker
            if part in self.gathers[stage]:
                found[maker, value] = part
            elif any(other != stage for other, _ in readers):
                found[maker, value] = info(value).name
            elif part == "dgrad":
                found[maker, value] = f"dkept{stage}"
            else:
                until = {"dgrad", "wgrad"} & {of for _, of in readers}
                found[maker, value] = f"kept{stage}" + (f".{until.pop()[0]}" if len(until) == 1 else "")
        return found

    def makes(self, place: Place) -> dict[fx.Node, str]:
        return {value: name for (maker, value), name in self.names.items() if maker == place}

    def reads(self, place: Place) -> list[str]:
        readers = self.readers.items()
        return list(dict.fromkeys(self.names[key] for key, places in readers if place in places))

    @cached_property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """The stages that need each sum: those with terms, and those that hold the parameter whose gradient it is."""
        held: dict[fx.Node, set[int]] = {}
        for (stage, _), calls in self.calls.items():
            for value in {v for call in calls for v in operands(call)} & self.anatomy.given:
                held.setdefault(value, set()).add(stage)
        found = {one.total: set(one.parts) for one in self.sums}
        inputs = self.graph.input_nodes()
        gradients = dict(self.graph.gradients)
        gradients |= {p.name: v for p, v in self._returned if p.role == "grad"}
        for name, value in gradients.items():
            for total in _sums_above(value, found):
                found[total] |= held.get(inputs[name], set())
        return {one.name: tuple(sorted(found[one.total])) for one in self.sums}

    @property
    def _returned(self) -> list[tuple[Port, fx.Node]]:
        return list(zip(self.graph.outputs, self.graph.output_values, strict=True))


def _sums_above(value: fx.Node, sums: Mapping[fx.Node, set[int]]) -> set[fx.Node]:
    """The sums that a gradient is made of."""
    found: set[fx.Node] = set()
    todo, seen = [value], set[fx.Node]()
    while todo:
        node = todo.pop()
        if node in sums:
            found.add(node)
        elif node not in seen:
            seen.add(node)
            todo.extend(node.all_input_nodes)
    return found
