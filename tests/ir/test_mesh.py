import math
import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401 (registers the "fake" backend)
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardc.ir.diagnostic import ShardcError
from shardc.ir.mesh import Mesh

meshes = st.dictionaries(st.sampled_from(["pp", "dp", "cp", "tp"]), st.integers(1, 4), max_size=4).map(
    lambda sizes: Mesh(**sizes)
)


def test_last_axis_is_fastest() -> None:
    mesh = Mesh(dp=2, tp=4)
    assert mesh.world_size == 8
    assert mesh.coordinate(6) == {"dp": 1, "tp": 2}
    assert mesh.groups("tp") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups("dp") == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_first_axis_given_is_major_within_a_group() -> None:
    mesh = Mesh(dp=2, tp=2)
    assert mesh.groups(("dp", "tp")) == ((0, 1, 2, 3),)
    assert mesh.groups(("tp", "dp")) == ((0, 2, 1, 3),)
    assert mesh.groups(()) == ((0,), (1,), (2,), (3,))


@given(meshes, st.data())
def test_groups_partition_the_ranks_and_agree_with_index(mesh: Mesh, data: st.DataObject) -> None:
    axes = tuple(data.draw(st.permutations(mesh.names)))[: data.draw(st.integers(0, len(mesh.axes)))]
    groups = mesh.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    assert [group[0] for group in groups] == sorted(min(group) for group in groups)
    for group in groups:
        assert len(group) == mesh.size(axes)
        for position, rank in enumerate(group):
            assert mesh.index(rank, axes) == position
            assert mesh.group_of(rank, axes) == group


@given(meshes)
def test_round_trips(mesh: Mesh) -> None:
    assert Mesh.parse(str(mesh)) == mesh
    assert Mesh(mesh.axes) == mesh
    assert hash(Mesh(mesh.axes)) == hash(mesh)
    assert all(mesh.rank(mesh.coordinate(rank)) == rank for rank in range(mesh.world_size))


@given(st.lists(st.integers(1, 3), min_size=2, max_size=3))
def test_split_keeps_every_rank_and_group(sizes: list[int]) -> None:
    whole = Mesh(dp=2, tp=math.prod(sizes))
    split = whole.split("tp", sizes)
    subs = split.children("tp")
    assert len(subs) == len(sizes)
    assert {split.parent(sub) for sub in subs} == {"tp"}
    assert split.resolve("tp") == subs
    assert split.size("tp") == whole.size("tp")
    assert split.groups("tp") == whole.groups("tp")
    assert split.merged(("dp", *subs)) == ("dp", "tp")


def test_merged_only_merges_a_full_run_in_order() -> None:
    mesh = Mesh(dp=2, tp=4).split("tp", (2, 2))
    assert mesh.merged(("tp:0",)) == ("tp:0",)
    assert mesh.merged(("tp:1", "tp:0")) == ("tp:1", "tp:0")
    assert mesh.merged(("tp:0", "dp", "tp:1")) == ("tp:0", "dp", "tp:1")
    assert mesh.groups("tp:0") == ((0, 2), (1, 3), (4, 6), (5, 7))


def test_sub_axes_split_again() -> None:
    mesh = Mesh(tp=8).split("tp", (4, 2)).split("tp:0", (2, 2))
    assert mesh.names == ("tp:0:0", "tp:0:1", "tp:1")
    assert mesh.resolve("tp:0") == ("tp:0:0", "tp:0:1")
    assert mesh.merged("tp") == ("tp",)
    assert mesh.merged("tp:0") == ("tp:0",)


@pytest.fixture
def four_ranks() -> Iterator[None]:
    # The fake backend: a job of four ranks of which only this one exists.
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    dist.init_process_group("fake", rank=0, world_size=4, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
def test_device_mesh() -> None:
    mesh = Mesh(dp=2, tp=2)
    assert Mesh.from_device_mesh(mesh.to_device_mesh("cpu")) == mesh
    with pytest.raises(ShardcError, match=r"SC210.*no names"):
        Mesh.from_device_mesh(init_device_mesh("cpu", (2, 2)))
    with pytest.raises(ShardcError, match=r"SC210.*\[1, 0, 3, 2\]"):
        Mesh.from_device_mesh(DeviceMesh("cpu", [[1, 0], [3, 2]], mesh_dim_names=("dp", "tp")))


@pytest.mark.parametrize(
    "axes", [[("d p", 2)], [("tp", 0)], [("tp", True)], [("tp", 2), ("tp", 2)], [("tp", 2), ("tp:0", 2)], [("", 1)]]
)
def test_malformed(axes: list[tuple[str, int]]) -> None:
    with pytest.raises(ShardcError, match="SC210"):
        Mesh(axes)


@pytest.mark.parametrize("text", ["dp", "dp=", "dp=x", "=2", "dp=2 tp=2", "dp=-1"])
def test_malformed_text(text: str) -> None:
    with pytest.raises(ShardcError, match="SC210"):
        Mesh.parse(text)


def test_unknown_axis() -> None:
    with pytest.raises(ShardcError, match=r"SC201(.|\n)*did you mean 'tp'"):
        Mesh(dp=2, tp=2).groups("tpp")
