"""Addresses of a tile's elements in generated source: 32 bits wide where that is enough, otherwise 64."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels_triton.codegen import addresses
from kernels_triton.gate.corpus import Draft
from kernels_triton.generated.launcher import source
from kernels_triton.ir.access_map import AccessMap
from kernels_triton.ir.kernel import Kernel
from kernels_triton.ir.text import parse

SIZES = (1, 2, 3, 5, 64, 4096, 50304, 2**20 + 1, 2**31 + 7)
MOST = 2**44  # elements


@st.composite
def points(draw: st.DrawFn) -> tuple[Kernel, AccessMap, tuple[int, ...]]:
    """A kernel, the walk of its input, and a point of its space, often a last one."""
    space = list[int]()
    for _ in range(draw(st.integers(1, 4))):
        space.append(draw(st.sampled_from([n for n in SIZES if n * math.prod(space) <= MOST])))
    k = Draft(tuple(space), batch=draw(st.integers(0, len(space) - 1)))
    strides, reach = [0] * len(space), 1
    for dim in draw(st.permutations(range(len(space)))):
        step = draw(st.sampled_from((0, reach, reach, reach + 3, -reach)))
        strides[dim] = step if reach * space[dim] <= MOST else 0
        reach += abs(strides[dim]) * (space[dim] - 1)
    first = -sum(min(s, 0) * (n - 1) for s, n in zip(strides, space, strict=True))
    walk = AccessMap(first + draw(st.sampled_from((0, 1, 2**31 + 1))), tuple(strides))
    k.out(k.input(torch.uint8, (walk.last_element(space) + 1,), walk), torch.uint8)
    kernel = k.kernel("walked")
    return kernel, kernel.inputs[0].access_map, tuple(draw(st.sampled_from((n - 1, n - 1, 0, n // 2))) for n in space)


def number(at: int, size: int) -> torch.Tensor:
    """What counts to a size: in 64 bits where 32 do not."""
    return torch.tensor([at], dtype=torch.int64 if size > addresses.INT32_MAX else torch.int32)


@given(points())
def test_every_element_is_found(case: tuple[Kernel, AccessMap, tuple[int, ...]]) -> None:
    """The lines are run as torch, whose tensors of 32 bits wrap as Triton's do."""
    kernel, walk, point = case
    space, batch = kernel.space, kernel.batch
    flat = [sum(i * math.prod(dims[at + 1 :]) for at, i in enumerate(own)) for own, dims in (
        (point[:batch], space[:batch]), (point[batch:-1], space[batch:-1]))]  # fmt: skip
    names = {
        "tl": SimpleNamespace(int64=torch.int64),
        "p": torch.tensor([0]),  # a pointer, to which the terms are added one by one
        "b": number(flat[0], kernel.batches),
        "r": number(flat[1], kernel.rows),
        "c": number(point[-1], kernel.cols),
    }
    for term in addresses.derived_indices(kernel):
        names[term.name] = eval(term.definition, {}, names)
    for one in (walk, kernel.outputs[0].stores[0].access_map):
        text = f"p + {addresses.tile_offsets(kernel, one, 'c') or '0'}"
        found = int(eval(text, {}, names))
        assert found == one.offset + sum(s * i for s, i in zip(one.strides, point, strict=True)), text


@pytest.mark.parametrize(("cols", "wide"), [(4096, False), (2**25, True)])
def test_lines_of_sums_that_reach_far(cols: int, wide: bool) -> None:
    """Of 132 programs with 2^25 columns each."""
    far = source(
        parse(f"far[300|{cols}](f32[300,{cols}]){{%1=rsum(%0); %2=mul(%0, %1); %3=csum(%2)}}->f32[{cols}]=%3@0:0,1")
    )
    lines = [line for line in far.splitlines() if "P3 +" in line]
    assert len(lines) == 2
    assert all((f".to(tl.int64) * {cols}" in line) == wide for line in lines)
