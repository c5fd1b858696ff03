"""What `shardc.compile` is asked for, and the way from there to the graphs of a program and its record.

    train    the loss, its gradients, and with an optimizer the update; model and modes as they are
    eval     the loss, if there is one, and the outputs, of the model as `model.eval()` makes it, under `no_grad`

A program may be compiled `like` one that trains: it then takes parameters, buffers and state as that program holds
them, stage by stage, so that both run on one state. An evaluation is, and a step for batches of another shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor, nn

from shardc.compiler.binding import check_loss, check_module, collect_plan
from shardc.compiler.fusion_default import with_fusion
from shardc.compiler.pass_pipeline import Watch
from shardc.compiler.step_plan import Held
from shardc.frontend.program_optimizers import Optimizers, optimizers_of
from shardc.frontend.trace import Traced
from shardc.ir.diagnostic import did_you_mean, error
from shardc.ir.mesh import Mesh
from shardc.ir.microbatch import fewest_microbatches
from shardc.partition.staged_program import StagedProgram
from shardc.plan.schema import Plan
from shardc.runtime.execute.batch import leaves_of
from shardc.runtime.train.result import Kept

Mode = Literal["train", "eval"]


@dataclass(frozen=True)
class Request:
    """The arguments of `compile`; also which outputs an evaluation keeps, and whose state a program shares. A step that
    `generates` takes its cache as it is held.

    `rows` are the most that a microbatch of such a program may have: as many as the other's.
    """

    model: nn.Module
    batch: Any
    mesh: Mesh | Mapping[str, int] | str | Any = None
    plan: Plan | Mapping[str, Any] | str | Path | None = None
    loss: Callable[[Any, Any], Tensor] | None = None
    optimizer: Optimizers = None
    strict: bool = False
    watch: Watch | None = None
    mode: Mode = "train"
    kept: Kept = "all"
    like: StagedProgram | None = None
    data_parts: int = 1  # of a program like another: in how many parts ranks bring a batch
    generates: bool = False
    cache: Held = ()
    rows: int = 0
    updates: bool = True  # of a step: else its gradients are returned, as they are
    traced: Traced | None = None  # the trace of this very call, where there is one
    checked: bool = True  # whether passes are verified: a planner's estimates run none of what they make

    @property
    def trains(self) -> bool:
        return self.mode == "train"

    def check(self) -> None:
        """Raise ShardcError for arguments that no program can be made of."""
        check_module(self.model)
        check_loss(self.loss)
        if self.mode not in get_args(Mode):
            hint = did_you_mean(str(self.mode), get_args(Mode), "modes")
            raise error("SC553", f"compile is given mode={self.mode!r}", hint=hint)
        if self.optimizer is not None and not optimizers_of(self.optimizer):
            hint = "leave optimizer= out to have gradients returned"
            raise error("SC107", "there is no optimizer in the list", hint=hint)
        if not self.trains and self.optimizer is not None:
            message = "a program for evaluation has no update for the optimizer to make"
            hint = 'leave out optimizer=, or mode="eval"; trainer.evaluate(batches) evaluates a program that trains'
            raise error("SC218", message, hint=hint)

    def asked(self) -> tuple[Plan, str]:
        """The plan as it is compiled, and what says that it has kernels where it leaves that open, else ''."""
        plan, fused_on = with_fusion(collect_plan(self.model, self.plan), self.model, self.batch)
        if not self.updates:
            plan = plan.model_copy(
                update={"clip_grad_norm": None, "nonfinite": None, "experts": plan.experts.without_refusal}
            )
        if self.like is not None or not self.trains:
            plan = plan.model_copy(update={"overlap": plan.overlap.in_parts(1)})
        if self.like is not None:
            plan = _in_parts(plan, self)
        if plan.clip_grad_norm is not None and self.trains and self.optimizer is None:
            plan.clip_grad_norm.refuse_returned()
        return plan, fused_on


def _in_parts(plan: Plan, request: Request) -> Plan:
    """The plan for a batch that need not be as long as the first. All microbatches are of one size: of an evaluation
    as many as divide the batch, of those that a step has; of a step as few as divide it and have no more rows each. Of
    a batch that ranks bring in parts, each part is divided."""
    rows, most = rows_of(request.batch), max(request.rows, 1)
    if plan.microbatches == 1:
        return plan
    if rows % request.data_parts == 0:
        rows, most = rows // request.data_parts, max(most // request.data_parts, 1)
    count = fewest_microbatches(rows, most) if request.trains else math.gcd(rows, plan.microbatches)
    if plan.pipeline is None:
        return plan.model_copy(update={"accumulate": count})
    return plan.model_copy(update={"pipeline": plan.pipeline.model_copy(update={"microbatches": count})})


def rows_of(batch: Any) -> int:
    """The dim 0 that a batch is split along: that of its first tensor that has one."""
    return next((leaf.shape[0] for _, leaf in leaves_of(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)
