"""The programs of generation, each with the engine that runs it, on the parameters and buffers that a trainer holds.

Step(program, engine, types)            a prefill or a decode program
step.state(engine, types, tensors)      what it reads of the trainer's tensors
step.run(state, cache, inputs, number)  runs it: the cache is filled, and what chooses the next tokens is returned
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from shardc.frontend.cached_model import Form
from shardc.ir.graph import Graph, Port, type_of
from shardc.ir.microbatch import CACHE
from shardc.ir.ops.streams import step_key
from shardc.ir.program import CONSTANT
from shardc.ir.types import TensorType
from shardc.partition.staged_program import StagedProgram
from shardc.runtime.execute.microbatches import Feed

Tensors = Mapping[str, Tensor]


class StepProgram(Protocol):
    """What of a compiled step is run."""

    @property
    def staged(self) -> StagedProgram: ...
    @property
    def reference(self) -> Graph: ...
    @property
    def constants(self) -> Mapping[str, Tensor]: ...
    def refuse_changed_model(self) -> None: ...


class Compile(Protocol):
    """Compiles the decode program of a form; or, given one, the prefill that fills the cache as it lies there."""

    def __call__(self, form: Form, decode: Any = None, /) -> StepProgram: ...


Types = Mapping[str, tuple[Port, TensorType]]


class StepEngine(Protocol):
    """What runs a trainer's steps, as `runtime.train.engine` has it."""

    homes: Any

    @property
    def shards(self) -> Any: ...
    def holds(self, name: str) -> bool: ...
    def fetch(self, name: str, tensor: Tensor | None, type: TensorType) -> Tensor: ...
    def run(self, state: Mapping[str, Tensor], fed: Any, step: int) -> dict[Port, Tensor]: ...
    def output(self, port: Port, tensor: Tensor | None) -> Tensor: ...
    def derived(self, port: Port, whole: Tensor | None, like: Tensor) -> Tensor: ...
    def beside(self, program: StagedProgram, evaluates: bool) -> StepEngine: ...


class Step:
    """One of the two programs, and what runs it."""

    def __init__(self, program: StepProgram, engine: StepEngine, known: Types) -> None:
        self.program, self.engine = program, engine.beside(program.staged, True)
        body = program.staged.body
        pairs = list(zip(body.inputs, body.placeholders, strict=True))
        self.inputs = {port.name: (port, type_of(node)) for port, node in pairs}
        self.outputs = {port: type_of(value) for port, value in zip(body.outputs, body.output_values, strict=True)}
        # What the trainer holds of the model is as it is now; a program's own tensors are those of that program.
        own = {n: t for n, t in program.constants.items() if n.startswith(CONSTANT) or n not in known}
        hold = self.engine.shards.hold
        self.constants = {name: hold(t, self.inputs[name][1]) for name, t in own.items() if name in self.inputs}
        kept = [name for name, (port, _) in self.inputs.items() if port.role in ("param", "buffer")]
        self.kept = [name for name in kept if name not in self.constants and not name.startswith(CACHE)]
        self.borrowed = [n for n in self.kept if not {*self.engine.homes.get(n, ())} <= {*engine.homes.get(n, ())}]

    def state(self, engine: StepEngine, known: Types, state: Tensors) -> dict[str, Tensor]:
        """Parameters and buffers as the program takes them; of a pipeline, tensors that a rank's stages do not hold in
        training are fetched."""
        tensors = {name: state[name] for name in self.kept if name in state} | self.constants
        for name in self.borrowed:
            whole = engine.fetch(name, state.get(name), known[name][1])
            tensors[name] = self.engine.shards.hold(whole, known[name][1])
        return tensors

    def run(self, state: Tensors, cache: dict[str, Tensor], given: Tensors, step: int) -> tuple[Port, Tensor | None]:
        """One step, which fills the cache; what it chooses the next tokens by, as this rank has it."""
        fed: Feed = {name: given[name] for name, (port, _) in self.inputs.items() if port.role == "input"}
        fed |= {
            name: torch.full(type.shape, step_key(0, step), dtype=type.dtype)
            for name, (port, type) in self.inputs.items()
            if port.role == "seed"
        }
        results = self.engine.run({**state, **cache}, [fed], step)
        for port, value in results.items():
            if port.role == "buffer" and port.name.startswith(CACHE):
                cache[port.name] = self._as_taken(port, value)
        (port,) = (port for port in self.outputs if port.role == "output")
        return port, results.get(port)

    def _as_taken(self, port: Port, value: Tensor) -> Tensor:
        made, taken = self.outputs[port], self.inputs[port.name][1]
        if made.dims == taken.dims and not made.partial:
            return value
        return self.engine.shards.hold(self.engine.shards.whole(value, made), taken)


def empty_cache(*steps: Step) -> dict[str, Tensor]:
    """What this rank holds of the cache that these programs share."""
    cache: dict[str, Tensor] = {}
    for step in steps:
        for name, (_, type) in step.inputs.items():
            if name.startswith(CACHE) and name not in cache and step.engine.holds(name):
                cache[name] = step.engine.shards.load(_zeros(type), type)
    return cache


def rows_like(type: TensorType, tensor: Tensor) -> TensorType:
    """The placement of a tensor whose rows lie where those of a placed one do."""
    plain = TensorType.of(tensor)
    return TensorType(tensor.dtype, (type.dims[0], *plain.dims[1:]))


def _zeros(type: TensorType) -> Callable[[tuple[slice, ...]], Tensor]:
    return lambda slices: torch.zeros([s.stop - s.start for s in slices], dtype=type.dtype)
