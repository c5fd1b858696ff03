"""Hashes of tensors, and which ranks they are compared between."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import Tensor

from shardc.ir.diagnostic import ShardcError
from shardc.ir.mesh import Mesh
from shardc.ir.types import TensorType
from shardc.runtime.train.replicas import Item, Peers, fingerprint

CPU = torch.device("cpu")
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
INTEGERS = [torch.int64, torch.int32, torch.uint8, torch.bool]
SIZES = [1, 3, 7, 1021, 8 * 1021 + 5]


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_a_hash_sees_every_bit_and_no_layout(dtype: torch.dtype) -> None:
    for size in SIZES:
        x = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(size)).to(dtype)
        own = fingerprint(x, CPU)
        assert own == fingerprint(torch.stack([x, x], 1)[:, 1], CPU)  # not contiguous
        assert own == fingerprint(torch.cat([x[:1], x])[1:], CPU)  # not aligned to 8 bytes
        for at in {0, size // 2, size - 1}:
            other = x.clone()
            other[at] = 0 if bool(other[at]) else 1
            assert own != fingerprint(other, CPU), (size, at)


def test_a_hash_sees_that_elements_were_exchanged() -> None:
    x = torch.randn(5000)
    for a, b in ((0, 2), (10, 4999), (2500, 2504)):
        other = x.clone()
        other[[a, b]] = x[[b, a]]
        assert fingerprint(x, CPU) != fingerprint(other, CPU)


def checked(values: Sequence[Tensor], type: str, mesh: Mesh, launching: bool = False) -> list[str]:
    """What every rank says, each a thread, where they hold these values."""
    ranks = range(mesh.world_size)
    meeting = Barrier(mesh.world_size, timeout=10)
    brought: dict[int, Tensor] = {}

    def rank(own: int) -> str:
        def gather(x: Tensor) -> list[Tensor]:
            brought[own] = x
            meeting.wait()
            rows = [brought[r] for r in ranks]
            meeting.wait()
            return rows

        item = Item("w", "param", TensorType.parse(type), values[own])
        try:
            Peers(mesh, CPU, gather, [(0, r) for r in ranks]).check([item], "now", launching=launching)
        except ShardcError as failure:
            return str(failure)
        return ""

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(rank, ranks))


def test_a_shard_is_compared_with_its_replicas_alone() -> None:
    mesh = Mesh(dp=2, tp=2)
    top, bottom = torch.zeros(2, 4), torch.ones(2, 4)
    assert checked([top, bottom, top, bottom], "f32[4@tp, 4]", mesh) == [""] * 4
    said = checked([top, bottom, top, bottom + 1], "f32[4@tp, 4]", mesh)
    assert len(set(said)) == 1
    assert "now: rank 3 holds other values than the other ranks" in said[0]
    assert checked([top, bottom, top + 1, bottom + 1], "f32[4@dp.tp, 4]", mesh) == [""] * 4


def test_the_majority_is_right() -> None:
    said = checked([torch.ones(3), torch.zeros(3), torch.zeros(3), torch.zeros(3)], "f32[3]", Mesh(dp=4))
    assert "now: rank 0 holds other values" in said[0]


def test_rounding_is_a_warning_where_it_was_computed_and_an_error_at_the_launch() -> None:
    x = torch.linspace(1, 2, 40_000)
    near = [x, x * (1 + 1e-6)]
    with pytest.warns(UserWarning, match="rank 1 and the others differ in what they hold of w, by 1e-06 of its size"):
        assert checked(near, "f32[40000]", Mesh(dp=2)) == [""] * 2
    assert "starts from other values" in checked(near, "f32[40000]", Mesh(dp=2), launching=True)[0]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1.01])
def test_more_than_rounding_is_an_error(wrong: float) -> None:
    x = torch.linspace(1, 2, 40_000)
    other = x.clone()
    other[20_001] = wrong  # which the sample does not see
    for odd in (x * wrong, other):
        assert "rank 1 holds other values" in checked([x, odd], "f32[40000]", Mesh(dp=2))[0]
