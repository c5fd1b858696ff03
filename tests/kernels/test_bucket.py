"""A bucket's kernels under the interpreter, with sentinels around every buffer and NaN in every output: bitwise what
plain torch copies, whatever the members' sizes, and one launch for as many as a launch may have."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
from interpreter import Interpreter
from torch import Tensor

from kernels_triton.base.buckets import unit_of
from kernels_triton.bucket import layout
from kernels_triton.bucket.kernel import copy_members, kernel_source
from kernels_triton.launch import launch
from shardc.ir.ops.buckets import PACK, UNPACK, fill, member_views

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.uint8, torch.complex64]
LONG = 3 * layout.TILE  # elements: several tiles of any dtype


@dataclass(frozen=True)
class Case:
    """Members of `shape`, cut along dim `pos` over `rows`."""

    rows: int
    members: tuple[tuple[tuple[int, ...], int], ...]

    @property
    def leads(self) -> list[int]:
        return [math.prod(shape[:pos]) for shape, pos in self.members]

    @property
    def mids(self) -> list[int]:
        return [shape[pos] for shape, pos in self.members]

    @property
    def chunks(self) -> list[int]:
        return [-(-mid // self.rows) for mid in self.mids]

    def parts(self) -> list[list[int]]:
        """The shapes of a rank's chunks."""
        of = zip(self.members, self.chunks, strict=True)
        return [[chunk if at == pos else n for at, n in enumerate(shape)] for (shape, pos), chunk in of]


CASES = {
    "one": Case(2, (((8, 16), 0),)),
    "one row": Case(1, (((8, 16), 0), ((24,), 0), ((2, 3, 8), 1))),
    "odd sizes in one row": Case(1, (((7,), 0), ((1,), 0), ((3, 5), 0), ((1029,), 0), ((3, 5, 11), 1))),
    "odd sizes": Case(2, (((14,), 0), ((2,), 0), ((6, 5), 0), ((3, 6, 11), 1), ((9, 2), 1))),
    "do not divide": Case(3, (((7,), 0), ((1,), 0), ((4, 5), 0), ((2, 7, 3), 1), ((2, 2, 8), 1))),
    "divide by 16 bytes but not by rows": Case(4, (((9, 16), 0), ((2, 6, 16), 1), ((1, 16), 0))),
    "several tiles": Case(2, (((LONG + 16,), 0), ((2, LONG // 16, 16), 1), ((LONG + 5,), 0))),
    "a long odd one": Case(1, (((LONG + 5,), 0), ((8,), 0))),
    "many": Case(8, tuple(((8 * n, 3), 0) for n in range(1, layout.MOST_MEMBERS + 1))),
}


def drawn(seed: int) -> Case:
    draw = random.Random(seed)
    members = []
    for _ in range(draw.randint(1, 8)):
        shape = tuple(draw.choice((1, 2, 3, 4, 5, 8, 16, 40)) for _ in range(draw.randint(1, 3)))
        members.append((shape, draw.randrange(len(shape))))
    return Case(draw.randint(1, 8), tuple(members))


CASES.update({f"drawn {seed}": drawn(seed) for seed in range(16)})


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Every bit pattern may come up: NaN with payloads, infinities, numbers below the least normal one."""
    size = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).view(shape)


def same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.equal(bits(x), bits(y))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def dtypes(name: str) -> list[torch.dtype]:
    """All for a few, one for each of the others."""
    return DTYPES if name in ("odd sizes", "do not divide") else [DTYPES[sorted(CASES).index(name) % 4]]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CASES)
def test_what_is_packed_and_unpacked_is_as_plain_torch_has_it(interpreted: Interpreter, name: str) -> None:
    case = CASES[name]
    for at, dtype in enumerate(dtypes(name)):
        torch.manual_seed(at)
        unit = unit_of(dtype)
        xs = [filled(shape, dtype) for shape, _ in case.members]
        expected = PACK(xs, case.leads, case.mids, case.rows, unit)
        found = interpreted("packing", case.leads, case.mids, case.rows, unit, [], None, *xs)
        assert same(found, expected)

        # What the ranks' chunks make together.
        flat = filled(tuple(expected.shape), dtype)
        shapes = [list(shape) for shape, _ in case.members]
        given = (case.leads, case.chunks, case.rows, unit, case.mids)
        ranks = [len(shape) for shape in shapes]
        back = UNPACK(flat, *given, [n for shape in shapes for n in shape], ranks)
        made = interpreted("unpacking", flat, *given, shapes, [])
        assert all(same(x, y) for x, y in zip(made, back, strict=True))

        # And one rank's own.
        own, parts = flat[: len(flat) // case.rows], case.parts()
        given = (case.leads, case.chunks, 1, unit, case.chunks)
        back = UNPACK(own, *given, [n for part in parts for n in part], ranks)
        made = interpreted("unpacking", own, *given, parts, [])
        assert all(same(x, y) for x, y in zip(made, back, strict=True))


def test_members_that_are_in_their_places_are_left_alone(interpreted: Interpreter) -> None:
    """Only the zeros behind them are written."""
    shapes = [(7,), (5, 3), (16,), (LONG + 1,), (9,)]
    xs, dtype = [filled(shape, torch.float16) for shape in shapes], torch.float16
    given = ([1] * 5, [shape[0] for shape in shapes], 1, 8)
    expected = PACK(xs, *given)
    flat = filled(tuple(expected.shape), dtype)
    views, _, _ = member_views(tuple(x.numel() for x in xs), tuple(given[0]), tuple(given[1]), 1, 8)
    fill(flat, [x if at in (0, 2, 3) else None for at, x in enumerate(xs)], views)
    found = interpreted("packing", *given, [0, 2, 3], flat, *xs)
    assert same(found, expected)


def test_empty_members_take_no_place(interpreted: Interpreter) -> None:
    shapes = [[4, 3], [0, 2], [8], [3, 0]]
    xs = [filled(tuple(shape), torch.bfloat16) for shape in shapes]
    flat = interpreted("packing", [1] * 4, [4, 2, 8, 3], 1, 8, [], None, *xs)
    assert same(flat, torch.cat([xs[0].flatten(), torch.zeros(4, dtype=torch.bfloat16), xs[2]]))
    back = interpreted("unpacking", flat, [1] * 4, [4, 2, 8, 3], 1, 8, [4, 2, 8, 3], shapes, [])
    assert all(same(x, y) for x, y in zip(xs, back, strict=True))


def test_results_that_nothing_reads_are_not_made(interpreted: Interpreter) -> None:
    flat = filled((64,), torch.float32)
    made = interpreted("unpacking", flat, [1, 1], [4, 12], 2, 4, [8, 24], [[8], [24]], [0])
    assert made[0] is None
    assert same(made[1], UNPACK(flat[:32], [1, 1], [4, 12], 2, 4, [8, 24], [8, 24], [1, 1])[1])


def meta(laid: layout.BucketLayout) -> list[launch.Launch]:
    """What is launched for a layout."""
    found: list[launch.Launch] = []
    flat = torch.empty(laid.rows * laid.row, dtype=layout.WORDS[laid.bytes], device="meta")
    xs = [flat.new_empty(m.lead * m.size * m.tail) if m.copied else None for m in laid.members]
    with launch.recording(found.append):
        copy_members(laid, flat, xs)
    return found


@pytest.mark.skipif(not launch.HAS_TRITON, reason="Triton is not installed: no kernel is defined")
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_a_bucket_is_one_launch(rows: int) -> None:
    """GPT-2's block; a row more members than a launch takes is two."""
    sizes = [768, 768, 768 * 2304, 2304, 768 * 768, 768, 768, 768, 768 * 3072, 3072, 3072 * 768, 768]
    for count, launches in ((1, 1), (12, 1), (layout.MOST_MEMBERS, 1), (layout.MOST_MEMBERS + 1, 2)):
        numels = [sizes[at % 12] for at in range(count)]
        laid = layout.pack_layout(numels, [1] * count, numels, rows, 8, torch.bfloat16, range(count))
        assert laid is not None
        found = meta(laid)
        assert len(found) == launches
        tiles = sum(rows * -(-numel // rows // laid.block) for numel in numels)
        assert sum(one.grid[0] for one in found) == tiles
    assert meta(layout.pack_layout([8], [1], [8], 1, 8, torch.bfloat16, [])) == []  # type: ignore[arg-type]


def test_kernels_are_shared_by_layers_and_by_dtypes_of_a_size() -> None:
    texts = {
        kernel_source(laid.launch_layouts()[0][1])
        for dtype in (torch.bfloat16, torch.float16)
        for _ in range(2)
        if (laid := layout.pack_layout([64, 8], [1, 1], [64, 8], 2, 8, dtype, [0, 1])) is not None
    }
    assert len(texts) == 1
    assert layout.pack_layout([64], [1], [64], 2, 1, torch.complex128, [0]) is None


def test_more_than_32_bits_can_count() -> None:
    """Offsets are 64-bit where they must be, and only there."""
    short, long = (layout.pack_layout([n], [1], [n], 2, 8, torch.bfloat16, [0]) for n in (1 << 20, (1 << 31) + 16))
    assert short is not None
    assert long is not None
    assert "True" not in kernel_source(short)
    assert "True" in kernel_source(long)
