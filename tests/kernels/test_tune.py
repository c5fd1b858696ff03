"""`shardc tune`: schedules are read from the table that it writes. A fake clock replaces the GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kernels_triton.gate import tune, tuning
from kernels_triton.launch import launch, row_schedule, tables
from kernels_triton.launch.row_schedule import Schedule
from shardc import ShardcError

META = torch.empty((1, 1), dtype=torch.bfloat16, device="meta")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four warps, two rows a program take half as long as anything else."""

    def times(calls: dict[Schedule, Any], rounds: int) -> tuple[dict[Schedule, float], dict[Schedule, Exception]]:
        return {one: 0.5 if (one.warps, one.rows) == (4, 2) else 1.0 for one in calls}, {}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(launch, "HAS_TRITON", True)
    monkeypatch.setattr(tuning, "import_module", lambda name: torch)  # for its version
    monkeypatch.setattr(tuning, "_compile", lambda module, workers: None)
    monkeypatch.setattr(tune, "call_of", lambda template, cols, count: None)
    monkeypatch.setattr(tune, "time_calls", times)


@pytest.mark.usefixtures("clock")
def test_what_is_written_is_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tuning.table(["rms_norm", "gated"])
    assert text.startswith("# Measured by `shardc tune`")
    found = yaml.safe_load(text)
    assert found["device"] == "NVIDIA H200"
    assert found["schedules"].keys() == {"rms_norm", "gated"}
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    monkeypatch.setenv(tables.VARIABLE, str(tmp_path))
    tables.schedules.cache_clear()
    try:
        for name, entries in found["schedules"].items():
            for entry in entries:
                chosen = row_schedule.table_schedule(name, META, entry["cols"][1], Schedule(16))
                assert chosen == Schedule(**entry["schedule"])
                assert (chosen.warps, chosen.rows) == (4, 2)
        assert row_schedule.table_schedule("gated", META.float(), 1024, Schedule(16)) == Schedule(16)
    finally:
        tables.schedules.cache_clear()


@pytest.mark.usefixtures("clock")
def test_what_has_no_schedules_is_said() -> None:
    with pytest.raises(ShardcError, match="SC532") as caught:
        tuning.table(["adamw"])
    assert "adamw has no schedules to choose from" in str(caught.value)
    assert "one of layer_norm, " in str(caught.value)
