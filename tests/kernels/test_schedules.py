"""Row views of tensors, and how schedules cut rows."""

from dataclasses import replace

import pytest
import torch

from kernels_triton import ops
from kernels_triton.gate import gate
from kernels_triton.launch import launch, row_schedule, tables
from kernels_triton.launch.row_schedule import Schedule
from kernels_triton.ops.registry import TEMPLATES

META = torch.empty((1, 1), dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("most", [8192, 16384])
def test_a_cut_covers_the_columns_and_little_more(most: int) -> None:
    for cols in (1, 2, 3, 17, 1000, 1024, 1025, 4096, 5000, 8192, 8193, 12288, 14336, 16384):
        block, chunks = row_schedule.column_chunks(cols, most, 4)
        assert block * chunks >= cols
        assert block & (block - 1) == 0
        assert block <= most
        assert (chunks - 1) * block < cols
        if cols >= 4096:
            assert block * chunks <= 1.5 * cols
    assert row_schedule.column_chunks(12288, most, 4) == (4096, 3)
    assert row_schedule.column_chunks(70000, most, 4)[1] == 0


def test_rows_with_a_stride_are_views() -> None:
    whole = torch.zeros(4, 6, 10)
    part = whole[..., 2:7]
    flat = row_schedule.as_rows(part)
    assert flat.shape == (24, 5)
    assert row_schedule.row_stride(flat) == 10
    assert flat.data_ptr() == part.data_ptr()
    assert row_schedule.as_rows(whole.transpose(0, 1)).is_contiguous()
    assert row_schedule.as_rows(whole.transpose(1, 2)).stride(-1) == 1


def test_every_row_has_a_program_and_waves_bound_them() -> None:
    schedule = Schedule(1024, 1, rows=4, waves=0)
    assert schedule.programs(9, META) == 3
    assert replace(schedule, waves=2).programs(10_000, META) == 264
    assert replace(schedule, waves=2).column_grid(10_000, 4096, META) == (4, 66)
    assert schedule.tiles(9, 4096) == 12


def test_the_table_holds_where_it_was_measured_and_the_guess_elsewhere() -> None:
    guess = Schedule(4096, 1, warps=8)
    for name, entries in tables.schedules(launch.H200.name).items():
        for entry in entries:
            low, high = entry["cols"]
            assert row_schedule.measured_schedule(name, launch.H200.name, high, entry["bytes"], guess) == replace(
                guess, **entry["schedule"]
            )
            covered = entry["schedule"]["block"] * max(1, entry["schedule"]["chunks"])
            is_row = entry["schedule"]["chunks"] and ("norm" in name or "softmax" in name)
            assert covered >= high or not is_row, f"{name}: a row of {high} does not fit its schedule"
            assert low <= high
            elements = covered * entry["schedule"]["rows"]
            bytes_a_thread = elements * entry["bytes"] / (32 * entry["schedule"]["warps"])
            assert bytes_a_thread >= 16, f"{name}: less than 16 bytes a thread"
    assert row_schedule.table_schedule("layer_norm_backward", META.float(), 4096, guess) == guess
    assert row_schedule.table_schedule("no_such_op", META, 4096, guess) == guess


def test_a_gpu_without_a_table_is_scheduled_by_size() -> None:
    """Fewer multiprocessors, less shared memory: no entry of the H200's table, fewer programs, fewer stages."""
    other = launch.Device("l40", 60, 99 << 10)
    tabled = row_schedule.forward_schedule("rms_norm", META, 12288)
    with launch.assuming(other):
        guess = row_schedule.forward_schedule("rms_norm", META, 12288)
        backward = row_schedule.backward_schedule("layer_norm_backward", META, 4096)
        assert replace(backward, waves=1).programs(10_000, META) == 60
        assert (
            row_schedule.vocabulary_register_schedule("cross_entropy", META, 50304).chunks == row_schedule.KEPT_CHUNKS
        )
    assert guess == Schedule(4096, 3, 1, warps=8)
    assert guess != tabled
    held = backward.waves * backward.stages * 3 * backward.block * backward.chunks * META.element_size()
    assert held <= other.shared_bytes


@pytest.mark.skipif(not launch.HAS_TRITON, reason="Triton is not installed: ops do not launch here")
def test_every_template_launches_on_a_gpu_without_a_table() -> None:
    for template in TEMPLATES.values():
        launches: list[launch.Launch] = []
        with launch.assuming(launch.Device("l40", 60, 99 << 10)), launch.recording(launches.append):
            template.op(*template.arguments(gate.sizes(4096), torch.bfloat16, "meta"), **template.variants[0])
        assert launches, template.name


@pytest.mark.skipif(not launch.HAS_TRITON, reason="Triton is not installed: ops do not launch here")
@pytest.mark.parametrize(
    ("of_group", "space", "forward", "backward"),
    [(8, 1024, 1, 1), (96, 1024, 6, 12), (10, 4096, 4, 5), (1024, 1024, 0, 0), (4, 65536, 0, 0), (512, 49, 0, 0)],
)
def test_a_long_group_is_shared_by_programs_that_fit_on_a_gpu_together(
    of_group: int, space: int, forward: int, backward: int
) -> None:
    """One launch reads it once: programs with channels each, which wait for each other. 0: one reads it twice."""
    x, stats = META.new_empty(2, of_group * 32, space), META.new_empty(2, 32, dtype=torch.float32)
    w = x.new_empty(of_group * 32)
    launches: list[launch.Launch] = []
    with launch.recording(launches.append):
        ops.group_norm(x, 32, w, w)
        ops.group_norm_backward(x, x, 32, w, stats, stats)
    for one, name, parts in ((launches[0], "forward", forward), (launches[1], "backward", backward)):
        assert one.name == f"group_norm.group_norm_{name}{'_held' if parts else ''}"
        assert one.grid == (64 * max(1, parts), 1, 1)
        assert one.constants.get("PARTS", 0) == parts
    assert [one.name for one in launches[2:]] == ["norm.column_sums"]
