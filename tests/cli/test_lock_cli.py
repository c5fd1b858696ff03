"""`shardc lock`: what it writes, what it compares, and its exit codes."""

import json
from pathlib import Path

import pytest

from tests.cli.test_cli import MODEL, PLAN, ROOT, shardc_cli


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture
def lockfile(tmp_path: Path) -> str:
    path = tmp_path / "shardc.lock"
    ran = shardc_cli("lock", MODEL, *PLAN, "-o", str(path))
    assert ran.code == 0, ran.err
    assert ran.out.startswith(f"written to {path}: ")
    return str(path)


CHECK = ["lock", MODEL, *PLAN, "--check", "-o"]


def cheaper(path: str, fact: str, factor: float) -> None:
    """As if the model had cost less when the lockfile was written."""
    lines = Path(path).read_text().splitlines()
    index = next(i for i, line in enumerate(lines) if line.startswith(f"{fact} = "))
    lines[index] = f"{fact} = {int(int(lines[index].rpartition(' = ')[2]) * factor)}"
    Path(path).write_text("\n".join(lines) + "\n")


def test_what_is_as_it_was_passes(lockfile: str) -> None:
    ran = shardc_cli(*CHECK, lockfile)
    assert (ran.code, ran.out) == (0, f"as {lockfile} says")


def test_the_file_is_the_same_each_time(lockfile: str) -> None:
    text = Path(lockfile).read_text()
    assert shardc_cli("lock", MODEL, *PLAN, "-o", lockfile).code == 0
    assert Path(lockfile).read_text() == text


def test_what_costs_more_exits_with_1(lockfile: str) -> None:
    cheaper(lockfile, "memory.peak", 0.5)
    ran = shardc_cli(*CHECK, lockfile)
    assert ran.code == 1
    assert ran.out.startswith(f"worse than {lockfile} says:\n  memory at the peak: ")
    assert "(+100.0%)" in ran.out
    assert shardc_cli(*CHECK, lockfile, "--tolerance", "memory=1").code == 0
    assert shardc_cli(*CHECK, lockfile, "--tolerance", "1").code == 0
    assert shardc_cli(*CHECK, lockfile, "--tolerance", "1", "--tolerance", "memory=0.5").code == 1, "the kind's counts"


def test_what_costs_less_passes_with_a_hint(lockfile: str) -> None:
    cheaper(lockfile, "memory.peak", 2)
    ran = shardc_cli(*CHECK, lockfile)
    assert ran.code == 0
    assert "better than" in ran.out
    assert "run `shardc lock` without --check to keep what was won" in ran.out


def test_json(lockfile: str) -> None:
    assert json.loads(shardc_cli(*CHECK, lockfile, "--json").out)["ok"] is True
    cheaper(lockfile, "memory.peak", 0.5)
    ran = shardc_cli(*CHECK, lockfile, "--json")
    assert ran.code == 1
    (change,) = json.loads(ran.out)["worse"]
    assert change["fact"] == "memory.peak"
    written = json.loads(shardc_cli("lock", MODEL, *PLAN, "-o", lockfile, "--json").out)
    assert written["amounts"]["memory.peak"] == change["after"]


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ([*CHECK, "none/shardc.lock"], "SC411"),
        (["lock", MODEL, *PLAN, "-o", "none/shardc.lock"], "SC409"),
        (["lock", MODEL, *PLAN, "--tolerance", "0.1"], "SC105"),
        ([*CHECK, "shardc.lock", "--tolerance", "much"], "SC105"),
        ([*CHECK, "shardc.lock", "--tolerance", "-1"], "SC105"),
        ([*CHECK, "shardc.lock", "--tolerance", "nan"], "SC105"),
        ([*CHECK, "shardc.lock", "--tolerance", "=1"], "SC105"),
    ],
)
def test_bad_input_exits_with_2(args: list[str], code: str) -> None:
    ran = shardc_cli(*args)
    assert ran.code == 2
    assert f"[{code} " in ran.err


def test_other_arguments_are_refused(lockfile: str) -> None:
    ran = shardc_cli(*CHECK, lockfile, "--mesh", "dp=4,tp=2")
    assert ran.code == 2
    assert "SC412" in ran.err
    assert "mesh: dp=2, tp=2, here dp=4, tp=2" in ran.err
    ran = shardc_cli(*CHECK, lockfile, "--tolerance", "memroy=1")
    assert "did you mean 'memory'?" in ran.err


def test_hardware_of_a_file_is_given_anew(tmp_path: Path) -> None:
    machine, lockfile = tmp_path / "mine.yaml", str(tmp_path / "shardc.lock")
    machine.write_text("like: h200\nnetwork_bytes_per_second: 2.4e+10\n")
    assert shardc_cli("lock", MODEL, *PLAN, "-o", lockfile, "--hardware", str(machine)).code == 0
    ran = shardc_cli(*CHECK, lockfile)
    assert ran.code == 2
    assert "SC412" in ran.err
    assert "predicts a step on 'mine'" in ran.err
    assert shardc_cli(*CHECK, lockfile, "--hardware", str(machine)).code == 0
