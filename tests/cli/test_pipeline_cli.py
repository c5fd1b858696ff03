"""Pipelines on the command line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardc import Program
from shardc.cli import main

GRAPHS = ("forward0", "backward0", "forward1", "backward1", "update0", "update1")
ROOT = Path(__file__).parent.parent.parent
MODEL = "examples/mlp.py:mlp"
PIPELINED = ["--plan", "tests/cli/mlp_pp.yaml"]


def run_cli(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(main.app, list(args), prog_name="shardc")
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return "\n".join(line.rstrip() for line in result.stdout.splitlines())


@pytest.mark.parametrize("case", ["compile", "rank", "timeline", "cost", "verify"])
def test_command(case: str, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    command = ["compile"] if case == "rank" else [case]
    out = run_cli(*command, MODEL, *PIPELINED, *(["--rank", "2"] if case == "rank" else []))
    if case == "verify":
        assert out.startswith("4 ranks in float64: equal to the single device")
    else:
        golden(f"pipeline_{case}.txt", out)


@pytest.mark.parametrize("form", ["text", "json", "python", "dot"])
def test_emit(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    out = run_cli("compile", MODEL, *PIPELINED, "--emit", form)
    if form == "json":
        assert Program.from_json(out + "\n").prove().ok
    elif form == "python":
        scope: dict[str, Any] = {}
        exec(compile(out, "program.py", "exec"), scope)
        assert {*GRAPHS} <= scope.keys()
    elif form == "dot":
        assert {*GRAPHS} <= set(re.findall(r'digraph "?(\w+)', out))
    else:
        assert {*GRAPHS[:4], "update"} <= set(re.findall(r"graph @(\w+)", out))


def test_timeline_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    run_cli("timeline", MODEL, *PIPELINED, "--svg", str(tmp_path / "t.svg"), "--trace", str(tmp_path / "t.json"))
    assert (tmp_path / "t.svg").read_text().startswith("<svg")
    assert "traceEvents" in (tmp_path / "t.json").read_text()
    run_cli("timeline", MODEL, *PIPELINED, "--svg", str(tmp_path / "no" / "t.svg"), code=2)


@pytest.mark.parametrize("case", [[], ["gelu.send1"]], ids=["list", "transfer"])
def test_explain(case: list[str], golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    golden(f"pipeline_explain_{'_'.join(case) or 'list'}.txt", run_cli("explain", MODEL, *case, *PIPELINED))


def test_a_run_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    losses = [float(line.split()[-1]) for line in run_cli("run", MODEL, *PIPELINED, "--steps", "3").splitlines()]
    assert len(losses) == 3
    assert losses[2] < losses[0]


@pytest.mark.long  # test_cli.py runs processes without a pipeline, tests/distributed with one
def test_a_run_in_real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    command = ("run", MODEL, *PIPELINED, "--steps", "2")
    assert run_cli(*command, "--nproc", "4") == run_cli(*command)
    run_cli(*command, "--nproc", "2", code=2)
