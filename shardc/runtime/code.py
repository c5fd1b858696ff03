"""A graph as prepared code: a flat list of plain calls, which one rank runs again and again.

Everything that can be known beforehand is: argument templates, slots, what dies when, offsets that depend on the rank
alone, where collectives begin and where they are waited for. A run is then one loop; an error in it names the
instruction, the user's line and the rank. Who keeps the values of the slots, and in which order code is run, is for
others to say: `executor` runs a whole step of microbatches, `stages.executor` the parts of a pipeline's list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

import shardc.ir.ops.fused_attention  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers what GPUs run)
from shardc.ir.arena import views
from shardc.ir.buckets import Piece, layout_of, pieces, reduced_in_place
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import Graph
from shardc.ir.in_place import INTO, Operand, Place, Write, writes
from shardc.ir.ops.buckets import PACK, UNPACK
from shardc.ir.ops.collectives import COLLECTIVES, all_reduce_over, run_collective
from shardc.ir.ops.context import RankContext, running
from shardc.ir.ops.local import axis_offset
from shardc.runtime.arena import Arena
from shardc.runtime.flat import Flat, packed, unpacked
from shardc.runtime.index_check import out_of_range
from shardc.runtime.instructions import Instruction, Numerics, flatten
from shardc.runtime.monitor import Monitor
from shardc.runtime.overlap import Action, arranged, begin

Single = int  # the slot of a call's only result
Many = tuple[tuple[int, int], ...]  # (position among the results, slot)
Arguments = Callable[[Sequence[Any]], tuple[Sequence[Any], dict[str, Any]]]
NOTHING: dict[str, Any] = {}
Code = tuple[int, Callable[..., Any], Any, Single | Many, tuple[int, ...]]


class Routine:
    """A localized graph, as the rank of `context` runs it. `empty` is what its slots hold before: what is the same in
    every run, such as the places of results in an arena, is there all along."""

    def __init__(
        self, graph: Graph, context: RankContext, rank: int, device: torch.device, arena: Arena | None = None
    ) -> None:
        self.graph, self.rank, self._arena = graph, rank, arena
        self.listing = listing = flatten(graph, Numerics(device))
        self.names = [instruction.where for instruction in listing.instructions]
        self.empty: list[Any] = [None] * listing.size
        self._device = device
        constant: set[int] = set()
        for instruction in listing.instructions:
            if instruction.target is axis_offset:
                args, kwargs = instruction.arguments(self.empty)
                into = _into(instruction)
                assert isinstance(into, int)
                with running(context):
                    self.empty[into] = axis_offset(*args, **kwargs).to(device)
                constant.add(into)
        self._over = {write.value: write for write in writes(graph)}
        self._slots = dict(zip(graph.placeholders, listing.inputs, strict=True))
        self._pieces = pieces(graph)
        self._flats = {
            one.node: Flat(layout, one.yields[0][2], one.reads, self._pieces, device)
            for one in listing.instructions
            if one.node.target is PACK and (layout := layout_of(graph, one.node)) is not None
        }
        self._fixed: dict[int, torch.Tensor] = {}  # by slot
        self._viewed: set[fx.Node] = set()  # calls that are done, for good
        if arena is not None:
            self._place(arena)
        self._staying = constant | {self._slots[write.over] for write in self._over.values()} | self._fixed.keys()

    def _place(self, arena: Arena) -> None:
        """Put the tensors of an arena into their slots, and those that are views of them alone."""
        places = arena.places(self.graph)
        for instruction in self.listing.instructions:
            self._fixed |= {slot: places[value] for value, _, slot in instruction.yields if value in places}
            if reduced_in_place(instruction.node) and instruction.reads[0] in self._fixed:
                self._fixed[instruction.yields[0][2]] = self._fixed[instruction.reads[0]]
            if instruction.reads and self._fixed.keys() >= set(instruction.reads) and views(instruction.node):
                args, kwargs = instruction.arguments(self._fixed)
                result, into = instruction.target(*args, **kwargs), _into(instruction)
                made = {into: result} if isinstance(into, int) else {slot: result[at] for at, slot in into}
                if all(arena.holds(x) for x in made.values()):
                    self._fixed |= made
                    self._viewed.add(instruction.node)
        for slot, x in self._fixed.items():
            self.empty[slot] = x

    def code(self, first: int = 0, last: int | None = None) -> list[Code]:
        """The instructions from `first` up to `last`. New parameters and state are written over those held."""
        listing, code = self.listing, list[Code]()
        for action in arranged(listing.instructions, first, len(listing.instructions) if last is None else last):
            free = tuple(slot for slot in action.free if slot not in self._staying)
            instruction = listing.instructions[action.at]
            if instruction.target is axis_offset or instruction.node in self._viewed:
                continue
            if (flat := self._flats.get(instruction.node)) is not None:
                if flat.copies or not code:
                    filled = flat.prepared(self._fixed) or flat.filled
                    code.append((action.at, filled, _everything, flat.slot, free))
                else:  # all members are in their places
                    code[-1] = (*code[-1][:4], code[-1][4] + free)
                continue
            code.append(self._called(instruction, action, free))
            if action.kind not in ("run", "wait"):
                continue
            over = [(self._over[v], p, slot) for v, p, slot in instruction.yields if v in self._over]
            pieces = {p or 0: self._pieces[v] for v, p, _ in instruction.yields if v in self._pieces}
            if instruction.node.target in INTO:
                inside: dict[int, Place] = {
                    p or 0: _held(self._slots[write.over]) for write, p, _ in over if write.op is not None
                }
                inside |= {p: self._member(piece) for p, piece in pieces.items()}
                inside |= {p or 0: self._fixed[slot] for _, p, slot in instruction.yields if slot in self._fixed}
                code[-1] = self._written_inside(code[-1], instruction, inside)
            elif pieces:
                code[-1] = _made_at(code[-1], pieces[0].make, self._member(pieces[0]))
            for value, _, slot in instruction.yields:
                if value in self._over and (self._over[value].op is None or instruction.node.target not in INTO):
                    code[-1:] = _written(code[-1], self._over[value], self._slots[self._over[value].over], slot)
        return code

    def _called(self, one: Instruction, action: Action, free: tuple[int, ...]) -> Code:
        at, call, arguments, into, free = _code(one, action, free, self._fixed)
        if one.node.target is PACK:
            pack = packed(self.graph, one.node, one.reads, self._fixed, self._device)
            call, arguments = (call, arguments) if pack is None else (pack, _everything)
        return at, call, arguments, into, free

    def _member(self, piece: Piece) -> Place:
        flat = self._flats[piece.layout.pack]
        found = flat.place(piece.at)
        return found(self.empty) if flat.slot in self._fixed else found

    def _written_inside(self, code: Code, one: Instruction, over: dict[int, Place]) -> Code:
        """A call of several results, some of which are written where they are told."""
        at, _, arguments, into, free = code
        op, places = one.node.target, tuple(over.items())
        if op is UNPACK:
            (flat,), used = one.reads, {p or 0 for _, p, _ in one.yields}
            unpack = unpacked(one.node, self._fixed.get(flat, flat), used, over, self._device)
            if unpack is not None:
                into = tuple((p or 0, slot) for _, p, slot in one.yields if slot not in self._fixed)
                return at, unpack, _everything, into, free
        if isinstance(into, tuple):
            into = tuple((position, slot) for position, slot in into if slot not in self._fixed)
        if (prepare := INTO[op].prepare) is not None:
            (slots, line), _ = arguments(_Slots())
            operands: list[Operand] = [s if (x := self._fixed.get(s)) is None else x for s in slots]
            scratch = None if self._arena is None else self._arena.scratch
            prepared = prepare(operands, line, over, self._device, scratch)
            if prepared is not None:
                return at, prepared, _everything, into, free
        if not places:
            return at, INTO[op].run, arguments, into, free

        def placed(env: list[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
            args, kwargs = arguments(env)
            told = {p: place if isinstance(place, torch.Tensor) else place(env) for p, place in places}
            return args, {**kwargs, "over": told}

        return at, INTO[op].run, placed, into, free

    def run(
        self, code: Sequence[Code], env: list[Any], monitor: Monitor | None, base: int = 0, within: str = ""
    ) -> None:
        """Run code on the values in `env`. `base` is the number of its first instruction to the monitor, and `within`
        says in an error what it is a part of."""
        at = 0
        try:
            for at, call, arguments, into, free in code:
                if monitor is not None:
                    monitor.at = base + at
                args, kwargs = arguments(env)
                result = call(*args, **kwargs)
                if type(into) is int:
                    env[into] = result
                else:
                    for position, slot in into:  # type: ignore[union-attr]
                        env[slot] = result[position]
                for slot in free:
                    env[slot] = None
        except Exception as failure:
            explained = self._explained(failure, at, monitor, env, within)
            if explained is failure:
                raise
            raise explained from failure

    def _explained(
        self, failure: Exception, at: int, monitor: Monitor | None, env: Sequence[Any], within: str
    ) -> Exception:
        where = self.names[at] + within
        failure.add_note(f"in instruction {where}, on rank {self.rank}")
        if isinstance(failure, ShardcError):
            return failure
        one = self.listing.instructions[at]
        if one.target in COLLECTIVES:
            return failure if monitor is None else monitor.blame(failure)
        named = out_of_range(one, self.rank, [env[slot] for slot in one.reads])
        why = f"{type(failure).__name__}: {failure}" if named is None else str(named).partition("\n")[0]
        if monitor is not None:
            monitor.failed_alone(f"{why} in instruction {where}")
        return named or failure


def _code(one: Instruction, action: Action, free: tuple[int, ...], fixed: Mapping[int, torch.Tensor]) -> Code:
    steps, into = COLLECTIVES.get(one.target), _into(one)
    match action.kind:
        case "run":
            call = one.target if steps is None else partial(run_collective, steps)
            return action.at, call, one.arguments, into, free
        case "begin":
            assert steps is not None
            steps = all_reduce_over if reduced_in_place(one.node) else steps
            return action.at, partial(begin, steps), one.arguments, into, free
        case "wait":
            assert isinstance(into, int)
            return action.at, partial(_arrived, fixed.get(into)), lambda env: ((env[into],), {}), into, free
        case "free":
            return action.at, partial(_arrived, None), lambda env: ((tuple,), {}), (), free


def _written(code: Code, write: Write, over: int, slot: int) -> list[Code]:
    """A call whose result takes the place of what slot `over` holds, which then is in `slot` as well."""
    at, _, arguments, into, free = code
    if write.op is None:
        return [code, (at, torch.Tensor.copy_, lambda env: ((env[over], env[slot]), {}), slot, ())]

    def placed(env: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        args, kwargs = arguments(env)
        return args, {**kwargs, "out": env[over]}

    return [(at, write.op, placed, into, free)]


def _made_at(code: Code, make: Callable[..., Any] | None, place: Place) -> Code:
    """A call of one result, which is written where it is told."""
    at, _, arguments, into, free = code
    assert make is not None

    def placed(env: list[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        args, kwargs = arguments(env)
        return args, {**kwargs, "out": place if isinstance(place, torch.Tensor) else place(env)}

    return at, make, placed, into, free


class _Slots:
    """In the place of values, the numbers of their slots."""

    def __getitem__(self, slot: int, /) -> int:
        return slot


def _everything(env: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    return (env,), NOTHING


def _held(slot: int) -> Callable[[list[Any]], torch.Tensor]:
    return lambda env: env[slot]


def _arrived(place: torch.Tensor | None, arrival: Callable[[], Any]) -> Any:
    """What a collective gives; in `place`, where others will look for it."""
    found = arrival()
    return found if place is None or found.data_ptr() == place.data_ptr() else place.copy_(found)


def _into(one: Instruction) -> Single | Many:
    places = one.yields
    return places[0][2] if len(places) == 1 and places[0][1] is None else tuple((p or 0, s) for _, p, s in places)
