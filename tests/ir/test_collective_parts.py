"""Around a collective: what is sent lies in one piece, and what came is put where it belongs, bit by bit."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardc.ir.blocks import Block, Blocks
from shardc.ir.mesh import Mesh
from shardc.ir.ops.collectives import COLLECTIVES, all_gather, all_to_all, gather_blocks, late, reduce_scatter
from shardc.ir.ops.context import Communicator, RankContext, running

MESH = Mesh(cp=4)
DTYPES = [torch.bool, torch.int64, torch.float8_e5m2, torch.bfloat16, torch.float32, torch.float64, torch.complex128]
ZIGZAG = Blocks((Block(8), Block(8, reverse="cp")))
SHORT = Blocks((Block(8), Block(5, reverse="cp")))  # whose last chunk is empty
FUSED = Blocks((Block(6, unit=4), Block(3, unit=4, cut=False), Block(4)))
OF = {
    "counts": lambda of: [b.count if b.cut else -b.count for b in of.parts],
    "units": lambda of: [b.unit for b in of.parts],
}


def bits(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Any bits, NaNs of all kinds among them."""
    raw = torch.randint(256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return (raw % 2 if dtype == torch.bool else raw).view(dtype).view(shape)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def places(of: Blocks, ranks: int) -> list[list[int]]:
    """By rank: the places in the whole of what it has, -1 of padding. Written down from what blocks are said to be."""
    held: list[list[int]] = [[] for _ in range(ranks)]
    start = 0
    for block in of.parts:
        elements = list(range(start, start + block.size))
        if not block.cut:
            each = [elements] * ranks
        else:
            room = -(-block.count // ranks) * block.unit
            elements += [-1] * (room * ranks - len(elements))
            each = [elements[i * room : (i + 1) * room] for i in range(ranks)]
        for rank, own in enumerate(reversed(each) if block.reverse else each):
            held[rank] += own
        start += block.size
    return held


def run(op: object, ranks: list[torch.Tensor], *args: object, **kwargs: object) -> list[torch.Tensor]:
    """A collective on all ranks of MESH: an all-gather or an all-to-all as the ranks' tensors say."""
    generators, sent = [], []
    with running(RankContext(MESH, {}, cast(Communicator, None))):
        for x in ranks:
            generators.append(COLLECTIVES[op](x, *args, **kwargs))
            sent.append(next(generators[-1]))
    results: list[torch.Tensor] = []
    for rank, generator in enumerate(generators):
        assert all(one.x.is_contiguous() for one in sent)
        if sent[rank].kind == "all_gather":
            received = torch.stack([one.x for one in sent])
        else:
            received = torch.stack([one.x[rank] for one in sent])
        with pytest.raises(StopIteration) as done:
            generator.send(received)
        results.append(done.value.value)
    return results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of", [ZIGZAG, SHORT, FUSED], ids=str)
@pytest.mark.parametrize("width", [1, 8, 12])
def test_gathered_blocks(of: Blocks, dtype: torch.dtype, width: int) -> None:
    whole = bits(3, int(of), width, dtype=dtype)
    padded = torch.cat([whole, bits(3, 1, width, dtype=dtype)], 1)
    parts = [padded[:, own] for own in places(of, 4)]
    told = [OF["counts"](of), OF["units"](of)]
    reverse = [block.reverse for block in of.parts]
    atoms = list(parts[0].shape)
    for found in run(gather_blocks, parts, ["cp"], atoms, 1, *told, list(whole.shape), reverse):
        assert same(found, whole)
        assert found.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lies", ["rows", "turned", "cut out"])
def test_to_heads_and_back(dtype: torch.dtype, lies: str) -> None:
    """From zigzag rows of all heads to all rows of some heads, and back, of operands that lie in several ways."""
    whole = bits(8, 16, 8, dtype=dtype)
    told = {"counts": OF["counts"](ZIGZAG), "units": [1, 1], "reverse": ["", "cp"]}
    rows = [whole[:, own] for own in places(ZIGZAG, 4)]
    if lies == "turned":
        rows = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in rows]
    elif lies == "cut out":
        rows = [torch.cat([x[..., :3], x, x[..., 3:]], -1)[..., 3:11] for x in rows]
    heads = run(all_to_all, rows, ["cp"], [8, 4, 8], 0, 1, 16, [2, 16, 8], **told)
    assert all(same(found, whole[2 * rank : 2 * rank + 2]) for rank, found in enumerate(heads))
    back = run(all_to_all, heads, ["cp"], [2, 16, 8], 1, 0, 8, [8, 4, 8], **told, splits_blocks=True)
    assert all(same(found, x) for found, x in zip(back, rows, strict=True))


@given(st.integers(1, 9), st.integers(0, 2), st.integers(0, 2), st.sampled_from(DTYPES))
def test_gathered_chunks(size: int, pos: int, turned: int, dtype: torch.dtype) -> None:
    local, shape = -(-size // 4), [3, 5, 8]
    shape[pos] = 4 * local
    whole = bits(*shape, dtype=dtype)
    parts = [x.transpose(turned, 0).contiguous().transpose(turned, 0) for x in whole.chunk(4, pos)]
    shape[pos] = size
    for found in run(all_gather, parts, ["cp"], list(parts[0].shape), pos, size, shape):
        assert same(found, whole.narrow(pos, 0, size))


@pytest.mark.parametrize("of", [ZIGZAG, SHORT, None], ids=str)
def test_what_a_sum_is_made_of(of: Blocks | None) -> None:
    """A reduce-scatter sends each rank its own part, zero where it has padding."""
    size = 14 if of is None else int(of)
    whole = torch.arange(1.0, 1 + 3 * size * 2).view(3, size, 2)
    told = () if of is None else (OF["counts"](of), OF["units"](of), [block.reverse for block in of.parts])
    owns = places(of or Blocks((Block(size),)), 4)
    with running(RankContext(MESH, {}, cast(Communicator, None))):
        sent = next(COLLECTIVES[reduce_scatter](whole, "sum", ["cp"], [3, size, 2], 1, [3, len(owns[0]), 2], *told)).x
    padded = torch.cat([whole, torch.zeros(3, 1, 2)], 1)
    assert sent.is_contiguous()
    assert all(torch.equal(sent[rank], padded[:, own]) for rank, own in enumerate(owns))


def test_a_late_exchange_is_the_same_but_for_that() -> None:
    steps = COLLECTIVES[all_gather]
    with running(RankContext(MESH, {}, cast(Communicator, None))):
        usual, marked = steps(torch.ones(2), ["cp"], [2], 0, 8, [8]), late(steps, torch.ones(2), ["cp"], [2], 0, 8, [8])
        first, second = next(usual), next(marked)
    assert not first.late
    assert second.late
    assert torch.equal(first.x, second.x)
    for generator in (usual, marked):
        with pytest.raises(StopIteration) as done:
            generator.send(torch.arange(8.0).view(4, 2))
        assert torch.equal(done.value.value, torch.arange(8.0))
