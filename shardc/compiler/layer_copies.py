"""What passes make of a step with many equal layers, by what they make of few of them; see `ir/equal_layers.py`.

Nearly all passes decide by a call and what is near it, so what they make of few layers is lengthened:

    normalized   by the layers that a trace has recorded: the reference
    body         behind the body's passes; what comes then looks over the whole step, or few layers are too few for it
    finished     behind all passes but those that look over the whole step: updates that are merged, kernels
    sharded      behind `combine`, by fewer layers still, where that is all: a budget of memory is shared by all layers

All layers are looked at where something is told or asked of single ones: findings, and annotations or storage that
differ from layer to layer; and where somebody watches the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ParamSpec, TypeVar

from shardc.compiler.pass_pipeline import Options, inspect
from shardc.ir.equal_layers import LEAST, equal_layers, shortened
from shardc.ir.graph import Graph
from shardc.ir.lengthened import lengthened
from shardc.ir.mesh import Mesh
from shardc.ir.overlap_schedule import AHEAD
from shardc.ir.units import UnequalError, Units
from shardc.passes.base import Pass
from shardc.passes.communication.combine import Combine
from shardc.passes.communication.prefetch import Prefetch, gathers_weights
from shardc.passes.communication.split_batch import SplitBatch
from shardc.passes.context.divide_attention import Divided
from shardc.passes.normalize.normalize import Normalize
from shardc.passes.sharding.dispatch import Choice
from shardc.passes.sharding.seed import Bound

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", Choice, Divided)
Distribute = Callable[[Graph, Sequence[Bound], Options], Graph]
Finish = Callable[[Graph, Options], Graph]
# So many more layers at either end go through all passes, as some look beyond the next layer; and so many where weights
# are gathered, each at most `AHEAD` collectives early.
NEAR, FAR = (3, 5), (AHEAD + 1, AHEAD + 1)


def normalized_by_layers(
    few: Graph, mesh: Mesh, normalize: Callable[[Graph], Graph], options: Options
) -> tuple[Graph, Graph] | None:
    """A traced step with all of its layers and with the few that were recorded, normalised by doing it to these; None
    where all of them have to be looked at."""
    if options.watch is not None:
        return None
    short = few.copy()
    short.mesh = mesh
    try:
        whole = short = normalize(short)
        if short.diagnostics:  # which may tell how many calls, or in which layers
            return None
        for units in reversed(few.units):
            whole = lengthened(whole, units)
        inspect(Normalize(), whole, whole, 0.0, replace(options, verify=True))
    except Exception:  # whatever is wrong with few layers, all of them are looked at
        return None
    return whole, short


@dataclass(frozen=True)
class Bodies:
    """What ranks run of a step: its `body` behind the body's passes, and that `finished` by those behind them, but for
    what looks over the whole step; None where that has not been made."""

    body: Graph | None
    finished: Graph | None = None


def made_by_layers(
    reference: Graph,
    bound: Sequence[Bound],
    options: Options,
    distribute: Distribute,
    finish: Finish | None,
    traced: Graph | None = None,
) -> Bodies | None:
    """What `distribute`, and then `finish`, make of a step, by doing it to few of its equal layers; None where all of
    them have to be looked at. `traced` is the reference with those that were recorded."""
    if options.watch is not None:
        return None
    try:
        return made_by_few_layers(reference, bound, options, distribute, finish, traced)
    except Exception:  # also a check that failed: whatever is wrong with few layers, all of them are looked at
        return None


def made_by_few_layers(
    reference: Graph,
    bound: Sequence[Bound],
    options: Options,
    distribute: Distribute,
    finish: Finish | None,
    traced: Graph | None = None,
    *,
    both: bool = False,
) -> Bodies | None:
    """What `made_by_layers` returns. Raises UnequalError where layers turn out not to be equal, and ShardcError for
    what is wrong with few of them. A body that is finished is not made before that, unless `both` are wanted."""
    if traced is not None and len(traced.units) != 1:  # others are found in the whole
        traced = None
    equal = equal_layers(reference) if traced is None else traced.units[0]
    if equal is None or options.recompute.mode == "budget":  # which all layers share
        return None
    is_far = bool(options.store.zero or options.store.bound)
    units = equal.narrowed(*(FAR if is_far else NEAR))
    if len(units.removed) < LEAST:
        units, finish = equal.narrowed(*NEAR), None
    if len(units.removed) < LEAST:
        return None
    kept, few = _of_few(units, bound, options)
    short = shortened(reference, units) if traced is None else lengthened(traced, equal, units)
    try:  # another list may have more
        made = made_by_few_layers(short, kept, few, distribute, finish, both=True)
    except UnequalError:
        made = None
    if made is None:
        body = distribute(short, kept, few)
        made = Bodies(body, None if finish is None else _unless_unequal(finish, body.copy(), few))
    if made.finished is not None and not is_far and gathers_weights(made.finished):
        made = replace(made, finished=None)
    of_all = partial(_of_all, reference=reference, units=units, options=options)
    finished = None if made.finished is None else _unless_unequal(of_all, made.finished, last=Prefetch())
    whole = of_all(made.body, last=SplitBatch()) if made.body is not None and (both or finished is None) else None
    _choose_for_all(options, units)
    return Bodies(whole, finished)


def _unless_unequal(make: Callable[P, Graph], *args: P.args, **kwargs: P.kwargs) -> Graph | None:
    try:
        return make(*args, **kwargs)
    except UnequalError:
        return None


def sharded_by_layers(
    reference: Graph, bound: Sequence[Bound], options: Options, distribute: Distribute
) -> Graph | None:
    """What `distribute` leaves of a step behind `Combine`, by doing it to few of its equal layers; None where all of
    them have to be looked at."""
    if options.watch is not None:
        return None
    try:
        return by_few_layers(reference, bound, options, distribute)
    except Exception:  # whatever is wrong with few layers, all of them are looked at
        return None


def by_few_layers(reference: Graph, bound: Sequence[Bound], options: Options, distribute: Distribute) -> Graph | None:
    """What `sharded_by_layers` returns. Raises UnequalError where layers turn out not to be equal, and ShardcError for
    what is wrong with few of them: of a step's faults all layers are told."""
    units = equal_layers(reference)
    if units is None:
        return None
    kept, few = _of_few(units, bound, options)
    short = shortened(reference, units)
    try:  # another list may have more
        sharded = by_few_layers(short, kept, few, distribute)
    except UnequalError:
        sharded = None
    sharded = distribute(short, kept, few) if sharded is None else sharded
    whole = _of_all(sharded, reference, units, options, Combine())
    _choose_for_all(options, units)
    return whole


def _of_all(short: Graph, reference: Graph, units: Units, options: Options, last: Pass) -> Graph:
    """The graph of all layers, as a pass `last` leaves it."""
    for finding in short.diagnostics[len(reference.diagnostics) :]:
        unit = units.within(finding.fqn or "")[0]
        if unit is not None and unit >= units.first:
            raise UnequalError(f"of each layer is told: {finding.message}")
    whole = lengthened(short, units)
    if (whole.inputs, whole.outputs) != (reference.inputs, reference.outputs):
        raise UnequalError("inputs and outputs are others")
    inspect(last, whole, whole, 0.0, replace(options, verify=True))  # copies are always checked
    return whole


def _choose_for_all(options: Options, units: Units) -> None:
    options.assign.chosen[:] = _of_all_layers(options.assign.chosen, units)
    for divided in (options.attention.chosen, options.keys.chosen):
        divided[:] = _of_all_layers(divided, units)


def _of_few(units: Units, bound: Sequence[Bound], options: Options) -> tuple[list[Bound], Options]:
    """What is asked of the shortened step. Raises UnequalError where single layers are asked for otherwise than
    others."""
    store = options.store
    stored = _asked(units, [(each.name, each) for each in store.bound])
    layout = _asked(units, [(name, (name, type)) for name, type in store.layout])
    gathered = _asked(units, [(name, name) for name in sorted(options.keep_gathered)])
    kept = [
        replace(each, alike=tuple(units.renamed(each.name, unit) for unit in units.removed))
        if units.within(each.name)[0] == units.first
        else each
        for each in _asked(units, [(each.name, each) for each in bound])
    ]
    few = replace(options, store=replace(store, bound=stored, layout=layout), keep_gathered=frozenset(gathered))
    return kept, few


def _asked(units: Units, named: Sequence[tuple[str, T]]) -> tuple[T, ...]:
    """What is asked of tensors and modules, without that of units that are removed, of which the same is asked."""
    asked: dict[int | None, list[object]] = {}
    for name, item in named:
        unit, inside = units.within(name)
        plain = replace(item, name="") if isinstance(item, Bound) else item[1:] if isinstance(item, tuple) else None
        asked.setdefault(unit, []).append((inside, plain))
    if any(asked.get(unit) != asked.get(units.first) for unit in range(units.first, units.last + 1)):
        raise UnequalError("one layer is placed otherwise than the next")
    return tuple(item for name, item in named if units.within(name)[0] not in units.removed)


def _of_all_layers(choices: Sequence[C], units: Units) -> list[C]:
    """Choices of the layers of a shortened step, as those of all."""
    of_all: list[C] = []
    of = [(units.within(choice.fqn)[0], choice) for choice in choices]
    first, last = ([choice for unit, choice in of if unit == end] for end in (units.first, units.last))
    if [(units.within(c.fqn)[1], *c[1:]) for c in first] != [(units.within(c.fqn)[1], *c[1:]) for c in last]:
        raise UnequalError("of two layers otherwise alike is chosen differently")
    for _, choice in of:
        of_all.append(choice)
        if first and choice is first[-1]:
            of_all += [c._replace(fqn=units.renamed(c.fqn, at)) for at in units.removed for c in first]
    return of_all
