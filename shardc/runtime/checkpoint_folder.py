"""A checkpoint's folder: what lies in it, how it replaces the one before, and how damage is found.

    __0_0.distcp ...   the tensors, as torch.distributed.checkpoint writes them, a file a rank
    .metadata          its index, also as it writes it
    shardc.json        written last: step, seed, roles, the size of every file and the CRC of every piece of it

A checkpoint is written to `NAME.tmp-STEP` beside it, brought to disk, and renamed. Where one lies already, that one is
first moved to `NAME.tmp-replaced`, and removed at last; a crash between the two renames leaves it there, where `find`
looks. So at any moment the new one or the one before is whole, and a half-written one has no name that is looked at.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from shardc.ir.diagnostic import Diagnostic, ShardcError, did_you_mean, error

FORMAT, VERSION = "shardc-checkpoint", 1
MANIFEST, METADATA = "shardc.json", ".metadata"
BLOCK = 1 << 20


class Piece(NamedTuple):
    """A stretch of a file, and the tensor that it holds a part of."""

    file: str
    offset: int
    length: int
    tensor: str


@dataclass(frozen=True)
class Stored:
    """What the manifest says of a tensor."""

    role: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """What makes a folder a checkpoint."""

    step: int
    seed: int
    mesh: str
    extra: dict[str, Any]
    tensors: dict[str, Stored]
    files: dict[str, int] = field(default_factory=dict[str, int])  # name -> bytes
    checks: dict[str, list[list[int]]] = field(default_factory=dict[str, list[list[int]]])  # name -> offset, bytes, CRC

    def write(self, folder: Path) -> None:
        body = asdict(self)
        data = {"format": FORMAT, "version": VERSION, "crc32": _crc_of(body), "body": body}
        with (folder / MANIFEST).open("w", encoding="utf-8") as file:
            json.dump(data, file)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest, where all that it lists is there in full. Contents are checked as they are needed."""
        try:
            data = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            version, body = data["version"], data["body"]
            intact = data["format"] == FORMAT and (version != VERSION or data["crc32"] == _crc_of(body))
        except OSError as failure:
            raise error("SC408", f"cannot read {folder / MANIFEST}: {failure.strerror}") from failure
        except (ValueError, KeyError, TypeError):
            raise _damaged(folder, f"{MANIFEST} is cut short or altered") from None
        if not intact:
            raise _damaged(folder, f"{MANIFEST} is altered")
        if version != VERSION:
            message = f"the checkpoint {folder} has version {version}, this shardc reads {VERSION}"
            raise error("SC403", message, hint="load it with the shardc that wrote it, and save it anew")
        tensors = {name: Stored(one["role"], tuple(one["aliases"])) for name, one in body["tensors"].items()}
        manifest = cls(**(body | {"tensors": tensors}))
        for name, size in manifest.files.items():
            found = (folder / name).stat().st_size if (folder / name).is_file() else None
            if found != size:
                what = "is missing" if found is None else f"has {found} bytes, not the {size} that were written"
                raise _damaged(folder, f"{name} {what}")
        manifest.verify(folder, [Piece(METADATA, 0, manifest.files[METADATA], "the index of all tensors")])
        return manifest

    def verify(self, folder: Path, pieces: Iterable[Piece]) -> None:
        """Raise SC405 unless all of these pieces are what was written. All damage is listed."""
        known = {(name, at): (length, crc) for name, rows in self.checks.items() for at, length, crc in rows}
        by_file: dict[str, list[Piece]] = {}
        for piece in sorted(set(pieces)):
            by_file.setdefault(piece.file, []).append(piece)
        damaged: list[str] = []
        for name, wanted in by_file.items():
            with (folder / name).open("rb") as file:
                for piece in wanted:
                    if known.get((name, piece.offset)) != (piece.length, crc_of(file, piece.offset, piece.length)):
                        damaged.append(f"{name} is altered, in {piece.tensor}")
        if damaged:
            raise _damaged(folder, *damaged)


def crc_of(file: BinaryIO, offset: int, length: int) -> int:
    file.seek(offset)
    crc = 0
    while length > 0 and (block := file.read(min(BLOCK, length))):
        crc = zlib.crc32(block, crc)
        length -= len(block)
    return crc


def find(path: Path) -> Path:
    """The folder of the checkpoint that goes by `path`: itself, or the one that was being replaced."""
    for folder in (path, _replaced(path)):
        if (folder / MANIFEST).is_file():
            return folder
    if path.is_dir() and any(path.iterdir()):
        if (path / METADATA).is_file():
            hint = "read another program's with torch.distributed.checkpoint, and pass the tensors to launch(state=...)"
            raise error("SC405", f"the checkpoint {path} is not shardc's, or not whole: no {MANIFEST}", hint=hint)
        inside = [one.name for one in path.iterdir() if (one / MANIFEST).is_file()]
        hint = f"in it are the checkpoints {', '.join(sorted(inside))}" if inside else None
        raise error("SC407", f"{path} is no checkpoint: it has no {MANIFEST}", hint=hint)
    beside = [one.name for one in path.parent.iterdir() if (one / MANIFEST).is_file()] if path.parent.is_dir() else []
    raise error(
        "SC407", f"there is no checkpoint at {path}", hint=did_you_mean(path.name, beside, "checkpoints beside it")
    )


def begin(path: Path, step: int) -> Path:
    """An empty folder to write in. What crashed saves have left is tidied; what is no checkpoint is not touched."""
    if path.exists() and not (path / METADATA).is_file() and not (path.is_dir() and not any(path.iterdir())):
        hint = "give the path of a folder of its own; one that is there already is replaced, if it is a checkpoint"
        raise error("SC408", f"{path} exists, and is no checkpoint: it is not replaced", hint=hint)
    if not path.exists() and _replaced(path).exists():
        os.rename(_replaced(path), path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for one in path.parent.iterdir():
        if re.fullmatch(re.escape(path.name) + r"\.tmp-\d+", one.name):
            shutil.rmtree(one)
    folder = temporary(path, step)
    folder.mkdir()
    return folder


def temporary(path: Path, step: int) -> Path:
    return path.with_name(f"{path.name}.tmp-{step}")


def publish(folder: Path, path: Path) -> None:
    """Let a folder that is complete take its place."""
    sync(folder)
    replaced = _replaced(path)
    shutil.rmtree(replaced, ignore_errors=True)  # left where a save was killed after its renames
    if path.exists():
        os.rename(path, replaced)
    os.rename(folder, path)
    sync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def sync(folder: Path) -> None:
    """Bring a folder's names to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replaced(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-replaced")


def _crc_of(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _damaged(folder: Path, *what: str) -> ShardcError:
    hint = "load an earlier checkpoint"
    return ShardcError(*[Diagnostic("SC405", f"the checkpoint {folder} is damaged: {one}", hint=hint) for one in what])
