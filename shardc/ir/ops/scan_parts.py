"""A recurrence whose steps lie over ranks: each takes its own steps, from the state that those before leave it.

    scan_part       carried, inputs, before    own steps; what is carried in comes out of `before`
    scan_turn       carried, inputs, before    the states behind the steps of the rank whose turn it is; elsewhere 0
    scan_summary    carried, inputs            how a state goes through all own steps: a factor and an addend each

and the same three of backward, where gradients of states come from the ranks behind. A state of a rank has a dim of
one element in front, which lies over the axes.

There are two ways for states to travel. Of any body they go from rank to rank (`affine=False`): rank 0 takes its steps
and sends its states to rank 1 (`neighbour_rows`), which takes its own with them, and so on; `before` has what came
after each turn. Then all ranks take their steps once more, for the results. One after the other, that is no longer
than all steps on one rank, for the last turn is everybody's.

Where the next state is `h = a * h + b`, with a and b that know nothing of h, the steps of a rank are together such a
step: its factor is the product of all a, its addend what they make of 0. Ranks gather these two of all others, as
`before`, and take those before their own one by one (`affine=True`). That is Blelloch's scan over ranks (Prefix Sums
and Their Applications, 1990). Gradients of states go back by h's own factor whenever no element of a state reads
another one, so backward may go so where forward does not.

All read the coordinate. The last states are those of the last rank, and gradients of the first ones those of the first:
other ranks yield 0, so that a pending sum has them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels_triton.base.library import define
from shardc.ir.ops.context import current
from shardc.ir.ops.local import AXES_READ, span
from shardc.ir.ops.scan import backward, blocks_of_steps, empty, forward, last_states, sizes_of, wide
from shardc.ir.ops.scan_body import TIME, Body, parse_body


def _own_steps(source: str, axes: list[str]) -> tuple[int, int, int]:
    """A rank's number along the axes, of how many, and how many steps it has."""
    context = current()
    held = span(int(source), axes, context.mesh, context.coordinate)
    return context.index(tuple(axes)), context.mesh.size(axes), held.extent


def _taken(body: Body, inputs: Sequence[Tensor], steps: int) -> list[Tensor]:
    """The inputs of the first steps."""
    pairs = zip(body.inputs, inputs, strict=True)
    return [x.narrow(dims.index(TIME), 0, steps) if TIME in dims else x for (_, dims), x in pairs]


def _step(state: Tensor, through: Tensor) -> Tensor:
    """A state behind the steps of a rank; a factor that is infinite leaves 0 as it is."""
    factor, addend = through[0], through[1]
    return torch.where(state == 0, addend, factor * state + addend)


def _brought(
    given: Sequence[Tensor], before: Sequence[Tensor], ranks: Sequence[int], turn: int, affine: bool
) -> list[Tensor]:
    """The states that a rank begins with: those `given`, after the steps of other ranks, in this order.

    `before` has what all ranks' steps do to each state, or the states that came after each turn, of which the rank's is
    number `turn`.
    """
    if not ranks:
        return list(given)
    if not affine:
        count = len(given)
        return [x[0] for x in before[turn * count : (turn + 1) * count]]
    states = list(given)
    for rank in ranks:
        states = [_step(state, through[rank]) for state, through in zip(states, before, strict=True)]
    return states


def _widened(carried: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    dtype = wide([*carried, *inputs])
    return [x.to(dtype) for x in carried]


# ------------------------------------------------------------------------------------------------ forward
def _part(
    carried: list[Tensor], inputs: list[Tensor], before: list[Tensor], text: str, source: str, axes: list[str],
    segment: int, affine: bool,
) -> list[Tensor]:  # fmt: skip
    body = parse_body(text)
    own, ranks, steps = _own_steps(source, axes)
    states = _brought(_widened(carried, inputs), before, range(own), own - 1, affine)
    results = _fake_part(carried, inputs, before, text, source, axes, segment, affine)
    for y in results:
        y.zero_()
    yields, states_at = len(body.yields), len(body.yields) + len(carried)
    found = forward(states, _taken(body, inputs, steps), text, segment) if steps else []
    lasts = found[yields:states_at] or states
    for (_, dims), y, part in zip(body.yields, results[:yields], found[:yields], strict=False):
        y.narrow(dims.index(TIME), 0, steps).copy_(part)
    for place, part in zip(results[states_at:], found[states_at:], strict=False):
        place[: part.shape[0]].copy_(part)
    for place, last in zip(results[yields:states_at], lasts, strict=True):
        if own == ranks - 1:
            place.copy_(last)
    return results


def _fake_part(
    carried: list[Tensor], inputs: list[Tensor], before: list[Tensor], text: str, source: str, axes: list[str],
    segment: int, affine: bool,
) -> list[Tensor]:  # fmt: skip
    body = parse_body(text)
    sizes = sizes_of(body, [x.shape for x in carried], [x.shape for x in inputs])
    return empty(body, sizes, inputs[0], wide([*carried, *inputs]), segment)


def _turn(
    carried: list[Tensor], inputs: list[Tensor], before: list[Tensor], text: str, source: str, axes: list[str],
    segment: int, turn: int,
) -> list[Tensor]:  # fmt: skip
    body = parse_body(text)
    own, _, steps = _own_steps(source, axes)
    states = _widened(carried, inputs)
    if own != turn:
        return [torch.zeros_like(x).unsqueeze(0).contiguous() for x in states]
    if turn:
        states = [x[0] for x in before]
    if steps:
        states = last_states(states, _taken(body, inputs, steps), body)
    return [x.unsqueeze(0).clone(memory_format=torch.contiguous_format) for x in states]


def _fake_turn(carried: list[Tensor], inputs: list[Tensor], *_: object) -> list[Tensor]:
    dtype = wide([*carried, *inputs])
    return [x.new_empty([1, *x.shape], dtype=dtype) for x in carried]


def _factors(body: Body, states: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor] | None:
    """What all steps multiply each state by; None where that depends on the states."""
    linear = body.homogeneous
    return None if linear is None else last_states([torch.ones_like(x) for x in states], inputs, linear)


def _summary(
    carried: list[Tensor], inputs: list[Tensor], text: str, source: str, axes: list[str], segment: int
) -> list[Tensor]:
    body = parse_body(text)
    _, _, steps = _own_steps(source, axes)
    zeros = [torch.zeros_like(x) for x in _widened(carried, inputs)]
    factors: list[Tensor] | None = [torch.ones_like(x) for x in zeros]
    if steps:
        own = _taken(body, inputs, steps)
        factors, zeros = _factors(body, zeros, own), last_states(zeros, own, body)
    assert factors is not None, f"a state is no multiple of the one before: {text}"
    return [torch.stack(pair).unsqueeze(0).contiguous() for pair in zip(factors, zeros, strict=True)]


def _fake_summary(carried: list[Tensor], inputs: list[Tensor], *_: object) -> list[Tensor]:
    dtype = wide([*carried, *inputs])
    return [x.new_empty([1, 2, *x.shape], dtype=dtype) for x in carried]


# ------------------------------------------------------------------------------------------------ backward
class _Behind:
    """A rank's backward: gradients of what its steps yield, and of the states behind them."""

    def __init__(
        self, grads: list[Tensor], starts: list[Tensor], inputs: list[Tensor], text: str, given: list[int],
        source: str, axes: list[str], segment: int,
    ) -> None:  # fmt: skip
        self.text, self.body, self.segment = text, parse_body(text), segment
        self.own, self.ranks, self.steps = _own_steps(source, axes)
        self.dtype = wide([*starts, *inputs])
        by_place = dict(zip(given, grads, strict=True))
        self.yields, count = len(self.body.yields), len(self.body.carried)
        self.of_yields = {
            i: by_place[i].narrow(dims.index(TIME), 0, self.steps)
            for i, (_, dims) in enumerate(self.body.yields)
            if i in by_place
        }
        self.of_lasts = [
            by_place[place].to(self.dtype)
            if (place := self.yields + i) in by_place
            else starts[i].new_zeros(starts[i].shape[1:], dtype=self.dtype)
            for i in range(count)
        ]
        self.starts = [x.narrow(0, 0, len(blocks_of_steps(self.steps, segment))) for x in starts]
        self.inputs = _taken(self.body, inputs, self.steps)
        self.states = [True] * count

    def through(self, of_states: Sequence[Tensor], needed: Sequence[bool], yields: bool = True) -> list[Tensor]:
        """Gradients of the states before own steps, and of inputs; `yields`: of what they yield too."""
        of_yields = self.of_yields if yields else {}
        places = [*of_yields, *(self.yields + i for i in range(len(of_states)))]
        return backward(
            [*of_yields.values(), *of_states], self.starts, self.inputs, self.text, places, needed, self.segment
        )

    def before(self, of_states: Sequence[Tensor], yields: bool = True) -> list[Tensor]:
        """Gradients of the states before own steps."""
        if not self.steps:
            return list(of_states)
        return self.through(of_states, [*self.states, *(False for _ in self.inputs)], yields)


def _part_backward(
    grads: list[Tensor], starts: list[Tensor], inputs: list[Tensor], before: list[Tensor], text: str, given: list[int],
    needed: list[bool], source: str, axes: list[str], segment: int, affine: bool,
) -> list[Tensor]:  # fmt: skip
    behind = _Behind(grads, starts, inputs, text, given, source, axes, segment)
    others = range(behind.ranks - 1, behind.own, -1)
    of_states = _brought(behind.of_lasts, before, others, len(others) - 1, affine)
    results = _fake_part_backward(grads, starts, inputs, before, text, given, needed, source, axes, segment, affine)
    for y in results:
        y.zero_()
    count = sum(needed[: len(starts)])
    if not behind.steps:
        found = [g for g, need in zip(of_states, needed, strict=False) if need]
    else:
        found = behind.through(of_states, needed)
    for place, part in zip(results[:count], found, strict=False):
        if behind.own == 0:
            place.copy_(part)
    dims_of = [dims for (_, dims), need in zip(behind.body.inputs, needed[len(starts) :], strict=True) if need]
    for dims, place, part in zip(dims_of, results[count:], found[count:], strict=False):
        (place.narrow(dims.index(TIME), 0, behind.steps) if TIME in dims else place).copy_(part)
    return results


def _fake_part_backward(
    grads: list[Tensor], starts: list[Tensor], inputs: list[Tensor], before: list[Tensor], text: str, given: list[int],
    needed: list[bool], source: str, axes: list[str], segment: int, affine: bool,
) -> list[Tensor]:  # fmt: skip
    dtype = wide([*starts, *inputs])
    initial = [x.new_empty(x.shape[1:], dtype=dtype) for x, need in zip(starts, needed, strict=False) if need]
    return [*initial, *(x.new_empty(x.shape) for x, n in zip(inputs, needed[len(starts) :], strict=True) if n)]


def _turn_backward(
    grads: list[Tensor], starts: list[Tensor], inputs: list[Tensor], before: list[Tensor], text: str, given: list[int],
    source: str, axes: list[str], segment: int, turn: int,
) -> list[Tensor]:  # fmt: skip
    behind = _Behind(grads, starts, inputs, text, given, source, axes, segment)
    if behind.own != turn:
        return [torch.zeros_like(g).unsqueeze(0).contiguous() for g in behind.of_lasts]
    of_states = [x[0] for x in before] if turn < behind.ranks - 1 else behind.of_lasts
    return [g.unsqueeze(0).clone(memory_format=torch.contiguous_format) for g in behind.before(of_states)]


def _fake_turn_backward(grads: list[Tensor], starts: list[Tensor], inputs: list[Tensor], *_: object) -> list[Tensor]:
    dtype = wide([*starts, *inputs])
    return [x.new_empty([1, *x.shape[1:]], dtype=dtype) for x in starts]


def _summary_backward(
    grads: list[Tensor], starts: list[Tensor], inputs: list[Tensor], text: str, given: list[int], source: str,
    axes: list[str], segment: int,
) -> list[Tensor]:  # fmt: skip
    behind = _Behind(grads, starts, inputs, text, given, source, axes, segment)
    zeros = [torch.zeros_like(g) for g in behind.of_lasts]
    ones = [torch.ones_like(g) for g in zeros]
    factors = _factors(behind.body, zeros, behind.inputs) if behind.steps else ones
    if factors is None:  # a slope that depends on the states
        factors = behind.before(ones, yields=False)
    return [torch.stack(pair).unsqueeze(0).contiguous() for pair in zip(factors, behind.before(zeros), strict=True)]


def _fake_summary_backward(grads: list[Tensor], starts: list[Tensor], inputs: list[Tensor], *_: object) -> list[Tensor]:
    dtype = wide([*starts, *inputs])
    return [x.new_empty([1, 2, *x.shape[1:]], dtype=dtype) for x in starts]


_READ, _LAYOUT = "Tensor[] carried, Tensor[] inputs", "str source, str[] axes, int segment"
_READ_BACK = "Tensor[] grads, Tensor[] starts, Tensor[] inputs"
SCAN_PART = define(
    f"scan_part({_READ}, Tensor[] before, str body, {_LAYOUT}, bool affine) -> Tensor[]", _part, _fake_part
)
SCAN_TURN = define(f"scan_turn({_READ}, Tensor[] before, str body, {_LAYOUT}, int turn) -> Tensor[]", _turn, _fake_turn)
SCAN_SUMMARY = define(f"scan_summary({_READ}, str body, {_LAYOUT}) -> Tensor[]", _summary, _fake_summary)
SCAN_PART_BACKWARD = define(
    f"scan_part_backward({_READ_BACK}, Tensor[] before, str body, int[] given, bool[] needed, {_LAYOUT}, bool affine)"
    " -> Tensor[]",
    _part_backward,
    _fake_part_backward,
)
SCAN_TURN_BACKWARD = define(
    f"scan_turn_backward({_READ_BACK}, Tensor[] before, str body, int[] given, {_LAYOUT}, int turn) -> Tensor[]",
    _turn_backward,
    _fake_turn_backward,
)
SCAN_SUMMARY_BACKWARD = define(
    f"scan_summary_backward({_READ_BACK}, str body, int[] given, {_LAYOUT}) -> Tensor[]",
    _summary_backward,
    _fake_summary_backward,
)
AXES_READ[SCAN_PART] = lambda carried, inputs, before, body, source, axes, segment, affine: axes
AXES_READ[SCAN_TURN] = lambda carried, inputs, before, body, source, axes, segment, turn: axes
AXES_READ[SCAN_SUMMARY] = lambda carried, inputs, body, source, axes, segment: axes
AXES_READ[SCAN_PART_BACKWARD] = lambda g, s, i, before, body, given, needed, source, axes, segment, affine: axes
AXES_READ[SCAN_TURN_BACKWARD] = lambda g, s, i, before, body, given, source, axes, segment, turn: axes
AXES_READ[SCAN_SUMMARY_BACKWARD] = lambda g, s, i, body, given, source, axes, segment: axes
