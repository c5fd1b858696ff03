"""What PyTorch itself finds: the user's own model, trained by autograd and the user's optimizer on one device.

The independent witness: neither our tracer nor our passes had a hand in it. It is the model itself, with its hooks, and
not a copy, which would lack them; tensors, Python's state and the generators of random numbers are put back afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from shardc.frontend.evaluation_mode import evaluating
from shardc.frontend.lifted_casts import LiftedCasts, lifted_code
from shardc.frontend.model_outputs import output_tensors
from shardc.frontend.optimizer_trace import explicit
from shardc.frontend.program_optimizers import groups_of, stored_state
from shardc.frontend.python_state import Snapshot
from shardc.frontend.sample_call import forward_arguments
from shardc.runtime.execute.microbatches import split
from shardc.runtime.oracle.lifted import Lifted, copied, copied_batch
from shardc.runtime.oracle.verify import CHANGED
from shardc.torch_compat import bare_optimizer, checkpoints_ended, plain_attention

Witness = dict[tuple[str, str], Tensor]  # (role, name) of an output -> its value; "changed" buffers once more


class EagerTraining:
    """Steps of plain PyTorch with a model that is lifted to `dtype` (in its own if that is None), on the CPU.

    Of several `microbatches` the loss is the mean, or, where tokens are `counted` in them, the mean weighted by these;
    they are run one after the other. What is `stored` of a parameter may have been rounded; it is
    what the model then has. Gradients are clipped to `clip_grad_norm`, on their way to the optimizer or where they are
    returned. A step with a gradient that is not finite is skipped if `check_finite`. If it `evaluates`, a step is a
    forward of `model.eval()` under `no_grad`, and gives the model's outputs. With `lifted_code`, floats that the model
    makes by itself and casts to float32 are lifted too.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor] | None = None,
        dtype: torch.dtype | None = torch.float64,
        *,
        microbatches: int = 1,
        stored: Mapping[str, Tensor] | None = None,
        counted: Callable[[Any], int] | None = None,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        clip_grad_norm: float | None = None,
        check_finite: bool = False,
        evaluates: bool = False,
        lifted_code: bool = False,
    ) -> None:
        self.model, self.loss, self.dtype = model, loss, dtype
        self.microbatches, self.stored, self.counted = microbatches, stored or {}, counted
        self.optimizers, self.limit, self.check_finite = optimizers, clip_grad_norm, check_finite
        self.evaluates = evaluates
        self.lifted_code = lifted_code
        self._dtypes = [g["params"][0].dtype if g["params"] else None for _, g in groups_of(optimizers)]
        self._state: dict[Tensor, dict[str, Any]] = {}
        self._updates: list[Callable[[], Any]] = []

    @contextmanager
    def active(self) -> Generator[EagerTraining]:
        """A context in which the model is lifted and may make steps. Everything that they change is restored."""
        snapshot = Snapshot(self.model, self.loss)
        with _same_random_numbers(), Lifted(self._tensors(snapshot), self.dtype), plain_attention():
            try:
                self._begin()
                yield self
            finally:
                snapshot.restore()

    @checkpoints_ended()
    def step(self, batch: Any, gradients: Mapping[str, Tensor] | None = None) -> Witness:
        """The loss, the gradient of every parameter that gets one, every buffer after the step; what is updated.

        The optimizer is given `gradients` where there are some, in the place of those found: Adam divides a gradient by
        its own size, and what is rounding in one run would become an update of another sign.

        Gradients are those of `.backward()`, which also reaches parameters that `autograd.grad` does not see (reentrant
        checkpointing's). Buffers that the step left as they were are given too.
        """
        batch = copied_batch(dict(batch) if isinstance(batch, Mapping) else batch, self.dtype)
        own = self.dtype if self.lifted_code else None
        with nullcontext() if own is None else lifted_code(own, torch.float32):
            return self._evaluated(batch) if self.evaluates else self._trained(batch, gradients or {})

    def _trained(self, batch: Any, gradients: Mapping[str, Tensor]) -> Witness:
        sums: dict[Tensor, Tensor] = {}
        before = {name: b.detach().clone() for name, b in self._changeable()}
        total = torch.zeros((), dtype=self.dtype or torch.float32)
        parts = split(batch, self.microbatches)
        counts = [1 if self.counted is None else self.counted(part) for part in parts]
        for part, count in zip(parts, counts, strict=True):
            # Summed here: torch adds in place to gradients that may be views of one another, and counts terms twice.
            self._forget_gradients()
            with torch.enable_grad():
                value = self._loss_of(part)
                if count:
                    value = value * count / sum(counts)
                    value.backward()
                    total += value.detach()
                else:  # a mean over no tokens is 0 / 0
                    _backward_of_nothing(value, list(self.model.parameters()))
            for p in self.model.parameters():
                if p.grad is not None:
                    sums[p] = sums[p] + p.grad if p in sums else p.grad.clone()
        for p in self.model.parameters():
            p.grad = sums.get(p)
        results: Witness = {("loss", "loss"): total}
        params = dict(self.model.named_parameters())
        if not self.optimizers and self.limit is not None:  # these are returned clipped
            results["output", "grad_norm"] = torch.nn.utils.clip_grad_norm_(list(params.values()), self.limit)
        used = {id(p) for p in self._optimized()}
        every = not self.optimizers or self.limit is not None or self.check_finite  # the norm is that of all gradients
        results |= {
            ("grad", name): p.grad.clone()
            for name, p in params.items()
            if p.grad is not None and (every or id(p) in used)
        }
        if self.optimizers:
            results |= self._updated(params, gradients)
        return results | self._buffers_after(before)

    def _evaluated(self, batch: Any) -> Witness:
        """The loss, if there is one, the model's outputs, stacked where there are several microbatches, and buffers."""
        before = {name: b.detach().clone() for name, b in self._changeable()}
        losses: list[tuple[Tensor, int]] = []
        outputs: dict[str, list[Tensor]] = {}
        with torch.no_grad(), evaluating(self.model):
            for part in split(batch, self.microbatches):
                output = self._output_of(part)
                loss = self.loss(output, part) if self.loss is not None else _loss_in(output)
                if isinstance(loss, Tensor):
                    losses.append((loss, 1 if self.counted is None else self.counted(part)))
                for name, value in output_tensors(output).items():
                    outputs.setdefault(name, []).append(value.clone())
        results: Witness = {
            ("output", name): torch.stack(values) if self.microbatches > 1 else values[0]
            for name, values in outputs.items()
        }
        if losses:
            total = sum(count for _, count in losses)
            terms = [loss * count / total for loss, count in losses if count]
            results["loss", "loss"] = torch.stack(terms).sum() if terms else torch.zeros((), dtype=self.dtype)
        return results | self._buffers_after(before)

    def _buffers_after(self, before: Mapping[str, Tensor]) -> Witness:
        """Every buffer, and once more what a step has changed."""
        after = {name: b.detach().clone() for name, b in self._changeable()}
        results: Witness = {("buffer", name): after[name] for name, _ in self.model.named_buffers()}
        return results | {(CHANGED, n): b for n, b in after.items() if n not in before or not _equal(b, before[n])}

    def _changeable(self) -> Iterator[tuple[str, Tensor]]:
        """What a step may change by itself: buffers, and parameters, of which an optimizer changes those it has."""
        yield from self.model.named_buffers()
        updated = {id(p) for p in self._optimized()}
        yield from ((name, p) for name, p in self.model.named_parameters() if id(p) not in updated)

    def _forget_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def _output_of(self, part: Any) -> Any:
        args, kwargs = forward_arguments(self.model, part, has_loss=self.loss is not None)
        return self.model(*args, **kwargs)

    def _loss_of(self, part: Any) -> Tensor:
        output = self._output_of(part)
        return self.loss(output, part) if self.loss is not None else _own_loss(output)

    def _begin(self) -> None:
        parameters = dict(self.model.named_parameters())
        for name, value in self.stored.items():
            if name in parameters:
                parameters[name].data.copy_(value)
        for parameter, state in stored_state(self.optimizers).items():
            keys = [key for key, value in state.items() if isinstance(value, Tensor)]
            values = (copied([state[key]], self.dtype if state[key].dim() else None)[0] for key in keys)
            self._state[parameter] = {**state, **dict(zip(keys, values, strict=True))}
        for (optimizer, group), dtype in zip(groups_of(self.optimizers), self._dtypes, strict=True):
            bare, update = bare_optimizer(optimizer, explicit(group, dtype), self._state)
            self._state = cast("dict[Tensor, dict[str, Any]]", bare.state)
            self._updates.append(update)

    def _optimized(self) -> Iterator[Tensor]:
        yield from (p for one in self.optimizers for group in one.param_groups for p in group["params"])

    def _updated(self, params: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> Witness:
        """Clip, then step. Returns the new parameters, the optimizer's new state, and the norm."""
        results: Witness = {}
        for name, value in gradients.items():
            if name in params and params[name].grad is not None:
                params[name].grad = value.to(params[name].dtype).clone()
        trained = [p for p in params.values() if p.grad is not None]
        if self.limit is not None:
            results["output", "grad_norm"] = torch.nn.utils.clip_grad_norm_(trained, self.limit)
        if not self.check_finite or all(bool(p.grad.isfinite().all()) for p in trained if p.grad is not None):
            with LiftedCasts(self.dtype) if self.dtype is not None else nullcontext():
                for update in self._updates:
                    update()
        results |= {("param", name): p.detach().clone() for name, p in params.items()}
        for name, p in params.items():
            state = self._state.get(p, {})
            results |= {("state", f"{name}:{k}"): v.clone() for k, v in state.items() if isinstance(v, Tensor)}
        return results

    def _tensors(self, snapshot: Snapshot) -> Iterator[Tensor]:
        """The tensors that a step may read or write: the model's, the optimizer's, and those in the model's objects."""
        yield from chain(self.model.parameters(), self.model.buffers(), snapshot.tensors())
        yield from self._optimized()


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


@contextmanager
def _same_random_numbers() -> Generator[None]:
    """Restore the state of every random number generator afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _backward_of_nothing(value: Tensor, params: Sequence[Tensor]) -> None:
    """Leave gradients as they are, but for a 0 where a parameter had none."""
    gradients = [None if p.grad is None else p.grad.clone() for p in params]
    value.backward()
    for p, grad in zip(params, gradients, strict=True):
        if p.grad is not None:
            p.grad = torch.zeros_like(p) if grad is None else grad


def _loss_in(output: Any) -> Tensor | None:
    """The loss of an evaluation, if the model returns one: a scalar, alone, first, or as `loss`."""
    try:
        loss: Any = _own_loss(output)
    except (AttributeError, StopIteration):
        return None
    return loss if isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point() else None


def _own_loss(output: Any) -> Tensor:
    """The loss that a model returns: alone, first, or as `loss`. Tracing has checked that there is one."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    if isinstance(output, (tuple, list)):
        return next(item for item in output if isinstance(item, Tensor))
    return cast(Any, output).loss
