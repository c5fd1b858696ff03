"""Loops over time as one op, while a model is traced.

A library's recurrence is a loop over the positions of a sequence (Mamba, RWKV, RG-LRU, xLSTM), or over chunks of it
(gated delta rules); traced as it is, a sequence of 4,096 makes hundreds of thousands of nodes, most of which time goes
into before any pass runs. `active` gives the functions of a model's classes and modules other code meanwhile
(`loop_source`). Where the loop is reached, `roll` runs its body once, on stand-ins (`loop_values`), and calls
`shardc::scan` with what the body computes. A body that does anything else (`loop_body`) leaves the loop as it was, and
a note says so (`loop_notes`).

Since one step stands for all, a body may not depend on the number of the step but for indexing tensors, keep Python
values from step to step, draw random numbers, or write to tensors other than at the step's index.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardc import torch_compat
from shardc.frontend.loop_body import Appended, Appends, Store, is_foreign
from shardc.frontend.loop_notes import note_unrolled
from shardc.frontend.loop_source import Loop, has_loop, with_rolled_loops
from shardc.frontend.loop_values import (
    Dim,
    Index,
    Recorder,
    Same,
    Step,
    Symbol,
    UnrolledError,
    Value,
    as_value,
    refuse,
)
from shardc.ir.ops.scan import scan
from shardc.ir.ops.scan_body import TIME, WITH_LETTERS

FEWEST_STEPS = 8  # below, the loop's own ops are few, and can be sharded over time and fused
KNOWN = (Tensor, nn.Module, int, float, str, torch.Size, torch.dtype, torch.device, type(None))  # hold no stand-in


# ------------------------------------------------------------------ the functions of a model
def functions_of(model: nn.Module) -> Iterator[types.FunctionType]:
    """The functions that a model's modules may call: those of their classes, and of the files these lie in. Those of
    transformers that only surround models (generation, loading) are left out: to parse their files takes long."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__ if _may_loop(cls.__module__)}
    holders: list[Mapping[str, Any]] = [vars(cls) for cls in classes]
    modules = {cls.__module__ for cls in classes}
    holders += [vars(sys.modules[name]) for name in modules if name in sys.modules]
    seen: set[int] = set()
    for holder in holders:
        for value in list(holder.values()):
            function: Any = getattr(value, "__func__", value)
            while isinstance(function, types.FunctionType) and id(function) not in seen:
                seen.add(id(function))
                if _may_loop(function.__module__ or ""):
                    yield function
                function = getattr(function, "__wrapped__", None)


def _may_loop(module: str) -> bool:
    """May a module's functions loop over time while a model runs?"""
    of_library = module.startswith("transformers.") and not module.startswith("transformers.models.")
    return not of_library and not is_foreign(module)


@contextmanager
def active(model: nn.Module) -> Generator[None]:
    """Meanwhile the loops of a model's functions may become one op."""
    changed: list[tuple[types.FunctionType, types.CodeType]] = []
    try:
        for function in functions_of(model):
            code = function.__code__
            if "range" in code.co_names and has_loop(code) and function.__name__ != "__init__":
                rewritten = with_rolled_loops(code)
                if rewritten is not None:
                    changed.append((function, code))
                    function.__code__ = rewritten
        yield
    finally:
        for function, code in changed:
            function.__code__ = code


# ------------------------------------------------------------------ a loop
def roll(step: Callable[..., dict[str, Any]], steps: Any, names: dict[str, Any], known: tuple[Any, ...]) -> Any:
    """The values of names behind a loop that has become one op; None if it has not."""
    if type(steps) is not range or steps.start or steps.step != 1 or len(steps) < FEWEST_STEPS:
        return None
    loop = Loop(*known)
    wider: dict[str, torch.Size] = {}
    while True:
        recorder = Recorder(len(steps))
        try:
            return _Roll(step, recorder, names, loop, wider).results()
        except _WiderStateError as state:
            wider[state.path] = state.shape
        except Exception as problem:
            if torch_compat.stops_recomputation(problem):
                raise
            if recorder.over_time or any(isinstance(names.get(name), Tensor) for name in loop.indexed):
                note_unrolled(step.__code__, len(steps), problem)
            return None  # whatever a body makes of stand-ins: the loop as it is will say what is wrong, if anything is


def unrolled(why: str) -> NoReturn:
    raise UnrolledError(why)


class _WiderStateError(UnrolledError):
    """A state that the first step broadcasts: it is expanded first."""

    def __init__(self, path: str, shape: torch.Size) -> None:
        super().__init__()
        self.path, self.shape = path, shape


class _Roll:
    def __init__(
        self,
        step: Callable[..., dict[str, Any]],
        recorder: Recorder,
        names: dict[str, Any],
        loop: Loop,
        wider: Mapping[str, torch.Size],
    ) -> None:
        self.names, self.loop, self.steps, self.wider = names, loop, recorder.steps, wider
        self.recorder = recorder
        self.states: dict[str, tuple[Value, Tensor]] = {}  # by path: name, and place in a tuple
        self.stores: dict[str, Store] = {}
        self.lists: dict[str, Appends] = {}
        self.given: list[Tensor] = []
        self.widened: list[tuple[str, int]] = []  # states, and dims that the first step does not have
        parameters = step.__code__.co_varnames[: step.__code__.co_argcount]
        self.index = parameters[0]
        if self.index in loop.assigned:
            unrolled(f"a step assigns to {self.index}")
        self.after = step(Index(), *(self._given(name) for name in parameters[1:]))

    def _given(self, name: str) -> Any:
        loop, value = self.loop, self.names.get(name, refuse)
        if name in loop.appended:
            others = [other for key, other in self.names.items() if key != name and key in (*loop.read, *loop.appended)]
            if name in loop.assigned or type(value) is not list or any(other is value for other in others):
                unrolled(f"{name} is no list, or has another name too")
            self.lists[name] = Appends()
            return self.lists[name]
        if name in loop.stored:
            if name in loop.assigned or not isinstance(value, Tensor):
                unrolled(f"a step stores into {name}, which is no tensor, or assigns to it, too")
            self.stores[name] = Store(self.recorder, value)
            return self.stores[name]
        if name in loop.assigned and name in loop.read and name in self.names:
            return self._state(name, value)
        return self._wrapped(value)

    def _wrapped(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.given.append(value)
            return Same(self.recorder, value)
        if type(value) is tuple:
            return tuple(map(self._wrapped, value))
        return value

    def _state(self, path: str, value: Any) -> Any:
        if type(value) is tuple:
            return tuple(self._state(f"{path}.{place}", part) for place, part in enumerate(value))
        if not isinstance(value, Tensor) or not value.dtype.is_floating_point:
            unrolled(f"{path} is carried from step to step, and is no tensor of floats")
        narrow = value.shape
        value = value.expand(self.wider[path]) if path in self.wider else value
        state = self.recorder.state(f"s{len(self.states)}", value)
        self.states[path] = state, value
        padded = (*(1 for _ in range(value.ndim - len(narrow))), *narrow)
        added = [d for d, size in zip(state.dims, padded, strict=True) if size == 1 and d is not None]
        self.widened += [(state.name, label) for label in added]
        return state

    # -------------------------------------------------------------- behind the loop
    def results(self) -> dict[str, Any]:
        """Call the scan."""
        pairs = self._next()
        stored = [store.stored for store in self.stores.values() if store.stored is not None]
        if len(stored) != len(self.stores) or any(len(of.values) != 1 for of in self.lists.values()):
            unrolled("not every step stores, or appends, once")
        self._refuse_shared([tensor for tensor, _, _ in stored])
        lasts = {n: v for n, v in self.after.items() if n in self.loop.wanted and n in self.loop.assigned}
        if not all(self._is_known(name, value) for name, value in lasts.items()):
            unrolled("what a name is behind the loop depends on the number of the step")
        carried_on = {path for path, _, _, _ in pairs}
        yielded = [(of.values[0], self._stacked(name)) for name, of in self.lists.items()]
        yielded += [(symbol, place) for _, (place, _, _), symbol in stored]
        yielded += [(v, 0) for n, v in lasts.items() if n not in carried_on]
        values = {v.name: (v, place) for v, place in reversed(yielded) if isinstance(v, Value)}
        self._refuse_widened_sums()
        body, inputs = self.recorder.body([(before, after) for _, before, after, _ in pairs], list(values.values()))
        if not any(TIME in letters for _, letters in body.inputs):
            unrolled("no step reads a part of its own of a tensor")
        ys, ends = scan(body, [_squeezed(initial, before) for _, before, _, initial in pairs], inputs)
        self.of_value = {
            name: (y, _count_present(v.dims[:place]), v.dims)
            for (name, (v, place)), y in zip(values.items(), ys, strict=True)
        }
        self.of_state = {
            path: _unsqueezed(end, after.dims).to(after.dtype)
            for (path, _, after, _), end in zip(pairs, ends, strict=True)
        }
        found: dict[str, Any] = {self.index: self.steps - 1}
        for name, value in lasts.items():
            found[name] = self._last(name, value)
        for name in self.lists:
            found[name] = self._appended(name)
        for store in self.stores.values():
            self._fill(store)
        return found

    def _next(self) -> list[tuple[str, Value, Value, Tensor]]:
        """Each state, and what the next step gets in its place."""
        pairs: list[tuple[str, Value, Value, Tensor]] = []
        read = {operand for _, _, operands, _ in self.recorder.statements for operand in operands}
        ends = {name: value for name, value in self.after.items() if name in self.loop.assigned}
        for name, value in ends.items():
            paths = [path for path in self.states if path.partition(".")[0] == name]
            if not paths and not isinstance(value, (Symbol, tuple)) and value is not self.names.get(name, value):
                unrolled(f"a step changes {name}, which is no tensor")  # a Python value that the step has changed
            if not paths and name in self.loop.read and name in self.names:
                unrolled(f"a step changes {name}, which is no tensor")
        for path, (before, initial) in self.states.items():
            end = _part(ends[path.partition(".")[0]], path)
            if not isinstance(end, (Symbol, Tensor)):
                refuse()
            after = as_value(self.recorder, end)
            if after.shape != before.shape:
                if before.name not in read and not self._returned(before):
                    continue  # a name that each step assigns before it reads it
                if path in self.wider or torch.broadcast_shapes(after.shape, before.shape) != after.shape:
                    unrolled(f"{path} has another shape after each step")
                raise _WiderStateError(path, after.shape)
            if not after.dtype.is_floating_point:
                unrolled(f"{path} is carried from step to step, and is no tensor of floats")
            for place in range(before.ndim):
                label, other = before.dims[place], after.dims[place]
                if label is not None and other is not None and not self.recorder.unify(label, other):
                    after = self.recorder.renamed(after, place, label)
            pairs.append((path, before, after, initial))
        return pairs

    def _refuse_widened_sums(self) -> None:
        """The first step does not sum over a dim that a state does not yet have."""
        recorder = self.recorder
        for state, label in self.widened:
            reached = {state}
            for name, op, operands, note in recorder.statements:
                if reached.isdisjoint(operands):
                    continue
                reached.add(name)
                if op in WITH_LETTERS and recorder.root(label) in map(recorder.root, note):
                    unrolled("the first step broadcasts a state that later steps sum")

    def _returned(self, value: Value) -> bool:
        """Does a step yield a state as it was, or carry it to another name?"""
        lists = [v for of in self.lists.values() for v in of.values]
        stores = [store.stored[2] for store in self.stores.values() if store.stored is not None]
        ends = [_part(end, path) for path in self.states for name, end in self.after.items()
                if name == path.partition(".")[0]]  # fmt: skip
        return any(isinstance(v, Value) and v.name == value.name for v in (*lists, *stores, *ends))

    def _refuse_shared(self, stored: Sequence[Tensor]) -> None:
        """A tensor that steps store into may not be read by another name."""
        memory = [torch_compat.storage_of(t) for t in stored]
        symbols = [v for of in self.lists.values() for v in of.values]
        symbols += [store.stored[2] for store in self.stores.values() if store.stored is not None]
        bases = [v.base if isinstance(v, Step) else v.tensor for v in symbols if isinstance(v, (Step, Same))]
        read = {torch_compat.storage_of(t) for t in (*self.recorder.alive, *self.given, *bases)}
        initial = {torch_compat.storage_of(t) for _, t in self.states.values()}
        if len(set(memory)) != len(memory) or read.intersection(memory) or initial.intersection(memory):
            unrolled("a tensor that steps store into is read by another name")

    def _timed(self, symbol: Any, dim: int) -> Tensor:
        """A value of all steps, with the steps along a dim."""
        if isinstance(symbol, Step):
            return symbol.base.movedim(symbol.time, dim)
        if isinstance(symbol, Same):
            return symbol.tensor.unsqueeze(0).expand(self.steps, *symbol.shape).movedim(0, dim)
        y, time, dims = self.of_value[symbol.name]
        labels, order = ([self.recorder.root(d) for d in some if d is not None] for some in (dims, symbol.dims))
        if labels != order:  # the same value, transposed
            y, time = y.movedim(time, 0).permute(0, *(1 + labels.index(label) for label in order)), 0
        wanted = _count_present(symbol.dims[:dim])
        y = y if time == wanted else y.movedim(time, wanted)
        return _unsqueezed(y, (*symbol.dims[:dim], -1, *symbol.dims[dim:])).to(symbol.dtype)

    def _last(self, name: str, value: Any) -> Any:
        def end(path: str, part: Any) -> Any:
            if path in self.of_state:
                return self.of_state[path]
            if type(part) is tuple:
                return tuple(end(f"{path}.{place}", inner) for place, inner in enumerate(part))
            if isinstance(part, Same):
                return part.tensor
            if isinstance(part, Symbol):
                return self._timed(part, 0).select(0, self.steps - 1)
            return part.in_step(self.steps - 1) if type(part) is Index else part

        return end(name, value)

    def _is_known(self, name: str, value: Any) -> bool:
        """Can it be said what a name is behind the loop?"""
        if type(value) is tuple:
            return all(self._is_known(name, part) for part in value)
        return isinstance(value, (Symbol, Index, *KNOWN)) or value is self.names.get(name, refuse)

    def _stacked(self, name: str) -> int:
        """The dim that the values of a list are stacked along, of those that they then have."""
        (symbol,) = self.lists[name].values
        return dict(self.loop.stacked).get(name, 0) % (symbol.ndim + 1)

    def _appended(self, name: str) -> Any:
        (symbol,) = self.lists[name].values
        if name not in dict(self.loop.stacked) or self.names[name]:
            self.names[name].extend(self._timed(symbol, 0).unbind(0))
            return self.names[name]
        dim = self._stacked(name)
        return Appended(self._timed(symbol, dim).contiguous(), dim)

    def _fill(self, store: Store) -> None:
        assert store.stored is not None
        tensor, (place, start, width), symbol = store.stored
        value = self._timed(symbol, place)
        value = value if width is None else value.flatten(place, place + 1)
        tensor.narrow(place, start, value.shape[place]).copy_(value)


def _part(value: Any, path: str) -> Any:
    for place in path.split(".")[1:]:
        if type(value) is not tuple or int(place) >= len(value):
            refuse()
        value = value[int(place)]
    return value


def _count_present(dims: Sequence[Dim]) -> int:
    """How many dims a scan has of these."""
    return sum(label is not None for label in dims)


def _squeezed(tensor: Tensor, like: Value) -> Tensor:
    for place in reversed([d for d, label in enumerate(like.dims) if label is None]):
        tensor = tensor.squeeze(place)
    return tensor


def _unsqueezed(tensor: Tensor, dims: Sequence[Dim]) -> Tensor:
    for place in [d for d, label in enumerate(dims) if label is None]:
        tensor = tensor.unsqueeze(place)
    return tensor
