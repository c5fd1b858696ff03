"""Independent outputs: parts that share only scalars are detected, get their own programs, and overwrite no shared
scalar.
"""

from __future__ import annotations

from interpreter import Interpreter
from test_broadcast_stores import held

from kernels_triton.codegen.schedules import choose_plan, inplace_pairs
from kernels_triton.generated.launcher import source
from kernels_triton.ir.text import parse
from kernels_triton.launch.launch import H200
from kernels_triton.transform.independent_outputs import independent_outputs, values_of_outputs

UPDATES = (
    "a[|3000](f32[3000], bf16[3000], f32[], f32[3000], bf16[3000], f32[3000]){%6=mul(%1, %2); %7=sub(%0, %6); "
    "%8=mul(%4, %2); %9=sub(%3, %8); %10=add(%5, %8)}->f32[3000]=%7, f32[3000]=%9, f32[3000]=%10"
).replace("f32[],", "f32[]@0:0,")
STEPS = (
    "a[|1](f64[], f64[], f64[]){%3=add(%0, 1); %4=pow(0.9, %3); %5=div(%2, %4); %6=add(%1, 1); %7=pow(0.9, %6); "
    "%8=div(%2, %7); %9=mul(%2, 0.5)}->f64[]=%3, f64[]=%5, f64[]=%6, f64[]=%8, f64[]=%9"
)


def test_updates_have_programs_of_their_own(interpreted: Interpreter) -> None:
    """Two, of which one has two results."""
    kernel = parse(UPDATES)
    assert independent_outputs(kernel) == ((0,), (1, 2))
    assert [sorted(values_of_outputs(kernel, part)) for part in independent_outputs(kernel)] == [
        [0, 1, 2, 6, 7],
        [2, 3, 4, 5, 8, 9, 10],
    ]
    assert choose_plan(kernel, H200).grid == (3, 2)
    assert source(kernel).count("if tl.program_id(1) == ") == 2
    held(interpreted, UPDATES, None, None)


def test_parts_stay_what_they_are_however_a_kernel_is_rewritten(interpreted: Interpreter) -> None:
    """A half moves from the number to what it is multiplied by, and a stored number becomes a step: what joined two
    parts is gone. The grid was made for so many parts as there were."""
    scaled = (
        "a[|3000](f32[]@0:0, f32[3000], f32[3000], f32[3000]){%4=mul(%0, 0.5); %5=mul(%1, %4); %6=mul(%2, %4); "
        "%7=mul(%3, %0)}->f32[3000]=%5, f32[3000]=%6, f32[3000]=%7"
    )
    stored = (
        "a[|3000](f32[]@0:0, f32[3000], f32[3000]){%3=mul(%0, %1); %4=neg(%2)}"
        "->f32[3000]=%0@0:1, f32[3000]=%3, f32[3000]=%4"
    )
    for line in (scaled, stored):
        assert choose_plan(parse(line), H200).grid == (3, 2)
        held(interpreted, line, None, None)


def test_a_number_that_parts_share_is_not_written_over() -> None:
    """Whose program would read it first? A number that is one part's alone is the memory of what it becomes."""
    kernel = parse(STEPS)
    assert len(independent_outputs(kernel)) == 3
    assert inplace_pairs(kernel) == {(0, 0), (1, 0), (2, 1), (3, 1)}
    two = parse("a[|1](f64[], f64[], f64[]){%3=mul(%0, %2); %4=mul(%1, %2)}->f64[]=%3, f64[]=%4")
    assert inplace_pairs(two) == {(0, 0), (1, 1)}


def test_what_has_something_in_common_stays_together() -> None:
    reduced = "a[4|8](f32[4,8], f32[4,8]){%2=rsum(%0); %3=rsum(%1)}->f32[4]=%2@0:1,0, f32[4]=%3@0:1,0"
    read = "a[|64](f32[64]){%1=neg(%0); %2=exp(%0)}->f32[64]=%1, f32[64]=%2"
    stored = "a[|64](f32[]@0:0, f32[64]){%2=mul(%0, %1)}->f32[]=%0@0:0, f32[64]=%2"
    for line in (reduced, read, stored):
        assert len(independent_outputs(parse(line))) == 1
