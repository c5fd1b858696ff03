"""Random models under random plans on random meshes: every rank simulated equals the single device.

A plan that is refused with a diagnostic is discarded; anything else that is not an equal program is a bug. `make fuzz`
runs 5,000 examples, CI 300 that are the same every time.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, event, given, note, settings
from hypothesis import strategies as st

from shardc.api import complete_inputs, model_state
from shardc.compiler import driver
from shardc.compiler.pass_pipeline import Options
from shardc.frontend.trace import trace
from shardc.ir.mesh import Mesh
from tests.properties.check import Refused, check, compiled, kinds
from tests.properties.grower import Program
from tests.properties.plans import meshes, plans
from tests.properties.programs import programs

EXAMPLES = max(8, settings().max_examples)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Program, Mesh, dict[str, dict[str, str]]]:
    program, mesh = draw(programs()), draw(meshes)
    return program, mesh, draw(plans(program.shapes(), mesh))


@pytest.mark.slow
@given(cases())
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink])
def test_a_random_program_equals_the_single_device(case: tuple[Program, Mesh, dict[str, dict[str, str]]]) -> None:
    program, mesh, plan = case
    note(f"{program}\nmesh {mesh}\nplan {plan}")
    run(program, mesh, plan)


def run(program: Program, mesh: Mesh, plan: dict[str, dict[str, str]]) -> None:
    model, batch = program.model(), program.batch()
    traced = trace(model, batch)
    reference = driver.single_device(traced, mesh, Options())
    body = compiled(reference, plan, mesh)
    if isinstance(body, Refused):
        event(f"refused: {', '.join(sorted(set(body.codes)))}")
        assume(False)
        return
    event(f"ranks: {mesh.world_size}")
    for kind in kinds(body) or ["none"]:
        event(f"collective: {kind}")
    given: dict[str, Any] = {**traced.constants, **model_state(model), **batch}
    check(body, reference, complete_inputs(reference, given, seed=3))
