"""Layers that say the same as those before them run, but are not recorded: a trace of 128 layers has the nodes of six.

    layers 0, 1, 2        recorded; 2 says the same as 1
    layers 3 ... 124      run: each call of torch must be the one that layer 2 made, and gets an imitation of its result
    layers 125, 126, 127  recorded; 125 reads of layer 2 what it would have read of 124

All of the model's Python runs, in each layer. Calls are equal that call the same function in the same module, line and
surroundings (autocast, `no_grad`), with the same numbers, with parameters of the same names and geometries, with what
the same calls of this layer or of the one before returned, or with one and the same tensor. So their results have the
same geometries, and their backward is the same. A call that is not equal, one of which more is known than its result's
geometry (it reads values, writes, calls an `autograd.Function`), or one that no mode sees raises `UnequalError`; so do
a module that returns otherwise, other random numbers, and an imitation that something keeps when forward is over. Then
all layers have to be recorded.

`ir.equal_layers` says which units of layers are left out, and `ir.lengthened` puts them back. Longer than 400 lines: it
is one state that each event of forward changes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, fx, nn

from shardc import torch_compat
from shardc.frontend.call_forms import Call, CallForms, new_in
from shardc.frontend.memory_writes import memory_of
from shardc.frontend.model_tree import named_modules
from shardc.frontend.op_overrides import RandomOps
from shardc.frontend.provenance import Origins
from shardc.frontend.sample_values import SampleValues
from shardc.ir.equal_layers import LEAST, LONGEST_PERIOD
from shardc.ir.layers import layer_of, list_and_index
from shardc.ir.units import UnequalError, Units

KEPT_AT_END = 3  # units that are recorded behind those that are not
_SAID = (bool, str, float)  # attributes by which layers are of different kinds


class Unrecorded(Protocol):
    """`lists` of layers of which some may be left out, with their lengths; to `units` goes what is left out."""

    lists: Mapping[str, int]
    units: list[Units]


@dataclass
class _Run:
    """The layers of one list, in turn. `units`: those that are left out, once it is known."""

    path: str
    count: int
    at: int = -1
    calls: dict[int, list[Call]] = field(default_factory=dict[int, list[Call]])
    drawn: dict[int, int] = field(default_factory=dict[int, int])  # how many random numbers before each layer
    spoilt: bool = False  # none of the list can be left out
    odd: set[int] = field(default_factory=set[int])  # layers of which more is known than forms tell
    units: Units | None = None
    imitating: bool = False
    next: int = 0

    @property
    def of_template(self) -> int:
        """The recorded layer that the present one has to say the same as."""
        assert self.units is not None
        return self.units.first * self.units.period + self.at % self.units.period

    @property
    def template(self) -> list[Call]:
        return self.calls[self.of_template]


class UnrecordedLayers:
    """Stands between a recording and `answers`. `tensors`: by the name of each parameter and buffer, what stands for it
    in the recording, in any dtype."""

    refused = SampleValues.refused

    def __init__(
        self,
        answers: SampleValues,
        model: nn.Module,
        of: Unrecorded,
        origins: Origins,
        random: RandomOps,
        mode: Any,
        tensors: Sequence[Mapping[str, Tensor]],
    ) -> None:
        self._answers, self._model, self._lists = answers, model, of.lists
        self._units = of.units
        self._origins, self._random = origins, random
        self._imitations = torch_compat.Imitations(mode)
        self._runs: dict[str, _Run] = {}
        self._run: _Run | None = None
        self._over = self._within_call = self._wrote = False
        self._modes, self._number = torch_compat.modes(), 0  # the number: of the next random draw, before a call
        origins.on_return = self.on_return
        self._failed = ""
        self._splits: dict[str, tuple[str, int, str]] = {}
        self._forms = CallForms()
        for which, table in enumerate(tensors):
            for name, t in table.items():
                path, index, inside = self._split(name)
                if index >= 0 and not self._forms.knows(t):
                    self._forms.assign(t, path, index, f"{which}{inside}", torch_compat.Geometry.of(t))
        self._kinds: dict[str, list[object]] = {}
        self._recorded: dict[int, Tensor] = {}  # of the last unit that is not recorded, by its imitations

    # -------------------------------------------------------------- events
    def on_node(self, node: fx.Node) -> None:
        """Raises UnequalError in a layer that is not recorded: no mode has seen what computes the node."""
        if self._run is not None and self._run.imitating:
            self._fail("a call that no mode sees")
        if not self._over and torch_compat.mutates(node):
            self._wrote = True
            if not self._is_of_layer(node) or torch_compat.changes_shapes(node):
                self._spoil()

    def _is_of_layer(self, write: fx.Node) -> bool:
        """Does a call write to nothing but what its own layer has made?"""
        written = [memory_of(value) for value in torch_compat.written_by(write)]
        made = [self._origins.of[value].fqn if value in self._origins.of else "" for value in written]
        layer = self._split(self._origins.fqn)[:2]
        return layer[1] >= 0 and all(self._split(fqn)[:2] == layer for fqn in made)

    def recorded(self, imitation: Tensor) -> Tensor | None:
        """What stands in the recording for an imitation that is read there; None in layers that are not recorded."""
        self._move()
        if self._run is not None and self._run.imitating:
            return None
        if id(imitation) not in self._recorded:
            self._fail("a layer that is not recorded is read by others than the next")
        return self._recorded[id(imitation)]

    def instead(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self._over:
            return self._answers.instead(function, args, kwargs)
        if function in torch_compat.DESCRIBING:
            return self.refused
        self._move(calls=True)
        run = self._run
        if run is not None and run.imitating:
            return self._imitated(run, function, args, kwargs)
        if isinstance(function, type):  # an `autograd.Function`: of the user's, or in the midst of a call of torch
            if not self._within_call:
                self._spoil()
            return self._answers.instead(function, args, kwargs)
        self._within_call, self._wrote, self._number = True, False, self._random.number
        given = self._answers.instead(function, args, kwargs)
        if given is not self.refused:
            self._spoil()
        return given

    def observe(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        run = self._run
        if run is not None and run.imitating:
            return
        self._within_call = False
        self._answers.observe(function, args, kwargs, result)
        if self._over or run is None or run.spoilt or run.units is not None or function in torch_compat.DESCRIBING:
            return
        if run.at in run.odd:
            return
        calls = run.calls[run.at]
        held: list[Tensor] = []
        try:
            name: str = getattr(function, "__name__", "")
            if name.endswith("_") and not name.endswith("__") and not self._wrote:
                raise UnequalError("it changes what is no value of a tensor")  # `requires_grad_`
            form = self._form_of(run, function, args, kwargs, held)
            made: list[Tensor] = []
            returned = self._forms.returned(run.path, run.at, function, result, made, held)
        except UnequalError:
            self._spoil()
            return
        for place, t in enumerate(made):
            self._forms.assign(t, run.path, run.at, len(calls), place)
        draws = self._number - run.drawn[run.at], self._random.number - self._number
        calls.append(Call((form, returned), made, held, draws))

    def on_return(self, name: str, returned: Tensor) -> None:
        """A module has returned; see `Origins`."""
        if self._over:
            return
        path, index, inside = self._split(name)
        self._move_to(path, index, calls=True)
        run = self._run
        if run is None or not run.imitating:
            if torch_compat.is_imitation(returned):
                self._fail("a module returns what a layer computed that is not recorded")
            if run is None or run.spoilt or run.units is not None or index < 0:
                return
        held: list[Tensor] = []
        form = inside, self._forms.of(run.path, run.at, returned, held)
        if run.imitating and (run.next >= len(run.template) or run.template[run.next].form != form):
            self._fail(f"{name} returns what those before it do not")
        run.calls[run.at].append(Call(form, [], held, (0, 0)))
        run.next += 1

    def answer(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._within_call = False
        self._spoil()
        return self._answers.answer(function, args, kwargs)

    def finish(self) -> None:
        """Forward is over. Raises UnequalError if layers were left out that should not have been."""
        if any(run.imitating for run in self._runs.values()):
            self._fail("forward ends in a layer that is not recorded")
        self._over, self._run = True, None
        self._forms, self._recorded = CallForms(), {}
        for run in self._runs.values():
            run.calls = {}
        if self._failed:
            raise UnequalError(self._failed)
        if self._imitations.held():
            self._fail("forward keeps what a layer computed that is not recorded")

    def _fail(self, why: str) -> None:
        self._failed = self._failed or why  # also if forward catches it
        raise UnequalError(why)

    def _spoil(self) -> None:
        """What has happened in a layer lets none be left out that does the same."""
        if self._run is not None:
            if self._run.imitating:
                self._fail("a call that layers before did not make")
            if self._run.units is None:
                self._run.odd.add(self._run.at)

    # -------------------------------------------------------------- from layer to layer
    def _split(self, name: str) -> tuple[str, int, str]:
        split = self._splits.get(name)
        if split is None:
            layer = layer_of(name)
            path, index = list_and_index(layer)
            split = (path, index, name[len(layer) :]) if path in self._lists and layer else ("", -1, name)
            self._splits[name] = split
        return split

    def _move(self, calls: bool = False) -> None:
        """Follow forward to the layer in which it is now. `calls`: something is called there."""
        path, index, _ = self._split(self._origins.fqn)
        run = self._run
        if run is None or not run.imitating or index != run.at or path != run.path or self._failed:
            self._move_to(path, index, calls)

    def _move_to(self, path: str, index: int, calls: bool) -> None:
        if self._failed:
            raise UnequalError(self._failed)
        run = self._run
        if run is not None and run.imitating:
            self._move_on(run, path, index)
        elif calls and not self._over:
            self._look(path, index)

    def _move_on(self, run: _Run, path: str, index: int) -> None:
        """Within layers that are not recorded, up to the first that is again."""
        assert run.units is not None
        if (path, index) == (run.path, run.at):
            return
        if path != run.path or index != run.at + 1 or run.next != len(run.template):
            self._fail("forward does something between layers, or leaves out a part of one")
        drawn = self._random.number - run.drawn[run.at]
        if drawn != run.drawn[run.of_template + 1] - run.drawn[run.of_template]:
            self._fail("a layer draws more or fewer random numbers than those before")
        run.drawn[index] = self._random.number
        period, units = run.units.period, run.units
        for done in [done for done in run.calls if done not in self._templates(run) and done <= index - 2 * period]:
            self._forget(run, done)
        run.at, run.next = index, 0
        if index == units.last * period:
            run.imitating = False
            for done in range(index - period, index):
                templates = run.calls[units.first * period + done % period]
                for mine, template in zip(run.calls[done], templates, strict=True):
                    self._recorded |= {id(t): real for t, real in zip(mine.tensors, template.tensors, strict=True)}
        else:
            run.calls[index] = []

    @staticmethod
    def _templates(run: _Run) -> range:
        assert run.units is not None
        return range(run.units.first * run.units.period, (run.units.first + 1) * run.units.period)

    def _look(self, path: str, index: int) -> None:
        """Within layers that are recorded: is this the first that need not be?"""
        run = self._run
        if index < 0:
            if run is not None and run.units is None and 0 <= run.at < run.count - 1:
                run.spoilt, run.calls = True, {}  # computed between two layers
            return
        if run is None or path != run.path:
            known = self._runs.get(path)
            if known is not None and known.units is not None:
                self._fail("layers are called again")
            if run is not None and run.units is None:
                run.calls = {}
            run = self._run = self._runs.setdefault(path, _Run(path, self._lists[path]))
            run.spoilt = known is not None or index != 0
        if index == run.at:
            return
        if run.units is not None and index in _layers(run.units):
            self._fail("layers are called again")
        run.spoilt = run.spoilt or index != run.at + 1
        run.at = index
        if run.spoilt or run.units is not None:
            return
        run.drawn[index] = self._random.number
        run.units = self._left_out(run)
        if run.units is not None:
            run.imitating, run.next = True, 0
            self._units.append(run.units)
            keep = self._templates(run)
        else:
            keep = range(index - 2 * LONGEST_PERIOD, index)
        for done in [done for done in run.calls if done not in keep]:
            self._forget(run, done)
        run.calls[index] = []

    def _forget(self, run: _Run, done: int) -> None:
        for call in run.calls.pop(done):
            self._forms.forget(call)

    def _left_out(self, run: _Run) -> Units | None:
        """The units that begin with the layer which forward enters, if they say the same as the two before."""
        for period in range(1, LONGEST_PERIOD + 1):
            first, last = run.at // period - 1, run.count // period - KEPT_AT_END
            if run.at % period or first < 1 or last - first - 1 < LEAST:
                continue
            start = first * period
            mine, before = ([*range(begin, begin + period)] for begin in (start, start - period))
            draws = run.drawn[run.at] - run.drawn[start]
            equal = draws == run.drawn[start] - run.drawn[start - period] and all(
                len(run.calls[i]) == len(run.calls[j])
                and all((a.form, a.draws) == (b.form, b.draws) for a, b in zip(run.calls[i], run.calls[j], strict=True))
                for i, j in zip(mine, before, strict=True)
            )
            made = all(any(call.tensors for call in run.calls[i]) for i in mine)
            if not equal or not made or not run.odd.isdisjoint((*mine, *before)):
                continue
            units = Units(run.path, period, first, last, frozenset({0, draws}))
            kinds = self._kinds_of(run)
            if all(
                kinds[i] == kinds[start + i % period]
                for i in (*_layers(units), *range(last * period, last * period + period))
            ):
                return units
        return None

    def _kinds_of(self, run: _Run) -> list[object]:
        """By layers of a list, what tells without a run that they do not say the same: classes, sizes and options."""
        if run.path not in self._kinds:
            elements = vars(self._model.get_submodule(run.path))["_modules"].values()
            self._kinds[run.path] = [[] if element is None else [*_kind(element)] for element in elements]
        return self._kinds[run.path]

    # -------------------------------------------------------------- calls
    def _imitated(self, run: _Run, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the call would return, if it is the one that the template made here."""
        templates = run.template
        if run.next >= len(templates):
            self._fail("a layer calls more than those before")
        template = templates[run.next]
        try:
            form = self._form_of(run, function, args, kwargs, [])
        except UnequalError:
            form = None
        if form != template.form[0]:
            self._fail(f"a layer calls {getattr(function, '__name__', function)} otherwise than those before")
        if self._random.number - run.drawn[run.at] != template.draws[0]:
            self._fail("a layer draws other random numbers than those before")
        if template.draws[1]:
            self._random.skip(template.draws[1])
        made = [self._imitations.make(geometry) for geometry in new_in(template.form[1])]
        for place, t in enumerate(made):
            self._forms.assign(t, run.path, run.at, run.next, place)
        result = self._forms.rebuilt(run.path, run.at, template.form[1], template.held, iter(made))
        run.calls[run.at].append(Call(None, made, [], template.draws))
        run.next += 1
        return result

    def _form_of(
        self, run: _Run, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], held: list[Tensor]
    ) -> Any:
        surroundings = torch_compat.surroundings()
        if surroundings is None or torch_compat.modes() != self._modes or isinstance(function, type):
            raise UnequalError("more is known of it than its arguments")
        fqn = self._origins.fqn[len(run.path) :].partition(".")[2].partition(".")[2]
        where = self._origins.where(sys._getframe(2))  # pyright: ignore[reportPrivateUsage]
        given = [self._forms.of(run.path, run.at, arguments, held) for arguments in (args, kwargs)]
        return function, surroundings, fqn, where, given


def _layers(units: Units) -> range:
    """The elements of a list that are left out."""
    return range((units.first + 1) * units.period, units.last * units.period)


def _kind(element: nn.Module) -> Iterator[object]:
    for name, module in named_modules(element):
        said = [(key, value) for key, value in vars(module).items() if type(value) in _SAID]
        tensors = [
            (key, None if t is None else (t.shape, t.stride(), t.dtype, t.requires_grad))
            for table in (vars(module)["_parameters"], vars(module)["_buffers"])
            for key, t in table.items()
        ]
        yield name, type(module), said, tensors
