"""What a trainer takes from the program that it is launched for.

A program of `shardc.compile` has all of it. One that was put together by hand, or read from a file, has its stages and
perhaps its plan: the rest is absent, and what needs it says so when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from shardc.frontend.sample_call import forward_part
from shardc.ir.graph import Graph
from shardc.ir.program import PlanRecord
from shardc.partition.staged_program import StagedProgram
from shardc.plan.schema import Plan
from shardc.runtime.checkpoint.hugging_face import sources_of
from shardc.runtime.checkpoint.weights import Init, Weights, source_of
from shardc.runtime.execute.data_parts import DataParts, data_parts_of
from shardc.runtime.execute.index_check import IndexCheck
from shardc.runtime.generate.steps import Compile
from shardc.runtime.train.evaluate import Evaluation
from shardc.runtime.train.padding import Padding
from shardc.runtime.train.programs import Compiled
from shardc.runtime.train.result import Tensors
from shardc.runtime.train.starting_values import StartingValues, init_of


class Launchable(Protocol):
    """What every program has."""

    @property
    def staged(self) -> StagedProgram: ...


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Launched:
    """A program's body, and what else of it a trainer uses."""

    body: Graph
    plan: PlanRecord
    model: nn.Module | None
    batch: Any  # the sample batch
    optimizers: Sequence[torch.optim.Optimizer]  # the program's own: their learning rates are those of each step
    rates: Callable[[], Tensors]
    state: Callable[[], Tensors]  # of the optimizers, before the first step
    constants: Tensors
    uncomputed: Mapping[str, str]  # buffers that the model's code gives no value, and why
    check: IndexCheck | None  # of a microbatch
    refuse_changed_model: Callable[[], None]
    accept_values: Callable[[], None]  # that the model's tensors have now
    evaluation: Evaluation | None  # these compile a program beside it: for an evaluation,
    generation: Compile | None  # for generation,
    training: Callable[[Any, bool], Compiled] | None  # for steps on another shape,
    again: Callable[[], Launchable] | None  # and for the model as it is now
    forward_part: Callable[[Any], Any]  # what forward takes of a batch, of which the loss function may take more
    parts: DataParts | None  # of a batch, where ranks bring them
    padding: Padding | None

    @classmethod
    def of(cls, program: Launchable) -> Launched:
        """What there is of a program."""
        plan: PlanRecord = getattr(program, "plan", PlanRecord())
        reference: Graph | None = getattr(program, "reference", None)
        body, request = program.staged.body, getattr(program, "request", None)
        return cls(
            body=body,
            plan=plan,
            model=getattr(program, "model", None),
            batch=getattr(request, "batch", None),
            optimizers=tuple(getattr(program, "optimizers", ())),
            rates=getattr(program, "learning_rates", dict),
            state=getattr(program, "optimizer_state", dict),
            constants=getattr(program, "constants", {}),
            uncomputed=getattr(program, "uncomputed", {}),
            check=None if reference is None else IndexCheck(reference),
            refuse_changed_model=getattr(program, "refuse_changed_model", _nothing),
            accept_values=getattr(program, "accept_values", _nothing),
            evaluation=getattr(program, "evaluation", None),
            generation=getattr(program, "generation_step", None),
            training=getattr(program, "training", None),
            again=getattr(program, "again", None),
            forward_part=_forward_part(request),
            parts=data_parts_of(plan, body),
            padding=_padding(plan, reference),
        )

    def start(
        self, state: Weights | Sequence[Weights] | None = None, init: Init | str | None = None, seed: int = 0
    ) -> StartingValues:
        """Where the values that it starts from come from."""
        sources = sources_of(state, self.model)
        if self.model is not None:
            model = self.model
            tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
            sources.append(source_of(dict(tensors)))
        sources += [source_of(self.constants), source_of(self.state())]
        return StartingValues(sources, init_of(init, self.model, seed), self.model, self.uncomputed)


def _forward_part(request: Any) -> Callable[[Any], Any]:
    if request is None or request.loss is None:
        return lambda batch: batch
    return partial(forward_part, request.model)


def _padding(plan: PlanRecord, reference: Graph | None) -> Padding | None:
    """What a program's plan says of smaller batches."""
    pad = Plan.parse(plan.get("text", "")).pad
    if not pad or reference is None or reference.tokens is None:
        return None
    mask = pad if isinstance(pad, str) else "attention_mask"
    inputs = {port.name for port in reference.inputs if port.role == "input"}
    return Padding(reference.tokens, mask if mask in inputs else None)
