"""Who may write a checkpoint: one job at a time, told by a file `NAME.lock` beside it.

    {"id": "5c2e...", "host": "node1", "pid": 4711, "started": "83513", "run": "none"}

The owner renews the file's time while it lives. A lock is stale when its process is gone, where that can be seen (on
the same host), or when it has not been renewed for `STALE` seconds; then it is taken over. A process may take over from
itself: it saves one checkpoint at a time.

The file is written beside its place as `NAME.lock.HOST-PID-ID` and linked there. What a process leaves there that is
killed in between goes with the next lock: the name says whose it is, for its content may be cut short.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
import uuid
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardc.ir.diagnostic import error

RENEWED = 15.0  # seconds from one renewal to the next
STALE = 120.0  # after which an owner that nobody can ask is taken to be gone
DRAFT = re.compile(r"\.(?P<host>[0-9a-f]{8})-(?P<pid>\d{1,9})-[0-9a-f]{32}")


class FolderLock:
    """The right to write the checkpoint at `path`, from `acquire` to `release`."""

    def __init__(self, path: Path) -> None:
        self._file = path.with_name(f"{path.name}.lock")
        self._path, self._id = path, uuid.uuid4().hex
        self._ended = threading.Event()
        self._beats: threading.Thread | None = None

    def acquire(self) -> None:
        """Raises ShardcError (SC551) where another job has it, with who that is."""
        if self._owner().get("id") == self._id:
            self._tidy()
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(100):
            if self._created():
                break
            owner = self._owner()
            if owner and not self._stale(owner):
                raise self._taken(owner)
            self._remove(owner)
        else:
            raise self._taken(self._owner())
        self._tidy()
        if self._beats is None:
            self._beats = threading.Thread(target=self._renew, name="shardc-checkpoint-lock", daemon=True)
            self._beats.start()

    def release(self) -> None:
        self._ended.set()
        if self._owner().get("id") == self._id:
            with suppress(OSError):
                self._file.unlink()

    def _created(self) -> bool:
        """Make the file, whole from its first moment, unless there is one."""
        about = {"id": self._id, "host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid())}
        about["run"] = os.environ.get("TORCHELASTIC_RUN_ID", "")
        try:
            self._draft.write_text(json.dumps(about), encoding="utf-8")
            os.link(self._draft, self._file)
        except (FileExistsError, FileNotFoundError):  # the latter: another process has tidied the draft away
            return False
        finally:
            with suppress(OSError):
                self._draft.unlink()
        return True

    @property
    def _draft(self) -> Path:
        return self._file.with_name(f"{self._file.name}.{_host()}-{os.getpid()}-{self._id}")

    def _tidy(self) -> None:
        """Remove the drafts of processes that are gone, and its own where the disk did not let it."""
        with suppress(OSError):
            for path in self._file.parent.iterdir():
                name = path.name.removeprefix(self._file.name)
                if name != path.name and (draft := DRAFT.fullmatch(name)):
                    host, pid = draft["host"], int(draft["pid"])
                    gone = host == _host() and _started(pid) is None
                    if gone or path == self._draft or time.time() - path.stat().st_mtime > STALE:
                        path.unlink(missing_ok=True)

    def _owner(self) -> dict[str, Any]:
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _stale(self, owner: dict[str, Any]) -> bool:
        if owner.get("host") == socket.gethostname() and isinstance(pid := owner.get("pid"), int):
            return pid == os.getpid() or _started(pid) != owner.get("started")
        try:
            return time.time() - self._file.stat().st_mtime > STALE
        except OSError:
            return True

    def _remove(self, owner: dict[str, Any]) -> None:
        """Take a stale lock away; what turns out to be another one by then goes back."""
        with suppress(OSError, ValueError):
            os.rename(self._file, self._draft)
            taken = json.loads(self._draft.read_text(encoding="utf-8")) if owner else {}
            if taken.get("id") != owner.get("id"):
                with suppress(FileExistsError):
                    os.link(self._draft, self._file)
        with suppress(OSError):
            self._draft.unlink()

    def _taken(self, owner: dict[str, Any]) -> Exception:
        who = f"process {owner.get('pid')} on {owner.get('host')}" if owner else "another job"
        message = f"the checkpoint {self._path} is being written by another job: {who}"
        return error("SC551", message, hint=f"give each job a folder of its own, or end the other ({self._file})")

    def _renew(self) -> None:
        while not self._ended.wait(RENEWED):
            if self._owner().get("id") == self._id:
                with suppress(OSError):
                    os.utime(self._file)


def _host() -> str:
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def _started(pid: int) -> str | None:
    """When a process was started, as the system counts; None for one that is not there. Numbers are used again."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return ""
    return text.rpartition(")")[2].split()[19]
