"""Who may write a checkpoint: one job at a time, told by a file `NAME.lock` beside it.

    {"id": "5c2e...", "host": "node1", "pid": 4711, "started": "83513", "run": "none"}

The owner renews the file's time while it lives. A lock is stale when its process is gone, where that can be seen (on
the same host), or when it has not been renewed for `STALE` seconds; then it is taken over. A process may take over from
itself: it saves one checkpoint at a time.

A lock's file is replaced and removed only by a process that holds the system's lock (`flock`) on that very file, and
then sees that it still has its name. Of two that saw one stale lock, the second then sees another file there: the lock
of a living job is never away from its place. The system's lock ends with the process that holds it.

The file is written beside its place as `NAME.lock.HOST-PID-ID` and linked there. What a process leaves there that is
killed in between goes with the next lock: the name says whose it is, for its content may be cut short.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

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
        """Take the lock. Raises ShardcError (SC551), naming the owner, if another job has it."""
        if self._owner().get("id") == self._id:
            self._tidy()
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(100):
            if self._created() or self._took_over():
                break
        else:
            raise self._taken(self._owner())
        self._tidy()
        if self._beats is None:
            self._beats = threading.Thread(target=self._renew, name="shardc-checkpoint-lock", daemon=True)
            self._beats.start()

    def release(self) -> None:
        self._ended.set()
        for _ in range(100):
            if self._owner().get("id") != self._id:
                return
            with suppress(OSError), self._held_still() as file:
                if file is not None and _content(file).get("id") == self._id:
                    self._file.unlink()

    def _created(self) -> bool:
        """Create the complete lock file atomically, unless there is one."""
        return self._placed(os.link)

    def _took_over(self) -> bool:
        """Replace the file if it is stale; False where it is no longer there, or another is at it: then look again.

        Raises ShardcError (SC551) where a living job has it."""
        with self._held_still() as file:
            if file is None:
                return False
            owner = _content(file)
            if owner and not self._stale(owner, os.fstat(file.fileno()).st_mtime):
                raise self._taken(owner)
            return self._placed(os.replace)

    def _placed(self, put: Callable[[Path, Path], None]) -> bool:
        """Write a draft that names the owner, and put it in the place of the lock. False if that failed."""
        about = {"id": self._id, "host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid())}
        about |= {"run": os.environ.get("TORCHELASTIC_RUN_ID", ""), "processes": _processes()}
        try:
            self._draft.write_text(json.dumps(about), encoding="utf-8")
            put(self._draft, self._file)
        except (FileExistsError, FileNotFoundError):  # the latter: another process has tidied the draft away
            return False
        finally:
            with suppress(OSError):
                self._draft.unlink()
        return True

    @contextmanager
    def _held_still(self) -> Generator[IO[bytes] | None]:
        """The file, which nobody replaces or removes meanwhile; None where there is none, or another is at it."""
        with ExitStack() as stack:
            file: IO[bytes] | None = None
            with suppress(FileNotFoundError):
                file = stack.enter_context(self._file.open("rb+"))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    time.sleep(0.02)
                    file = None
                except OSError:  # the file system has no such locks: two takers may then still meet
                    pass
                if file is not None and not os.path.samestat(os.fstat(file.fileno()), self._file.stat()):
                    file = None
            yield file

    @property
    def _draft(self) -> Path:
        return self._file.with_name(f"{self._file.name}.{_host()}-{os.getpid()}-{self._id}")

    def _tidy(self) -> None:
        """Remove the drafts of processes that have ended, and own drafts whose removal failed before."""
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
            with self._file.open("rb") as file:
                return _content(file)
        except OSError:
            return {}

    def _stale(self, owner: dict[str, Any], renewed: float) -> bool:
        local = owner.get("host") == socket.gethostname() and owner.get("processes", _processes()) == _processes()
        if local and isinstance(pid := owner.get("pid"), int):
            return pid == os.getpid() or _started(pid) != owner.get("started")
        return time.time() - renewed > STALE

    def _taken(self, owner: dict[str, Any]) -> Exception:
        writer = f"process {owner.get('pid')} on {owner.get('host')}" if owner else "another job"
        message = f"the checkpoint {self._path} is being written by another job: {writer}"
        return error("SC551", message, hint=f"give each job a folder of its own, or end the other ({self._file})")

    def _renew(self) -> None:
        while not self._ended.wait(RENEWED):
            if self._owner().get("id") == self._id:
                with suppress(OSError):
                    os.utime(self._file)


def _content(file: IO[bytes]) -> dict[str, Any]:
    """The fields of a lock file; empty if the file is no lock."""
    try:
        content = json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _host() -> str:
    """Where processes are known by their numbers: a host, or a container of its own."""
    return f"{zlib.crc32(f'{socket.gethostname()} {_processes()}'.encode()):08x}"


def _processes() -> str:
    """Which numbering this process is in: two containers may have a host's name, and not see each other's processes."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


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
