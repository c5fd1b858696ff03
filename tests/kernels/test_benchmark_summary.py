"""The summary of benchmarks/kernels.py: runs are merged, goals counted, and every line that misses one has a reason."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import kernel_summary, kernels
from benchmarks.kernel_cases import COLS, ROWS
from benchmarks.kernel_summary import UNKNOWN, Reason, results, summary, table


def line(op: str, cols: int, provider: str, us: float, of_copy: float = 0.95) -> dict[str, object]:
    return {"op": op, "shape": [8192, cols], "provider": provider, "us": us, "of_copy": of_copy}


def test_runs_are_put_together_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = (Reason("soft*", "copy", 0.75, "few columns", range(2000)), Reason("soft*", "copy", 0.85, "many"))
    monkeypatch.setattr(kernel_summary, "REASONS", reasons)
    first = [
        line("softmax", 1024, "ours", 99.0),
        line("softmax", 1024, "eager", 30.0),
        line("rope", 4096, "ours", 10.0),
        line("rope", 4096, "again", 9.8),  # no peer
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
        ("softmax", (8192, 4096), {"copy": UNKNOWN}),
        ("rope", (8192, 4096), {"peer": "within the 2.0% that two times of the same kernel differ by"}),
    ]
    assert goals == {
        "summary": "goals",
        "lines": 3,
        "copy >= 0.9": 1,
        "with peers": 2,
        "peer >= 1.0": 1,
        "the same kernel twice, 95 % within": 0.02,
        "peer >= 1.0 but for that": 2,
        "geometric mean": 1.219,  # the root of 1.5 * 0.99
        "unexplained": 1,
    }
    assert list(table(found, (8192, 4096)))[2:] == [
        "| softmax | 20.0 |  |  |  | 0.80 | 1.50 | 1.50 |",
        "| rope | 10.0 | 40.0 | 9.9 |  | 0.95 | 0.99 | 0.99 |",
    ]


def test_processes_share_the_work_and_leave_none(tmp_path: Path) -> None:
    """Each piece is one process's, whoever comes first; the pieces of a group hold each of its cases once."""
    options = argparse.Namespace(rows=ROWS, cols=COLS, part="1/1", only=None)
    work = kernels.pieces(options)
    first, second = kernels.taken(work, tmp_path), kernels.taken(work, tmp_path)
    shared = [next(second), *(next(first) for _ in range(5)), *second, *first]
    assert sorted(shared) == sorted(work)
    shapes = {name: 1 if name == "adamw" else 2 if name == "cross_entropy" else 12 for name in kernels.PIECES}
    assert len(set(work)) == sum(shapes[name] * count for name, count in kernels.PIECES.items())
