"""Tables of schedules are found by the GPU that they name, in every place. Malformed tables are reported."""

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from kernels_triton.launch import launch, tables
from kernels_triton.launch.row_schedule import Schedule
from shardc import ShardcError
from tests.files.mutations import mutated, mutated_text, nothing_done

pytestmark = pytest.mark.audited
TABLE = "device: {device}\nschedules:\n  softmax:\n  - {{cols: [1, 8], bytes: 2, schedule: {{block: 8}}}}\n"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    tables.schedules.cache_clear()
    yield
    tables.schedules.cache_clear()


def test_the_name_of_the_gpu_decides_and_not_that_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = "NVIDIA H100 80GB HBM3", launch.H200.name
    for number, device in enumerate(names):
        (tmp_path / f"{number}.yaml").write_text(TABLE.format(device=device))
    measured = tables.schedules(launch.H200.name)
    assert len(measured["softmax"]) > 1
    assert tables.schedules(names[0]) == {}
    tables.schedules.cache_clear()
    monkeypatch.setenv(tables.VARIABLE, os.pathsep.join((str(tmp_path / "0.yaml"), str(tmp_path))))
    for device in names:
        assert tables.schedules(device)["softmax"] == [{"cols": [1, 8], "bytes": 2, "schedule": {"block": 8}}]
    assert tables.schedules("NVIDIA GH200 480GB") == {}


@pytest.mark.parametrize("text", ["device: x", "[1, 2]", "a: {", None])
def test_what_is_no_table_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv(tables.VARIABLE, str(path))
    with pytest.raises(ShardcError, match="SC533") as caught:
        tables.schedules("x")
    assert str(path) in str(caught.value)
    assert "shardc tune -o FILE" in str(caught.value)


def test_what_is_no_yaml_is_said_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("device: x\nschedules:\n  a: [1\n  b: 2\n")
    monkeypatch.setenv(tables.VARIABLE, str(path))
    with pytest.raises(ShardcError, match=rf"SC533.*{path}:4' is no YAML") as caught:
        tables.schedules("x")
    assert "unicode string" not in str(caught.value)


ENTRY = {"cols": [1, 8], "bytes": 2, "schedule": {"block": 8, "again": True}}


@pytest.mark.parametrize(
    "change",
    [
        {"cols": [1]},
        {"cols": "1 to 8"},
        {"bytes": "two"},
        {"bytes": True},
        {"schedule": None},
        {"schedule": {"block": 12}},
        {"schedule": {"block": 1 << 40}},
        {"schedule": {"warps": -1}},
        {"schedule": {"warp": 1}},
        {"schedule": {"again": 1}},
    ],
    ids=str,
)
def test_an_entry_that_is_no_schedule_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object]
) -> None:
    path = tmp_path / "mine.yaml"
    monkeypatch.setenv(tables.VARIABLE, str(path))
    path.write_text(yaml.safe_dump({"device": "x", "schedules": {"softmax": [ENTRY]}}))
    assert tables.schedules("x")["softmax"] == [ENTRY]
    tables.schedules.cache_clear()
    path.write_text(yaml.safe_dump({"device": "x", "schedules": {"softmax": [{**ENTRY, **change}]}}))
    with pytest.raises(ShardcError, match=r"SC533(.|\n)*an entry of softmax is none"):
        tables.schedules("x")


def test_altered_tables_are_read_or_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, draw = tmp_path / "mine.yaml", random.Random(5)
    monkeypatch.setenv(tables.VARIABLE, str(path))
    text = next(tables.PACKAGED.glob("*.yaml")).read_text().partition("\n  add_layer_norm:")[0]
    whole, refused = yaml.safe_load(text), 0
    for number in range(200):
        altered = mutated_text(text, draw) if number % 2 else yaml.safe_dump(mutated(whole, draw))
        path.write_text(altered)
        tables.schedules.cache_clear()
        with nothing_done():
            try:
                found = tables.schedules(whole["device"])
            except ShardcError as said:
                refused += said.code == "SC533"
                continue
        for entries in found.values():
            for entry in entries:
                assert len(entry["cols"]) == 2
                replace(Schedule(block=8), **entry["schedule"])
    assert refused > 60
