"""A recurrence whose steps lie over ranks: each takes its own steps, from the state that those before leave it.

    scan_part       carried, inputs, before    own steps; what is carried in comes out of `before`
    scan_turn       carried, inputs, before    the states behind the steps of the run whose turn it is; elsewhere 0
    scan_summary    carried, inputs            how a state goes through each run of own steps: a factor and an addend

and the same three of backward, where gradients of states come from the steps behind. A state of a rank has a dim of
one element in front, which lies over the axes. A rank has one run of steps, or of a zigzag two (`step_runs`).

There are two ways for states to travel. Of any body they go from run to run in the order of time (`affine=False`): the
rank of run 0 takes its steps and sends its states to that of run 1 (`neighbour_rows`), which takes its own with them,
and so on; nothing is sent where a rank has both. `before` has what came after each turn. Then all ranks take their
steps once more, for the results. One after the other, that is no longer than all steps on one rank, and half of a
rank's share, for the last turn is everybody's.

Where the next state is `h = a * h + b`, with a and b that know nothing of h, the steps of a run are together such a
step: its factor is the product of all a, its addend what they make of 0. Ranks gather these two of all runs, as
`before`, and take those before their own one by one (`affine=True`). That is Blelloch's scan over ranks (Prefix Sums
and Their Applications, 1990). Gradients of states go back by h's own factor whenever no element of a state reads
another one, so backward may go so where forward does not.

All read the coordinate. The last states are those of the rank with the last step, and gradients of the first ones those
of the rank with the first: other ranks yield 0, so that a pending sum has them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels_triton.base.library import define
from shardc.ir.blocks import blocks_of
from shardc.ir.ops.context import current
from shardc.ir.ops.local import AXES_READ
from shardc.ir.ops.scan import backward, blocks_of_steps, empty, forward, last_states, sizes_of, wide
from shardc.ir.ops.scan_body import TIME, Body, parse_body
from shardc.ir.ops.shift import size_of
from shardc.ir.ops.step_runs import StepRun, StepRuns, step_runs


def _runs(source: str, axes: list[str]) -> tuple[int, StepRuns]:
    """A rank's number along the axes, and the runs of all."""
    context = current()
    return context.index(tuple(axes)), step_runs(source, tuple(axes), context.mesh)


def _taken(body: Body, inputs: Sequence[Tensor], run: StepRun) -> list[Tensor]:
    """The inputs of the steps of a run."""
    pairs = zip(body.inputs, inputs, strict=True)
    return [x.narrow(dims.index(TIME), run.local, run.extent) if TIME in dims else x for (_, dims), x in pairs]


def _step(state: Tensor, through: Tensor) -> Tensor:
    """A state behind the steps of a run; a factor that is infinite leaves 0 as it is."""
    factor, addend = through[0], through[1]
    return torch.where(state == 0, addend, factor * state + addend)


def _brought(given: Sequence[Tensor], before: Sequence[Tensor], runs: Sequence[StepRun], affine: bool) -> list[Tensor]:
    """The states that a run begins with: those `given`, after the steps of other runs, in this order.

    `before` has what the steps of all runs do to each state, or the states that came after each turn.
    """
    if not runs:
        return list(given)
    if not affine:
        count = len(given)
        return [x[0] for x in before[(len(runs) - 1) * count : len(runs) * count]]
    states = list(given)
    for run in runs:
        pairs = zip(states, before, strict=True)
        states = [_step(state, through[run.rank, run.place]) for state, through in pairs]
    return states


def _widened(carried: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    dtype = wide([*carried, *inputs])
    return [x.to(dtype) for x in carried]


# ------------------------------------------------------------------------------------------------ forward
def _part(
    carried: list[Tensor], inputs: list[Tensor], before: list[Tensor], text: str, source: str, axes: list[str],
    segments: list[int], affine: bool,
) -> list[Tensor]:  # fmt: skip
    body = parse_body(text)
    own, runs = _runs(source, axes)
    given = _widened(carried, inputs)
    results = _fake_part(carried, inputs, before, text, source, axes, segments, affine)
    for y in results:
        y.zero_()
    yields, states_at = len(body.yields), len(body.yields) + len(carried)
    for number, run in runs.of(own):
        states = _brought(given, before, runs.runs[:number], affine)
        found = forward(states, _taken(body, inputs, run), text, runs.segments(run, segments))
        for (_, dims), y, part in zip(body.yields, results[:yields], found[:yields], strict=True):
            y.narrow(dims.index(TIME), run.local, run.extent).copy_(part)
        for place, part in zip(results[states_at:], found[states_at:], strict=True):
            place.narrow(0, runs.starts(run, segments), part.shape[0]).copy_(part)
        if number == len(runs.runs) - 1:
            for place, last in zip(results[yields:states_at], found[yields:states_at], strict=True):
                place.copy_(last)
    return results


def _fake_part(
    carried: list[Tensor], inputs: list[Tensor], before: list[Tensor], text: str, source: str, axes: list[str],
    segments: list[int], affine: bool,
) -> list[Tensor]:  # fmt: skip
    body = parse_body(text)
    sizes = sizes_of(body, [x.shape for x in carried], [x.shape for x in inputs])
    return empty(body, sizes, inputs[0], wide([*carried, *inputs]), segments)


def _turn(
    carried: list[Tensor], inputs: list[Tensor], before: list[Tensor], text: str, source: str, axes: list[str],
    segments: list[int], turn: int,
) -> list[Tensor]:  # fmt: skip
    body = parse_body(text)
    own, runs = _runs(source, axes)
    states, run = _widened(carried, inputs), runs.runs[turn]
    if own != run.rank:
        return [torch.zeros_like(x).unsqueeze(0).contiguous() for x in states]
    states = last_states([x[0] for x in before] if turn else states, _taken(body, inputs, run), body)
    return [x.unsqueeze(0).clone(memory_format=torch.contiguous_format) for x in states]


def _fake_turn(carried: list[Tensor], inputs: list[Tensor], *_: object) -> list[Tensor]:
    dtype = wide([*carried, *inputs])
    return [x.new_empty([1, *x.shape], dtype=dtype) for x in carried]


def _factors(body: Body, states: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor] | None:
    """What all steps multiply each state by; None where that depends on the states."""
    linear = body.homogeneous
    return None if linear is None else last_states([torch.ones_like(x) for x in states], inputs, linear)


def _of_runs(states: Sequence[Tensor], places: int) -> list[Tensor]:
    """A factor and an addend for each run of a rank: those of no steps."""
    found = [x.new_zeros([1, places, 2, *x.shape]) for x in states]
    for y in found:
        y[:, :, 0] = 1
    return found


def _summary(
    carried: list[Tensor], inputs: list[Tensor], text: str, source: str, axes: list[str], segments: list[int]
) -> list[Tensor]:
    body = parse_body(text)
    own, runs = _runs(source, axes)
    zeros = [torch.zeros_like(x) for x in _widened(carried, inputs)]
    results = _of_runs(zeros, len(runs.lengths))
    for _, run in runs.of(own):
        taken = _taken(body, inputs, run)
        factors = _factors(body, zeros, taken)
        assert factors is not None, f"a state is no multiple of the one before: {text}"
        for y, *pair in zip(results, factors, last_states(zeros, taken, body), strict=True):
            y[0, run.place] = torch.stack(pair)
    return results


def _fake_summary(
    carried: list[Tensor], inputs: list[Tensor], text: str, source: str, axes: list[str], segments: list[int]
) -> list[Tensor]:
    dtype, places = wide([*carried, *inputs]), len(blocks_of(size_of(source)))
    return [x.new_empty([1, places, 2, *x.shape], dtype=dtype) for x in carried]


# ------------------------------------------------------------------------------------------------ backward
class _Behind:
    """A rank's backward: gradients of what its steps yield, and of the states behind them."""

    def __init__(
        self, grads: list[Tensor], starts: list[Tensor], inputs: list[Tensor], text: str, given: list[int],
        source: str, axes: list[str], segments: list[int],
    ) -> None:  # fmt: skip
        self.text, self.body, self.segments = text, parse_body(text), segments
        self.own, self.runs = _runs(source, axes)
        self.starts, self.inputs = starts, inputs
        dtype, by_place = wide([*starts, *inputs]), dict(zip(given, grads, strict=True))
        self.yields, count = len(self.body.yields), len(self.body.carried)
        self.of_yields = {i: (by_place[i], dims) for i, (_, dims) in enumerate(self.body.yields) if i in by_place}
        self.of_lasts = [
            by_place[place].to(dtype)
            if (place := self.yields + i) in by_place
            else starts[i].new_zeros(starts[i].shape[1:], dtype=dtype)
            for i in range(count)
        ]

    def through(
        self, run: StepRun, of_states: Sequence[Tensor], needed: Sequence[bool], yields: bool = True
    ) -> list[Tensor]:
        """Gradients of the states before a run, and of inputs; `yields`: of what its steps yield too."""
        segments = self.runs.segments(run, self.segments)
        first, blocks = self.runs.starts(run, self.segments), len(blocks_of_steps(run.extent, segments))
        of_yields = {
            i: g.narrow(dims.index(TIME), run.local, run.extent)
            for i, (g, dims) in (self.of_yields if yields else {}).items()
        }
        return backward(
            [*of_yields.values(), *of_states], [x.narrow(0, first, blocks) for x in self.starts],
            _taken(self.body, self.inputs, run), self.text,
            [*of_yields, *(self.yields + i for i in range(len(of_states)))], needed, segments,
        )  # fmt: skip

    def before(self, run: StepRun, of_states: Sequence[Tensor], yields: bool = True) -> list[Tensor]:
        """Gradients of the states before a run."""
        needed = [*(True for _ in self.starts), *(False for _ in self.inputs)]
        return self.through(run, of_states, needed, yields)


def _part_backward(
    grads: list[Tensor], starts: list[Tensor], inputs: list[Tensor], before: list[Tensor], text: str, given: list[int],
    needed: list[bool], source: str, axes: list[str], segments: list[int], affine: bool,
) -> list[Tensor]:  # fmt: skip
    behind = _Behind(grads, starts, inputs, text, given, source, axes, segments)
    results = _fake_part_backward(grads, starts, inputs, before, text, given, needed, source, axes, segments, affine)
    for y in results:
        y.zero_()
    count = sum(needed[: len(starts)])
    dims_of = [dims for (_, dims), need in zip(behind.body.inputs, needed[len(starts) :], strict=True) if need]
    for number, run in behind.runs.of(behind.own):
        of_states = _brought(behind.of_lasts, before, behind.runs.runs[:number:-1], affine)
        found = behind.through(run, of_states, needed)
        if number == 0:
            for place, part in zip(results[:count], found[:count], strict=True):
                place.copy_(part)
        for dims, place, part in zip(dims_of, results[count:], found[count:], strict=True):
            (place.narrow(dims.index(TIME), run.local, run.extent) if TIME in dims else place).add_(part)
    return results


def _fake_part_backward(
    grads: list[Tensor], starts: list[Tensor], inputs: list[Tensor], before: list[Tensor], text: str, given: list[int],
    needed: list[bool], source: str, axes: list[str], segments: list[int], affine: bool,
) -> list[Tensor]:  # fmt: skip
    dtype = wide([*starts, *inputs])
    initial = [x.new_empty(x.shape[1:], dtype=dtype) for x, need in zip(starts, needed, strict=False) if need]
    return [*initial, *(x.new_empty(x.shape) for x, n in zip(inputs, needed[len(starts) :], strict=True) if n)]


def _turn_backward(
    grads: list[Tensor], starts: list[Tensor], inputs: list[Tensor], before: list[Tensor], text: str, given: list[int],
    source: str, axes: list[str], segments: list[int], turn: int,
) -> list[Tensor]:  # fmt: skip
    behind = _Behind(grads, starts, inputs, text, given, source, axes, segments)
    run = behind.runs.runs[turn]
    if behind.own != run.rank:
        return [torch.zeros_like(g).unsqueeze(0).contiguous() for g in behind.of_lasts]
    of_states = [x[0] for x in before] if turn < len(behind.runs.runs) - 1 else behind.of_lasts
    return [g.unsqueeze(0).clone(memory_format=torch.contiguous_format) for g in behind.before(run, of_states)]


def _fake_turn_backward(grads: list[Tensor], starts: list[Tensor], inputs: list[Tensor], *_: object) -> list[Tensor]:
    dtype = wide([*starts, *inputs])
    return [x.new_empty([1, *x.shape[1:]], dtype=dtype) for x in starts]


def _summary_backward(
    grads: list[Tensor], starts: list[Tensor], inputs: list[Tensor], text: str, given: list[int], source: str,
    axes: list[str], segments: list[int],
) -> list[Tensor]:  # fmt: skip
    behind = _Behind(grads, starts, inputs, text, given, source, axes, segments)
    zeros = [torch.zeros_like(g) for g in behind.of_lasts]
    results = _of_runs(zeros, len(behind.runs.lengths))
    for _, run in behind.runs.of(behind.own):
        factors = _factors(behind.body, zeros, _taken(behind.body, inputs, run))
        if factors is None:  # a slope that depends on the states
            factors = behind.before(run, [torch.ones_like(g) for g in zeros], yields=False)
        for y, *pair in zip(results, factors, behind.before(run, zeros), strict=True):
            y[0, run.place] = torch.stack(pair)
    return results


def _fake_summary_backward(
    grads: list[Tensor], starts: list[Tensor], inputs: list[Tensor], text: str, given: list[int], source: str,
    axes: list[str], segments: list[int],
) -> list[Tensor]:  # fmt: skip
    dtype, places = wide([*starts, *inputs]), len(blocks_of(size_of(source)))
    return [x.new_empty([1, places, 2, *x.shape[1:]], dtype=dtype) for x in starts]


_READ, _LAYOUT = "Tensor[] carried, Tensor[] inputs", "str source, str[] axes, int[] segments"
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
AXES_READ[SCAN_PART] = lambda carried, inputs, before, body, source, axes, segments, affine: axes
AXES_READ[SCAN_TURN] = lambda carried, inputs, before, body, source, axes, segments, turn: axes
AXES_READ[SCAN_SUMMARY] = lambda carried, inputs, body, source, axes, segments: axes
AXES_READ[SCAN_PART_BACKWARD] = lambda g, s, i, before, body, given, needed, source, axes, segments, affine: axes
AXES_READ[SCAN_TURN_BACKWARD] = lambda g, s, i, before, body, given, source, axes, segments, turn: axes
AXES_READ[SCAN_SUMMARY_BACKWARD] = lambda g, s, i, body, given, source, axes, segments: axes
