"""Where a rank of the whole mesh stands: its coordinate on the pipeline's axis, and its rank among the others."""

import json

import pytest
import torch
from torch import nn

import shardc
from shardc import Mesh
from shardc.partition.cut import CutStep, cut
from shardc.partition.staged_program import StagedProgram, scheduled
from tests.partition.whole import step


@pytest.fixture(scope="module")
def staged() -> CutStep:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    program = step(
        model, (torch.randn(4, 4),), 2, "dp=2,tp=2", lambda out, batch: out.square().mean(), inputs={"input": "dp, -"}
    )
    assert isinstance(program, shardc.Program)
    return cut(program.body, 2)


@pytest.mark.parametrize("order", ["pp=2,dp=2,tp=2", "dp=2,pp=2,tp=2", "dp=2,tp=2,pp=2"])
def test_the_axis_may_stand_anywhere(staged: CutStep, order: str) -> None:
    program = scheduled(staged, "1f1b", mesh=Mesh.parse(order))
    for rank in range(8):
        at = program.mesh.coordinate(rank)
        c, i = program.coordinates(rank)
        assert c == at["pp"]
        assert program.body.mesh.coordinate(i) == {"dp": at["dp"], "tp": at["tp"]}
        assert program.rank_of(c, i) == rank
    assert sorted(program.rank_of(c, i) for c in range(2) for i in range(4)) == list(range(8))


def test_first_unless_said(staged: CutStep) -> None:
    program = scheduled(staged, "gpipe", axis="stage")
    assert str(program.mesh) == "stage=2, dp=2, tp=2"
    assert program.coordinates(5) == (1, 1)


def test_a_file_keeps_it(staged: CutStep) -> None:
    program = scheduled(staged, "1f1b", mesh=Mesh(dp=2, pipe=2, tp=2), axis="pipe")
    read = StagedProgram.from_plain(json.loads(json.dumps(program.to_plain())))
    assert (read.mesh, read.axis) == (program.mesh, "pipe")
    assert read.costs == program.costs == staged.costs
    assert [read.coordinates(rank) for rank in range(8)] == [program.coordinates(rank) for rank in range(8)]


def test_a_mesh_of_another_size_is_none(staged: CutStep) -> None:
    with pytest.raises(AssertionError, match="axis 'pp' of 4"):
        scheduled(staged, "1f1b", mesh=Mesh(pp=4, dp=2, tp=2))


@pytest.mark.parametrize("part", ["stages", "finishes"])
def test_a_file_without_one_of_its_graphs_is_none(staged: CutStep, part: str) -> None:
    data = json.loads(json.dumps(scheduled(staged, "1f1b").to_plain()))
    data[part].pop()
    with pytest.raises(AssertionError, match="of 2"):
        StagedProgram.from_plain(data)
