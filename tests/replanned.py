"""A program compiled once more, not traced: under a plan that says otherwise of what comes after its placements.

    replanned(program, recompute="full", bucket=False)

`recompute`, `offload`, `align`, `overlap`, `bucket` and `fuse` concern no tracing and no rule; a trace is half of what
compiling takes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import shardc
from shardc.compiler import driver
from shardc.compiler.binding import bind_passes
from shardc.explain.collective import bound_of, hardware_of, options_of


def replanned(program: shardc.Program, **said: Any) -> shardc.Program:
    assert said.keys() <= {"recompute", "offload", "align", "overlap", "bucket", "fuse"}
    plan = shardc.Plan.parse(program.plan["text"]).merge(shardc.Plan.from_dict(said))
    options = bind_passes(plan, hardware_of(program), options_of(program))
    body = driver.finish_body(driver.distribute(program.reference, bound_of(program), options), options)
    text = {"text": plan.dump()}
    return replace(program, body=body, diagnostics=tuple(body.diagnostics), plan={**program.plan, **text})
