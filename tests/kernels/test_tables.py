"""Tables of schedules are found by the GPU that they name, wherever they lie; what is no table is said."""

import os
import tomllib
from collections.abc import Iterator
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from kernels_triton import launch, tables
from shardc import ShardcError

ROOT = Path(__file__).parents[2]
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


def test_a_wheel_brings_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (pattern,) = project["tool"]["setuptools"]["data-files"][tables.INSTALLED]
    (source,) = ROOT.glob(pattern)
    installed = tmp_path / tables.INSTALLED / source.name
    installed.parent.mkdir(parents=True)
    installed.write_text(source.read_text())
    info = tmp_path / "lib" / "site-packages" / "shardc-0.dist-info"
    info.mkdir(parents=True)
    (info / "RECORD").write_text(f"../../{tables.INSTALLED}/{source.name},,\nshardc/__init__.py,,\n")
    monkeypatch.setattr(tables, "distribution", lambda name: PathDistribution(info))
    monkeypatch.setattr(tables, "REPOSITORY", tmp_path / "none")
    assert "softmax" in tables.schedules(launch.H200.name)


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
