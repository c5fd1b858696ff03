"""What the interpreter's worker runs by its text: a kernel, on the plan that is asked for, and a template."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor

from kernels_triton import launch, ops
from kernels_triton.fused.launcher import Ready, program
from kernels_triton.fused.schedules import Plan, Style, choose, planned
from kernels_triton.fused.text import parse
from kernels_triton.rows import Schedule, trying
from kernels_triton.templates import launcher as templates

DEVICE = replace(launch.H200, sms=2)  # so few that programs have several tiles of rows each


def fused(line: str, style: Style | None, schedule: Schedule | None, *inputs: Tensor) -> tuple[Tensor, ...]:
    kernel = parse(line)
    plan: Plan
    if style is None:
        plan = choose(kernel, DEVICE)
    else:
        assert schedule is not None
        plan = planned(kernel, style, schedule, DEVICE)
    outputs = [launch.empty(made.shape, made.dtype, inputs[0]) for made in kernel.outputs]
    Ready(program(kernel, plan)).run(inputs, outputs)
    return tuple(outputs)


def template(line: str, *inputs: Tensor, looped: int = 0) -> tuple[Tensor, ...]:
    """`looped`: over rows, so many columns at a time."""
    made = templates.launcher(parse(line))
    name, schedule = made.match.template.name, Schedule(looped, 0, rows=2, warps=1, waves=1)
    with launch.assuming(DEVICE), trying(name, schedule) if looped else nullcontext():
        return tuple(made(inputs))


def in_wide_rows(op: str, *args: Any) -> tuple[Tensor, ...]:
    """An op with `padded`, and of its last result the whole rows."""
    *rest, made = getattr(ops, op)(*args, padded=True)
    return *rest, made.as_strided((made.shape[0], made.stride(0)), (made.stride(0), 1))


def scheduled(op: str, name: str, schedule: Schedule, *args: Any) -> Any:
    """An op, with this schedule where it asks for that of `name`."""
    with trying(name, schedule):
        return getattr(ops, op)(*args)
