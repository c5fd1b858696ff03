"""Unrolled dims: results are bitwise the same, and fewer bytes are read."""

from __future__ import annotations

import pytest
import torch

from kernels_triton.ir import reference
from kernels_triton.ir.kernel import Kernel
from kernels_triton.ir.text import parse, text
from kernels_triton.transform.unroll_dim import unroll_dim

ROTARY = (
    "a[3,2,5,2|8](f32[5,16]@0:0,0,16,8,1, bf16[3,5,32]@0:160,16,32,8,1, bf16[3,5,32]@8:160,16,32,0,1, "
    "bf16[3,5,32]@0:160,16,32,0,1, f32[5,16]@0:0,0,16,8,1){%5=iota{3}(); %6=eq(%5, 0); %7=mul(%1, %0); %8=neg(%2); "
    "%9=where(%6, %8, %3); %10=mul(%9, %4); %11=add(%7, %10)}->bf16[3,2,5,16]=%11"
)
BACK = (
    "a[3,2|8](f32[3,16], f32[2,8]@0:0,8,1, f32[3,16]@8:16,0,1, f32[3,16]@0:16,0,1){%4=mul(%0, %1); %5=iota{1}(); "
    "%6=eq(%5, 1); %7=neg(%3); %8=where(%6, %7, 0.0); %9=eq(%5, 0); %10=where(%9, %2, 0.0); %11=add(%8, %10); "
    "%12=add(%11, %4)}->f32[3,16]=%12"
)
JOINED = (
    "a[4,3|8](f32[4,8]@0:8,0,1, f32[4,8]@0:8,0,1, f32[4,8]@0:8,0,1){%3=iota{1}(); %4=eq(%3, 0); %5=where(%4, %0, %1); "
    "%6=lt(%3, 2); %7=where(%6, %5, %2); %8=exp(%7); %9=cast.f32(%3); %10=mul(%9, 0.5); %11=sub(%8, %10); "
    "%12=add(%3, 7)}->f32[4,24]=%11, f32[4,3,8]=%8"
)


def same(kernel: Kernel, sources: str) -> tuple[Kernel, str]:
    """`unrolled`, whose results are the kernel's own; sources are letters, one a tensor."""
    made, kept = unroll_dim(kernel, sources)
    torch.manual_seed(0)
    tensors = {name: (torch.randn(i.shape) * 3).to(i.dtype) for name, i in zip(sources, kernel.inputs, strict=True)}
    old, new = (reference.run(k, [tensors[s] for s in of]) for k, of in ((kernel, sources), (made, kept)))
    assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
    assert parse(text(made)) == made
    return made, "".join(kept)


def test_halves_that_turn_read_each_element_once() -> None:
    made, kept = same(parse(ROTARY), "cxxxs")
    assert (made.space, kept) == ((3, 2, 5, 8), "cxxscs")
    x = 3 * 5 * 32 * 2
    assert made.bytes_moved == 2 * x + 2 * 5 * 16 * 4
    assert not any(step.op in ("where", "iota", "eq") for step in made.steps)


def test_the_gradient_of_halves_reads_each_element_once() -> None:
    made, kept = same(parse(BACK), "xcxx")
    assert kept.count("x") == 2
    assert not any(isinstance(o, float) for step in made.steps for o in step.operands)  # no zeros are added


def test_parts_that_are_joined_are_read_where_they_go() -> None:
    made, kept = same(parse(JOINED), "abc")
    assert (made.space, kept) == ((4, 8), "abc")
    assert [len(one.stores) for one in made.outputs] == [3, 3]


DRAWN = (
    "a[4,2|8](f32[4,8]@0:8,0,1, f32[4,8]@0:8,0,1, i64[]@0:0,0,0){%3=iota{1}(); %4=eq(%3, 0); %5=where(%4, %0, %1); "
    "%6=uniform{7,16,8,1}(%2, 0); %7=mul(%5, %6)}->f32[4,16]=%7@0:16,8,1"
)
MIXED = (
    "a[4,2|8](f32[4,8]@0:8,0,1, i32[4,8]@0:8,0,1, f32[4,8]@0:8,0,1){%3=iota{1}(); %4=eq(%3, 0); %5=where(%4, %0, %1); "
    "%6=where(%4, %5, %2); %7=add(%5, 4097); %8=mul(%7, %7); %9=sub(%8, 16777216); %10=add(%9, %6)}"
    "->f32[4,16]=%10@0:16,8,1"
)
WRAPPED = (
    "a[4,2|8](f32[4,8]@0:8,0,1, f32[4,8]@0:8,0,1){%2=iota{1}(); %3=eq(%2, 0); %4=where(%3, %0, %1); %5=mul(%2, 200); "
    "%6=add(%5, 100); %7=cast.u8(%6); %8=mul(%2, 0.1); %9=cast.bf16(%8); %10=mul(%4, %9); %11=add(%10, %7)}"
    "->f32[4,16]=%11@0:16,8,1"
)


@pytest.mark.parametrize(("line", "sources"), [(DRAWN, "abs"), (MIXED, "aib"), (WRAPPED, "ab")])
def test_each_part_draws_converts_and_rounds_as_before(line: str, sources: str) -> None:
    same(parse(line), sources)


LEFT = {
    "another tensor's parts, all read": ("a[4,2|8](f32[4,2,8]){%1=iota{1}(); %2=add(%0, %1)}->f32[4,2,8]=%2", "x"),
    "too many parts": (ROTARY.replace("2|8", "8|2").replace("8,1", "2,1"), "cxxxs"),
    "a sum over the parts": (BACK.replace("}->f32[3,16]=%12", "; %13=rsum(%12)}->f32[3,2]=%13@0:2,1,0"), "xcxx"),
}  # fmt: skip


@pytest.mark.parametrize("why", LEFT)
def test_what_stays(why: str) -> None:
    line, sources = LEFT[why]
    kernel = parse(line)
    assert unroll_dim(kernel, sources) == (kernel, tuple(sources))
