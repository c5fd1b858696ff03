"""What is false of calls that take a rank's steps of a recurrence (`shardc.ir.ops.scan_parts`).

    %scan.behind      : f64[2@cp, 4, 8]  = scan_turn([%h0], [%x], [], "h:bd | x:btd | ...", "16", [cp], [8], 0)
    %s                : f64[2@cp, 4, 8]  = neighbour_rows(%scan.behind, [cp], 0, 0, 1, 1)
    %y, %last, %starts = scan_part([%h0], [%x], [%s], "h:bd | x:btd | ...", "16", [cp], [8], False)

Every turn must be there, in order, of the same operands, and go to the rank of the steps behind, or in backward of
those before; or what is gathered must be of all runs of steps, and of a body whose steps are a factor and an addend.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import fx

from shardc.ir.graph import info, operands, producer, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.collectives import all_gather
from shardc.ir.ops.halo import NEIGHBOUR_ROWS
from shardc.ir.ops.scan import SCAN, SCAN_BACKWARD, wide_of
from shardc.ir.ops.scan_body import TIME, parse_body
from shardc.ir.ops.scan_parts import (
    SCAN_PART,
    SCAN_PART_BACKWARD,
    SCAN_SUMMARY,
    SCAN_SUMMARY_BACKWARD,
    SCAN_TURN,
    SCAN_TURN_BACKWARD,
)
from shardc.ir.ops.shift import size_of
from shardc.ir.ops.step_runs import own_segments, starts_of, step_runs
from shardc.ir.schema import given
from shardc.ir.types import Atom, TensorType

Declared = Sequence[TensorType | None]
FORWARD, BACKWARD = (
    (SCAN_PART, SCAN_TURN, SCAN_SUMMARY),
    (SCAN_PART_BACKWARD, SCAN_TURN_BACKWARD, SCAN_SUMMARY_BACKWARD),
)
PARTS = (SCAN_PART, SCAN_PART_BACKWARD)
SCAN_PARTS = (*FORWARD, *BACKWARD)


class _Call:
    """A call, and what it says of the whole scan that it is a part of."""

    def __init__(self, node: fx.Node, mesh: Mesh) -> None:
        self.node, self.mesh, self.args = node, mesh, given(node)
        self.backward = node.target in BACKWARD
        self.body = parse_body(self.args["body"])
        self.axes = tuple(mesh.resolve(self.args["axes"]))
        self.ranks = mesh.size(self.axes)
        self.part, self.turn, self.summary = BACKWARD if self.backward else FORWARD
        names = ("grads", "starts") if self.backward else ("carried",)
        self.read = {name: list(self.args[name]) for name in (*names, "inputs")}
        self.runs = step_runs(self.args["source"], self.axes, mesh)
        self.turns = self.runs.turns(self.backward)

    @property
    def told(self) -> tuple[Any, ...]:
        """All that calls of one scan have in common."""
        args = self.args
        return self.read, args["body"], list(args.get("given", ())), args["source"], self.axes, list(args["segments"])

    @property
    def states(self) -> list[TensorType]:
        dtype = wide_of([type_of(x).dtype for x in self.read["starts" if self.backward else "carried"]
                         + self.read["inputs"]])  # fmt: skip
        of = self.read["starts" if self.backward else "carried"]
        return [TensorType(dtype, type_of(x).dims[1 if self.backward else 0 :]) for x in of]

    def of_each(self, state: TensorType, *extra: int) -> TensorType:
        """One of a state for each rank."""
        return TensorType(
            state.dtype, ((Atom(self.ranks, self.axes),), *((Atom(n),) * (n > 1) for n in extra), *state.dims)
        )


def scan_faults(node: fx.Node, result_types: Declared, mesh: Mesh) -> list[str]:
    """The faults of a call, beside what the rule of the scan that it stands for says."""
    try:
        call = _Call(node, mesh)
    except ValueError as wrong:
        return [str(wrong)]
    if not call.axes or not call.runs.runs:
        return ["takes steps that lie over no axes"]
    if wrong := _layout_fault(call):
        return [wrong]
    if node.target in PARTS:
        faults = _before_faults(call)
        starts = [TensorType(t.dtype, ((Atom(_blocks(call), call.axes),), *t.dims)) for t in call.states]
        pairs = list(zip(result_types[-len(starts) :], starts, strict=False)) if node.target is SCAN_PART else []
        return faults + _unlike(pairs)
    if node.target is call.turn:
        turns, turn, before = call.turns, call.args["turn"], list(call.args["before"])
        if turn not in turns:
            return [f"is turn {turn} of {len(call.runs.runs)} runs of steps"]
        if turn == turns[0]:
            faults = [f"begins, and continues %{info(x).name}" for x in before[:1]]
        else:
            faults = _came(call, before, turns[turns.index(turn) - 1])
        want = [call.of_each(state) for state in call.states]
    else:
        faults = [] if _factored(call) else ["has steps that are no factor and addend"]
        want = [call.of_each(state, len(call.runs.lengths), 2) for state in call.states]
    return faults + _unlike(list(zip(result_types, want, strict=False)))


def _unlike(pairs: Sequence[tuple[TensorType | None, TensorType]]) -> list[str]:
    """Of declared types and what they ought to be."""
    return [f"yields {right}, the result says {said}" for said, right in pairs if said is not None and said != right]


def _segments(call: _Call) -> list[int]:
    """The segments of the whole scan."""
    return [n for run in call.runs.runs for n in _clipped(call.runs.segments(run, call.args["segments"]), run.extent)]


def _clipped(segments: Sequence[int], steps: int) -> list[int]:
    """Those of so many steps."""
    ends = [0, *(min(end, steps) for end in accumulate(segments))]
    return [end - first for first, end in pairwise(ends) if end > first]


def _blocks(call: _Call) -> int:
    """The starts of blocks of steps that all ranks have."""
    return starts_of(call.args["source"], _segments(call))


def _factored(call: _Call) -> bool:
    return call.body.diagonal if call.backward else call.body.homogeneous is not None


def _layout_fault(call: _Call) -> str:
    """What is wrong with how steps lie, as a call tells it."""
    segments, source = list(call.args["segments"]), call.args["source"]
    if own_segments(source, call.axes, call.mesh, _segments(call)) != segments:
        return f"has no segments of {segments} steps"
    size = size_of(source)
    wanted: list[tuple[fx.Node, int, int]] = [(x, 0, _blocks(call)) for x in call.read.get("starts", ())]
    for (_, dims), x in zip(call.body.inputs, call.read["inputs"], strict=True):
        wanted += [(x, dims.index(TIME), size)] if TIME in dims else []
    for x, dim, length in wanted:
        type = type_of(x)
        if dim >= type.ndim or len(type.dims[dim]) != 1:
            return f"takes steps along dim {dim} of {type}"
        (atom,) = type.dims[dim]
        if (str(atom.size), tuple(call.mesh.resolve(atom.axes))) != (str(length), call.axes):
            return f"takes dim {dim} of {type} to be {length}@{'.'.join(call.axes)}"
    for x in call.read.get("carried", ()):
        if call.axes and {*call.axes} & {axis for atom in type_of(x).atoms for axis in atom.axes}:
            return f"begins with a state that lies over its steps' axes: {type_of(x)}"
    return ""


def _before_faults(call: _Call) -> list[str]:
    """Of what a rank gets of others: everything, and nothing else."""
    before, count, steps = list(call.args["before"]), len(call.states), call.turns
    if call.args["affine"]:
        if not _factored(call):
            return ["has steps that are no factor and addend"]
        if len(before) != count:
            return [f"reads {len(before)} states of other ranks, where it has {count}"]
        return [fault for i, x in enumerate(before) for fault in _gathered(call, x, i)]
    if len(before) != count * len(steps):
        return [f"reads what comes of {len(before) // max(1, count)} turns, where there are {len(steps)}"]
    groups = [before[i * count : (i + 1) * count] for i in range(len(steps))]
    return [fault for group, turn in zip(groups, steps, strict=True) for fault in _came(call, group, turn)]


def _gathered(call: _Call, x: fx.Node, i: int) -> list[str]:
    each = call.of_each(call.states[i], len(call.runs.lengths), 2)
    if x.op == "placeholder":  # of a stage, which did not gather it itself
        want = TensorType(each.dtype, ((Atom(call.ranks),), *each.dims[1:]))
        return [] if type_of(x) == want else [f"%{info(x).name} is {type_of(x)}, not {want}"]
    if x.target is not all_gather or tuple(call.mesh.resolve(given(x)["axes"])) != call.axes or given(x)["pos"]:
        return [f"%{info(x).name} is not gathered of all ranks"]
    return _result_of(call, given(x)["x"], call.summary, i)


def _came(call: _Call, before: Sequence[fx.Node], turn: int) -> list[str]:
    """Of what has come from the rank whose turn was the last one."""
    if len(before) != len(call.states):
        return [f"reads {len(before)} states of turn {turn}, where there are {len(call.states)}"]
    faults: list[str] = []
    hop = call.runs.hop(turn, call.backward)
    for i, x in enumerate(before):
        if not hop:
            faults += _result_of(call, x, call.turn, i, turn)
            continue
        if x.op == "placeholder":
            want = call.of_each(call.states[i])
            faults += [] if type_of(x) == want else [f"%{info(x).name} is {type_of(x)}, not {want}"]
            continue
        args = given(x) if x.target is NEIGHBOUR_ROWS else {}
        how = tuple(args.get(name) for name in ("dim", "start", "length", "shift"))
        if how != (0, 0, 1, hop) or tuple(call.mesh.resolve(args["axes"])) != call.axes:
            faults.append(
                f"%{info(x).name} has not come from the rank of the steps {'behind' if call.backward else 'before'}"
            )
        else:
            faults += _result_of(call, args["x"], call.turn, i, turn)
    return faults


def _result_of(call: _Call, value: fx.Node, target: Any, i: int, turn: int | None = None) -> list[str]:
    """Is a value the i-th result of such a call, of the same scan?"""
    if value.op == "placeholder":
        return []
    made, place = producer(value)
    if made.target is not target or place != i:
        return [f"%{info(value).name} is no state of such a scan"]
    other = _Call(made, call.mesh)
    if other.told != call.told:
        return [f"%{info(value).name} is of another scan"]
    if turn is not None and other.args["turn"] != turn:
        return [f"%{info(value).name} is of turn {other.args['turn']}, not {turn}"]
    return []


def stands_for(node: fx.Node) -> tuple[Any, int]:
    """The op that a call on a rank's steps stands for, and how many of its operands that op has."""
    args = given(node)
    return SCAN_BACKWARD if node.target in BACKWARD else SCAN, len(operands(node)) - len(args["before"])
