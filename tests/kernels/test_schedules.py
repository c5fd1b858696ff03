"""How rows are seen and cut."""

from dataclasses import replace

import pytest
import torch

from kernels_triton import rows
from kernels_triton.rows import Schedule

META = torch.empty((1, 1), dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("most", [8192, 16384])
def test_a_cut_covers_the_columns_and_little_more(most: int) -> None:
    for cols in (1, 2, 3, 17, 1000, 1024, 1025, 4096, 5000, 8192, 8193, 12288, 14336, 16384):
        block, chunks = rows.cut(cols, most, 4)
        assert block * chunks >= cols
        assert block & (block - 1) == 0
        assert block <= most
        assert (chunks - 1) * block < cols
        if cols >= 4096:
            assert block * chunks <= 1.5 * cols
    assert rows.cut(12288, most, 4) == (4096, 3)
    assert rows.cut(70000, most, 4)[1] == 0


def test_rows_with_a_stride_are_views() -> None:
    whole = torch.zeros(4, 6, 10)
    part = whole[..., 2:7]
    flat = rows.as_rows(part)
    assert flat.shape == (24, 5)
    assert rows.row_stride(flat) == 10
    assert flat.data_ptr() == part.data_ptr()
    assert rows.as_rows(whole.transpose(0, 1)).is_contiguous()
    assert rows.as_rows(whole.transpose(1, 2)).stride(-1) == 1


def test_every_row_has_a_program_and_waves_bound_them() -> None:
    schedule = Schedule(1024, 1, rows=4, waves=0)
    assert schedule.programs(9, META) == 3
    assert replace(schedule, waves=2).programs(10_000, META) == 264
    assert replace(schedule, waves=2).walk(10_000, 4096, META) == (66, 4)
    assert schedule.tiles(9, 4096) == 12


def test_the_table_holds_where_it_was_measured_and_the_guess_elsewhere() -> None:
    guess = Schedule(4096, 1, warps=8)
    for name, entries in rows._table("h200").items():
        for entry in entries:
            low, high = entry["cols"]
            assert rows.tabled(name, META, high, guess) == replace(guess, **entry["schedule"])
            covered = entry["schedule"]["block"] * max(1, entry["schedule"]["chunks"])
            is_row = entry["schedule"]["chunks"] and ("norm" in name or "softmax" in name)
            assert covered >= high or not is_row, f"{name}: a row of {high} does not fit its schedule"
            assert low <= high
    assert rows.tabled("layer_norm_backward", META.float(), 4096, guess) == guess
    assert rows.tabled("no_such_op", META, 4096, guess) == guess
