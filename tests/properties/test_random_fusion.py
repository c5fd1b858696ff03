"""Random models under random plans, with their kernels: still the single device, in no more memory."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from hypothesis import HealthCheck, Phase, assume, event, given, note, settings
from hypothesis import strategies as st

from kernels_triton.match.op import KERNELS
from shardc.api import complete_inputs, model_state
from shardc.compiler import driver
from shardc.compiler.pass_pipeline import Options
from shardc.cost.memory import memory
from shardc.frontend.trace import trace
from shardc.ir.mesh import Mesh
from shardc.ir.text import print_graph
from shardc.ir.verify import violations
from shardc.passes.communication.bucket import bucket
from shardc.passes.fusion.analysis import iteration_space
from shardc.passes.fusion.clustering.memory_budget import allowed_peak
from shardc.passes.fusion.fuse import fuse
from shardc.passes.verify import collectives_in_order
from tests.properties.check import Refused, compiled, judge
from tests.properties.grower import Program
from tests.properties.plans import fusions
from tests.properties.test_random_programs import cases

EXAMPLES = max(6, settings().max_examples // 4)


@given(cases(), st.sampled_from((iteration_space.MAX_SPLIT_COLUMNS, 4)), fusions, st.sampled_from((None, None, 2000)))
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink])
def test_a_fused_random_program_equals_the_single_device(
    case: tuple[Program, Mesh, dict[str, dict[str, str]]], widest: int, asked: Any, bucketed: int | None
) -> None:
    """In programs so small a sum is made in parts only if `widest` is small too."""
    program, mesh, plan = case
    note(f"{program}\nmesh {mesh}\nplan {plan}\nwidest {widest}\nfuse {asked}\nbucket {bucketed}")
    model, batch = program.model(), program.batch()
    traced = trace(model, batch)
    reference = driver.single_device(traced, mesh, Options())
    body = compiled(reference, plan, mesh)
    if isinstance(body, Refused):
        assume(False)
        return
    if bucketed is not None:
        body = bucket(body, bucketed)
    options = asked if isinstance(asked, dict) else {}
    with patch.object(iteration_space, "MAX_SPLIT_COLUMNS", widest):
        fused = fuse(body, tuple(options.get("exclude", ())), options.get("templates"))
    event(f"kernels: {min(5, sum(1 for node in fused.calls() if node.target in KERNELS))}")
    assert not violations(fused)
    assert memory(fused).peak <= allowed_peak(memory(body).peak)
    assert collectives_in_order(body, fused) == []  # a gather that only a fused call read may go
    given_: dict[str, Any] = {**traced.constants, **model_state(model), **batch}
    report, wrong = judge(fused, reference, complete_inputs(reference, given_, seed=3))
    assert not wrong, "\n".join([*wrong, "", str(report), "", print_graph(fused)])
