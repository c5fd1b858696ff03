"""Evaluation beside training: programs of the same model without backward, on the tensors that the trainer holds.

    trainer.evaluate(batches)      mean loss and mean scalars: of the outputs only these are kept
    trainer.predict(batch)         all outputs of one batch

A program is compiled when a batch of its form is first seen: its leaves, their shapes and dtypes, its Python values. It
takes each parameter and buffer as the trainer's program holds it, so nothing is copied and nothing is written back, not
even buffers that forward changes in the mode of `model.eval()`, too: the steps of training, their random numbers
included, are those that they were without it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from shardc.ir.diagnostic import error
from shardc.ir.graph import Port
from shardc.ir.types import TensorType
from shardc.runtime.execute.batch import batch_inputs, leaves_of
from shardc.runtime.execute.data_parts import Parts
from shardc.runtime.train.engine import Engine
from shardc.runtime.train.feeding import Feeding
from shardc.runtime.train.metrics import Evaluated, count_items
from shardc.runtime.train.programs import (
    Compiled,
    Prepared,
    Programs,
    form_of,
    prepare,
    refuse_empty,
    shapes_text,
    typed,
)
from shardc.runtime.train.replicas import FIRST
from shardc.runtime.train.result import Kept, StepResult, Tensors

PROGRAMS = 4  # of single forms of batches, that are kept


Evaluation = Callable[[Any, Kept], Compiled]
Held = Mapping[str, tuple[Port, TensorType]]


@dataclass(frozen=True)
class _Ready(Prepared):
    """A compiled evaluation, and what runs it. It takes `held` of the trainer's tensors; `borrowed` are those that no
    rank of a stage holds in training."""

    held: tuple[str, ...]
    borrowed: tuple[str, ...]


class _Mean:
    """A weighted mean that is summed on the device."""

    def __init__(self) -> None:
        self.total, self.weight = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)

    def add(self, value: torch.Tensor, weight: torch.Tensor) -> None:
        weight = weight.to(value.device, torch.float64)
        # A batch that counts nothing may have any value.
        term = torch.where(weight > 0, value.detach().double() * weight, weight)
        self.total, self.weight = self.total.to(term.device) + term, self.weight.to(term.device) + weight

    def value(self) -> float:
        return float(self.total / self.weight) if float(self.weight) else 0.0


class Evaluator:
    """The evaluations of a trainer, whose engine holds `inputs`."""

    def __init__(
        self,
        engine: Engine,
        compile: Evaluation | None,
        inputs: Held,
        check_every: int,
        training: Feeding,
        forward_part: Callable[[Any], Any],
    ) -> None:
        self._forward_part = forward_part  # of a batch, of which the loss function may take more
        self.engine, self._compile, self._inputs, self._check_every = engine, compile, inputs, check_every
        self._training = training
        what = "an evaluation is compiled for each form of batch (shapes, dtypes, Python values)"
        self._programs = Programs[_Ready](engine, PROGRAMS, what, lambda ready: ready.engine.release())
        self._taken = 0

    def mean(self, batches: Iterable[Any], steps: int | None, state: Tensors, seed: int, step: int) -> Evaluated:
        """The means over batches, of at most so many. A loader's draws of torch's global generator, by which training's
        loader may go on, are taken back."""
        _check(steps)
        check_batches(batches)
        with torch.random.fork_rng(devices=[]):
            return self._mean(batches, steps, state, seed, step)

    def _mean(self, batches: Iterable[Any], steps: int | None, state: Tensors, seed: int, step: int) -> Evaluated:
        start, count, items = time.perf_counter(), 0, 0
        loss, scalars = _Mean(), dict[str, _Mean]()
        has_loss = False
        batches, own = (self._given(batch) for batch in islice(batches, steps)), self._training.own
        parts = 1 if own is None else own.parts.count
        for batch in batches if own is None else own.together(batches):
            ready = self._of(batch, "scalars", step)
            result = self._run(ready, batch, state, seed, step)
            rows = torch.tensor(parts * self._rows(batch))
            if result.own_loss is not None:
                has_loss = True
                loss.add(result.own_loss, self._weight(ready, batch, rows))
            for name, value in result.scalars.items():
                scalars.setdefault(name, _Mean()).add(value, rows)
            count, items = count + 1, items + parts * count_items(batch)
        if not count:
            hint = "an iterator is used up after one pass: give a list or a loader, which begins anew"
            raise error("SC546", "evaluate was given no batch, so there is no mean", hint=hint)
        means = {name: mean.value() for name, mean in scalars.items()}
        return Evaluated(loss.value() if has_loss else None, means, count, items, time.perf_counter() - start)

    def run(self, batch: Any, kept: Kept, state: Tensors, seed: int, step: int) -> StepResult:
        """The evaluation of one batch."""
        batch, own = self._given(batch), self._training.own
        if kept == "all":  # without the loss of a function
            batch = self._forward_part(batch)
        if own is not None:
            own.agree(batch)
        return self._run(self._of(batch, kept, step), batch, state, seed, step)

    def _run(self, ready: _Ready, batch: Any, state: Tensors, seed: int, step: int) -> StepResult:
        feeding, engine = ready.feeding, ready.engine
        ready.program.refuse_changed_model()
        fed = feeding.feeds(batch, seed, step)
        if self._due and ready.engine.peers is not None:  # as the batches of training are
            ready.engine.peers.check(feeding.items(fed), _when(step))
        self._taken += 1
        tensors = {name: state[name] for name in ready.held if name in state} | ready.constants
        for name in ready.borrowed:
            whole = self.engine.fetch(name, state.get(name), self._inputs[name][1])
            tensors[name] = engine.shards.hold(whole, self._inputs[name][1])
        return StepResult.of(feeding.body, engine.run(tensors, fed, step), engine.output, ready.by_row)

    @property
    def _due(self) -> bool:
        """The first batches, and then one in so many, are compared over ranks."""
        return bool(self._check_every) and (self._taken < FIRST or self._taken % self._check_every == 0)

    def _weight(self, ready: _Ready, batch: Any, rows: torch.Tensor) -> torch.Tensor:
        """What the loss of a batch counts by: its tokens where the plan's does, else its rows."""
        tokens = ready.program.reference.tokens
        if tokens is None:
            return rows
        labels = ready.feeding.tensors(batch)[tokens.input]
        count, own = (labels[..., tokens.shift :] != tokens.ignore).sum(), ready.feeding.own
        return own.total(count) if own is not None and tokens.input in own.parts.inputs else count

    def _given(self, batch: Any) -> Any:
        """A batch as this rank has it. In simulation, parts are joined as they are split again."""
        parts = self._training.parts
        if not isinstance(batch, Parts) or parts is None or self._training.own is not None or not batch:
            return self._training.given(batch)
        parts.check_count(batch)
        return parts.joined(batch, math.gcd(self._rows(batch[0]), parts.microbatches))

    def _rows(self, batch: Any) -> int:
        """How many rows a batch has: dim 0 of the first input whose rows the plan shards, else of most tensors."""
        placed = {name: type for name, (port, type) in self._training.placed.items() if port.role == "input"}
        tensors = batch_inputs(batch, list(placed))
        sharded = (n for n, type in placed.items() if n in tensors and type.dims and any(a.axes for a in type.dims[0]))
        name = next(sharded, None)
        return _rows(batch) if name is None else tensors[name].shape[0]

    # ------------------------------------------------------------------ programs by the form of a batch
    def _of(self, batch: Any, kept: Kept, step: int) -> _Ready:
        form = form_of(batch)
        refuse_empty(batch)
        self._programs.agree(batch, (kept, form), _when(step), self._due)

        def text(ready: _Ready) -> str:
            return shapes_text({name: tuple(t.shape) for name, t in ready.feeding.tensors(batch).items()})

        return self._programs.of(kept, form, lambda: self._prepared(batch, kept), text)

    def _prepared(self, batch: Any, kept: Kept) -> _Ready:
        if self._compile is None:
            hint = "launch a program that compile made of a model"
            raise error("SC546", "the trainer has no model, so no evaluation can be compiled", hint=hint)
        own = self._training.own
        program = self._compile(batch if own is None else own.parts.sample(batch), kept)
        ready = prepare(program, self.engine, self._inputs, evaluates=True, own=own)
        roles = ("param", "buffer")
        held = [p.name for p, _ in typed(ready.feeding.body) if p.role in roles and p.name not in ready.constants]
        homes, trained = ready.engine.homes, self.engine.homes
        borrowed = tuple(name for name in held if not {*homes.get(name, ())} <= {*trained.get(name, ())})
        return _Ready(ready.program, ready.engine, ready.feeding, ready.constants, tuple(held), borrowed)


def _when(step: int) -> str:
    return f"in an evaluation after step {step}"


def _rows(batch: Any) -> int:
    """The size of dim 0 that most tensors of a batch have; of equally many, the first: a table, or a mask that all rows
    share, is beside inputs and labels that have the rows."""
    sizes = [leaf.shape[0] for _, leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    return Counter(sizes).most_common(1)[0][0] if sizes else 1


def _check(steps: object) -> None:
    """Raise ShardcError (SC553) for a number of steps that `evaluate` cannot make."""
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise error("SC553", f"evaluate is given steps={steps!r}", hint="give a whole number from 1, or leave it out")


def check_batches(batches: object) -> None:
    """Raise ShardcError (SC553) for what cannot be batches to evaluate."""
    if isinstance(batches, torch.Tensor | Mapping | str) or not isinstance(batches, Iterable):
        hint = "give a list of batches, as in evaluate([batch]), or a loader"
        raise error("SC553", f"evaluate is given a {type(batches).__name__} as batches", hint=hint)
