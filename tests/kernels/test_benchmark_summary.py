"""The end of benchmarks/kernels.py: runs put together, goals counted, and a reason for every line that misses one."""

import json
from pathlib import Path

import pytest

from benchmarks import kernel_summary
from benchmarks.kernel_summary import TIE, UNKNOWN, results, summary, table


def line(op: str, cols: int, provider: str, us: float, of_copy: float = 0.95) -> dict[str, object]:
    return {"op": op, "shape": [8192, cols], "provider": provider, "us": us, "of_copy": of_copy}


def test_runs_are_put_together_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_summary, "REASONS", (("soft*", "copy", range(2000), "few columns"),))
    first = [
        line("softmax", 1024, "ours", 99.0),
        line("softmax", 1024, "eager", 30.0),
        line("rope", 4096, "ours", 10.0),
    ]
    second = [
        line("softmax", 1024, "ours", 20.0, 0.8),
        line("softmax", 4096, "ours", 20.0, 0.8),
        line("rope", 4096, "compile", 9.9),
        line("rope", 4096, "eager", 40.0),
        {"op": "rope", "shape": [8192, 4096], "provider": "liger", "failed": "no"},
    ]
    for name, lines in (("a", first), ("b", second)):
        (tmp_path / name).write_text("noise\n" + "\n".join(map(json.dumps, lines)), encoding="utf-8")
    found = results(kernel_summary.read([str(tmp_path / "a"), str(tmp_path / "b")]))
    *short, goals = summary(found)
    assert [(one["op"], one["shape"], one["why"]) for one in short] == [
        ("softmax", (8192, 1024), {"copy": "few columns"}),
        ("rope", (8192, 4096), {"peer": TIE}),
        ("softmax", (8192, 4096), {"copy": UNKNOWN}),
    ]
    assert goals == {
        "summary": "goals",
        "lines": 3,
        "copy >= 0.9": 1,
        "with peers": 2,
        "peer >= 1.0": 1,
        "peer >= 0.98": 2,
        "geometric mean": 1.219,  # the root of 1.5 * 0.99
        "unexplained": 1,
    }
    assert list(table(found, (8192, 4096)))[2:] == [
        "| softmax | 20.0 |  |  |  | 0.80 | 1.50 | 1.50 |",
        "| rope | 10.0 | 40.0 | 9.9 |  | 0.95 | 0.99 | 0.99 |",
    ]
