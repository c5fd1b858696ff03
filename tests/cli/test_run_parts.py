"""`shardc run` of a plan whose ranks bring parts: each process is given its own, as the simulation is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardc.cli.main import app
from tests.distributed.ranks import fork_ranks

ROOT = Path(__file__).parents[2]
TARGET = f"{ROOT / 'examples/mlp.py'}:mlp"


def losses(*arguments: str) -> list[float]:
    result = CliRunner().invoke(app, ["run", *arguments, "--steps", "2"], prog_name="shardc")
    assert result.exit_code == 0, result.output
    found = [float(loss) for loss in re.findall(r"loss (\S+)", result.stdout)]
    assert len(found) == 2
    return found


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text('mesh: dp=2\ndata: per_rank\naccumulate: 2\ninputs: {x: "dp, -"}\n')
    return path


def test_processes_bring_their_parts(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_ranks(monkeypatch)
    simulated = losses(TARGET, "--plan", str(plan))
    assert losses(TARGET, "--plan", str(plan), "--nproc", "2") == pytest.approx(simulated, rel=1e-5)
    whole = plan.read_text().replace("data: per_rank\n", "")
    plan.write_text(whole)
    assert losses(TARGET, "--plan", str(plan)) == simulated


@pytest.mark.long
def test_a_program_from_a_file_is_given_a_whole_batch(plan: Path, tmp_path: Path) -> None:
    saved = str(tmp_path / "program.json")
    result = CliRunner().invoke(app, ["compile", TARGET, "--plan", str(plan), "-o", saved], prog_name="shardc")
    assert result.exit_code == 0, result.output
    assert losses(saved) == pytest.approx(losses(saved, "--nproc", "2"), rel=1e-5)
