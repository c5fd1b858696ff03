"""`shardc cost` with --scaling, --bottlenecks and --node-mtbf."""

import json
import math

import pytest

from tests.cli.test_cli import MODEL, PLAN, ROOT, shardc_cli

COST = ["cost", MODEL, *PLAN]


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_scaling() -> None:
    ran = shardc_cli(*COST, "--scaling", "tp=1,2,4", "--hardware", "h200")
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert lines[0].split()[:2] == ["tp", "ranks"]
    assert lines[-1] == "predicted on h200"
    assert [line.split()[:2] for line in lines[1:4]] == [["1", "2"], ["2", "4"], ["4", "8"]]
    rows = json.loads(shardc_cli(*COST, "--scaling", "tp=1,2,4", "--json").out)["scaling"]["rows"]
    for row in rows:
        assert math.fsum(row["shares_ms"].values()) == pytest.approx(row["step_ms"] - row["ideal_ms"], abs=1e-9)


def test_bottlenecks_and_failures_together() -> None:
    asked = ["--bottlenecks", "--memory-limit", "80GiB", "--node-mtbf", "6000", "--restart-mesh", "dp=1,tp=2"]
    ran = shardc_cli(*COST, *asked, "--hardware", "h200")
    assert ran.code == 0, ran.err
    first, second = ran.out.split("\n\n")
    assert first.startswith("many small kernels: ")
    assert second.startswith("1 nodes, one failure in 250 days each")
    assert "onto the other mesh" in second
    data = json.loads(shardc_cli(*COST, *asked, "--json").out)
    assert set(data) == {"bottlenecks", "failures"}
    assert data["bottlenecks"]["fits"]
    assert 0.99 < data["failures"]["goodput"] < 1


def test_a_program_that_does_not_fit_is_said_to() -> None:
    asked = ["--bottlenecks", "--memory-limit", "1KiB", "--hardware", "h200"]
    first = shardc_cli(*COST, *asked).out.splitlines()[0]
    assert first.startswith("does not fit: ")
    assert first.endswith(" at the peak, of 1 KiB that a rank may hold")
    held = json.loads(shardc_cli(*COST, *asked, "--json").out)["bottlenecks"]
    assert (held["fits"], held["memory_limit"]) == (False, 1024)
    assert held["peak_bytes"] > 1024


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--scaling", "tp"], "names no sizes of an axis"),
        (["--scaling", "tp=1,x"], "names no sizes of an axis"),
        (["--scaling", "pt=1,2"], "SC201"),
        (["--scaling", "tp=1,0"], "SC210"),
        (["--memory-limit", "1GiB"], "--memory-limit says nothing without --bottlenecks"),
        (["--restart-mesh", "dp=2"], "--restart-mesh says nothing without --node-mtbf"),
        (["--bottlenecks", "--memory", "--trace", "x.json"], "--memory and --trace go with none of --scaling"),
        (["--node-mtbf", "0"], "SC208"),
        (["--bottlenecks", "--hardware", "h20"], "SC208"),
        (["--hardware", "h200", "--profile", "none.json"], "SC402"),
    ],
)
def test_bad_input(args: list[str], says: str) -> None:
    ran = shardc_cli(*COST, *args)
    assert (ran.code, ran.out) == (2, "")
    assert says in ran.err


def test_an_evaluation_is_predicted() -> None:
    steps = [
        json.loads(shardc_cli(*COST, "--hardware", "h200", "--json", *mode).out)["predicted"]
        for mode in ([], ["--mode", "eval"])
    ]
    assert steps[1]["step_ms"] < steps[0]["step_ms"]
    assert 3 * steps[1]["model_flops"] == pytest.approx(steps[0]["model_flops"], rel=0.2)
    assert steps[1]["tokens"] == steps[0]["tokens"]
