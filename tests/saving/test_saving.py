"""A saving that is killed, or whose disk is full or broken, at each of its system calls: a whole checkpoint stays.

All calls that change files are seen, native code's too (`disk_faults.c`). `make test` tries some of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.saving.disk_faults import COMPILER, build

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FAULTS = ("KILL", "HALF", "FULL", "BROKEN", "ONCE")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or COMPILER is None, reason="a C library takes the place of libc's calls"
)


def report_of(script: str, folder: Path, *arguments: object, limit: float = 120) -> dict[str, Any]:
    """What the script reports, and that it found nothing wrong."""
    env = {
        "LD_PRELOAD": str(build(folder)),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
    }
    with (folder / "log").open("w") as log:
        status = subprocess.run(
            [sys.executable, str(HERE / script), str(folder), *map(str, arguments)],
            env=os.environ | env, stdout=log, stderr=log, timeout=limit, check=False,
        ).returncode  # fmt: skip
    assert status == 0, (folder / "log").read_text()[-3000:]
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    assert not report["wrong"], f"{len(report['wrong'])} of {report['tried']} points\n" + "\n".join(report["wrong"])
    return report


def on_disk_in_order(calls: list[str]) -> None:
    """What a power cut would leave is whole: each file is brought to disk after its last write, then its name."""
    renamed, removed = calls.index("rename ck"), calls.index("rmdir ck.tmp-replaced")
    before = [call.replace(".metadata.tmp", ".metadata") for call in calls[:renamed]]
    folder = next(call.split()[1] for call in before if call.startswith("mkdir ck.tmp-"))
    files = {call.split()[1] for call in before if call.startswith("write")} - {folder}
    files = {name for name in files if not name.startswith("ck.lock")}
    assert files == {"__0_0.distcp", ".metadata", "shardc.json"}
    synced = before.index(f"fsync {folder}")
    for name in files:
        events = [event for event, _, of in (call.partition(" ") for call in before) if of == name]
        assert [event for event in events if event in ("write", "fsync")][-1] == "fsync", (name, events)
        assert max(n for n, call in enumerate(before) if call == f"fsync {name}") < synced
    assert "fsync work" in calls[renamed:removed]
    assert not [call for call in calls[renamed : calls.index("fsync work", renamed)] if call.startswith("unlink")]


def test_some_calls_of_a_saving(tmp_path: Path) -> None:
    report = report_of("worker.py", tmp_path, 53, *FAULTS)
    assert report["tried"] > 7
    assert len(report["calls"]["older"]) > 40
    on_disk_in_order(report["calls"]["older"])


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_every_call_of_a_saving(fault: str, tmp_path: Path) -> None:
    report = report_of("worker.py", tmp_path, 1, fault, limit=600)
    assert report["tried"] > (30 if fault == "HALF" else 120)


def test_some_calls_of_a_sharded_saving(tmp_path: Path) -> None:
    report = report_of("two_ranks.py", tmp_path, 31, "0:KILL", "1:FULL")
    assert report["tried"] == 2


@pytest.mark.long
@pytest.mark.parametrize("harm", ["0:KILL", "1:KILL", "0:FULL", "1:FULL", "0:ONCE", "1:ONCE"])
def test_every_call_of_a_sharded_saving(harm: str, tmp_path: Path) -> None:
    report = report_of("two_ranks.py", tmp_path, 1, harm, limit=1200)
    assert report["tried"] > (25 if harm[0] == "0" else 4)
