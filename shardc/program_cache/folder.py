"""The folder of saved programs: a file a program, whole or not there, and no more in all than a bound.

    ~/.cache/shardc/                or $XDG_CACHE_HOME/shardc; SHARDC_CACHE names another folder, or says "off"
        KEY.program                 a line of JSON about it, with a checksum of the rest; the program
        KEY.hits                    as many bytes as times that it was taken
        refused.json                the last request that could not be cached, and why

The time of a file is that of its last use. Where the folder holds more than SHARDC_CACHE_LIMIT (2GiB), those that were
used least recently go. Several processes may write at once: each writes a file of its own and renames it.

A checksum is no signature, a program says what is trained, and `marshal` is not safe against bytes that were made to
harm. So the folder is its owner's alone (0700), and a file counts only where this user owns it and nobody else may
write to it or to its folder.
"""

from __future__ import annotations

import hashlib
import json
import marshal
import os
import stat
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardc.ir.diagnostic import ShardcError
from shardc.plan.values import read_bytes

VARIABLE, LIMIT_VARIABLE = "SHARDC_CACHE", "SHARDC_CACHE_LIMIT"
OFF = ("", "off", "0", "no", "false")
ON = ("on", "1", "yes", "true")
FORMAT, VERSION = "shardc-cached-program", 3
DEFAULT_LIMIT = 2 << 30  # bytes
_SUFFIX, _HITS, _REFUSED = ".program", ".hits", "refused.json"
_ABANDONED = 3600.0  # seconds after which a file that nobody renamed was left by a process that is dead


@dataclass(frozen=True)
class Entry:
    """A saved program. `size` in bytes, `used` in seconds since 1970."""

    key: str
    model: str
    mesh: str
    mode: str
    size: int
    used: float
    hits: int


@dataclass(frozen=True)
class Folder:
    path: Path
    limit: int = DEFAULT_LIMIT

    @classmethod
    def of_environment(cls) -> Folder | str:
        """The folder that variables name, or the user's own; else why there is none."""
        word, limit = os.environ.get(VARIABLE, ON[0]), _limit()
        if word.strip().lower() in OFF:
            return "the cache is off"
        if limit == 0:
            return f"the cache is off: {LIMIT_VARIABLE} is 0"
        is_default = word.strip().lower() in ON
        try:
            folder = cls(_default_path() if is_default else Path(word).expanduser().absolute(), limit)
            return folder.misplaced(of_home=is_default) or folder
        except (RuntimeError, OSError) as unknown:
            return f"no folder is known: {unknown}; {VARIABLE} may name one"

    # ------------------------------------------------------------------ one program
    def read(self, key: str) -> dict[str, Any] | None:
        """What was written under a key. A file that is damaged, or of another version, is deleted."""
        path = self.path / f"{key}{_SUFFIX}"
        if self.distrust():
            return None
        try:
            with path.open("rb") as file:
                if not _is_private(os.fstat(file.fileno())):
                    return None
                head, _, payload = file.read().partition(b"\n")
        except OSError:
            return None
        content = _content(head, payload, key)
        if content is None:
            self._remove(key)
            return None
        return content

    def note_hit(self, key: str) -> None:
        """Count that a program was taken, which makes it the last that was used."""
        with suppress(OSError):
            os.utime(self.path / f"{key}{_SUFFIX}")
            with (self.path / f"{key}{_HITS}").open("ab") as hits:
                hits.write(b".")

    def write(self, key: str, about: Mapping[str, str], content: dict[str, Any]) -> bool:
        """Write a program, and make room for it. False where it cannot be written, or is larger than the bound."""
        payload = marshal.dumps(content)  # plain data: ValueError for all else
        head = {"format": FORMAT, "version": VERSION, "key": key, **about}
        head["sha256"] = hashlib.sha256(payload).hexdigest()
        data = json.dumps(head).encode() + b"\n" + payload
        if len(data) > self.limit:
            return False
        temporary = self.path / f".{key}.{os.getpid()}.{uuid.uuid4().hex}.tmp"
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self.distrust():
                return False
            with open(temporary, "xb", opener=_private) as file:
                file.write(data)
            os.replace(temporary, self.path / f"{key}{_SUFFIX}")
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            return False
        self._make_room(key)
        return True

    def distrust(self) -> str:
        """Why nothing is read from the folder or written to it; an empty text where nothing is wrong, or it is not
        there yet."""
        try:
            about = self.path.stat()
        except OSError:
            return ""
        if _is_private(about):
            return ""
        return f"others may write to {self.path}, or own it, so it is not trusted: chmod 700 it, or name another"

    def misplaced(self, *, of_home: bool) -> str:
        """Why no folder can be made here, where there is none; an empty text where there is one, or it can be made.
        One of a home is not made in another user's, as root has it under `sudo`, who could not delete it."""
        if os.path.isdir(self.path):
            return ""
        if os.path.lexists(self.path):
            return f"{self.path} is no folder; {VARIABLE} may name another"
        parent = next((folder for folder in self.path.parents if os.path.exists(folder)), self.path)
        if not os.path.isdir(parent) or not os.access(parent, os.W_OK | os.X_OK):
            return f"{self.path} cannot be made: {parent} is not writable; {VARIABLE} may name another folder"
        if of_home and hasattr(os, "getuid") and os.stat(parent).st_uid != os.getuid():
            return f"{self.path} is not made: {parent} is another user's; {VARIABLE} may name another folder"
        return ""

    def _make_room(self, newest: str) -> None:
        entries = self._files()
        size = sum(about.st_size for about in entries.values())
        for key, about in sorted(entries.items(), key=lambda item: (item[0] == newest, item[1].st_mtime_ns)):
            if size <= self.limit:
                break
            size -= about.st_size
            self._remove(key)
        for path in self.path.glob(".*.tmp"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED:
                    path.unlink()

    def _remove(self, key: str) -> None:
        for suffix in (_SUFFIX, _HITS):
            with suppress(OSError):
                (self.path / f"{key}{suffix}").unlink()

    def _files(self) -> dict[str, os.stat_result]:
        """By key; another process may delete one meanwhile."""
        found: dict[str, os.stat_result] = {}
        for path in self.path.glob(f"*{_SUFFIX}"):
            with suppress(OSError):
                found[path.name.removesuffix(_SUFFIX)] = path.stat()
        return found

    # ------------------------------------------------------------------ all programs
    def entries(self) -> list[Entry]:
        """The programs, those that were used last first."""
        entries: list[Entry] = []
        for key, about in self._files().items():
            hits = self.path / f"{key}{_HITS}"
            try:
                with (self.path / f"{key}{_SUFFIX}").open("rb") as file:
                    head = json.loads(file.readline())
                count = hits.stat().st_size if hits.exists() else 0
                model, mesh, mode = (str(head[name]) for name in ("model", "mesh", "mode"))
            except (OSError, ValueError, KeyError, TypeError):
                continue  # deleted meanwhile; or damaged, which whoever takes it will see
            entries.append(Entry(key, model, mesh, mode, about.st_size, about.st_mtime, count))
        return sorted(entries, key=lambda entry: -entry.used)

    def clear(self) -> int:
        """Delete all programs; how many there were."""
        keys = [*self._files()]
        for key in keys:
            self._remove(key)
        with suppress(OSError):
            (self.path / _REFUSED).unlink()
        return len(keys)

    def refused(self) -> dict[str, str] | None:
        """The model of the last request that could not be cached, and the reason."""
        try:
            data = json.loads((self.path / _REFUSED).read_text("utf-8"))
            return {"model": str(data["model"]), "reason": str(data["reason"])}
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def note_refusal(self, model: str, reason: str) -> None:
        temporary = self.path / f".refused.{os.getpid()}.{uuid.uuid4().hex}.tmp"
        with suppress(OSError):
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self.distrust():
                return
            temporary.write_text(json.dumps({"model": model, "reason": reason}), "utf-8")
            os.replace(temporary, self.path / _REFUSED)
        with suppress(OSError):  # of a disk that is full
            temporary.unlink(missing_ok=True)


def packed(plain: Any) -> bytes:
    """A part of a program that is not read with the rest."""
    return marshal.dumps(plain)


def unpacked(data: bytes) -> Any:
    return marshal.loads(data)


def _content(head: bytes, payload: bytes, key: str) -> dict[str, Any] | None:
    """The content of a file that is whole and of this version."""
    try:
        about = json.loads(head)
        known = about["format"], about["version"], about["key"], about["sha256"]
        if known != (FORMAT, VERSION, key, hashlib.sha256(payload).hexdigest()):
            return None
        content = marshal.loads(payload)
    except (ValueError, KeyError, TypeError, EOFError):
        return None
    return content if isinstance(content, dict) else None


def _default_path() -> Path:
    """Raises RuntimeError where no home is known."""
    named = os.environ.get("XDG_CACHE_HOME", "")  # one that is relative does not count, its standard says
    return (Path(named) if os.path.isabs(named) else Path.home().absolute() / ".cache") / "shardc"


def _limit() -> int:
    """Of the variable; what cannot be read is as if it were not there."""
    text = os.environ.get(LIMIT_VARIABLE)
    try:
        return DEFAULT_LIMIT if text is None else int(read_bytes(text))
    except (ShardcError, ValueError, TypeError):
        return DEFAULT_LIMIT


def _is_private(about: os.stat_result) -> bool:
    """Whether this user owns a file or a folder, and no other may write to it. Where users have no numbers: yes."""
    if not hasattr(os, "getuid"):
        return True
    return about.st_uid == os.getuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
