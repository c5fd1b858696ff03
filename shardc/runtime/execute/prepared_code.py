"""A graph as prepared code: a flat list of plain calls, which one rank runs every step.

Preparation computes everything that is static: argument templates, slots, their last uses, offsets that depend on the
rank alone, and where collectives begin and are waited for. A run is then one Python function (`written_code`). An error
in it names the instruction, the user's line and the rank. Executors keep the values of the slots and choose the order
of runs: `body_code` runs a whole step of microbatches, `executor` the parts of an instruction list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import fx

import shardc.ir.ops.fused_attention  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers what GPUs run)
from kernels_triton.base.inplace import INTO, Operand, Place
from shardc.ir.arena import views
from shardc.ir.buckets import Piece, layout_of, maker, pieces, reduced_in_place, writes_out
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import Graph
from shardc.ir.in_place import Write, writes
from shardc.ir.ops.buckets import PACK, UNPACK
from shardc.ir.ops.collectives import COLLECTIVES, all_reduce_over, late, run_collective
from shardc.ir.ops.context import RankContext, running
from shardc.ir.ops.linear import LINEAR
from shardc.ir.ops.local import axis_offset
from shardc.ir.overlap_schedule import Action, schedule_overlap, sums_gradients
from shardc.runtime.execute.arena import Arena
from shardc.runtime.execute.bucket_buffer import FlatBuffer, prepare_pack, prepare_unpack
from shardc.runtime.execute.call_arguments import ALL_SLOTS, CallArguments, Slot, Viewed, place_argument
from shardc.runtime.execute.decomposed_products import prepare_decomposed
from shardc.runtime.execute.direct_call import direct_call
from shardc.runtime.execute.failed_call import instruction_failed, out_of_range
from shardc.runtime.execute.held_views import HeldViews, ViewCall
from shardc.runtime.execute.instructions import CallInstruction, Numerics, list_calls
from shardc.runtime.execute.monitor import RunMonitor
from shardc.runtime.execute.over_operands import WRITERS, dead_slots, over_operands
from shardc.runtime.execute.overlap import begin
from shardc.runtime.execute.prepared_collective import PreparedCollective, UnderWay, prepare_collective
from shardc.runtime.execute.prepared_linear import LINEARS, prepare_linear
from shardc.runtime.execute.written_code import CodeLine, Many, Single, Unwatched, WrittenCode, write_code

ENVIRONMENT = CallArguments((ALL_SLOTS,), {})
HELD = ("param", "state", "buffer")


class Routine:
    """A localized graph, as the rank of `context` runs it. `empty` is the initial content of its slots. It already
    contains the tensors that are the same in every run, such as results that lie in an arena."""

    def __init__(
        self, graph: Graph, context: RankContext, rank: int, device: torch.device, arena: Arena | None = None
    ) -> None:
        self.graph, self.rank, self._arena = graph, rank, arena
        self.listing = listing = list_calls(graph, Numerics(device))
        self.names = [instruction.where for instruction in listing.instructions]
        self.empty: list[Any] = [None] * listing.size
        self._device, self._comm = device, context.comm
        self.collectives: dict[int, PreparedCollective] = {}  # by the index of the call that began
        self._written: dict[int, tuple[Sequence[CodeLine], WrittenCode]] = {}  # by the identity of the code
        constant: set[int] = set()
        for instruction in listing.instructions:
            if instruction.target is axis_offset:
                args, kwargs = instruction.arguments(self.empty)
                into = _result_slots(instruction)
                assert isinstance(into, int)
                with running(context):
                    self.empty[into] = axis_offset(*args, **kwargs).to(device)
                constant.add(into)
        self._write_of = {write.value: write for write in writes(graph)}
        self._slots = dict(zip(graph.placeholders, listing.inputs, strict=True))
        self._pieces = pieces(graph)
        self._flats = {
            pack.node: FlatBuffer(layout, pack.yields[0][2], pack.reads, self._pieces, device)
            for pack in listing.instructions
            if pack.node.target is PACK and (layout := layout_of(graph, pack.node)) is not None
        }
        self._dead = dead_slots(graph, listing)  # by result
        self._fixed: dict[int, torch.Tensor] = {}  # by slot
        self._viewed: set[fx.Node] = set()  # calls whose results are fixed views: they never run
        if arena is not None:
            self._bind_arena(arena)
        self._over = self._over_operands() if arena is not None and arena.overwrites else {}
        self._transposed: dict[int, Slot] = {}  # by the slot of a held matrix
        self._view_calls: dict[int, list[ViewCall]] = {}  # by held slot
        self._held = self._held_slots()
        held_views = self._bind_held_views()
        self._bind_transposed()
        self.held_views = HeldViews(self._view_calls)
        self._never_freed = (
            constant | held_views | {self._slots[write.over] for write in self._write_of.values()} | self._fixed.keys()
        )

    def _bind_arena(self, arena: Arena) -> None:
        """Put the tensors of an arena, and the views of them, into their slots."""
        tensors = arena.tensors(self.graph)
        for instruction in self.listing.instructions:
            self._fixed |= {slot: tensors[value] for value, _, slot in instruction.yields if value in tensors}
            if reduced_in_place(instruction.node) and instruction.reads[0] in self._fixed:
                self._fixed[instruction.yields[0][2]] = self._fixed[instruction.reads[0]]
            for value, _, slot in instruction.yields:
                if self._dead.get(value) in self._fixed:
                    self._fixed[slot] = self._fixed[self._dead[value]]
            if instruction.reads and self._fixed.keys() >= set(instruction.reads) and views(instruction.node):
                args, kwargs = instruction.arguments(self._fixed)
                result, into = instruction.target(*args, **kwargs), _result_slots(instruction)
                results = {into: result} if isinstance(into, int) else {slot: result[index] for index, slot in into}
                if all(arena.holds(x) for x in results.values()):
                    self._fixed |= results
                    self._viewed.add(instruction.node)
        for slot, x in self._fixed.items():
            self.empty[slot] = x

    def _over_operands(self) -> dict[fx.Node, int]:
        """The calls that write their result over an operand, with its slot."""
        listing, slot_of = self.listing, dict[fx.Node, int]()
        for instruction in listing.instructions:
            slot_of |= {value: slot for value, _, slot in instruction.yields}
        placed = {value for value, slot in slot_of.items() if slot in self._fixed}
        placed |= self._pieces.keys() | self._write_of.keys()
        starts, count = (listing.repeated.start, listing.repeated.stop), len(listing.instructions)
        sections = [-1 if index in listing.first else sum(index >= start for start in starts) for index in range(count)]
        over = over_operands(self.graph, [i.node for i in listing.instructions], sections, placed)
        return {call: slot_of[value] for call, value in over.items()}

    def _held_slots(self) -> set[int]:
        """The slots of inputs that lie where they are from step to step."""
        replaced = {into for _, into in self.listing.buffer_slots}  # by each microbatch
        inputs = zip(self.graph.inputs, self.listing.inputs, strict=True)
        return {slot for port, slot in inputs if port.role in HELD and slot not in replaced}

    def _bind_held_views(self) -> set[int]:
        """Take the calls that only view held tensors out of the code. Returns the slots of their results."""
        source_of = {slot: slot for slot in self._held}
        for instruction in self.listing.instructions:
            sources = {source_of.get(slot) for slot in instruction.reads}
            if len(sources) != 1 or None in sources or not views(instruction.node):
                continue
            (source,) = sources
            assert source is not None
            results = tuple((p, slot) for _, p, slot in instruction.yields)
            self._view_calls.setdefault(source, []).append((partial(_called, instruction), results))
            self._viewed.add(instruction.node)
            source_of |= {slot: source for _, slot in results}
        return source_of.keys() - self._held

    def _bind_transposed(self) -> None:
        """Give the transposed matrices of held weights slots, for products whose results have places."""
        for instruction in self.listing.instructions:
            result = instruction.yields[0][2]
            if instruction.target is not LINEAR or (result not in self._fixed and instruction.node not in self._pieces):
                continue
            weight = instruction.arguments.args[1].number
            if weight in self._held and weight not in self._transposed:
                self._transposed[weight] = view = Slot(len(self.empty))
                self.empty.append(None)
                make = partial(_transposed_in, weight)
                self._view_calls.setdefault(weight, []).append((make, ((None, view.number),)))

    def _transpose(self, slot: int) -> Slot | Viewed:
        """The transposed matrix of a slot: of a held one it is made once, and has a slot of its own."""
        return self._transposed.get(slot) or Viewed(Slot(slot), "t")

    def copy(self) -> Routine:
        """The same routine for other lists of its code."""
        other = copy(self)
        other._written, other.held_views = {}, self.held_views.copy()
        return other

    def code(self, first: int = 0, last: int | None = None) -> list[CodeLine]:
        """The code of the instructions from `first` up to `last`. New parameters and state overwrite the held ones."""
        listing, code = self.listing, list[CodeLine]()
        for action in schedule_overlap(
            listing.instructions, first, len(listing.instructions) if last is None else last
        ):
            free = tuple(slot for slot in action.free if slot not in self._never_freed)
            instruction = listing.instructions[action.at]
            if action.kind == "free" and code:
                code[-1] = (*code[-1][:4], code[-1][4] + free)
                continue
            if instruction.target is axis_offset or instruction.node in self._viewed:
                continue
            if (flat := self._flats.get(instruction.node)) is not None:
                if flat.has_copies or not code:
                    filled = flat.prepare_fill(self._fixed) or flat.fill
                    code.append((action.at, filled, ENVIRONMENT, flat.slot, free))
                else:  # all members were allocated in the flat tensor
                    code[-1] = (*code[-1][:4], code[-1][4] + free)
                continue
            code.append(self._call_line(instruction, action, free))
            if action.kind not in ("run", "wait"):
                continue
            over = [(self._write_of[v], p, slot) for v, p, slot in instruction.yields if v in self._write_of]
            pieces = {p or 0: self._pieces[v] for v, p, _ in instruction.yields if v in self._pieces}
            if instruction.node.target in INTO:
                result_places: dict[int, Place] = {
                    p or 0: Slot(self._slots[write.over]) for write, p, _ in over if write.op is not None
                }
                result_places |= {p or 0: Slot(self._dead[v]) for v, p, _ in instruction.yields if v in self._dead}
                result_places |= {p: self._member_place(piece) for p, piece in pieces.items()}
                result_places |= {p or 0: self._fixed[slot] for _, p, slot in instruction.yields if slot in self._fixed}
                code[-1] = self._write_in_place(code[-1], instruction, result_places)
            elif pieces and pieces[0].make is not None:
                code[-1] = self._produce_at(code[-1], instruction, pieces[0].make, self._member_place(pieces[0]))
            elif (slot := self._over.get(instruction.node)) is not None:
                write, name = WRITERS[instruction.node.target]
                index, _, arguments, into, free = code[-1]
                code[-1] = index, write, arguments.with_named(**{name: Slot(slot)}), into, free
            elif action.kind == "run" and len(instruction.yields) == 1 and writes_out(instruction.node):
                place = self._fixed.get(instruction.yields[0][2])
                if place is not None:
                    make = None if instruction.target in LINEARS else maker(instruction.node.target)
                    code[-1] = self._produce_at(code[-1], instruction, make, place)
            for value, _, slot in instruction.yields:
                if value in self._write_of and (
                    self._write_of[value].op is None or instruction.node.target not in INTO
                ):
                    code[-1:] = _write_over(
                        code[-1], self._write_of[value], self._slots[self._write_of[value].over], slot
                    )
        return code

    def _call_line(self, instruction: CallInstruction, action: Action, free: tuple[int, ...]) -> CodeLine:
        index, call, arguments, into, free = self._action_line(instruction, action, free)
        if instruction.node.target is PACK:
            pack = prepare_pack(self.graph, instruction.node, instruction.reads, self._fixed, self._device)
            call, arguments = (call, arguments) if pack is None else (pack, ENVIRONMENT)
        return index, call, arguments, into, free

    def _action_line(self, instruction: CallInstruction, action: Action, free: tuple[int, ...]) -> CodeLine:
        index, arguments, into = action.at, instruction.arguments, _result_slots(instruction)
        steps = COLLECTIVES.get(instruction.target)
        match action.kind:
            case "run":
                read = [position or 0 for _, position, _ in instruction.yields]
                run = prepare_decomposed(instruction.node, self._comm, self._device, read)
                run = run or (partial(run_collective, steps) if steps else None)
                call = run or direct_call(instruction.target, self._device, arguments.kwargs)
                return index, call, arguments, into, free
            case "begin":
                assert steps is not None
                spent, is_late = reduced_in_place(instruction.node), sums_gradients(instruction.node)
                prepared = prepare_collective(instruction.node, self._comm, is_late, spent)
                if prepared is not None:
                    self.collectives[index] = prepared
                    return index, prepared.begin, CallArguments((Slot(instruction.reads[0]),), {}), into, free
                steps = all_reduce_over if spent else steps
                steps = partial(late, steps) if is_late else steps
                return index, partial(begin, steps), arguments, into, free
            case "wait":
                assert isinstance(into, int)
                place, prepared = self._fixed.get(into), self.collectives.get(index)
                if prepared is None:
                    wait = partial(_wait_into, place)
                else:
                    wait = prepared.arrived if place is None else partial(_arrived_in, place, prepared)
                return index, wait, CallArguments((Slot(into),), {}), into, free
            case "free":
                return index, partial(_wait_into, None), CallArguments((tuple,), {}), (), free
            case "add":
                raise AssertionError("`stage_code` puts additions behind the lines that make the terms")

    def _member_place(self, piece: Piece) -> Place:
        flat = self._flats[piece.layout.pack]
        view = flat.member_view(piece.at)
        return view(self.empty) if flat.slot in self._fixed else view

    def _write_in_place(self, code: CodeLine, instruction: CallInstruction, over: dict[int, Place]) -> CodeLine:
        """A call of several results, some of which are written to given places."""
        index, _, arguments, into, free = code
        op = instruction.node.target
        if op is UNPACK:
            (flat,), used = instruction.reads, {p or 0 for _, p, _ in instruction.yields}
            unpack = prepare_unpack(instruction.node, self._fixed.get(flat, flat), used, over, self._device)
            if unpack is not None:
                into = tuple((p or 0, slot) for _, p, slot in instruction.yields if slot not in self._fixed)
                return index, unpack, ENVIRONMENT, into, free
        if isinstance(into, tuple):
            into = tuple((position, slot) for position, slot in into if slot not in self._fixed)
        if (prepare := INTO[op].prepare) is not None:
            (slots, line), _ = arguments(_SlotNumbers())
            operands: list[Operand] = [s if (x := self._fixed.get(s)) is None else x for s in slots]
            scratch = None if self._arena is None else self._arena.scratch
            # A kernel asks for a held tensor's place in each run: without a frame of Python's.
            places = {p: itemgetter(x.number) if isinstance(x, Slot) else x for p, x in over.items()}
            prepared = prepare(operands, line, places, self._device, scratch)
            if prepared is not None:
                return index, prepared, ENVIRONMENT, into, free
        if not over:
            return index, INTO[op].run, arguments, into, free

        destinations = {p: place_argument(place) for p, place in over.items()}
        return index, INTO[op].run, arguments.with_named(over=destinations), into, free

    def _produce_at(
        self, code: CodeLine, instruction: CallInstruction, make: Callable[..., Any] | None, place: Place
    ) -> CodeLine:
        """A call of one result, which is written to a given place."""
        index, _, arguments, into, free = code
        if instruction.target in LINEARS:
            slots: tuple[int, int] = tuple(arg.number for arg in arguments.args)  # type: ignore[assignment]
            call, arguments = (
                torch.mm,
                prepare_linear(
                    instruction.node, self.graph.mesh, slots, self._fixed, self._transpose, place_argument(place)
                ),
            )
        else:
            assert make is not None
            call, arguments = direct_call(make, self._device), arguments.with_named(out=place_argument(place))
        return index, call, arguments, () if into in self._fixed else into, free

    def run(
        self, code: Sequence[CodeLine], env: list[Any], monitor: RunMonitor | None, base: int = 0, within: str = ""
    ) -> None:
        """Run code on the values in `env`. `base` is the monitor's counter of its first instruction. `within` names in
        an error the list's instruction that the code belongs to. Code that has run must not change: it is written as
        Python only once."""
        written = self._written.get(id(code))
        if written is None or written[0] is not code:
            written = self._written[id(code)] = code, write_code(code)
        counted: Any = Unwatched() if monitor is None else monitor
        try:
            written[1](env, counted, base)
        except Exception as failure:
            index = counted.counter - base
            explained = self._explain(failure, index, monitor, env, within)
            if explained is failure:
                raise
            raise explained from failure

    def _explain(
        self, failure: Exception, index: int, monitor: RunMonitor | None, env: Sequence[Any], within: str
    ) -> Exception:
        name = self.names[index] + within
        failure.add_note(f"in instruction {name}, on rank {self.rank}")
        if isinstance(failure, ShardcError):
            return failure
        instruction = self.listing.instructions[index]
        if instruction.target in COLLECTIVES:
            return failure if monitor is None else monitor.blame(failure)
        index_error = out_of_range(instruction, self.rank, [env[slot] for slot in instruction.reads])
        known = index_error or instruction_failed(instruction, failure, f"on rank {self.rank}{within}")
        why = f"{type(failure).__name__}: {failure}" if known is None else str(known).partition("\n")[0]
        if monitor is not None:
            monitor.report_own_failure(f"{why} in instruction {name}")
        return known or failure


def _write_over(code: CodeLine, write: Write, over: int, slot: int) -> list[CodeLine]:
    """A call whose result overwrites the tensor in slot `over`. Slot `slot` then holds the same tensor."""
    index, _, arguments, into, free = code
    if write.op is None:
        return [code, (index, torch.Tensor.copy_, CallArguments((Slot(over), Slot(slot)), {}), slot, ())]
    return [(index, direct_call(write.op), arguments.with_named(out=Slot(over)), into, free)]


class _SlotNumbers:
    """Stands for an environment: each slot's value is its own number."""

    def __getitem__(self, slot: int, /) -> int:
        return slot


def _called(instruction: CallInstruction, env: list[Any]) -> Any:
    args, kwargs = instruction.arguments(env)
    return instruction.target(*args, **kwargs)


def _transposed_in(slot: int, env: list[Any]) -> torch.Tensor:
    return env[slot].t()


def _wait_into(place: torch.Tensor | None, pending: Callable[[], Any]) -> Any:
    """A collective's result, copied to `place` if its readers expect it there."""
    return _put(place, pending())


def _arrived_in(place: torch.Tensor, collective: PreparedCollective, under_way: UnderWay) -> torch.Tensor:
    return _put(place, collective.arrived(under_way))


def _put(place: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    return result if place is None or result.data_ptr() == place.data_ptr() else place.copy_(result)


def _result_slots(instruction: CallInstruction) -> Single | Many:
    results = instruction.yields
    return results[0][2] if len(results) == 1 and results[0][1] is None else tuple((p or 0, s) for _, p, s in results)
