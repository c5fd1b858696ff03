"""The steps of a trainer on batches of several shapes: a short last one, other lengths of sequences.

    compiled for [8, 128]      given [8, 128]     the trainer's own program
                               given [3, 128]     another, of the same model, plan and optimizer, over the same state

A batch of another shape has the inputs, dtypes, numbers of dims and Python values of the sample; what differs from it
in these is refused, as it is of one shape. The trainer's own program is kept; of others those used last are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from shardc.ir.diagnostic import error
from shardc.ir.graph import Graph, Port, type_of
from shardc.ir.types import TensorType
from shardc.runtime.execute.batch import Inputs, batch_inputs
from shardc.runtime.train.engine import Engine
from shardc.runtime.train.feeding import Feeding
from shardc.runtime.train.programs import Compiled, Programs, prepare
from shardc.runtime.train.result import Tensors

PROGRAMS = 8  # of other shapes than the first, that are kept
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Step:
    """A program that makes steps, and what runs it. `constants` are its own tensors, beside the trainer's."""

    engine: Engine
    feeding: Feeding
    by_row: Collection[str]
    constants: Tensors = field(default_factory=Tensors)

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
        compile: Callable[[Any], Compiled] | None,
        batch: Any,
        held: Mapping[str, tuple[Port, TensorType]],
    ) -> None:
        self.first = Step(engine, feeding, by_row)
        self._compile, self._held = compile, held
        self._inputs = [name for name, (port, _) in feeding.placed.items() if port.role == "input"]
        self._shapes = None if batch is None else self._of(batch_inputs(batch, self._inputs))
        what = "a step is compiled for each shape of batch"
        self._programs = Programs[Step](engine, PROGRAMS, what, lambda step: step.engine.release(), pinned=True)

    def of(self, batch: Any, when: str, due: bool) -> tuple[Step, Inputs]:
        """The program for a batch, compiled if it is not there yet, and the batch's tensors by name; all ranks must
        call it, with batches of one form.

        It is the first for what is like no batch at all: it says what is wrong. Raises ShardcError: SC542 for ranks
        with batches of several forms, SC547 for another shape where no program can be compiled.
        """
        tensors = self.first.feeding.tensors(batch)
        shapes = self._other_shapes(tensors)
        form = None if shapes is None else tuple(sorted(shapes.items()))
        self._programs.agree(batch, None if form is None else ("step", form), when, due)
        if form is None:
            return self.first, tensors
        return self._programs.of("step", form, lambda: self._prepared(batch)), tensors

    def _prepared(self, batch: Any) -> Step:
        if self._compile is None:
            raise error("SC547", "the trainer has no model", hint="launch a program that compile made of a model")
        first = self.first
        ready = prepare(self._compile(batch), first.engine, self._held, evaluates=False)
        return Step(ready.engine, ready.feeding, ready.by_row, ready.constants)

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
                split = count > 1 and name in tensors and tuple(tensors[name].shape) != type.shape and type.ndim
                shapes[name] = (count * type.shape[0], *type.shape[1:]) if split else type.shape
        return shapes
