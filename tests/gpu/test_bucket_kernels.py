"""A bucket's kernels on a GPU: bitwise the copies of plain torch, in one launch, also in a CUDA graph."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels_triton.base.buckets import unit_of
from kernels_triton.bucket.layout import pack_layout, unpack_layout
from kernels_triton.bucket.prepared_call import PreparedPack, PreparedUnpack
from shardc.ir.ops.buckets import PACK, UNPACK

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float32, torch.int64]
Members = list[tuple[tuple[int, ...], int]]
WIDE: Members = [((768,), 0), ((768, 2304), 0), ((3, 12, 64), 1), ((12, 64, 768), 0), ((3072, 768), 0), ((768,), 0)]


def drawn(seed: int) -> tuple[int, Members]:
    draw = random.Random(seed)
    members: Members = []
    for _ in range(draw.choice((1, 5, 12, 45))):
        shape = tuple(draw.choice((1, 2, 3, 5, 8, 16, 64, 129)) for _ in range(draw.randint(1, 3)))
        members.append((shape, draw.randrange(len(shape))))
    return draw.choice((1, 2, 3, 8)), members


CASES = {"gpt2 1": (1, WIDE), "gpt2 2": (2, WIDE), "gpt2 8": (8, WIDE), **{f"drawn {s}": drawn(s) for s in range(6)}}


def filled(count: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, device="cuda").view(dtype)


def same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def calls(case: str, dtype: torch.dtype) -> tuple[PreparedPack, PreparedUnpack, tuple[Any, ...], tuple[Any, ...]]:
    """Both ways, prepared, and the arguments of the ops that say the same."""
    rows, members = CASES[case]
    device, unit, every = torch.device("cuda"), unit_of(dtype), range(len(members))
    shapes = [shape for shape, _ in members]
    leads, mids = [math.prod(s[:pos]) for s, pos in members], [s[pos] for s, pos in members]
    chunks = [-(-mid // rows) for mid in mids]
    laid = pack_layout([math.prod(s) for s in shapes], leads, mids, rows, unit, dtype, every)
    back = unpack_layout(shapes, leads, chunks, mids, rows, unit, dtype, every)
    assert laid is not None
    assert back is not None
    pack = PreparedPack(laid, list(every), None, dtype, device)
    unpack = PreparedUnpack(back, 0, shapes, {}, every, dtype, device)
    flat = (leads, chunks, rows, unit, mids, [n for s in shapes for n in s], [len(s) for s in shapes])
    return pack, unpack, (leads, mids, rows, unit), flat


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_it_is_what_plain_torch_copies(case: str, dtype: torch.dtype) -> None:
    """Through Triton's launcher, then without it; what is not aligned, and what is not contiguous, too."""
    pack, unpack, packs, unpacks = calls(case, dtype)
    shapes = [shape for shape, _ in CASES[case][1]]
    with torch.no_grad():
        for turn in range(4):
            xs = [filled(math.prod(s) + (turn == 2), dtype)[turn == 2 :].view(s) for s in shapes]
            if turn == 3:
                xs = [x.movedim(-1, 0).contiguous().movedim(0, -1) for x in xs]
            expected = PACK(xs, *packs)
            assert same(pack(xs), expected)
            flat = filled(expected.numel(), dtype)
            found = unpack([flat])
            assert all(same(x, y) for x, y in zip(found, UNPACK(flat, *unpacks), strict=True))
    assert pack.ready is not None
    assert unpack.ready is not None


def test_a_graph_of_it_replays() -> None:
    """Nothing that a captured call needs is made, or written, when it is captured."""
    pack, unpack, packs, unpacks = calls("gpt2 2", torch.bfloat16)
    xs = [filled(math.prod(shape), torch.bfloat16).view(shape) for shape, _ in WIDE]
    with torch.no_grad():
        unpack([pack(xs)])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            flat = pack(xs)
            found = unpack([flat])
        for x in xs:
            x.copy_(filled(x.numel(), torch.bfloat16).view(x.shape))
        graph.replay()
        assert same(flat, PACK(xs, *packs))
        assert all(same(x, y) for x, y in zip(found, UNPACK(flat, *unpacks), strict=True))


def test_it_is_one_kernel() -> None:
    pack, unpack, _, _ = calls("gpt2 2", torch.bfloat16)
    xs = [filled(math.prod(shape), torch.bfloat16).view(shape) for shape, _ in WIDE]
    unpack([pack(xs)])
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as seen:
        unpack([pack(xs)])
        torch.cuda.synchronize()
    kernels = [e.name for e in seen.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]
    assert sorted(kernels) == ["pack", "unpack"]
