"""Random connected kernels whose values stay small and smooth, so that float32 may be held against float64.

Every kind of value meets every other: full, row, column and scalar inputs in several dtypes and walks (offsets, steps,
other orders, windows that overlap); pointwise ops, comparisons of what is exact, casts, random numbers, reductions one
after another, sums over rows and what follows them. Integers near their dtypes' limits meet one another and wrap,
float16 overflows and is compared, and values are stored over more of the space than they vary along, several times, in
parts, before zeros. Some kernels are several that have no more in common than numbers, which each of them scales
(`apart`); some compute in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from hypothesis import strategies as st
from random_grower import FLOATS, INTS, NARROW, REDUCTIONS, Grower
from torch import Tensor

from kernels_triton.codegen.schedules import PlanStyle, plan_style
from kernels_triton.gate.corpus import Draft
from kernels_triton.ir.access_map import AccessMap, contiguous_map
from kernels_triton.ir.kernel import Kernel, KernelStep, Output, OutputStore, Ref
from kernels_triton.ir.row_padding import UNIT
from kernels_triton.ir.text import text
from kernels_triton.launch.row_schedule import Schedule, power_of_two

SMALL = (1, 3, 8, 16, 17, 33, 70)  # columns; a GPU has time for more
LARGE = (*SMALL, 100, 257, 1024, 1030, 4096, 5000)
MOST = 1 << 18  # elements of a space
Kind = Literal["any", "apart", "reduced", "summed", "padded"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def permuted(space: tuple[int, ...], order: list[int]) -> tuple[tuple[int, ...], AccessMap]:
    """A whole tensor whose dims are the space's in another order."""
    shape = tuple(space[d] for d in order)
    strides = contiguous_map(shape).strides
    return shape, AccessMap(0, tuple(strides[order.index(d)] for d in range(len(space))))


@st.composite
def kernels(draw: st.DrawFn, kind: Kind | None = None, columns: tuple[int, ...] = SMALL, most: int = 6) -> Kernel:
    """Of a kind, or of any. No row dim is larger than `most`, and two are no larger together than two of these."""
    kind = draw(st.sampled_from(KINDS)) if kind is None else kind
    if kind == "apart":
        return draw(apart_kernels(columns, most))
    least = {"reduced": 1, "summed": 2}.get(kind, 0)  # row dims
    rows = draw(st.lists(st.integers(1 + bool(least), most), min_size=least, max_size=3 if most <= 6 else 2))
    cols = draw(st.sampled_from([n for n in columns if kind != "padded" or (n > UNIT and n % UNIT)]))
    while math.prod(rows) > min(most**2, MOST // cols):
        rows = [-(-n // 2) for n in rows]
    batch = 0 if kind == "padded" else draw(st.integers(0, len(rows) - (kind == "summed")))
    k = Draft((*rows, cols), batch=batch)
    grower = Grower(k, draw, kind == "any" and draw(st.booleans()))
    for _ in range(draw(st.integers(1, 4))):
        grower.input()
    if draw(st.booleans()):
        grower.seeds.append(k.input(torch.int64, ()))
    grower.start()
    if kind == "reduced":
        grower.step(REDUCTIONS, ())
    _grown(grower, draw(st.integers(1, 8)), () if kind == "summed" else REDUCTIONS)
    stored = draw(st.lists(st.sampled_from(grower.floats), min_size=0, max_size=3, unique=True))
    exact = (*grower.whole, *grower.bools, *grower.exact)
    counted = draw(st.lists(st.sampled_from(exact), max_size=2, unique=True)) if exact else []
    if grower.double or kind == "padded":
        stored = stored or [grower.floats[-1]]
    else:
        if kind == "reduced":
            stored.append(grower.floats[-1])
        fewest = 0 if stored and kind != "summed" else 1
        for value in draw(st.lists(st.sampled_from(grower.floats), min_size=fewest, max_size=2, unique=True)):
            total = grower.over_rows(value)
            stored.append(total)
            if draw(st.booleans()):  # what follows a sum over rows
                stored.append(k("mul", total, draw(st.sampled_from((0.5, *_numbers(k))))))
    _store(grower, stored, counted, kind == "padded")
    return k.kernel("fused_random")


@st.composite
def apart_kernels(draw: st.DrawFn, columns: tuple[int, ...], most: int) -> Kernel:
    """Several kernels in one, which share numbers: each scales them, stores them, or both."""
    rows = draw(st.lists(st.integers(1, most), min_size=0, max_size=1))
    k = Draft((*rows, draw(st.sampled_from(columns))))
    double = draw(st.integers(0, 4)) == 0
    together = Grower(k, draw, double)
    for _ in range(draw(st.integers(1, 2))):
        together.input("scalar")
    growers = [Grower(k, draw, double) for _ in range(draw(st.integers(2, 4)))]
    for grower in growers:
        for _ in range(draw(st.integers(1, 2))):
            grower.input("full", "full", "walked", "some")
    for grower in growers:
        numbers = draw(st.lists(st.sampled_from(together.floats), unique=True)) if together.floats else []
        grower.floats += numbers
        grower.whole += together.whole
        grower.exact += together.exact
        for number in numbers:
            if draw(st.booleans()):
                scaled = k("mul", number, draw(st.sampled_from((0.5, 2.0, 4.0))))
                grower.floats.append(k("mul", scaled, grower.pick()))
        grower.start()
        _grown(grower, draw(st.integers(0, 3)), ())
    for grower in growers:
        exact = (*grower.whole, *grower.bools, *grower.exact)
        stored = draw(st.lists(st.sampled_from(grower.floats), min_size=1, max_size=2, unique=True))
        counted = draw(st.lists(st.sampled_from(exact), max_size=1)) if exact else []
        _store(grower, stored, counted)
    return k.kernel("fused_apart")


def _numbers(k: Draft) -> list[Ref]:
    """Inputs that are floats and the same everywhere."""
    return [
        Ref(at) for at, one in enumerate(k.inputs) if one.dtype.is_floating_point and not any(one.access_map.strides)
    ]


def _grown(grower: Grower, count: int, reductions: Sequence[str]) -> None:
    for _ in range(count):
        if grower.whole and grower.draw(st.booleans()):
            grower.integers()
        else:
            grower.step(reductions)


def _store(grower: Grower, stored: Sequence[Ref], counted: Sequence[Ref], padded: bool = False) -> None:
    """Each as large as the value, or larger; whole, in another order, before zeros, or in parts of one output."""
    k, draw = grower.k, grower.draw
    probed = _probed(k)
    for value in (*stored, *counted):
        larger = [padded or (draw(st.booleans()) and draw(st.booleans())) for _ in k.space]
        if probed.in_epilogue[value.index]:
            larger[k.batch : -1] = [False] * (len(larger) - 1 - k.batch)
        along = [a or b for a, b in zip(probed.varies[value.index], larger, strict=True)]
        shape = tuple(n if a else 1 for n, a in zip(k.space, along, strict=True))
        floats = (torch.float64,) if grower.double else FLOATS
        dtype = draw(st.sampled_from((*NARROW, *INTS) if value in counted else floats))
        how = draw(
            st.sampled_from(("before zeros",) if padded else ("as it is", "before zeros", "in parts", "permuted"))
        )
        if shape == k.space and k.space[-1] > UNIT and how == "before zeros":
            k.out_before_zeros(value, dtype)
        elif shape == k.space and how == "in parts":
            others = [v for v in (counted if value in counted else stored) if not probed.in_epilogue[v.index]]
            parts = [value, *draw(st.lists(st.sampled_from([value, *others]), max_size=3))]
            dim = draw(st.integers(0, len(shape) - 1))
            joined = tuple(n * len(parts) if d == dim else n for d, n in enumerate(shape))
            strides = [math.prod(joined[at + 1 :]) for at in range(len(joined))]
            walks = [AccessMap(at * shape[dim] * strides[dim], tuple(strides)) for at in range(len(parts))]
            k.joined(dtype, joined, *zip(parts, walks, strict=True))
        elif shape == k.space and how == "permuted":
            shape, walk = permuted(shape, draw(st.permutations(range(len(shape)))))
            k.joined(dtype, shape, (value, walk))
        else:
            k.out(value, dtype, shape)


def _probed(k: Draft) -> Kernel:
    """The kernel, before it has outputs: with one of numbers of its places."""
    last = len(k.inputs) + len(k.steps)
    spread = KernelStep("spread", (Ref(0),), contiguous_map(k.space).strides)
    stored = Output(k.inputs[0].dtype, k.space, (OutputStore(Ref(last), contiguous_map(k.space)),))
    return Kernel("probe", k.space, tuple(k.inputs), (*k.steps, spread), (stored,), k.batch)


def arguments(kernel: Kernel, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made: list[Tensor] = []
    for given in kernel.inputs:
        if given.dtype.is_floating_point:
            made.append(torch.randn(given.shape, generator=generator).to(given.dtype))
        elif given.dtype in NARROW:
            least, most = torch.iinfo(given.dtype).min, torch.iinfo(given.dtype).max
            made.append(torch.randint(least, most + 1, given.shape, generator=generator).to(given.dtype))
        else:
            high = 2 if given.dtype == torch.bool else 6
            made.append(torch.randint(0, high, given.shape, generator=generator).to(given.dtype))
    return made


def judge(kernel: Kernel, found: Sequence[Tensor], expected: Sequence[Tensor], about: object) -> None:
    """Integers and bools are equal. Casts within a kernel are rounded in both: what float32 did otherwise can flip the
    last bit of such a cast. Sums over many rows have as many roundings."""
    coarse = any(step.op == "cast" and step.dtype in (torch.bfloat16, torch.float16) for step in kernel.steps)
    for at, (mine, exact, made) in enumerate(zip(found, expected, kernel.outputs, strict=True)):
        told = f"output {at} of {text(kernel)}\n{about}"
        if not made.dtype.is_floating_point:
            assert torch.equal(mine, exact), told
            continue
        assert not mine.isnan().any(), told
        limit = 3e-2 if coarse else 2 * torch.finfo(made.dtype).eps + (1e-13 if kernel.is_float64 else 2e-5)
        limit *= float(exact.double().abs().amax().clamp(min=1.0))
        limit += 1e-6 * kernel.rows if any(kernel.in_epilogue[store.value.index] for store in made.stores) else 0.0
        assert float((mine.double() - exact.double()).abs().amax()) <= limit, told


@st.composite
def schedules(draw: st.DrawFn, kernel: Kernel) -> tuple[PlanStyle | None, Schedule | None]:
    """The plan that its sizes ask for, or tiles small enough that there are several, large enough that the interpreter
    is soon done."""
    if draw(st.booleans()):
        return None, None
    style = plan_style(kernel)
    if style == "rows" and draw(st.booleans()):
        style = "loops"
    cols, rows = power_of_two(kernel.cols), power_of_two(kernel.rows)
    waves = draw(st.sampled_from((0, 1, 8)))
    tile = draw(st.sampled_from([n for n in (1, 2, 4, 8, 16, 32) if rows // 8 <= n <= max(1, rows // 2)]))
    if style == "rows":
        chunks = draw(st.sampled_from((1, 1, 2, 3)))
        return style, Schedule(power_of_two(-(-kernel.cols // chunks)), chunks, tile, 4, 2, waves)
    block = draw(st.sampled_from([n for n in (8, 16, 32, 64) if n >= cols // 4]))
    return style, Schedule(block, 0 if style == "loops" else 1, tile, 4, 1, waves)


@st.composite
def places(draw: st.DrawFn, kernel: Kernel, pairs: Sequence[tuple[int, int]]) -> tuple[int, tuple[int, ...]]:
    """An output of the pairs, and the inputs that are the tensor it is written over: one, or others like it too."""
    output, first = draw(st.sampled_from(pairs))
    like = [at for to, at in pairs if to == output and at != first]
    like = [at for at in like if kernel.inputs[at].shape == kernel.inputs[first].shape]
    return output, (first, *(at for at in like if draw(st.booleans())))
