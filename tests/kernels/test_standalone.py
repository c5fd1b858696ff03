"""`kernels_triton` is a distribution of its own: its wheel has all its packages, and needs nothing of `shardc`."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import kernels_triton

FOLDER = Path(kernels_triton.__file__).parent
SCRIPT = """
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
sys.modules["shardc"] = None  # an import of it, or from it, fails

import torch
from torch.nn import functional as F

import kernels_triton
from kernels_triton import ops
from kernels_triton.base.diagnostic import ShardcError
from kernels_triton.gate import tuning
from kernels_triton.launch import launch, tables
from kernels_triton.match.op import OPS

assert Path(kernels_triton.__file__).parent.parent == Path(sys.argv[1])
assert "layer_norm" in tables.schedules(launch.H200.name)
x, w, b = torch.randn(6, 40), torch.randn(40), torch.randn(40)
with torch.no_grad():
    torch.testing.assert_close(ops.layer_norm(x, w, b, 1e-5)[0], F.layer_norm(x, (40,), w, b, 1e-5))
    torch.testing.assert_close(ops.softmax(x, scale=0.5), torch.softmax(0.5 * x, -1))
    torch.testing.assert_close(ops.gated(x, 2 * x, "silu"), F.silu(x) * (2 * x))
    ops.bias_dropout_residual(x, b, x, 0.5, torch.tensor(3), 1)
    line = "sum[6|40](f32[6,40], f32[6,40]){%2=add(%0, %1)}->f32[6,40]=%2"
    (y,) = torch.ops.shardc.fused([x, 2 * x], line)
    torch.testing.assert_close(y, 3 * x)
    try:
        ops.layer_norm(x, w[:3], b, 1e-5)
        raise AssertionError("a weight of 3 columns was taken")
    except ShardcError as refused:
        assert refused.code == "SC530" and str(refused).startswith("error[SC530 kernel-operand]"), refused
assert OPS
"""


def project_of(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


def wheel_of(folder: Path, work: Path) -> Path:
    """The wheel of a copy of the folder, unpacked: what `pip install` would put beside other packages."""
    source, site = work / "source", work / "site"
    shutil.copytree(folder, source, ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, "-w", str(work), str(source)], check=True)
    (wheel,) = work.glob("*.whl")
    with ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def test_its_wheel_runs_without_shardc(tmp_path: Path) -> None:
    site = wheel_of(FOLDER, tmp_path)
    packed = {path.relative_to(site / "kernels_triton") for path in (site / "kernels_triton").rglob("*.*")}
    kept = {path.relative_to(FOLDER) for kind in ("*.py", "*.yaml", "py.typed") for path in FOLDER.rglob(kind)}
    assert packed == kept
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(site)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def test_its_project_agrees_with_that_of_shardc() -> None:
    kernels, compiler = project_of(FOLDER)["project"], project_of(FOLDER.parent)["project"]
    for key in ("version", "license", "requires-python"):
        assert kernels[key] == compiler[key]
    assert set(kernels["dependencies"]) <= set(compiler["dependencies"])
