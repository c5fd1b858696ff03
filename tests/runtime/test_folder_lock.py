"""The lock of a checkpoint's folder: whatever the order in which jobs come, find it stale and leave, one has it."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from shardc.ir.diagnostic import ShardcError
from shardc.runtime.checkpoint.lock import FolderLock

FORK = multiprocessing.get_context("fork")
GONE = {"id": "gone", "host": socket.gethostname(), "pid": 2**22 + 1, "started": "1"}  # beyond all process numbers


def _acquired(path: Path, report: Any) -> None:
    try:
        FolderLock(path).acquire()
        report.put("mine")
        time.sleep(60)
    except ShardcError as refused:
        report.put(refused.code)


def test_a_lock_that_was_left_and_taken_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner leaves just as another asks who has it; a third takes it, and keeps it."""
    file, report, link = tmp_path / "ck.lock", FORK.Queue(), os.link
    file.write_text(json.dumps(GONE | {"host": "elsewhere"}))
    third = FORK.Process(target=_acquired, args=(tmp_path / "ck", report))

    def refused(source: Any, target: Any) -> None:
        monkeypatch.setattr(os, "link", link)
        try:
            link(source, target)
        finally:
            file.unlink()

    read_text, opened = Path.read_text, Path.open

    def third_comes() -> None:
        if not file.exists() and not third.ident:
            third.start()
            assert report.get(timeout=30) == "mine"

    def read(self: Path, *args: Any, **options: Any) -> str:
        try:
            return read_text(self, *args, **options)
        except FileNotFoundError:
            third_comes()
            raise

    def open_(self: Path, *args: Any, **options: Any) -> Any:
        try:
            return opened(self, *args, **options)
        except FileNotFoundError:
            third_comes()
            raise

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(Path, "open", open_)
    lock = FolderLock(tmp_path / "ck")
    monkeypatch.setattr(os, "link", refused)
    try:
        with pytest.raises(ShardcError, match="SC551"):
            lock.acquire()
        assert json.loads(file.read_text())["pid"] == third.pid
    finally:
        third.kill()
        third.join()


def test_of_two_who_saw_one_stale_lock_one_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other comes, sees it stale and takes it, between this one's look at the file and its hold of it."""
    file, report, flock = tmp_path / "ck.lock", FORK.Queue(), fcntl.flock
    file.write_text(json.dumps(GONE))
    other = FORK.Process(target=_acquired, args=(tmp_path / "ck", report))

    def late(*arguments: Any) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        other.start()
        assert report.get(timeout=30) == "mine"
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", late)
    try:
        with pytest.raises(ShardcError, match="SC551"):
            FolderLock(tmp_path / "ck").acquire()
        assert json.loads(file.read_text())["pid"] == other.pid
    finally:
        other.kill()
        other.join()


def test_who_releases_meets_a_taker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One looks at the file at the moment at which its owner leaves: it goes all the same."""
    lock, file = FolderLock(tmp_path / "ck"), tmp_path / "ck.lock"
    lock.acquire()
    with file.open("rb+") as seen:
        fcntl.flock(seen, fcntl.LOCK_EX)
        waited: list[float] = []

        def sleep(seconds: float) -> None:
            waited.append(seconds)
            fcntl.flock(seen, fcntl.LOCK_UN)

        monkeypatch.setattr(time, "sleep", sleep)
        lock.release()
    assert len(waited) == 1
    assert not file.exists()


def test_processes_that_cannot_be_seen_are_not_gone(tmp_path: Path) -> None:
    """Two containers of one name on a host number their processes apart."""
    file = tmp_path / "ck.lock"
    file.write_text(json.dumps(GONE | {"processes": "pid:[1]"}))
    draft = tmp_path / f"ck.lock.{'0' * 8}-{GONE['pid']}-{'0' * 32}"
    draft.write_text("{")
    with pytest.raises(ShardcError, match="SC551"):
        FolderLock(tmp_path / "ck").acquire()
    assert draft.exists()
    file.write_text(json.dumps(GONE))
    FolderLock(tmp_path / "ck").acquire()
    assert json.loads(file.read_text())["pid"] == os.getpid()
