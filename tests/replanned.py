"""A program compiled once more, not traced: under a plan that says otherwise of what comes after its placements.

    replanned(program, recompute="full", bucket=False)

`recompute`, `align`, `bucket` and `fuse` concern no tracing and no rule; a trace is half of what compiling takes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import shardc
from shardc.compiler import driver
from shardc.explain.collective import bound_of, options_of
from shardc.passes.communication.bucket import Bucket
from shardc.passes.fusion.fuse import Fuse
from shardc.passes.gemm_padding import Align
from shardc.passes.memory.recompute import Recompute


def replanned(program: shardc.Program, **said: Any) -> shardc.Program:
    assert said.keys() <= {"recompute", "align", "bucket", "fuse"}
    plan = shardc.Plan.parse(program.plan["text"]).merge(shardc.Plan.from_dict(said))
    options = replace(
        options_of(program),
        recompute=Recompute(**plan.recompute.model_dump()),
        align=Align(plan.align),
        bucket=Bucket(plan.bucket.size),
        fuse=Fuse(plan.fuse.enabled, plan.fuse.left, plan.fuse.templates),
    )
    body = driver.finish_body(driver.distribute(program.reference, bound_of(program), options), options)
    text = {"text": plan.dump()}
    return replace(program, body=body, diagnostics=tuple(body.diagnostics), plan={**program.plan, **text})
