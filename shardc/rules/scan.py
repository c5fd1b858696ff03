"""Scans over time: time is whole, and so is each dim that a step sums over; all others are free.

    h:bdn | a:bdnt x:bdnt C:bnt | v0=mul(a,h) v1=add(v0,x) v2=dot(v1,C:n) | h=v1 | bdt=v2

is `b d n, b d n t, b d n t, b n t -> b d t, b d n, c b d n`, with n and t whole; c counts the blocks whose starts
forward keeps. A dim that some result does not have is whole too, since each rank would compute that result.

Backward gives C a gradient that is a sum over d, and a tensor that is the same in every step one over b. That holds
where every gradient that comes in has the dim: what has it not would be counted on each rank.

Time is free where a call has `segments`, and each rank's runs of steps are whole ones. A rank's call then needs the
states that steps before leave: `shardc.ir.ops.scan_parts` says how they travel. The last states are then a sum, of what
the rank of the last step has and of zeros. Blocks follow time: the starts of a rank's blocks lie with its steps.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from shardc.ir.graph import info, set_info
from shardc.ir.mesh import Mesh
from shardc.ir.ops.collectives import all_gather
from shardc.ir.ops.halo import NEIGHBOUR_ROWS
from shardc.ir.ops.scan import SCAN, SCAN_BACKWARD, wide_of
from shardc.ir.ops.scan_body import BLOCK, TIME, parse_body
from shardc.ir.ops.scan_parts import (
    SCAN_PART,
    SCAN_PART_BACKWARD,
    SCAN_SUMMARY,
    SCAN_SUMMARY_BACKWARD,
    SCAN_TURN,
    SCAN_TURN_BACKWARD,
)
from shardc.ir.ops.step_runs import own_segments, step_runs
from shardc.ir.schema import given as arguments
from shardc.ir.types import Atom, Axes, TensorType
from shardc.rules.local import LocalCall
from shardc.rules.notation import Dims, Notation
from shardc.rules.projection import Projection
from shardc.rules.registry import by_block, rule
from shardc.rules.shift import cause_of, moved

MAMBA = "h:bdn | a:bdnt x:bdnt C:bnt | v0=mul(a,h) v1=add(v0,x) v2=dot(v1,C:n) | h=v1 | bdt=v2"
SELECTIVE = (
    "h:bdn | d:dbt x:btd B:btn A:dn | p=mul(d,A) e=exp(p) q=mul(d,B) r=mul(q,x) v=mul(e,h) w=add(v,r) y=dot(w,B:n) "
    "| h=w | btd=y"
)
DELTA = (
    "h:bhkv | q:bthk k:bthk v:bthv z:bht | s=mul(h,z) m=dot(s,k:k) e=sub(v,m) u=mul(k,e) n=add(s,u) y=dot(n,q:k) "
    "| h=n | bhtv=y"
)
CHUNKS = (
    "h:bkv | q:tblk w:tblm u:tbmv | y=dot(q,h:k) z=dot(w,u:m) o=add(y,z) s=scale(h:0.5) e=sum(u:m) n=add(s,e) "
    "| h=n | tblv=o"
)  # its rows l are no dim of the state
SEGMENTS = [3, 3], [4, 3], [1, 1, 1]
RNN = "h:bk | x:tbn U:kn | s=dot(h,U:k) p=add(s,x) q=tanh(p) r=rename(q:nk) | h=r | tbn=q"


def _text(*tensors: str) -> str:
    return ", ".join(" ".join(letters) or "()" for letters in tensors)


# ------------------------------------------------------------------------------------------------ one rank's steps
def _timed(projection: Projection) -> int:
    return projection.names.index(TIME) if TIME in projection.names else -1


def unfit(node: fx.Node, projection: Projection, split: Mapping[int, Axes], mesh: Mesh) -> set[int]:
    """Time, where ranks have no whole segments."""
    piece = _timed(projection)
    axes, segments = tuple(mesh.resolve(split.get(piece, ()))), arguments(node).get("segments", ())
    if not axes or own_segments(str(projection.sizes[piece]), axes, mesh, tuple(segments)):
        return set()
    return {piece}


class _Parts:
    """A call whose steps lie over axes, and the calls before it by which states travel."""

    def __init__(self, call: LocalCall, states: Sequence[TensorType]) -> None:
        self.call, self.args, self.graph = call, call.args, call.graph
        self.body = parse_body(self.args["body"])
        piece, mesh = _timed(call.projection), self.graph.mesh
        self.axes = tuple(mesh.resolve(call.split.get(piece, ())))
        self.ranks = mesh.size(self.axes)
        if self.axes:
            source = str(call.projection.sizes[piece])
            self.runs = step_runs(source, self.axes, mesh)
            segments = own_segments(source, self.axes, mesh, tuple(self.args["segments"]))
            self.layout = (source, list(self.axes), segments)
        dtype = wide_of([type.dtype for type in call.operands])
        self.states = [TensorType(dtype, type.dims) for type in states]

    def _several(self, target: Any, args: tuple[Any, ...], types: Sequence[TensorType]) -> list[fx.Node]:
        about, node = info(self.call.node), self.call.node
        name = f"{about.name}.{'through' if target in (SCAN_SUMMARY, SCAN_SUMMARY_BACKWARD) else 'behind'}"
        cause = cause_of(self.call, self.args["inputs"][0], self.axes)
        made = self.graph.call(target, args, like=node, type=None, results=tuple(types), name=name, cause=cause)
        found: list[fx.Node] = []
        for i, type in enumerate(types):
            value = self.graph.fx.call_function(operator.getitem, (made, i))
            set_info(value, self.graph.info_like(node, target, type, name, cause=cause))
            found.append(value)
        return found

    def of_each(self, type: TensorType, *extra: int) -> TensorType:
        """One of a type for each rank."""
        return TensorType(
            type.dtype, ((Atom(self.ranks, self.axes),), *((Atom(n),) * (n > 1) for n in extra), *type.dims)
        )

    def by_turns(self, target: Any, read: tuple[Any, ...], told: tuple[Any, ...], backward: bool) -> list[fx.Node]:
        """What comes to each run from the one whose turn is before its own."""
        every: list[fx.Node] = []
        before: list[fx.Node] = []
        types = [self.of_each(state) for state in self.states]
        for turn in self.runs.turns(backward):
            before = self._several(target, (*read, before, *told, *self.layout, turn), types)
            if hop := self.runs.hop(turn, backward):
                before = [
                    moved(self.call, x, NEIGHBOUR_ROWS, (x, list(self.axes), 0, 0, 1, hop), type, self.axes)
                    for x, type in zip(before, types, strict=True)
                ]
            every += before
        return every

    def gathered(self, target: Any, read: tuple[Any, ...], told: tuple[Any, ...]) -> list[fx.Node]:
        """What the steps of all ranks do to each state."""
        types = [self.of_each(state, len(self.runs.lengths), 2) for state in self.states]
        found: list[fx.Node] = []
        for x, type in zip(self._several(target, (*read, *told, *self.layout), types), types, strict=True):
            every = TensorType(type.dtype, ((Atom(self.ranks),), *type.dims[1:]))
            mesh = self.graph.mesh
            how = (list(self.axes), list(type.local_atoms(mesh)), 0, self.ranks, list(every.local_shape(mesh)))
            found.append(moved(self.call, x, all_gather, (x, *how), every, self.axes))
        return found


@by_block
def local_scan(call: LocalCall) -> Any:
    """`scan` on a rank's steps."""
    args = call.args
    parts = _Parts(call, call.operands[: len(args["carried"])])
    if not parts.axes:
        return call.with_args()
    read, told, affine = (args["carried"], args["inputs"]), (args["body"],), parts.body.homogeneous is not None
    if affine:
        before = parts.gathered(SCAN_SUMMARY, read, told)
    else:
        before = parts.by_turns(SCAN_TURN, read, told, backward=False)
    return SCAN_PART, (*read, before, *told, *parts.layout, affine), {}


@by_block
def local_scan_backward(call: LocalCall) -> Any:
    """`scan_backward` on a rank's steps."""
    args = call.args
    first = len(args["grads"])
    starts = call.operands[first : first + len(args["starts"])]
    parts = _Parts(call, [TensorType(type.dtype, type.dims[1:]) for type in starts])
    if not parts.axes:
        return call.with_args()
    read, told = (args["grads"], args["starts"], args["inputs"]), (args["body"], args["given"])
    affine = parts.body.diagonal
    if affine:
        before = parts.gathered(SCAN_SUMMARY_BACKWARD, read, told)
    else:
        before = parts.by_turns(SCAN_TURN_BACKWARD, read, told, backward=True)
    return SCAN_PART_BACKWARD, (*read, before, *told, args["needed"], *parts.layout, affine), {}


# ------------------------------------------------------------------------------------------------ rules
@rule(
    SCAN,
    localize=local_scan,
    unfit=unfit,
    examples=[
        ([(4, 6, 3)], [(4, 6, 3, 5), (4, 6, 3, 5), (4, 3, 5)], MAMBA),
        ([(4, 6, 2)], [(6, 4, 70), (4, 70, 6), (4, 70, 2), (6, 2)], SELECTIVE),
        ([(2, 4, 3, 6)], [(2, 5, 4, 3), (2, 5, 4, 3), (2, 5, 4, 6), (2, 4, 5)], DELTA),
        ([(4, 3, 2)], [(3, 4, 6, 3), (3, 4, 6, 5), (3, 4, 5, 2)], CHUNKS),
        ([(4, 3)], [(5, 4, 3), (3, 3)], RNN),
        *(([(4, 6, 3)], [(4, 6, 3, sum(n)), (4, 6, 3, sum(n)), (4, 3, sum(n))], MAMBA, n) for n in SEGMENTS),
        ([(4, 6, 2)], [(6, 4, 70), (4, 70, 6), (4, 70, 2), (6, 2)], SELECTIVE, [35, 35]),
        ([(2, 4, 3, 6)], [(2, 5, 4, 3), (2, 5, 4, 3), (2, 5, 4, 6), (2, 4, 5)], DELTA, [3, 2]),
        ([(4, 3)], [(150, 4, 3), (3, 3)], RNN, [75, 75]),
        ([(4, 3)], [(8, 4, 3), (3, 3)], RNN, [2, 2, 2, 2]),
    ],
)
def scan(carried: Sequence[Dims], inputs: Sequence[Dims], body: str, segments: Sequence[int]) -> Notation:
    parsed = parse_body(body)
    states = [letters for _, letters in parsed.carried]
    ins = _text(*states, *(letters for _, letters in parsed.inputs))
    results = [*(letters for _, letters in parsed.yields), *states]
    outs = _text(*results, *(BLOCK + letters for letters in states))
    letters = {letter for _, dims in (*parsed.carried, *parsed.inputs) for letter in dims}
    everywhere = {letter for letter in letters if all(letter in dims for dims in results)}
    whole = {BLOCK, *parsed.summed, *(letters - everywhere - {TIME})}
    if not segments:
        return Notation(f"{ins} -> {outs}", whole=" ".join(sorted({TIME, *whole})))
    return Notation(f"{ins} -> {outs}", sum=TIME, whole=" ".join(sorted(whole - {BLOCK})), following=((TIME, BLOCK),))


@rule(
    SCAN_BACKWARD,
    localize=local_scan_backward,
    unfit=unfit,
    examples=[
        (
            [(4, 6, 5)], [(1, 4, 6, 3)], [(4, 6, 3, 5), (4, 6, 3, 5), (4, 3, 5)], MAMBA, [0],
            [True, True, True, True],
        ),
        (
            [(4, 70, 6), (4, 6, 2)], [(2, 4, 6, 2)], [(6, 4, 70), (4, 70, 6), (4, 70, 2), (6, 2)], SELECTIVE, [0, 1],
            [False, True, True, True, True],
        ),
        (
            [(2, 4, 5, 6)], [(1, 2, 4, 3, 6)], [(2, 5, 4, 3), (2, 5, 4, 3), (2, 5, 4, 6), (2, 4, 5)], DELTA, [0],
            [True, True, True, False, True],
        ),
        (
            [(3, 4, 6, 2)], [(1, 4, 3, 2)], [(3, 4, 6, 3), (3, 4, 6, 5), (3, 4, 5, 2)], CHUNKS, [0],
            [True, True, True, True],
        ),
        ([(4, 3)], [(1, 4, 3)], [(5, 4, 3), (3, 3)], RNN, [1], [True, True, True]),
        (
            [(4, 6, 7), (4, 6, 3)], [(2, 4, 6, 3)], [(4, 6, 3, 7), (4, 6, 3, 7), (4, 3, 7)], MAMBA, [0, 1],
            [True, True, True, True], [4, 3],
        ),
        ([(8, 4, 3)], [(4, 4, 3)], [(8, 4, 3), (3, 3)], RNN, [0], [True, True, True], [2, 2, 2, 2]),
        (
            [(2, 4, 5, 6)], [(2, 2, 4, 3, 6)], [(2, 5, 4, 3), (2, 5, 4, 3), (2, 5, 4, 6), (2, 4, 5)], DELTA, [0],
            [True, True, True, True, True], [3, 2],
        ),
    ],
)  # fmt: skip
def scan_backward(
    grads: Sequence[Dims], starts: Sequence[Dims], inputs: Sequence[Dims], body: str,
    given: Sequence[int], needed: Sequence[bool], segments: Sequence[int],
) -> Notation:  # fmt: skip
    parsed = parse_body(body)
    states, of_inputs = [dims for _, dims in parsed.carried], [dims for _, dims in parsed.inputs]
    results = [*(letters for _, letters in parsed.yields), *states]
    coming = [results[place] for place in given]
    ins = _text(*coming, *(BLOCK + letters for letters in states), *of_inputs)
    outs = [letters for letters, need in zip([*states, *of_inputs], needed, strict=True) if need]
    letters = {letter for tensor in (*states, *of_inputs) for letter in tensor}
    free = {x for x in letters if all(x in tensor for tensor in coming)} - parsed.summed - {TIME}
    whole = letters - free - {TIME}
    return Notation(
        f"{ins} -> {_text(*outs)}",
        sum=" ".join(sorted(free | {TIME, BLOCK} if segments else free)),
        whole=" ".join(sorted(whole if segments else whole | {BLOCK, TIME})),
        linear=(0,) if len(coming) == 1 else (),
        following=((TIME, BLOCK),) if segments else (),
    )
