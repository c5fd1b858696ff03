"""What one step gives back, sorted by what it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from shardc.ir.graph import Graph, Port

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class StepResult:
    """One step. In simulation gradients and buffers are whole, in a job they are this rank's shards.

    With an optimizer in the program there are no gradients but `updates`: new parameters and optimizer state. A rank of
    a pipeline has those of its stages alone, and the model's outputs only where they are made; the loss, the norm and
    whether all is finite are the same on every rank.
    """

    loss: torch.Tensor
    grads: Tensors
    buffers: Tensors
    outputs: Tensors = field(default_factory=Tensors)
    updates: Tensors = field(default_factory=Tensors)

    def __repr__(self) -> str:
        """In a line: tensors but the loss by their number."""
        parts = [f"loss={self.loss.item():.6g}"]
        parts += [f"grad_norm={self.grad_norm.item():.4g}"] if self.grad_norm is not None else []
        counted = {"grads": self.grads, "updates": self.updates, "buffers": self.buffers, "outputs": self.outputs}
        parts += [f"{len(tensors)} {name}" for name, tensors in counted.items() if tensors]
        return f"StepResult({', '.join(parts)})"

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
