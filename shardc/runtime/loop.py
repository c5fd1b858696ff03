"""The loop around a trainer's steps: metrics, a progress line, checkpoints, and going on from the last one.

    for metrics in trainer.train(batches, steps=1000, checkpoint="run", every=100, scheduler=scheduler):
        ...                                      # step 17  loss 3.2104  norm 1.02  lr 0.001  8.1k tokens/s  512 MiB

Started again with the same arguments, it goes on where the last whole checkpoint stands, and makes the very steps that
it would have made: parameters, optimizer state, seed and step are the checkpoint's, with the schedule and the learning
rates, and what of the batches was trained on is skipped.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from shardc.ir.collectives import human_bytes
from shardc.torch_compat import count_optimizer_step


class Scheduler(Protocol):
    """What of a `torch.optim.lr_scheduler` the loop needs."""

    optimizer: torch.optim.Optimizer

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Result(Protocol):
    """What of a step's result the metrics are made from."""

    @property
    def loss(self) -> torch.Tensor: ...
    @property
    def grad_norm(self) -> torch.Tensor | None: ...


class Steps(Protocol):
    """What of a trainer the loop needs."""

    steps: int

    @property
    def leads(self) -> bool: ...
    @property
    def device(self) -> torch.device: ...
    def step(self, batch: Any) -> Any: ...
    def save(self, path: str | Path, *, extra: Mapping[str, Any] | None, asynchronous: bool) -> Any: ...
    def load(self, path: str | Path) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Metrics:
    """A step in numbers. `items` are the tokens of the whole batch: the elements of its first tensor of whole numbers
    of two dims or more; without such a tensor, its samples, the first tensor's dim 0.

    `memory` is the most bytes that this rank held so far: on its GPU, or as a process. `skipped` says that the step
    was not made, because a gradient was not finite.
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

    @property
    def items_per_second(self) -> float:
        return self.items / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        parts = [f"loss {self.loss:.4f}"]
        if self.grad_norm is not None:
            parts.append(f"norm {self.grad_norm:.3g}")
        if self.learning_rates:
            parts.append("lr " + ",".join(f"{rate:.3g}" for rate in dict.fromkeys(self.learning_rates)))
        if self.loss_scale is not None:
            parts.append(f"scale {self.loss_scale:g}")
        parts += [f"{_short(self.items_per_second)} tokens/s", human_bytes(self.memory)]
        return "  ".join([*parts, *(["skipped"] if self.skipped else [])])


def train(
    trainer: Steps,
    batches: Iterable[Any],
    steps: int,
    *,
    checkpoint: str | Path | None = None,
    every: int = 0,
    scheduler: Scheduler | None = None,
    resume: bool = True,
    progress: bool = True,
) -> Iterator[Metrics]:
    """Steps up to the `steps`-th, the metrics of each; every rank must run it, with the same batches.

    `checkpoint` is saved every so many steps, in the background, and after the last one. Where it exists already,
    training goes on from it (unless `resume` is false): `batches` starts from the beginning all the same, and the
    first ones are passed over. The `scheduler` steps after each step. The leading rank shows a line: on a terminal
    one that is renewed, else about twenty over the whole run, on standard error.
    """
    if checkpoint is not None and resume and Path(checkpoint).exists():
        _restore(trainer.load(checkpoint), scheduler)
    saved = trainer.steps
    line = _Line(trainer.steps, steps) if progress and trainer.leads else None
    with line or nullcontext():
        for batch in islice(batches, trainer.steps, steps):
            start = time.perf_counter()
            result = trainer.step(batch)
            metrics = measure(result, batch, trainer, start, _rates(scheduler))
            if scheduler is not None:
                count_optimizer_step(scheduler.optimizer)
                scheduler.step()
            if checkpoint is not None and every and trainer.steps % every == 0:
                trainer.save(checkpoint, extra=_position(scheduler), asynchronous=True)
                saved = trainer.steps
            if line is not None:
                line.show(metrics)
            yield metrics
        if checkpoint is not None and saved != trainer.steps:
            trainer.save(checkpoint, extra=_position(scheduler), asynchronous=False)


def measure(
    result: Result, batch: Any, trainer: Steps, start: float, learning_rates: tuple[float, ...] = ()
) -> Metrics:
    """The metrics of a step that was begun at `start`, by time.perf_counter; waits for its loss."""
    loss, norm = float(result.loss), result.grad_norm
    finite, scale = getattr(result, "finite", None), getattr(result, "loss_scale", None)
    return Metrics(
        step=trainer.steps,
        loss=loss,
        grad_norm=None if norm is None else float(norm),
        seconds=time.perf_counter() - start,
        items=count_items(batch),
        memory=memory_held(trainer.device),
        learning_rates=learning_rates,
        skipped=finite is not None and not bool(finite),
        loss_scale=None if scale is None else float(scale),
    )


def count_items(batch: Any) -> int:
    """Tokens of a batch, or its samples; see `Metrics`."""
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else (batch,)
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.ndim]
    for tensor in tensors:
        if tensor.ndim > 1 and not tensor.is_floating_point():
            return tensor.numel()
    return tensors[0].shape[0] if tensors else 0


def memory_held(device: torch.device) -> int:
    """The most bytes held so far: of tensors on a GPU, or by this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kilobytes


def _rates(scheduler: Scheduler | None) -> tuple[float, ...]:
    return () if scheduler is None else tuple(float(group["lr"]) for group in scheduler.optimizer.param_groups)


def _position(scheduler: Scheduler | None) -> dict[str, Any]:
    """What of the loop a checkpoint holds: torch keeps the present rates with the optimizer, not with its schedule."""
    if scheduler is None:
        return {}
    return {"scheduler": scheduler.state_dict(), "learning_rates": list(_rates(scheduler))}


def _restore(extra: Mapping[str, Any], scheduler: Scheduler | None) -> None:
    if scheduler is None or "scheduler" not in extra:
        return
    scheduler.load_state_dict(dict(extra["scheduler"]))
    for group, rate in zip(scheduler.optimizer.param_groups, extra["learning_rates"], strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class _Line:
    """The progress line of a run."""

    LINES = 20  # over a run, where there is no terminal to renew one on

    def __init__(self, done: int, steps: int) -> None:
        self.console, self.steps = Console(stderr=True), steps
        self.each = max(1, (steps - done) // self.LINES)
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=20), TimeRemainingColumn())
        self.bar: Progress | None = None
        self.task = TaskID(0)
        if self.console.is_terminal:
            self.bar = Progress(*columns, TextColumn("{task.description}"), console=self.console)
            self.task = self.bar.add_task("", total=steps, completed=done)

    def __enter__(self) -> None:
        if self.bar is not None:
            self.bar.start()

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def show(self, metrics: Metrics) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=metrics.step, description=str(metrics))
        elif metrics.step % self.each == 0 or metrics.step == self.steps:
            print(f"step {metrics.step:>{len(str(self.steps))}}  {metrics}", file=sys.stderr, flush=True)


def _short(count: float) -> str:
    """`512`, `8.1k`, `1.2M`."""
    for scale, unit in ((1e6, "M"), (1e3, "k")):
        if count >= scale:
            return f"{count / scale:.1f}{unit}"
    return f"{count:.0f}"
