"""Random models under random plans, cut into random stages and run by random schedules in random orders.

A step that no cut suits is refused (SC221), and discarded; a plan that is refused likewise. Anything else that is not
an equal program is a bug, and so is a program that its file is not read back as.
"""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, event, given, note, settings
from hypothesis import strategies as st

import shardc
from shardc.api import complete_inputs, model_state
from shardc.compiler import driver
from shardc.compiler.pass_pipeline import Options
from shardc.frontend.trace import trace
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import Graph, info, update
from shardc.ir.mesh import Mesh
from shardc.ir.ops.host_copies import BEGIN_OFFLOAD
from shardc.ir.program import PlanRecord
from shardc.partition.cut import cut
from shardc.partition.stage_offload import offload_stages
from shardc.partition.staged_check import stage_faults
from shardc.partition.staged_program import StagedProgram, scheduled
from shardc.passes.accumulate import accumulate
from shardc.passes.fusion.fuse import fuse
from shardc.passes.memory.offload import Offload
from shardc.runtime.execute.batch import describe_sample
from shardc.runtime.oracle.verify import verify
from tests.partition.whole import SCHEDULES
from tests.properties.check import Refused, compiled
from tests.properties.grower import Program
from tests.properties.plans import meshes, plans
from tests.properties.programs import programs

EXAMPLES = max(4, settings().max_examples // 2)
Placed = dict[str, dict[str, str]]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Program, Mesh, Placed]:
    program, mesh = draw(programs()), draw(meshes)
    return program, mesh, draw(plans(program.shapes(), mesh))


@pytest.mark.slow
@given(
    cases(),
    st.sampled_from((2, 3)),
    st.integers(1, 3),
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(0, 2**16),
    st.booleans(),
    st.sampled_from((0, 300, "all")),
)
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink])
def test_a_random_pipeline_equals_the_single_device(
    case: tuple[Program, Mesh, Placed],
    ranks: int,
    microbatches: int,
    schedule: str,
    order: int,
    kernels: bool,
    offloaded: int | Literal["all"],
) -> None:
    program, mesh, plan = case
    note(f"{program}\nmesh {mesh}\nplan {plan}")
    model, micro = program.model(), program.batch()
    traced = trace(model, micro, microbatches=microbatches)
    reference = driver.single_device(traced, mesh, Options())
    _in_layers(reference)
    accumulate(reference, microbatches, always=True)
    body = compiled(reference, plan, mesh)
    assume(not isinstance(body, Refused))
    assert not isinstance(body, Refused)
    virtual = SCHEDULES[schedule]
    try:
        made = scheduled(cut(body, ranks * virtual), schedule, virtual)
    except ShardcError as refused:
        if refused.code != "SC221":
            raise
        event("refused")
        assume(False)
        return
    event(f"{ranks} pipeline ranks, {schedule}")
    made = made.transformed(fuse) if kernels else made
    made = offload_stages(made, Offload(offloaded, 1))
    assert stage_faults(made) == []
    event(f"{sum(len(graph.calls_of(BEGIN_OFFLOAD)) for graph in made.graphs()) > 0} that values lie on the host")
    batch = {name: _several(value, microbatches) for name, value in micro.items()}
    given: dict[str, Any] = {**traced.constants, **model_state(model), **batch}
    inputs = complete_inputs(reference, given, seed=3)
    report = verify(made, reference, inputs, order=order)
    assert report.equal, f"{report}\n\n{_text(made)}"
    record = PlanRecord(text="{}", seed=3, batch=describe_sample(batch, list(batch)))
    program = shardc.Program(made.body, reference, made.mesh, constants=traced.constants, plan=record, pipelined=made)
    assert _text(shardc.Program.from_json(program.to_json()).staged) == _text(made)


def _in_layers(graph: Graph) -> None:
    """Random programs have no modules: each call of forward is a layer, and a stage may begin at any."""
    for at, call in enumerate(call for call in graph.calls() if info(call).phase == "fwd"):
        update(call, fqn=f"h.{at}")


def _several(value: torch.Tensor, microbatches: int) -> torch.Tensor:
    """A batch for so many microbatches: the first as it is, the others with rows in another order."""
    return torch.cat([value.roll(k, 0) for k in range(microbatches)]) if value.dim() else value


def _text(program: StagedProgram) -> str:
    return "\n".join(program.text(c) for c in range(len(program.lists.ranks)))
