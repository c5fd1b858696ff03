"""What the interpreter's worker runs from text: a kernel, on the requested plan, and a template."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor

from kernels_triton import ops
from kernels_triton.bucket import layout
from kernels_triton.bucket.kernel import copy_members
from kernels_triton.codegen.schedules import GridPlan, PlanStyle, choose_plan, plan_grid
from kernels_triton.generated.launcher import DeviceKernel, check_out, define_kernel
from kernels_triton.ir.text import parse
from kernels_triton.launch import launch
from kernels_triton.launch.row_schedule import Schedule, trying
from kernels_triton.match import launcher as templates

DEVICE = replace(launch.H200, sms=2)  # so few that programs have several tiles of rows each
BATCHED = replace(launch.H200, sms=8)  # so many that several programs share the rows of a point of the batch dims


def fused(
    line: str,
    style: PlanStyle | None,
    schedule: Schedule | None,
    *inputs: Tensor,
    over: tuple[int, Sequence[int]] = (0, ()),
) -> tuple[Tensor, ...]:
    """`over`: an output, and the inputs that are one tensor, in the place of which the output is written."""
    kernel, (output, same) = parse(line), over
    device = BATCHED if kernel.batch else DEVICE
    plan: GridPlan
    if style is None:
        plan = choose_plan(kernel, device)
    else:
        assert schedule is not None
        plan = plan_grid(kernel, style, schedule, device)
    given = [inputs[same[0]] if at in same else x for at, x in enumerate(inputs)]
    outputs = [launch.empty(made.shape, made.dtype, inputs[0]) for made in kernel.outputs]
    if same:
        outputs[output] = given[same[0]]
        check_out(kernel, given, outputs)
    DeviceKernel(define_kernel(kernel, plan)).run(given, outputs)
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


def packing(
    leads: list[int], mids: list[int], rows: int, unit: int, absent: list[int], flat: Tensor | None, *xs: Tensor
) -> Tensor:
    """A bucket's kernel; the members `absent` are in `flat` already."""
    there = set(range(len(xs))) - set(absent)
    laid = layout.pack_layout([x.numel() for x in xs], leads, mids, rows, unit, xs[0].dtype, there)
    assert laid is not None
    made = launch.empty((rows * laid.row,), xs[0].dtype, xs[0]) if flat is None else flat
    copy_members(laid, made, [x if at in there else None for at, x in enumerate(xs)])
    return made


def unpacking(
    flat: Tensor,
    leads: list[int],
    mids: list[int],
    rows: int,
    unit: int,
    sizes: list[int],
    shapes: list[list[int]],
    absent: list[int],
) -> tuple[Tensor | None, ...]:
    there = set(range(len(shapes))) - set(absent)
    laid = layout.unpack_layout(shapes, leads, mids, sizes, rows, unit, flat.dtype, there)
    assert laid is not None
    made = [launch.empty(shape, flat.dtype, flat) if at in there else None for at, shape in enumerate(shapes)]
    copy_members(laid, flat, made)
    return tuple(made)
