"""A program's buckets as a GPU runs them: one launch each, given the addresses of what is moved, and no other copies.

In the place of compiled kernels is Python that moves bytes between addresses; that the kernels themselves are right is
for `tests/kernels/test_bucket.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels_triton.bucket import prepared_call
from kernels_triton.bucket.kernel import grid_size
from kernels_triton.bucket.layout import WORDS, BucketLayout, pack_layout, unpack_layout
from kernels_triton.launch import fast_launch, launch
from shardc.ir.arena import planned
from shardc.ir.graph import Graph, type_of
from shardc.ir.ops.buckets import PACK, UNPACK
from shardc.runtime.execute import bucket_buffer
from shardc.runtime.execute.arena import Arena
from shardc.runtime.execute.body_code import BodyCode
from shardc.runtime.execute.instructions import rank_context
from shardc.runtime.execute.prepared_code import Routine
from tests.runtime.test_bucket import Alone, body_of

CPU = torch.device("cpu")
F32 = torch.float32


def elements(address: int, count: int, size: int) -> Tensor:
    """What lies at an address."""
    if not count:
        return torch.empty(0, dtype=WORDS[size])
    return torch.frombuffer((ctypes.c_char * (count * size)).from_address(address), dtype=WORDS[size])


def moved(layout: BucketLayout, addresses: Sequence[int]) -> None:
    """What the kernel of a layout does, given its arguments."""
    first, *xs = addresses
    left = iter(xs)
    whole = elements(first, layout.rows * layout.row, layout.bytes).view(layout.rows, layout.row)
    for one in layout.members:
        here = whole[:, one.start : one.start + one.width]
        if layout.packs:
            here[:, one.columns :] = 0
        if not one.copied:
            continue
        own = elements(next(left), one.lead * one.size * one.tail, layout.bytes)
        row, c, lead, t = torch.meshgrid(
            *map(torch.arange, (layout.rows, one.chunk, one.lead, one.tail)), indexing="ij"
        )
        dim = row * one.chunk + c
        at, inside = ((lead * one.size + dim) * one.tail + t).flatten(1), (dim < one.size).flatten(1)
        here = here[:, : one.columns]
        if layout.packs:
            here[:] = torch.where(inside, own[at.clamp(max=len(own) - 1)], 0)
        else:
            own[at[inside]] = here[inside]


class GPU:
    """Notes how many kernels are launched through Triton's launcher, and how many without it."""

    def __init__(self) -> None:
        self.slow = self.fast = 0

    def kernel(self, layout: BucketLayout) -> Any:
        def run(*args: Tensor, **_: Any) -> Callable[..., None]:
            self.slow += 1
            moved(layout, [x.data_ptr() for x in args])
            return lambda stream, *addresses: self.repeated(layout, addresses)

        return {(grid_size(layout), 1, 1): run}

    def repeated(self, layout: BucketLayout, addresses: Any) -> None:
        self.fast += 1
        moved(layout, addresses)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> GPU:
    made = GPU()
    known: dict[str, BucketLayout] = {}

    def named(layout: BucketLayout) -> str:
        known[str(layout)] = layout
        return str(layout)

    def maker(shape: Any, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
        return lambda: torch.full(tuple(shape), float("nan")).to(dtype)

    for module in ("prepared_call", "kernel"):
        monkeypatch.setattr(f"kernels_triton.bucket.{module}.define_kernel", named)
    monkeypatch.setattr(launch, "kernel", lambda key: made.kernel(known[key]))
    monkeypatch.setattr(fast_launch, "direct_launch", lambda compiled, size: fast_launch.DirectLaunch(compiled))
    monkeypatch.setattr(fast_launch, "allocator", maker)
    monkeypatch.setattr(fast_launch, "stream_of", lambda: lambda index: 0)
    monkeypatch.setattr(fast_launch, "current_device", lambda: lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(bucket_buffer, "has_kernels", lambda device: True)
    return made


def buckets(body: Graph) -> tuple[int, int]:
    """Packs and unpacks."""
    targets = [node.target for node in body.calls()]
    return targets.count(PACK), targets.count(UNPACK)


PLANS: dict[str, dict[str, Any]] = {
    "dp": {},
    "zero-1": {"storage": {"zero": 1, "axes": ["dp"]}},
    "zero-3": {"storage": {"zero": 3, "axes": ["dp"]}},
    "zero-3 fused": {"storage": {"zero": 3, "axes": ["dp"]}, "fuse": True, "precision": "bf16"},
    "accumulate": {"accumulate": 2},
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("arena", [False, True], ids=["", "arena"])
@pytest.mark.parametrize("case", PLANS)
def test_a_step_is_the_same_to_the_bit(case: str, arena: bool, gpu: GPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three steps the first goes through Triton's launcher, and the others do not."""
    body = body_of(40_000, **PLANS[case])
    context = rank_context(body.mesh, 0, Alone(body.mesh))  # type: ignore[arg-type]

    def steps(kernels: bool) -> list[dict[str, Tensor]]:
        monkeypatch.setattr(bucket_buffer, "has_kernels", lambda device: kernels)
        torch.manual_seed(0)
        held = {
            port.name: torch.rand(type_of(n).local_shape(body.mesh)).to(type_of(n).dtype)
            for port, n in zip(body.inputs, body.placeholders, strict=True)
        }
        one = BodyCode(body, context, 0, CPU, Arena({body: planned(body)}, CPU) if arena else None)
        found: list[dict[str, Tensor]] = []
        for _ in range(3):
            before = (gpu.slow, gpu.fast)
            made = one.run(held, [held] * body.microbatches)
            found.append({f"{port.role} {port.name}": y.clone() for port, y in made.items()})
            launched.append((gpu.slow - before[0], gpu.fast - before[1]))
        return found

    launched: list[tuple[int, int]] = []
    plain = steps(False)
    assert launched == [(0, 0)] * 3
    launched.clear()
    ours = steps(True)
    for mine, theirs in zip(ours, plain, strict=True):
        assert [key for key, y in theirs.items() if not torch.equal(mine[key], y)] == []
    first, second, third = launched
    assert first[1] == 0
    assert second == third == (0, first[0])
    # Sums over microbatches are all made in their places, and what comes back from an all-reduce is views.
    assert (first[0] == 0) == (case == "accumulate")
    assert first[0] <= sum(buckets(body))


def test_nothing_else_is_copied(gpu: GPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """No `copy_all`, no member of a bucket by itself: a launch for each pack, and each unpack of several rows."""

    def copy_all(*_: Any) -> None:
        raise AssertionError("copied by torch")

    body = body_of(40_000, **PLANS["zero-3"])
    monkeypatch.setattr("shardc.ir.ops.buckets.copy_all", copy_all)
    made = Routine(body, rank_context(body.mesh, 0, Alone(body.mesh)), 0, CPU)  # type: ignore[arg-type]
    calls = [call for _, call, *_ in made.code() if isinstance(call, prepared_call.PreparedCopy)]
    assert len(calls) == sum(buckets(body))
    moves = [len(call.moves.launch_layouts) for call in calls]
    assert set(moves) <= {0, 1}
    assert moves.count(1) >= buckets(body)[0]


# ---------------------------------------------------------------------- one call
def packs(gpu: GPU, xs: list[Any], place: Any = None) -> prepared_call.PreparedPack:
    laid = pack_layout([6, 8], [1, 2], [3, 4], 2, 4, F32, [0, 1])
    assert laid is not None
    return prepared_call.PreparedPack(laid, xs, place, F32, CPU)


def test_what_is_fixed_is_written_into_the_call(gpu: GPU) -> None:
    xs, place = [torch.rand(3, 2), torch.rand(2, 4)], torch.full((16,), 7.0)
    expected = PACK(xs, [1, 2], [3, 4], 2, 4)
    call = packs(gpu, [xs[0], 0], place)
    for _ in range(3):
        place.fill_(7.0)
        assert call([xs[1]]) is place
        assert torch.equal(place, expected)
    assert (gpu.slow, gpu.fast) == (1, 2)


def test_what_is_elsewhere_or_not_aligned_is_found(gpu: GPU) -> None:
    """Addresses are of each call; what is not contiguous is copied first; what is not aligned is for the launcher."""
    call, xs = packs(gpu, [0, 1]), list[Tensor]()
    for at in range(4):
        xs = [torch.rand(2, 3).T, torch.rand(9)[at == 2 :][:8].view(2, 4)]
        found = call(xs)
        assert torch.equal(found, PACK(xs, [1, 2], [3, 4], 2, 4))
    assert gpu.fast == 2
    seen: list[launch.Launch] = []
    with launch.recording(seen.append):
        call(xs)
    assert len(seen) == 1
    assert gpu.fast == 2


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_results_are_views_copies_or_in_their_places(rows: int, fixed: bool, gpu: GPU) -> None:
    shapes, leads, mids = [[6, 2], [2, 6], [6], [2, 3 * rows]], [1, 2, 1, 1], [6 // rows, 6 // rows, 6 // rows, 2]
    sizes = [6, 6, 6, 2]
    if rows == 2:
        shapes[3], mids[3] = [2, 6], 1
    there = {0, 1, 2} if rows == 2 else {1, 2}
    laid = unpack_layout(shapes, leads, mids, sizes, rows, 4, F32, there)
    assert laid is not None
    whole = torch.rand(4 + rows * laid.row)[4:]
    place = torch.zeros(6)
    call = prepared_call.PreparedUnpack(
        laid, whole if fixed else 0, shapes, {2: lambda env: place}, {0, 1, 2}, F32, CPU
    )
    flattened = [n for shape in shapes for n in shape]
    expected = UNPACK(whole, leads, mids, rows, 4, sizes, flattened, [len(shape) for shape in shapes])
    for _ in range(3):
        place.zero_()
        found = call([whole])
        assert found[3] is None
        assert found[2] is place
        assert all(torch.equal(x, y) for x, y in zip(found[:3], expected[:3], strict=True))
        assert (found[0].untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()) == (rows == 1)
    assert (gpu.slow, gpu.fast) == (1, 2)


def test_nothing_is_prepared_for_a_cpu() -> None:
    assert not bucket_buffer.has_kernels(CPU)
    assert bucket_buffer.has_kernels(torch.device("cuda")) == launch.HAS_TRITON
