"""`launch.run`: prepared ops repeat their launches, and empty grids launch nothing."""

from typing import Any

import pytest
import torch

from kernels_triton import ops
from kernels_triton.launch import launch

pytestmark = pytest.mark.skipif(not launch.HAS_TRITON, reason="Triton is not installed: ops do not launch here")


class Counted:
    """In the place of a kernel: notes each launch's grid."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **constants: self.grids.append(grid)


def test_a_prepared_op_repeats_its_launches_into_the_same_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted()
    monkeypatch.setattr(launch, "kernel", lambda name: counted)
    x, w = torch.empty(300, 64, device="meta"), torch.empty(64, device="meta")
    stats = torch.empty(300, device="meta")
    prepared = launch.prepare(ops.layer_norm_backward, x, x, w, stats, stats)
    first = list(counted.grids)
    assert len(first) == 2  # the rows, then the column sums
    assert prepared() is prepared.outputs
    assert counted.grids == first * 2


def test_no_rows_launch_nothing_and_their_sums_are_zero() -> None:
    launches: list[launch.Launch] = []
    x, w = torch.empty(0, 64, device="meta"), torch.empty(64, device="meta")
    stats = torch.empty(0, device="meta")
    with launch.recording(launches.append):
        dx, dw, _ = ops.layer_norm_backward(x, x, w, stats, stats)
    assert not launches
    assert dx.shape == (0, 64)
    assert dw is not None
    assert dw.shape == (64,)


def test_float64_and_cpu_tensors_are_the_references() -> None:
    assert not launch.runs_on_triton(torch.zeros(2, 2))
    with launch.recording(lambda one: None):
        assert launch.runs_on_triton(torch.zeros(2, 2, device="meta"))
        assert not launch.runs_on_triton(torch.zeros(2, 2, device="meta", dtype=torch.float64))
