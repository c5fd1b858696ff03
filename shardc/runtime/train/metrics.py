"""What a step of training is in numbers."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from shardc.ir.collectives import human_bytes
from shardc.ir.diagnostic import did_you_mean, error
from shardc.runtime.execute.data_parts import Parts
from shardc.runtime.train.expert_load import ExpertLoad, Layer


class Result(Protocol):
    """The part of a step's result that the metrics are computed from."""

    @property
    def loss(self) -> torch.Tensor: ...
    @property
    def grad_norm(self) -> torch.Tensor | None: ...


class Stepped(Protocol):
    """The part of a trainer that the metrics are computed from."""

    steps: int

    @property
    def device(self) -> torch.device: ...
    @property
    def data_ranks(self) -> int: ...
    @property
    def expert_layers(self) -> Sequence[Layer]: ...


@dataclass(frozen=True)
class Evaluated:
    """Means over the batches of an evaluation. `loss` is None for a model that returns none; `scalars` are those among
    its other outputs, weighted by rows. `items` are counted as in `Metrics`."""

    loss: float | None
    scalars: Mapping[str, float] = field(default_factory=dict[str, float])
    batches: int = 0
    items: int = 0
    seconds: float = 0.0

    @property
    def items_per_second(self) -> float:
        return self.items / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        means = {} if self.loss is None else {"loss": self.loss}
        parts = [f"{name} {value:.4f}" for name, value in {**means, **self.scalars}.items()]
        return "  ".join([*parts, f"{self.batches} batch{'es' * (self.batches != 1)}"])


@dataclass(frozen=True)
class Metrics:
    """A step in numbers. `items` are the tokens of the whole batch: the elements of its first tensor of whole numbers
    of two dims or more; without such a tensor, its samples, the first tensor's dim 0.

    `memory` is the most bytes that this rank held so far: on its GPU, or as a process. `skipped` says that the step
    was not made, because a gradient was not finite. `scalars` are those among the model's outputs that the plan's
    `outputs` ask for, each a mean over the step's microbatches. `evaluated` is the evaluation that the loop made after
    this step, if it made one. `experts` says what experts were given, where the plan has a capacity, or asks for their
    load.
    """

    step: int
    loss: float
    grad_norm: float | None
    seconds: float
    items: int
    memory: int
    learning_rates: tuple[float, ...] = ()
    skipped: bool = False
    loss_scale: float | None = None
    scalars: Mapping[str, float] = field(default_factory=dict[str, float])
    evaluated: Evaluated | None = None
    unit: str = "tokens"  # what `items` are: or "samples"
    experts: ExpertLoad | None = None

    @property
    def items_per_second(self) -> float:
        return self.items / self.seconds if self.seconds else 0.0

    def value(self, name: str) -> float | None:
        """A number by name: `loss`, `grad_norm`, a scalar's name, `experts.imbalance`, `experts.dropped`;
        `evaluated.loss`, `evaluated.accuracy`, None after a step that was not evaluated. Raises ShardcError (SC552) for
        one that there is not."""
        group, _, evaluated_name = name.partition("evaluated.")
        numbers: dict[str, float | None] = {"loss": self.loss, "grad_norm": self.grad_norm, **self.scalars}
        if self.experts is not None:
            numbers |= {"experts.dropped": self.experts.dropped, "experts.imbalance": self.experts.imbalance}
        if evaluated_name and not group:
            if self.evaluated is None:
                return None
            numbers = {"loss": self.evaluated.loss, **self.evaluated.scalars}
            numbers = {f"evaluated.{key}": value for key, value in numbers.items()}
        value = numbers.get(name)
        if value is None:
            known = [key for key, number in numbers.items() if number is not None]
            raise error("SC552", f"there is no metric '{name}'", hint=did_you_mean(name, known, "metrics"))
        return value

    def __str__(self) -> str:
        parts = [f"loss {self.loss:.4f}"]
        if self.grad_norm is not None:
            parts.append(f"norm {self.grad_norm:.3g}")
        if self.learning_rates:
            parts.append("lr " + ",".join(f"{rate:.3g}" for rate in dict.fromkeys(self.learning_rates)))
        if self.loss_scale is not None:
            parts.append(f"scale {self.loss_scale:g}")
        parts += [f"{name} {value:.4g}" for name, value in self.scalars.items()]
        if self.experts is not None:
            parts.append(str(self.experts))
        if self.evaluated is not None:
            parts.append(f"evaluated: {self.evaluated}")
        parts += [f"{short_count(self.items_per_second)} {self.unit}/s", human_bytes(self.memory)]
        return "  ".join([*parts, *(["skipped"] if self.skipped else [])])


def measure(
    result: Result, batch: Any, trainer: Stepped, start: float, learning_rates: tuple[float, ...] = ()
) -> Metrics:
    """The metrics of a step that was begun at `start`, by time.perf_counter; waits for its loss."""
    loss, norm = float(result.loss), result.grad_norm
    finite, scale = getattr(result, "finite", None), getattr(result, "loss_scale", None)
    load: torch.Tensor | None = getattr(result, "load", None)
    return Metrics(
        step=trainer.steps,
        loss=loss,
        grad_norm=None if norm is None else float(norm),
        seconds=time.perf_counter() - start,
        items=sum(map(count_items, batch)) if isinstance(batch, Parts) else trainer.data_ranks * count_items(batch),
        memory=memory_held(trainer.device),
        learning_rates=learning_rates,
        skipped=finite is not None and not bool(finite),
        loss_scale=None if scale is None else float(scale),
        scalars={name: float(value) for name, value in getattr(result, "scalars", {}).items() if name != "loss"},
        experts=None if load is None else ExpertLoad.of(load, trainer.expert_layers),
        unit="samples" if _tokens(batch[0] if isinstance(batch, Parts) else batch) is None else "tokens",
    )


def count_items(batch: Any) -> int:
    """Tokens of a batch, or its samples; see `Metrics`."""
    tensors, tokens = _tensors(batch), _tokens(batch)
    if tokens is not None:
        return tokens.numel()
    return tensors[0].shape[0] if tensors else 0


def _tokens(batch: Any) -> torch.Tensor | None:
    return next((tensor for tensor in _tensors(batch) if tensor.ndim > 1 and not tensor.is_floating_point()), None)


def _tensors(batch: Any) -> list[torch.Tensor]:
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else (batch,)
    return [value for value in values if isinstance(value, torch.Tensor) and value.ndim]


def memory_held(device: torch.device) -> int:
    """The most bytes held so far: of tensors on a GPU, or by this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kilobytes


def short_count(count: float) -> str:
    """`0.47`, `512`, `8.1k`, `1.2M`."""
    for scale, unit in ((1e6, "M"), (1e3, "k")):
        if count >= scale:
            return f"{count / scale:.1f}{unit}"
    return f"{count:.2g}" if count < 10 else f"{count:.0f}"
