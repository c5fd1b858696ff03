"""The loop around a trainer's steps: metrics, a progress line, checkpoints, and going on from the last one.

    for metrics in trainer.train(batches, steps=1000, checkpoint="run", every=100, scheduler=scheduler):
        ...                                      # step 17  loss 3.2104  norm 1.02  lr 0.001  8.1k tokens/s  512 MiB

Started again with the same arguments, it goes on where the last whole checkpoint stands, and makes the very steps that
it would have made: parameters, optimizer state, seed and step are the checkpoint's, with the schedule and the learning
rates, and what of the batches was trained on is passed over. Called once more (a second epoch), it trains on all that
it is given.
"""

from __future__ import annotations

import inspect
import resource
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from shardc.ir.caller import warn
from shardc.ir.collectives import human_bytes
from shardc.ir.diagnostic import Diagnostic, error
from shardc.runtime.checkpoint.checkpoint import Checkpoints
from shardc.runtime.checkpoint.folder import place_of, present
from shardc.torch_compat import count_optimizer_step


class Scheduler(Protocol):
    """The part of a `torch.optim.lr_scheduler` that the loop uses."""

    optimizer: torch.optim.Optimizer

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


Schedulers = Scheduler | Sequence[Scheduler] | None  # as `train` takes them: of each of the program's optimizers


class Result(Protocol):
    """The part of a step's result that the metrics are computed from."""

    @property
    def loss(self) -> torch.Tensor: ...
    @property
    def grad_norm(self) -> torch.Tensor | None: ...


class Steps(Protocol):
    """The part of a trainer that the loop uses."""

    steps: int
    gradients_used: bool  # by the caller, since the launch

    @property
    def updates(self) -> bool: ...
    @property
    def leads(self) -> bool: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]: ...
    @property
    def checkpoints(self) -> Checkpoints: ...

    run: Run
    intact: bool  # no step was left halfway

    def step(self, batch: Any) -> Any: ...
    def rates(self) -> Mapping[str, torch.Tensor]: ...
    def save(self, path: str | Path, *, extra: Mapping[str, Any] | None, asynchronous: bool) -> Any: ...
    def load(self, path: str | Path) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Metrics:
    """A step in numbers. `items` are the tokens of the whole batch: the elements of its first tensor of whole numbers
    of two dims or more; without such a tensor, its samples, the first tensor's dim 0.

    `memory` is the most bytes that this rank held so far: on its GPU, or as a process. `skipped` says that the step
    was not made, because a gradient was not finite. `scalars` are those among the model's outputs that the plan's
    `outputs` ask for, each a mean over the step's microbatches.
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
        parts += [f"{name} {value:.4g}" for name, value in self.scalars.items()]
        parts += [f"{_short(self.items_per_second)} tokens/s", human_bytes(self.memory)]
        return "  ".join([*parts, *(["skipped"] if self.skipped else [])])


@dataclass
class Run:
    """Where a trainer stands in its calls of `train`."""

    place: Path | None = None  # the checkpoint that holds the trainer's state,
    step: int = -1  # at this step
    begun: int | None = None  # the step at which the batches began that a checkpoint was made among

    def take_up(self, trainer: Steps, folder: Path, schedulers: Sequence[Scheduler]) -> None:
        """Resume from a checkpoint, unless the trainer is already at it."""
        if present(folder) and (self.place, self.step) != (folder, trainer.steps):
            extra = trainer.load(folder)
            trainer.run = self
            _restore(extra, schedulers)
            self.begun = int(extra.get("begun", 0))
            self.place, self.step = folder, trainer.steps


def train(
    trainer: Steps,
    batches: Iterable[Any],
    steps: int,
    *,
    checkpoint: str | Path | None = None,
    every: int = 0,
    scheduler: Schedulers = None,
    resume: bool = True,
    progress: bool = True,
) -> Iterator[Metrics]:
    """Steps up to the `steps`-th, the metrics of each; every rank must run it, with the same batches.

    `checkpoint` is saved every so many steps, in the background, and at the end: after the last step or the last batch,
    and where an error, an interruption or the caller ends the loop between two steps (of a job's ranks, where all end
    at the same one). Where it exists already, training goes on from it (unless `resume` is false): `batches` starts
    from the beginning all the same, and those that were trained on are passed over. A later call of the same trainer
    passes over nothing: it trains on what it is given. The `scheduler`, or each of a list, steps after each step. The
    leading rank shows a line: on a terminal one that is renewed, else about twenty over the whole run, on standard
    error.

    Raises ShardcError: SC551 where another job writes the checkpoint, SC552 for a scheduler that wants a metric, SC553
    for arguments that could have no effect.
    """
    schedulers = check_schedulers(scheduler, trainer.optimizers)
    _check_numbers(batches, steps, every, checkpoint)
    folder = None if checkpoint is None else place_of(checkpoint)
    run = trainer.run
    if folder is not None:
        trainer.checkpoints.reserve(folder)
        if resume:
            run.take_up(trainer, folder, schedulers)
    if trainer.steps > steps:  # it was saved in a later call, which will come
        return
    first_step = trainer.steps if run.begun is None else run.begun
    run.begun = None
    saved = trainer.steps
    line = _Line(trainer.steps, steps) if progress and trainer.leads else None

    def save(asynchronous: bool) -> None:
        nonlocal saved
        if folder is not None and saved != trainer.steps:
            trainer.save(folder, extra={"begun": first_step, **_position(schedulers)}, asynchronous=asynchronous)
            saved = run.step = trainer.steps
            run.place = folder

    skipped = trainer.steps - first_step
    with line or nullcontext(), Interruptions() as interruptions:
        try:
            for batch in islice(batches, skipped, skipped + steps - trainer.steps):
                start = time.perf_counter()
                with interruptions.later():
                    result = trainer.step(batch)
                    metrics = measure(result, batch, trainer, start, _rates(schedulers))
                    for each in schedulers:
                        count_optimizer_step(each.optimizer)
                        each.step()
                if every and trainer.steps % every == 0:
                    save(asynchronous=True)
                if line is not None:
                    line.show(metrics)
                yield metrics
                if trainer.leads and trainer.steps == first_step + skipped + 1:
                    _warn_of_nothing(trainer, schedulers)
        except BaseException:
            with suppress(Exception), interruptions.later():  # what ended the loop is what there is to say
                if folder is not None and trainer.intact and trainer.checkpoints.together(trainer.steps):
                    save(asynchronous=False)
            raise
        save(asynchronous=False)


def _check_numbers(batches: object, steps: object, every: object, checkpoint: object) -> None:
    """Raise ShardcError (SC553) for arguments of `train` that it cannot use, or would use for nothing."""
    for name, value in (("steps", steps), ("every", every)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise error("SC553", f"train is given {name}={value!r}", hint="give a whole number from 0")
    if every and checkpoint is None:
        message = f"train is to save every {every} steps, and nowhere"
        raise error("SC553", message, hint="give checkpoint=, the path of a folder, or leave every= out")
    if not isinstance(batches, Iterable):
        raise error("SC553", f"train is given a {type(batches).__name__} as batches", hint="give a list or a loader")


def _warn_of_nothing(trainer: Steps, schedulers: Sequence[Scheduler]) -> None:
    """Warn (SC553) after a first step that changed no parameter, and after which the caller has done nothing either."""
    hint = what = ""
    if not trainer.gradients_used and not trainer.updates:
        hint = "pass optimizer= to compile, or descend in the loop over train(...): trainer.sgd(lr)"
        what = "the program has no optimizer"
    elif not schedulers and trainer.updates and (rates := trainer.rates()) and not any(rates.values()):
        hint = "set the optimizer's lr, or pass the scheduler that raises it: train(..., scheduler=...)"
        what = "every learning rate of the optimizer is 0"
    if hint:
        warning = Diagnostic("SC553", f"train makes steps that change no parameter: {what}", "warning", hint=hint)
        warn(str(warning))


def check_schedulers(given: Schedulers, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[Scheduler, ...]:
    """The schedulers, each of which steps: see `check_scheduler`. Raises ShardcError (SC553) for one given twice."""
    schedulers: tuple[Scheduler, ...] = tuple(given) if isinstance(given, (list, tuple)) else (given,)  # type: ignore[assignment]
    schedulers = () if given is None else schedulers
    for position, scheduler in enumerate(schedulers):
        check_scheduler(scheduler, optimizers)
        if any(scheduler is other for other in schedulers[:position]):
            message = f"a {type(scheduler).__name__} is given twice, and would step twice after each step"
            raise error("SC553", message, hint="give each scheduler once")
    return schedulers


def check_scheduler(scheduler: Scheduler, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise ShardcError for a scheduler whose step needs an argument, as ReduceLROnPlateau's metric (SC552), and for
    one of another optimizer than the program's, which would change nothing (SC553)."""
    name = type(scheduler).__name__
    if hasattr(scheduler, "step"):
        try:
            inspect.signature(scheduler.step).bind()
        except TypeError:
            hint = "step it in the loop over train(...), with the metric: scheduler.step(metrics.loss)"
            raise error("SC552", f"{name} wants a metric at each step, which train does not have", hint=hint) from None
    owner = getattr(scheduler, "optimizer", None)
    if not hasattr(scheduler, "step") or not any(owner is optimizer for optimizer in optimizers):
        whose = "it is not that of the program" if optimizers else "the program has none"
        message = f"the scheduler, a {name}, would change nothing: its optimizer's rates are not used, {whose}"
        hint = "make it of the very optimizer that was passed to compile(..., optimizer=...)"
        raise error("SC553", message, hint=hint)


class Interruptions:
    """SIGINT and SIGTERM between steps, not within: what came during one is raised when it is done.

    Only in the main thread, and only where nobody has taken the signal already.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._busy, self._came = False, 0

    def __enter__(self) -> Interruptions:
        if threading.current_thread() is threading.main_thread():
            for number, default_handler in (
                (signal.SIGINT, signal.default_int_handler),
                (signal.SIGTERM, signal.SIG_DFL),
            ):
                if signal.getsignal(number) is default_handler:
                    self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def later(self) -> Generator[None]:
        """While this is entered, signals wait. A second one does not."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
        if self._came:
            self._end()

    def _heard(self, number: int, _: object) -> None:
        repeated, self._came = bool(self._came), number
        if repeated or not self._busy:
            self._end()

    def _end(self) -> NoReturn:
        number, self._came = self._came, 0
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


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
        scalars={name: float(value) for name, value in getattr(result, "scalars", {}).items() if name != "loss"},
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


def _rates(schedulers: Sequence[Scheduler]) -> tuple[float, ...]:
    return tuple(float(group["lr"]) for group in _groups(schedulers))


def _groups(schedulers: Sequence[Scheduler]) -> list[dict[str, Any]]:
    """The parameter groups of all optimizers that are scheduled."""
    optimizers = {id(scheduler.optimizer): scheduler.optimizer for scheduler in schedulers}
    return [group for optimizer in optimizers.values() for group in optimizer.param_groups]


def _position(schedulers: Sequence[Scheduler]) -> dict[str, Any]:
    """What of the loop a checkpoint holds: torch keeps the present rates with the optimizer, not with its schedule."""
    if not schedulers:
        return {}
    states = [scheduler.state_dict() for scheduler in schedulers]
    state = {"scheduler": states[0]} if len(states) == 1 else {"schedulers": states}
    return {**state, "learning_rates": list(_rates(schedulers))}


def _restore(extra: Mapping[str, Any], schedulers: Sequence[Scheduler]) -> None:
    states = extra.get("schedulers", [extra["scheduler"]] if "scheduler" in extra else [])
    if not schedulers or not states:
        return
    groups, rates = _groups(schedulers), extra["learning_rates"]
    if (len(states), len(rates)) != (len(schedulers), len(groups)):
        message = f"the checkpoint holds {len(states)} schedulers of {len(rates)} parameter groups, not "
        hint = "give the schedulers that it was saved with, in their order"
        raise error("SC553", f"{message}{len(schedulers)} of {len(groups)}", hint=hint)
    for scheduler, state in zip(schedulers, states, strict=True):
        scheduler.load_state_dict(dict(state))
    for group, rate in zip(groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class _Line:
    """The progress line of a run."""

    LINES = 20  # over a run, where there is no terminal to renew one on

    def __init__(self, completed: int, steps: int) -> None:
        self.console, self.steps = Console(stderr=True), steps
        self.each = max(1, (steps - completed) // self.LINES)
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=20), TimeRemainingColumn())
        self.bar: Progress | None = None
        self.task = TaskID(0)
        if self.console.is_terminal:
            self.bar = Progress(*columns, TextColumn("{task.description}"), console=self.console)
            self.task = self.bar.add_task("", total=steps, completed=completed)

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
