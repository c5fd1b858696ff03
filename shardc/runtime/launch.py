"""`Trainer`: the steps of a program, on this rank of a running job, or on all ranks simulated in this process.

    trainer = launch(program)            # torchrun --nproc-per-node 4 train.py, or plain python
    for batch in batches:
        result = trainer.step(batch)     # loss, gradients; updated buffers are kept
        trainer.sgd(1e-3)

In a job each rank holds its shards alone, from the moment they are loaded: parameters are read slice by slice, or made
one at a time and cut. In simulation the tensors are whole, and the same calls give the same numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from shardc.ir.diagnostic import ShardcError, suggest
from shardc.ir.graph import Graph, Port, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.types import TensorType
from shardc.runtime.batch import Sample, batch_inputs
from shardc.runtime.checkpoint import Checkpoints, Position, Saving
from shardc.runtime.checkpoint_planners import Held
from shardc.runtime.export import export
from shardc.runtime.index_check import IndexCheck
from shardc.runtime.job import Job
from shardc.runtime.loop import Metrics, train
from shardc.runtime.microbatches import Feed, feeds
from shardc.runtime.nonfinite import nonfinite, probe
from shardc.runtime.simulate import missing, simulate, supplied
from shardc.runtime.weights import Init, Read, Source, Weights, find, source_of

Tensors = dict[str, torch.Tensor]


class Launchable(Protocol):
    """What of a program a trainer needs."""

    @property
    def body(self) -> Graph: ...
    @property
    def mesh(self) -> Mesh: ...


@dataclass(frozen=True)
class StepResult:
    """One step. In simulation gradients and buffers are whole, in a job they are this rank's shards.

    With an optimizer in the program there are no gradients but `updates`: new parameters and optimizer state.
    """

    loss: torch.Tensor
    grads: Tensors
    buffers: Tensors
    outputs: Tensors = field(default_factory=Tensors)
    updates: Tensors = field(default_factory=Tensors)

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The global L2 norm of all gradients before clipping; None where the plan neither clips nor checks."""
        return self.outputs.get("grad_norm")

    @property
    def finite(self) -> torch.Tensor | None:
        """Whether all gradients are, one bool; None where the plan does not check."""
        return self.outputs.get("finite")

    @property
    def skipped(self) -> torch.Tensor | None:
        """Whether the step changed nothing because some gradient is not finite; None where the plan does not check."""
        return None if self.finite is None else ~self.finite

    @property
    def loss_scale(self) -> torch.Tensor | None:
        """What float16's next loss is multiplied by before backward; `loss`, gradients and norm are without it."""
        return self.updates.get("loss:scale")

    @classmethod
    def of(cls, body: Graph, outputs: Mapping[Port, torch.Tensor]) -> StepResult:
        """Sort a graph's outputs by what they are."""
        by_role: dict[str, Tensors] = {role: {} for role in ("loss", "grad", "buffer", "output", "param", "state")}
        for port, value in outputs.items():
            by_role.setdefault(port.role, {})[port.name] = value
        assert len(by_role["loss"]) == 1, f"graph @{body.name} returns {len(by_role['loss'])} losses"
        (loss,) = by_role["loss"].values()
        updates = by_role["param"] | by_role["state"]
        return cls(loss, by_role["grad"], by_role["buffer"], by_role["output"], updates)


class Engine(Protocol):
    """Who runs the steps: `Simulation` below, or a `Job`. A `held` tensor is whole in the one, a shard in the other."""

    rank: int
    device: torch.device

    def load(self, read: Read, type: TensorType) -> torch.Tensor: ...
    def hold(self, whole: torch.Tensor, type: TensorType) -> torch.Tensor: ...
    def whole(self, held: torch.Tensor, type: TensorType) -> torch.Tensor: ...
    def run(self, held: Mapping[str, torch.Tensor], fed: Sequence[Feed], step: int) -> dict[Port, torch.Tensor]: ...
    def nonfinite(self, body: Graph, held: Mapping[str, torch.Tensor], fed: Sequence[Feed]) -> list[str]: ...
    def checkpoints(self) -> Checkpoints: ...
    def close(self, failure: BaseException | None = None) -> None: ...


class Simulation:
    """All ranks here, in lock-step."""

    def __init__(self, body: Graph) -> None:
        self.body, self.rank, self.device = body, 0, torch.device("cpu")

    def load(self, read: Read, type: TensorType) -> torch.Tensor:
        return read(tuple(slice(0, n) for n in type.shape)).to(type.dtype, copy=True)

    def hold(self, whole: torch.Tensor, type: TensorType) -> torch.Tensor:
        return whole

    def whole(self, held: torch.Tensor, type: TensorType) -> torch.Tensor:
        return held

    def run(self, held: Mapping[str, torch.Tensor], fed: Sequence[Feed], step: int) -> dict[Port, torch.Tensor]:
        return simulate(self.body, held, fed=fed)

    def nonfinite(self, body: Graph, held: Mapping[str, torch.Tensor], fed: Sequence[Feed]) -> list[str]:
        """The outputs of another body that are not finite."""
        found = simulate(body, held, fed=fed)
        return [port.name for port, value in found.items() if not value.isfinite().all()]

    def checkpoints(self) -> Checkpoints:
        return Checkpoints(Mesh(), 0)

    def close(self, failure: BaseException | None = None) -> None:
        pass


class Trainer:
    """Holds the state of a program and steps it; see `launch`."""

    def __init__(
        self,
        body: Graph,
        engine: Engine,
        sources: list[Source],
        init: Init | None,
        seed: int,
        rates: Callable[[], Tensors] = dict,
        sample: Sample | None = None,
        check: Callable[[Feed], None] | None = None,
        raises: bool = False,
    ) -> None:
        self._sample, self._check, self._raises = sample, check, raises
        self._rates = rates
        self.body, self.engine, self.seed, self.steps = body, engine, seed, 0
        self._inputs = {p.name: (p, type_of(n)) for p, n in zip(body.inputs, body.placeholders, strict=True)}
        self._outputs = {(p.role, p.name): type_of(n) for p, n in zip(body.outputs, body.output_values, strict=True)}
        kept = [(port, type) for port, type in self._inputs.values() if port.role in ("param", "buffer", "state")]
        if init is None:
            _all_supplied([port for port, _ in kept], sources)
        self.state = {port.name: self._loaded(port, type, sources, init) for port, type in kept}
        self._grads: Tensors = {}
        self._finite: torch.Tensor | None = None

    def step(self, batch: Any) -> StepResult:
        """Loss and gradients of a global batch; every rank is given the whole of it and takes its part."""
        self._grads = {}  # let the last step's go before this one's are made
        rates = {name: self.engine.hold(rate, self._inputs[name][1]) for name, rate in self._rates().items()}
        held, fed = self.state | rates, self._feeds(batch)
        result = StepResult.of(self.body, self.engine.run(held, fed, self.steps))
        if self._raises and result.finite is not None and not result.finite:
            raise nonfinite(self.steps, float(result.loss), self.engine.nonfinite(probe(self.body), held, fed))
        self._grads = result.grads
        self._finite = result.finite
        for name, value in result.buffers.items():
            new, old = self._as_input("buffer", name, value), self.state[name]
            self.state[name] = new.clone() if result.finite is None else torch.where(result.finite, new, old)
        for name, value in result.updates.items():
            self.state[name] = self._as_input(self._inputs[name][0].role, name, value)
        self.steps += 1
        return result

    def train(self, batches: Iterable[Any], steps: int, **options: Any) -> Iterator[Metrics]:
        """Steps with metrics, a progress line, checkpoints and resumption: see `runtime.loop.train` for the options."""
        return train(self, batches, steps, **options)

    @property
    def leads(self) -> bool:
        """The rank that speaks for all."""
        return self.engine.rank == 0

    @property
    def device(self) -> torch.device:
        return self.engine.device

    @torch.no_grad()
    def sgd(self, lr: float) -> None:
        """Plain gradient descent with the last step's gradients, in place on the held parameters.

        None after a step that is skipped.
        """
        if self._finite is not None and not self._finite:
            return
        for name, grad in self._grads.items():
            self.state[name].add_(self._as_input("grad", name, grad), alpha=-lr)

    def gather_grads(self) -> Tensors:
        """The last step's gradients, whole; every rank must call it."""
        return {name: self.engine.whole(g, self._outputs["grad", name]) for name, g in self._grads.items()}

    def state_dict(self, roles: Sequence[str] = ("param", "buffer")) -> Tensors:
        """Parameters and buffers, whole, under all their names; role "state" adds moments. Every rank must call it."""
        found: Tensors = {}
        for name, held in self.state.items():
            port, type = self._inputs[name]
            if port.role not in roles or name.startswith("_constant."):
                continue
            whole = self.engine.whole(held, type)
            # A copy, whatever the layout: the next step writes over what is held.
            found |= dict.fromkeys((name, *port.aliases), whole.clone() if whole is held else whole)
        return found

    @cached_property
    def checkpoints(self) -> Checkpoints:
        return self.engine.checkpoints()

    def save(self, path: str | Path, *, extra: Mapping[str, Any] | None = None, asynchronous: bool = False) -> Saving:
        """Write a checkpoint of all state, with `extra` (plain data) beside it; every rank must call it.

        It replaces the one at `path` when it is whole, not before. Asynchronous, it is written while training goes on:
        `wait()` on what is returned, or the next save, raises what went wrong.
        """
        position = Position(self.steps, self.seed, extra or {})
        return self.checkpoints.save(path, self._held(), position, asynchronous)

    def load(self, path: str | Path, *, strict: bool = True) -> dict[str, Any]:
        """Go on from a checkpoint, saved on whatever mesh and plan; returns its `extra`. Every rank must call it."""
        position = self.checkpoints.load(path, self._held(), strict)
        self.steps, self.seed, self._grads = position.step, position.seed, {}
        return dict(position.extra)

    def export_safetensors(self, path: str | Path) -> None:
        """Write parameters and buffers as Hugging Face stores them, into a folder; every rank must call it."""
        export(self.checkpoints, path, self._held("param", "buffer"))

    @property
    def parameter_bytes(self) -> int:
        """Bytes of parameters that one rank holds, the padding of uneven shards included."""
        types = (type for port, type in self._inputs.values() if port.role == "param")
        return sum(type.local_bytes(self.body.mesh) for type in types)

    def close(self, failure: BaseException | None = None) -> None:
        """Leave the job, when what is being saved is on disk; a trainer is also a context manager.

        The other ranks hear of a failure, if that is why.
        """
        try:
            if "checkpoints" in self.__dict__:
                self.checkpoints.close()
        finally:
            self.engine.close(failure)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: object, failure: BaseException | None, trace: object) -> None:
        self.close(failure)

    def _held(self, *roles: str) -> dict[str, Held]:
        ports = {name: self._inputs[name] for name in self.state}
        return {
            name: Held(self.state[name], type, port.role, tuple(port.aliases))
            for name, (port, type) in ports.items()
            if not roles or port.role in roles
        }

    def _feeds(self, batch: Any) -> list[Feed]:
        """The batch's tensors, checked, by microbatch, each with a seed: on every rank the same, every step another."""
        ports = [port for port, _ in self._inputs.values() if port.role == "input"]
        given: Tensors = batch_inputs(batch, [port.name for port in ports], self._sample)
        for port, type in self._inputs.values():
            if port.role == "seed":
                given[port.name] = torch.full(type.shape, self.seed + self.steps, dtype=type.dtype)
        placed = [(port, type) for port, type in self._inputs.values() if port.role in ("input", "seed")]
        found = feeds(self.body, given)
        for feed in found:
            supplied(placed, {**given, **feed})
            if self._check is not None:
                self._check(feed)
        return found

    def _as_input(self, role: str, name: str, value: torch.Tensor) -> torch.Tensor:
        """A gradient or buffer in the layout of the state that it belongs to."""
        made, kept = self._outputs[role, name], self._inputs[name][1]
        if made.dims == kept.dims and not made.partial:
            return value
        return self.engine.hold(self.engine.whole(value, made), kept)

    def _loaded(self, port: Port, type: TensorType, sources: list[Source], init: Init | None) -> torch.Tensor:
        read = find(sources, (port.name, *port.aliases))
        if read is not None:
            return self.engine.load(read, type)
        assert init is not None, f"{port.name} was looked for already"
        made = init(port.name, type.shape, type.dtype)
        assert tuple(made.shape) == type.shape, f"init gave {tuple(made.shape)} for '{port.name}' of {type.shape}"
        return self.engine.load(lambda slices: made[slices], type)


def _all_supplied(ports: Sequence[Port], sources: Sequence[Source]) -> None:
    """Better to miss a tensor now than after an hour of loading others."""
    lost = [port for port in ports if find(sources, (port.name, *port.aliases)) is None]
    if not lost:
        return
    guess = suggest(lost[0].name, [name for source in sources for name in source.names])
    hint = "pass state=, the path of safetensors or a mapping, or init=, which makes one tensor at a time"
    raise ShardcError(missing(lost, f"did you mean '{guess}'?" if guess else hint))


def launch(
    program: Launchable,
    *,
    state: Weights | None = None,
    init: Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor] | None = None,
    seed: int | None = None,
    timeout: float = 600.0,
    device: str | None = None,
) -> Trainer:
    """The trainer of a program: this rank under torchrun (gloo on CPUs, NCCL on GPUs), else all ranks simulated.

    Values come from `state` (a mapping, or a path of safetensors), then from the program's model unless it is on meta,
    then from `init(name, shape, dtype)`, which is called one tensor at a time and must give the same on every rank. A
    rank that is dead or stuck is an error that names it, at most `timeout` seconds later. `seed` is that of random ops,
    by default the plan's.
    """
    body = program.body
    seed = int(getattr(program, "plan", {}).get("seed", 0)) if seed is None else seed
    start: Callable[[], Tensors] = getattr(program, "optimizer_state", dict)
    rates: Callable[[], Tensors] = getattr(program, "learning_rates", dict)
    model: nn.Module | None = getattr(program, "model", None)
    sources = [source_of(state)] if state is not None else []
    if model is not None:
        own = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        sources.append(source_of(dict(own)))
    sources += [source_of(getattr(program, "constants", {})), source_of(start())]
    sample: Sample | None = getattr(program, "plan", {}).get("batch")
    reference: Graph | None = getattr(program, "reference", None)
    check = None if reference is None else IndexCheck(reference)
    raises = getattr(program, "plan", {}).get("nonfinite") == "raise"
    engine: Engine = Simulation(body)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        engine = Job(body, timeout, device)
    try:
        return Trainer(body, engine, sources, init, seed, rates, sample, check, raises)
    except BaseException as failure:
        engine.close(failure)
        raise
