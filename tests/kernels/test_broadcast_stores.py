"""Broadcast stores: outputs over more dims than their value varies along are written completely, on every plan."""

from __future__ import annotations

import pytest
import torch
from interpreter import Interpreter

from kernels_triton.codegen.schedules import PlanStyle
from kernels_triton.generated.launcher import transformed
from kernels_triton.ir import reference
from kernels_triton.ir.kernel import Kernel
from kernels_triton.ir.text import parse, text
from kernels_triton.launch.row_schedule import Schedule
from kernels_triton.match.match import match_template
from kernels_triton.transform.broadcast_stores import broadcast_stores
from kernels_triton.transform.simplify import order_rows, simplify
from shardc import ShardcError

LINES = {
    "a number, masked": "a[|120](f32[]@0:0){%1=div(%0, 30); %2=neg(%1)}->f32[120]=%2",
    "a number, many tiles": "a[|5000](f32[]@0:0){%1=neg(%0)}->f32[5000]=%1",
    "an input as it is": "a[21|5](f32[]@0:0,0, f32[5]@0:0,1){}->f32[21,5]=%0, f32[21,5]=%1",
    "a row": "a[30|5](f32[30]@0:1,0){%1=neg(%0)}->f32[30,5]=%1",
    "a column": "a[30|5](f32[5]@0:0,1){%1=neg(%0)}->f32[30,5]=%1",
    "between": "a[3,7|5](f32[7]@0:0,1,0){%1=neg(%0)}->f32[3,7,5]=%1",
    "of several sizes": "a[9|40](f32[]@0:0,0){%1=neg(%0)}"
    "->f32[9,40]=%1, f32[40]=%1@0:0,1, f32[9]=%1@0:1,0, f32[]=%1@0:0,0",
    "transposed": "a[9|40](f32[9]@0:1,0){%1=neg(%0)}->f32[40,9]=%1@0:1,9",
    "in parts": "a[4|3](f32[4]@0:1,0, f32[]@0:0,0){%2=neg(%0)}->f32[4,6]=%2@0:6,1+%1@3:6,1",
    "bools and bytes": "a[30|5](u8[30]@0:1,0){%1=gt(%0, 7)}->bool[30,5]=%1, u8[30,5]=%0",
    "random numbers of a part": "a[30|5](f32[30,5], i64[]@0:0,0){%2=uniform{3,9,1}(%1, 8); %3=lt(%2, 0.5); "
    "%4=where(%3, %0, 0.0)}->f32[30,5]=%2, f32[30,5]=%4",
    "of rows that begin anywhere": "a[6|64](f32[6,64], i64[2]@1:0,0){%2=uniform{3,66,1}(%1, 4); %3=ge(%2, 0.5); "
    "%4=where(%3, %0, 0.0)}->f32[6,64]=%4",
    "of every other column": "a[6|64](f32[6,64], i64[]@0:0,0){%2=uniform{3,128,2}(%1, 4); "
    "%3=mul(%0, %2)}->f32[6,64]=%3",
    "a random number": "a[30|5](i64[]@0:0,0){%1=uniform{3,1,0}(%0, 4); %2=lt(%1, 0.5)}->f32[30,5]=%1, bool[30,5]=%2",
}  # fmt: skip
REDUCED = {
    "what is the same in a row": "a[5|700](f32[5]@0:1,0, f32[]@0:0,0, f32[5,700]){%3=rsum(%0); %4=rmax(%2); "
    "%5=add(%3, %4); %6=rsum(%1); %7=rmax(%0); %8=mul(%6, %7)}->f32[5]=%5@0:1,0, f32[5]=%8@0:1,0",
    "rows": "a[3|700](f32[3]@0:1,0, f32[3,700]){%2=neg(%0); %3=rsum(%1); %4=exp(%3)}"
    "->f32[3,700]=%2, f32[3,700]=%3, f32[3]=%4@0:1,0",
    "columns": "a[5|700](f32[700]@0:0,1, f32[5,700]){%2=neg(%0); %3=rmax(%1)}->f32[5,700]=%2, f32[5]=%3@0:1,0",
    "a number": "a[50|64](f32[]@0:0,0, f32[50,64]){%2=neg(%0); %3=rsum(%1); %4=add(%1, %3)}"
    "->f32[50,64]=%2, f32[50,64]=%4",
}  # fmt: skip
SUMMED = {
    "of columns": "a[300|64](f32[]@0:0,0, f32[300,64]){%2=neg(%0); %3=csum(%1)}->f32[300,64]=%2, f32[64]=%3@0:0,1",
    "of a row": "a[300|64](f32[300]@0:1,0, f32[300,64]){%2=csum(%0); %3=csum(%1); %4=mul(%2, 2.0)}"
    "->f32[64]=%2@0:0,1, f32[64]=%3@0:0,1, f32[64]=%4@0:0,1",
    "with rows": "a[40|64](f32[40]@0:1,0, f32[40,64]){%2=rsum(%1); %3=mul(%1, %2); %4=csum(%3)}"
    "->f32[40,64]=%2, f32[40,64]=%0, f32[64]=%4@0:0,1",
}  # fmt: skip


def held(interpreted: Interpreter, line: str, style: PlanStyle | None, schedule: Schedule | None) -> None:
    """The interpreter fills outputs with NaN, or a pattern, and has sentinels around them."""
    kernel = parse(line)
    torch.manual_seed(0)  # an exp of a sum of 700 numbers is as far off as these are large
    given = [
        torch.randn(i.shape) if i.dtype.is_floating_point else torch.randint(0, 99, i.shape).to(i.dtype)
        for i in kernel.inputs
    ]
    results = interpreted("fused", line, style, schedule, *given)
    for mine, exact in zip(results, reference.run(kernel, given), strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-5, atol=1e-4)


@pytest.mark.sampled(15)
@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_pointwise(interpreted: Interpreter, line: str) -> None:
    held(interpreted, line, None, None)
    held(interpreted, line, "tiles", Schedule(16, 1, 4, 4))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("line", REDUCED.values(), ids=REDUCED)
@pytest.mark.parametrize("chunks", [1, 3])
def test_beside_a_reduction(interpreted: Interpreter, line: str, chunks: int) -> None:
    held(interpreted, line, "rows", Schedule(1024 if chunks == 1 else 256, chunks, 2, 4))
    held(interpreted, line, "rows", Schedule(1024 if chunks == 1 else 256, chunks, 2, 4, 2, 1))
    held(interpreted, line, "loops", Schedule(128, 0, 2, 4))


@pytest.mark.parametrize("name", SUMMED)
def test_beside_a_sum_over_rows(interpreted: Interpreter, name: str) -> None:
    line = SUMMED[name]
    if name == "with rows":
        held(interpreted, line, "rows", Schedule(32, 2, 4, 4, 2, 1))
        held(interpreted, line, "loops", Schedule(16, 0, 4, 4, waves=1))
    else:
        held(interpreted, line, "walk", Schedule(32, 1, 4, 4, 2, 1))


def test_only_what_is_smaller_is_spread() -> None:
    kernel = parse("a[9|40](f32[9]@0:1,0, f32[9,40]){%2=neg(%0); %3=add(%1, %2)}->f32[9,40]=%3, f32[9]=%2@0:1,0")
    assert broadcast_stores(kernel) is kernel
    wide = transformed(parse(LINES["of several sizes"]))
    assert [s.op for s in wide.steps].count("spread") == 3
    assert wide.inputs == parse(LINES["of several sizes"]).inputs


def test_a_spread_kernel_is_read_back_and_keeps_its_meaning_over_other_dims() -> None:
    kernel = broadcast_stores(parse("a[4,6|8](f32[4,6]@0:6,1,0){%1=neg(%0)}->f32[4,6,8]=%1, f32[6,8,4]=%1@0:1,32,4"))
    given = [torch.randn(4, 6)]
    for other in (parse(text(kernel)), simplify(kernel), order_rows(kernel)):
        for mine, exact in zip(reference.run(other, given), reference.run(kernel, given), strict=True):
            assert torch.equal(mine, exact)
        assert broadcast_stores(other) is other


def test_a_sum_over_rows_is_stored_in_no_row() -> None:
    """The second function knows no rows."""
    with pytest.raises(ShardcError, match="a sum over rows in every row"):
        parse("a[30|5](f32[30,5]){%1=csum(%0)}->f32[30,5]=%1")


def test_a_row_stored_whole_is_no_template() -> None:
    """A template writes a row's numbers once."""
    steps = "%2=rsum(%0); %3=mul(%2, 0.015625); %4=sub(%0, %3); %5=square(%4); %6=rsum(%5); %7=mul(%6, 0.015625); "
    steps += "%8=add(%7, 1e-06); %9=rsqrt(%8); %10=mul(%4, %9); %11=mul(%10, %1)"
    line = "a[30|64](f32[30,64], f32[64]@0:0,1){" + steps + "}->f32[30,64]=%11, f32[30"
    small: Kernel = parse(line + "]=%9@0:1,0")
    assert match_template(small) is not None
    assert match_template(parse(line + ",64]=%9")) is None
