"""What is published: the wheel and the source distribution hold what they need, and run away from the repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
BUILD = "import setuptools.build_meta as b; b.build_wheel('out'); b.build_sdist('out')"
SOURCES = ("shardc", "kernels_triton", "configs", "pyproject.toml", "README.md", "LICENSE")
STORY = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, shardc
from pathlib import Path
assert Path(shardc.__file__).is_relative_to(sys.argv[1]), shardc.__file__
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
program = shardc.compile(
    model, torch.randn(4, 4), mesh="dp=2,tp=2", loss=lambda y, batch: y.square().mean(),
    plan={"params": {"0.weight": "tp"}, "inputs": {"input": "dp"}, "fuse": True},
)
assert program.verify().ok
"""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the source distribution, built from a copy of the sources."""
    folder = tmp_path_factory.mktemp("package")
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        options = {"ignore": shutil.ignore_patterns("__pycache__")} if copy is shutil.copytree else {}
        copy(ROOT / name, folder / name, **options)
    subprocess.run([sys.executable, "-c", BUILD], cwd=folder, check=True, capture_output=True, timeout=300)
    (wheel,), (source,) = (folder / "out").glob("*.whl"), (folder / "out").glob("*.tar.gz")
    return wheel, source


def test_the_wheel_has_all_modules_and_data(published: tuple[Path, Path]) -> None:
    packed = set(ZipFile(published[0]).namelist())
    for package in ("shardc", "kernels_triton"):
        modules = {str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py")}
        assert modules <= packed
    assert {"shardc/py.typed", "kernels_triton/py.typed", "kernels_triton/schedules/h200.yaml"} <= packed
    assert any(name.endswith("share/shardc/hardware/h200-nvlink.yaml") for name in packed)
    assert not any(name.startswith("tests/") for name in packed)


def test_the_source_distribution_has_the_sources(published: tuple[Path, Path]) -> None:
    with tarfile.open(published[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "shardc/api.py", "configs/hardware/h200-nvlink.yaml"} <= names


def test_an_index_takes_both(published: tuple[Path, Path]) -> None:
    pytest.importorskip("twine")
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, published)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_the_wheel_runs_away_from_the_repository(published: tuple[Path, Path], tmp_path: Path) -> None:
    site = tmp_path / "site"
    with ZipFile(published[0]) as wheel:  # what `pip install` puts beside other packages
        wheel.extractall(site)
    run = subprocess.run(
        [sys.executable, "-c", STORY, str(site)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def test_versions_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{citation["version"]}"' in project
