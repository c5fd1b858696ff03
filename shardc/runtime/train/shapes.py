"""The steps of a trainer on batches of several shapes: a short last one, other lengths of sequences.

    compiled for [8, 128]      given [8, 128]     the trainer's own program
                               given [3, 128]     another, of the same model, plan and optimizer, over the same state

A batch of another shape has the inputs, dtypes, numbers of dims and Python values of the sample; what differs from it
in these is refused, as it is of one shape. The trainer's own program is kept; of others those used last are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from shardc.ir.caller import warn
from shardc.ir.diagnostic import error, listed
from shardc.ir.graph import Graph, Port, type_of
from shardc.ir.microbatch import fewest_microbatches
from shardc.ir.types import TensorType
from shardc.runtime.execute.batch import Inputs, batch_inputs, leaves_of
from shardc.runtime.execute.data_parts import Parts
from shardc.runtime.train.device_copy import Copied
from shardc.runtime.train.engine import Engine
from shardc.runtime.train.feeding import Feeding
from shardc.runtime.train.padding import Padding, Shapes, rebuilt
from shardc.runtime.train.padding_trial import BUFFER, GRADIENT, LOSS, SCALAR, Results, Trial
from shardc.runtime.train.programs import Compiled, Programs, form_of, prepare, refuse_empty, shapes_text
from shardc.runtime.train.result import StepResult, Tensors

PROGRAMS = 8  # of other shapes than the first, that are kept
TRIALS = 4  # of padding, by batches that cannot tell


@dataclass(frozen=True)
class Step:
    """A program that makes steps, and what runs it. `constants` are its own tensors, beside the trainer's."""

    engine: Engine
    feeding: Feeding
    by_row: Collection[str]
    constants: Tensors = field(default_factory=Tensors)
    resizes: bool = False

    @property
    def body(self) -> Graph:
        return self.feeding.body

    @cached_property
    def inputs(self) -> dict[str, TensorType]:
        return {p.name: type_of(n) for p, n in zip(self.body.inputs, self.body.placeholders, strict=True)}

    @cached_property
    def outputs(self) -> dict[tuple[str, str], TensorType]:
        pairs = zip(self.body.outputs, self.body.output_values, strict=True)
        return {(port.role, port.name): type_of(node) for port, node in pairs}


class Steps:
    """The programs of a trainer, whose engine and feeding are those of the first; `batch` is its sample.

    `compile` makes one for another batch; without a model there is neither.
    """

    def __init__(
        self,
        engine: Engine,
        feeding: Feeding,
        by_row: Collection[str],
        compile: Callable[[Any, bool], Compiled] | None,
        batch: Any,
        held: Mapping[str, tuple[Port, TensorType]],
        padding: Padding | None = None,
        state: Callable[[], Tensors] = dict,
        evaluated: Callable[[Any], StepResult] | None = None,
    ) -> None:
        self.first = Step(engine, feeding, by_row)
        self._compile, self._held = compile, held
        self._inputs = [name for name, (port, _) in feeding.placed.items() if port.role == "input"]
        self._shapes = None if batch is None else self._brought(self._of(batch_inputs(batch, self._inputs)))
        what = "a step is compiled for each shape of batch"
        pinned = "the program's own" if self._shapes is None else shapes_text(self._shapes)
        self._padding, self._state, self._evaluated = padding, state, evaluated
        self._tried: set[Hashable] = set()  # what was padded, of which program
        self._untold: dict[Hashable, int] = {}  # how often that was tried
        self._programs = Programs[Step](engine, PROGRAMS, what, lambda step: step.engine.release(), pinned)

    def of(self, batch: Any, when: str, due: bool) -> tuple[Step, Any]:
        """The program for a batch, compiled if it is not there yet, and what it is fed; all ranks must
        call it, with batches of one form.

        It is the first for what is like no batch at all: it says what is wrong. Raises ShardcError: SC542 for ranks
        with batches of several forms, SC547 for another shape where no program can be compiled.
        """
        host = self._host(batch)
        refuse_empty(host)
        tensors = self.first.feeding.tensors(host)
        shapes = self._other_shapes(tensors)
        form = None if shapes is None else tuple(sorted(shapes.items()))
        if self._padding is not None and self._shapes is not None:
            self._programs.agree(host, None, when, due=True)  # of another shape they are no less alike when padded
            if shapes is not None and (into := self._room(self._padding, shapes)) is not None:
                padded = self._padding.pad(tensors, into)
                self._try(self._padding, host, tensors, padded, into)
                padded = self._padded_by_part(self._padding, batch, into) or padded
                batch = host = rebuilt(host, padded)
                tensors = padded
                form = None if into == self._shapes else tuple(sorted(into.items()))
        else:
            self._programs.agree(host, None if form is None else ("step", form), when, due)
        step = self.first if form is None else self._made(form, host, tensors)
        return step, batch if isinstance(batch, Copied) else tensors

    def _made(self, form: Hashable, host: Any, tensors: Inputs) -> Step:
        text = shapes_text(self._of(tensors))
        return self._programs.of("step", form, lambda: self._prepared(host), lambda _: text, lambda step: step.resizes)

    def _host(self, batch: Any) -> Any:
        """The batch that this rank has, on the host; parts that a simulation is given are joined."""
        host, feeding = batch.host if isinstance(batch, Copied) else batch, self.first.feeding
        parts = feeding.parts
        if not isinstance(host, Parts) or parts is None or not host or parts.microbatches * parts.halves == 1:
            return feeding.given(host)
        rows = next(
            (leaf.shape[0] for _, leaf in leaves_of(host[0]) if isinstance(leaf, torch.Tensor) and leaf.dim()), 0
        )
        own = not rows or (parts.halves > 1 and rows == parts.rows * parts.microbatches)
        return feeding.given(host, None if own else fewest_microbatches(rows, parts.rows))

    def _brought(self, shapes: Shapes) -> Shapes:
        """The shapes of what this rank brings of a batch of these."""
        own = self.first.feeding.own
        if own is None:
            return shapes
        return {n: (s[0] // own.parts.count, *s[1:]) if n in own.parts.inputs else s for n, s in shapes.items()}

    def _prepared(self, batch: Any, updates: bool = True) -> Step:
        if self._compile is None:
            raise error("SC547", "the trainer has no model", hint="launch a program that compile made of a model")
        first, own = self.first, self.first.feeding.own
        program = self._compile(batch if own is None else own.parts.sample(batch), updates)
        ready = prepare(program, first.engine, self._held, evaluates=False, own=own)
        return Step(ready.engine, ready.feeding, ready.by_row, ready.constants, program.resizes)

    # ------------------------------------------------------------------ padding
    def _room(self, padding: Padding, shapes: Shapes) -> Shapes | None:
        """The smallest shapes of a program that a batch may be padded to; None where there are none, or its own are."""
        known = [self._shapes, *(dict(form) for form in self._programs.forms())]
        fitting = [other for other in known if other is not None and padding.fits(shapes, other)]
        best = min(fitting, key=lambda other: sum(map(math.prod, other.values())), default=None)
        return None if best == shapes else best

    def _padded_by_part(self, padding: Padding, batch: Any, into: Shapes) -> Inputs | None:
        """In simulation, a batch of parts as ranks of a job pad it: each its own. Elsewhere None."""
        feeding = self.first.feeding
        given, parts = batch.host if isinstance(batch, Copied) else batch, feeding.parts
        if not isinstance(given, Parts) or parts is None or feeding.own is not None:
            return None
        if any(into[name][0] % parts.count for name in parts.inputs):  # of a batch that was given whole
            return None
        shapes = {n: (s[0] // parts.count, *s[1:]) if n in parts.inputs else s for n, s in into.items()}
        each = Parts(rebuilt(part, padding.pad(feeding.tensors(part), shapes)) for part in given)
        return feeding.tensors(self._host(each))

    def _try(self, padding: Padding, batch: Any, tensors: Inputs, padded: Inputs, into: Shapes) -> None:
        """Refuse padding that a step would see, once for what is padded of which program."""
        changed = frozenset((n, d) for n, t in tensors.items() for d, size in enumerate(t.shape) if size != into[n][d])
        key = (tuple(sorted(into.items())), changed)
        if key in self._tried:
            return
        ready: dict[Hashable, Step] = {}

        def results(given: Any) -> Results:
            form = form_of(given)
            if form not in ready:
                ready[form] = self._prepared(given, updates=False)
            return self._results(ready[form], given)

        try:
            trial = Trial(padding, self.first.body, results, self._evaluation, self._any_rank)
            untold = trial.check(batch, tensors, padded, into) if trial.counts(tensors) else None
        finally:
            for step in ready.values():
                step.engine.release()
        if untold is None:  # loss and gradients are 0, whatever is added
            return
        self._untold[key] = self._untold.get(key, 0) + 1
        if untold and self._untold[key] == TRIALS:
            warn(
                f"{TRIALS} padded batches could not tell whether padding leaves {listed(untold)} what it is: it was 0, "
                "or not finite"
            )
        if not untold or self._untold[key] == TRIALS:
            self._tried.add(key)

    def _results(self, step: Step, batch: Any) -> Results:
        """Loss, gradients, buffers and scalar outputs of a step that updates nothing."""
        held = {name: t for name, t in self._state().items() if name in step.inputs}
        # A step may write over its buffers and state, not over parameters without an update.
        own = {name: t.clone() for name, t in held.items() if self._held[name][0].role != "param"}
        outputs = step.engine.run({**held, **own, **step.constants}, step.feeding.feeds(batch, 0, 0), 0)
        result = StepResult.of(step.body, outputs)
        gradients = {f"{GRADIENT}{name}": value for name, value in result.grads.items()}
        buffers = {f"{BUFFER}{name}": value for name, value in result.buffers.items()}
        return {LOSS: result.loss, **gradients, **buffers, **_scalars(result)}

    def _evaluation(self, batch: Any) -> Results:
        """Loss and scalar outputs of an evaluation."""
        if self._evaluated is None:
            return {}
        result = self._evaluated(batch)
        return {**({} if result.own_loss is None else {LOSS: result.own_loss}), **_scalars(result)}

    def _any_rank(self, flag: bool) -> bool:
        peers = self.first.engine.peers
        if peers is None:
            return flag
        return any(bool(row) for row in peers.gather(torch.tensor(int(flag), device=self.first.engine.device)))

    def _other_shapes(self, tensors: Inputs) -> Shapes | None:
        """The shapes of a batch that is like the first's in all else; None for one of the first's shapes."""
        expected = self._shapes if self._shapes is not None else self._compiled_for(tensors)
        shapes, types = self._of(tensors), self.first.inputs
        if shapes == expected or shapes.keys() != expected.keys():
            return None
        for name, tensor in tensors.items():
            if tensor.dtype != types[name].dtype or tensor.is_meta:
                return None
            if len(shapes[name]) != len(expected[name]) or not tensor.numel():
                return None
        return shapes

    def _of(self, tensors: Mapping[str, torch.Tensor]) -> Shapes:
        return {name: tuple(tensor.shape) for name, tensor in tensors.items() if name in self._inputs}

    def _compiled_for(self, tensors: Mapping[str, torch.Tensor]) -> Shapes:
        """The shapes that a program from a file is for: of what is split, that of all microbatches."""
        count, shapes = self.first.body.microbatches, dict[str, tuple[int, ...]]()
        for name, (port, type) in self.first.feeding.placed.items():
            if port.role == "input":
                known = self.first.feeding.split
                other = (
                    name in tensors and tuple(tensors[name].shape) != type.shape
                )  # records before that said not which
                split = count > 1 and type.ndim and (name in known if known else other)
                shapes[name] = (count * type.shape[0], *type.shape[1:]) if split else type.shape
        return self._brought(shapes)


def _scalars(result: StepResult) -> Results:
    """What the model returns beside its loss, and a step's metrics have."""
    return {f"{SCALAR}{name}": value for name, value in result.scalars.items() if name != "loss"}
