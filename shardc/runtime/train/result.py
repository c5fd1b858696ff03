"""What one step gives back, sorted by what it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from shardc.frontend.gradients import FITS
from shardc.ir.diagnostic import did_you_mean, error
from shardc.ir.graph import Graph, Port, type_of
from shardc.passes.normalize.limit_experts import LOAD

Tensors = dict[str, torch.Tensor]
Kept = Literal["all", "scalars"]  # of the model's outputs, by an evaluation
Whole = Callable[[Port, torch.Tensor | None], torch.Tensor]  # an output, given what this rank has of it
NUMBERS = ("grad_norm", "finite", FITS, LOAD)  # what clipping, checks and counts give, of the whole step


@dataclass(frozen=True)
class Output:
    """A tensor that the model returned, of the whole batch: the rows of all microbatches in the batch's order.

    What has no rows of the batch, because a longer batch makes it no longer, is stacked: an entry a microbatch.
    """

    local: torch.Tensor | None  # this rank's shard; None on ranks of a pipeline whose stages do not make it
    _whole: Callable[[], torch.Tensor] = field(repr=False)

    def full(self) -> torch.Tensor:
        """The whole tensor, on every rank; all of them must call it."""
        return self._whole()


class Outputs(dict[str, Output]):
    """A model's outputs by name. Raises ShardcError (SC545) for one that the program does not return."""

    def __missing__(self, name: str) -> Output:
        hint = did_you_mean(name, self, "outputs") if self else 'name it under "outputs" of the plan, as in {"y": "?"}'
        raise error("SC545", f"the program returns no output '{name}'", tensor=name, hint=hint)


@dataclass(frozen=True)
class StepResult:
    """One step. In simulation gradients and buffers are whole, in a job they are this rank's shards.

    With an optimizer in the program there are no gradients but `updates`: new parameters and optimizer state. A rank of
    a pipeline has those of its stages alone. The loss, the norm, whether all is finite, and the scalars among the
    model's outputs are the same on every rank. A program for evaluation has no gradients.
    """

    own_loss: torch.Tensor | None  # None: the model has none, and is evaluated
    grads: Tensors
    buffers: Tensors
    outputs: Mapping[str, Output] = field(default_factory=Outputs)
    updates: Tensors = field(default_factory=Tensors)
    scalars: Tensors = field(default_factory=Tensors)  # of the outputs: each a mean over the microbatches
    numbers: Tensors = field(default_factory=Tensors)

    @property
    def loss(self) -> torch.Tensor:
        """The loss of the whole batch. Raises ShardcError (SC545) where the model that is evaluated returns none."""
        if self.own_loss is None:
            hint = "add the labels to the batch if the model makes a loss of them, or pass loss= to compile"
            raise error("SC545", "the program returns no loss: the model has none", hint=hint)
        return self.own_loss

    def __repr__(self) -> str:
        """In a line: tensors but the loss by their number."""
        parts = [f"loss={self.own_loss.item():.6g}"] if self.own_loss is not None else []
        parts += [f"grad_norm={self.grad_norm.item():.4g}"] if self.grad_norm is not None else []
        counted = {"grads": self.grads, "updates": self.updates, "buffers": self.buffers, "outputs": self.outputs}
        parts += [f"{len(tensors)} {name}" for name, tensors in counted.items() if tensors]
        return f"StepResult({', '.join(parts)})"

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The global L2 norm of all gradients before clipping; None where the plan neither clips nor checks."""
        return self.numbers.get("grad_norm")

    @property
    def finite(self) -> torch.Tensor | None:
        """Whether all gradients are, one bool; None where the plan does not check."""
        return self.numbers.get("finite")

    @property
    def skipped(self) -> torch.Tensor | None:
        """Whether the step changed nothing because some gradient is not finite; None where the plan does not check."""
        return None if self.finite is None else ~self.finite

    @property
    def load(self) -> torch.Tensor | None:
        """For each layer of experts a line: the rows routed to each expert, and last how many of all were dropped. Over
        the whole batch; None where the plan neither has a capacity nor asks for it."""
        return self.numbers.get(LOAD)

    @property
    def dropped(self) -> torch.Tensor | None:
        """How many rows experts dropped, in all layers; None where they are not counted."""
        return None if self.load is None else self.load[:, -1].sum()

    @property
    def fits(self) -> torch.Tensor | None:
        """Whether experts dropped nothing, one bool; None where a step may drop rows."""
        return self.numbers.get(FITS)

    @property
    def loss_scale(self) -> torch.Tensor | None:
        """What float16's next loss is multiplied by before backward; `loss`, gradients and norm are without it."""
        return self.updates.get("loss:scale")

    @classmethod
    def of(
        cls,
        body: Graph,
        outputs: Mapping[Port, torch.Tensor],
        whole: Whole | None = None,
        by_row: Collection[str] = (),
    ) -> StepResult:
        """Sort a graph's outputs by what they are. `whole` assembles an output of all microbatches; those `by_row` have
        rows of the batch."""
        by_role: dict[str, Tensors] = {role: {} for role in ("loss", "grad", "buffer", "output", "param", "state")}
        for port, value in outputs.items():
            by_role.setdefault(port.role, {})[port.name] = value
        losses = list(by_role["loss"].values())
        assert len(losses) == 1 or body.is_forward_only, f"graph @{body.name} returns {len(losses)} losses"
        tensors = by_role["output"]
        numbers = {} if body.is_forward_only else {name: tensors.pop(name) for name in NUMBERS if name in tensors}
        made = zip(body.outputs, body.output_values, strict=True)
        types = {port: type_of(value) for port, value in made if port.role == "output"}
        model_outputs = Outputs()
        scalars: Tensors = {}
        for port, type in types.items():
            if port.name in numbers:
                continue
            held = tensors.get(port.name)
            joined = (body.microbatches > 1) + (body.halves > 1)
            join = partial(_joined, dims=joined if port.name in by_row else joined - 1)
            gather = partial(_gathered, port, held, whole, join)
            model_outputs[port.name] = Output(None if held is None else join(held), gather)
            if type.ndim == (body.halves > 1) and held is not None and not held.is_complex():
                scalars[port.name] = held.double().mean()
        updates = by_role["param"] | by_role["state"]
        loss = losses[0] if losses else None
        return cls(loss, by_role["grad"], by_role["buffer"], model_outputs, updates, scalars, numbers)


def _gathered(
    port: Port, held: torch.Tensor | None, whole: Whole | None, join: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    if whole is not None:
        return join(whole(port, held))
    assert held is not None, f"nobody has {port.name}"
    return join(held)


def _joined(value: torch.Tensor, dims: int) -> torch.Tensor:
    """An output of all microbatches, and their halves, with so many of its dims and the rows of the batch as one."""
    return value.flatten(0, dims) if dims > 0 else value
