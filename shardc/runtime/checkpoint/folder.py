"""A checkpoint's folder: what lies in it, how it replaces the one before, and how damage is found.

    __0_0.distcp ...   the tensors, as torch.distributed.checkpoint writes them, a file a rank
    .metadata          its index, also as it writes it
    shardc.json        written last: step, seed, roles, the size of every file and the CRC of every piece of it

A checkpoint is written to `NAME.tmp-STEP-JOB` beside it, brought to disk, and renamed. Where one lies already, that
one is first moved to `NAME.tmp-replaced`, and removed at last. So at any moment the new one or the one before is whole,
and `find` alone says which is the newest that is. Where NAME is a symbolic link, all this is done to what it leads to.

A folder for `transformers` is replaced in the same way, but has no manifest that tells a whole draft from a begun one:
of what a kill between the two renames leaves, `find_model` takes the one before.
"""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from shardc.ir.diagnostic import ShardcError, did_you_mean, error
from shardc.runtime.checkpoint.manifest import MANIFEST, METADATA, Manifest

JOB = ("TORCHELASTIC_RUN_ID", "MASTER_PORT")  # equal on all ranks: an agent that came back counts restarts by itself


def place_of(path: str | Path) -> Path:
    """The absolute path of a folder that the user named, with all symbolic links followed: a link stays as it is.

    Raises ShardcError (SC408) for what names no folder.
    """
    folder: Path | None = None
    problem: str | None = None
    try:
        named = Path(path).absolute()
    except TypeError:
        problem = f"is a {type(path).__name__}"
    else:
        if "\0" in str(named):
            problem = "holds a NUL byte"
        else:
            folder = Path(os.path.realpath(named))
            if os.path.islink(folder):
                problem = "is a symbolic link that leads back to itself"
            elif not folder.name:
                problem = "is the root of all files"
    if folder is None or problem is not None:
        raise error(
            "SC408", f"the path {path!r} of a checkpoint {problem}", hint="give the path of a folder: 'out/run'"
        )
    return folder


def find(path: Path) -> Path:
    """The folder of the newest whole checkpoint that goes by `path`; every reader of one asks here.

    It may lie beside `path`: a crash between the two renames of a save, or before them, leaves it there. Raises
    ShardcError: SC407 where there is none, SC405 where what there is is no checkpoint of shardc's or is damaged.
    """
    damaged: ShardcError | None = None
    for folder in _candidates(path):
        try:
            Manifest.read(folder)
        except ShardcError as failure:
            # One that was begun and is not whole is only what a crash left of a save: it was never a checkpoint.
            damaged = damaged or (failure if folder in (path, _replaced(path)) else None)
        else:
            return folder
    if damaged is not None:
        raise damaged
    if path.is_dir() and any(path.iterdir()):
        if (path / METADATA).is_file():
            hint = "read another program's with torch.distributed.checkpoint, and pass the tensors to launch(state=...)"
            raise error("SC405", f"the checkpoint {path} is not shardc's, or not whole: no {MANIFEST}", hint=hint)
        nested = [folder.name for folder in path.iterdir() if (folder / MANIFEST).is_file()]
        hint = f"in it are the checkpoints {', '.join(sorted(nested))}" if nested else None
        raise error("SC407", f"{path} is no checkpoint: it has no {MANIFEST}", hint=hint)
    others = path.parent.iterdir() if path.parent.is_dir() else ()
    siblings = [other.name for other in others if (other / MANIFEST).is_file()]
    raise error(
        "SC407", f"there is no checkpoint at {path}", hint=did_you_mean(path.name, siblings, "checkpoints beside it")
    )


def find_model(path: Path) -> Path:
    """The folder of the newest model that goes by `path`, which may name a file too; every reader of one asks here.

    A kill between the two renames of an export leaves the one before beside `path`, and nothing at `path`.
    """
    if path.exists() or "\0" in str(path):
        return path
    replaced = _replaced(Path(os.path.realpath(path)))
    return replaced if replaced.is_dir() else path


def present(path: Path) -> bool:
    """Whether `path` has a checkpoint to resume from: a whole one, or something that `find` refuses."""
    try:
        find(path)
    except ShardcError as failure:
        return failure.code != "SC407" or (path.exists() and not _is_empty(path))
    return True


def begin(path: Path, step: int) -> Path:
    """An empty folder to write in. Leftovers of crashed saves are removed; other files are not touched."""
    if path.exists() and not (path / METADATA).is_file() and not _is_empty(path):
        hint = "give the path of a folder of its own; one that is there already is replaced, if it is a checkpoint"
        raise error("SC408", f"{path} exists, and is no checkpoint: it is not replaced", hint=hint)
    path.parent.mkdir(parents=True, exist_ok=True)
    _recover(path)
    for draft in _begun(path):
        shutil.rmtree(draft)
    folder = temporary(path, step)
    folder.mkdir()
    return folder


def begin_export(path: Path) -> Path:
    """An empty folder to write a model in, for `publish`. Leftovers of crashed exports are removed."""
    if path.exists() and not _is_empty(path) and not (path / "config.json").is_file():
        hint = "give the path of a folder of its own; one that is there already is replaced, if it holds a model"
        raise error("SC408", f"{path} exists, and holds no model: it is not replaced", hint=hint)
    path.parent.mkdir(parents=True, exist_ok=True)
    newest = find_model(path)
    if newest != path:
        os.rename(newest, path)
    for draft in _begun(path):
        _unprotect(draft)
        shutil.rmtree(draft)
    folder = temporary(path, 0)
    folder.mkdir()
    return folder


def temporary(path: Path, step: int) -> Path:
    """The folder that a save writes in. All ranks of a job use one name; each job uses another name."""
    job = ":".join(os.environ[name] for name in JOB if name in os.environ) or str(os.getpid())
    return path.with_name(f"{path.name}.tmp-{step}-{zlib.crc32(job.encode()):08x}")


def discard(folder: Path) -> None:
    """Remove the incomplete folder of a failed save. A whole one stays, as the newest that `find` knows."""
    try:
        Manifest.read(folder)
    except ShardcError:
        shutil.rmtree(folder, ignore_errors=True)


class NotMovedBackError(OSError):
    """A folder could not take its place, nor the one before have it again. The message says where both lie."""


def publish(folder: Path, path: Path) -> None:
    """Move a complete folder to its place. What lay there lies there again if that fails.

    Raises NotMovedBackError, and both folders stay beside their place, if it cannot be moved back either.
    """
    sync(folder)
    replaced = _replaced(path)
    replaces = path.exists()
    if replaces:
        _remove(replaced)  # left where a save was killed after its renames
        os.rename(path, replaced)
    try:
        os.rename(folder, path)
    except OSError as failure:
        if replaces:
            _move_back(folder, path, failure)
        raise
    sync(path.parent)
    _remove(replaced)


def sync(folder: Path) -> None:
    """Bring a folder's names to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _move_back(folder: Path, path: Path, failure: OSError) -> None:
    replaced = _replaced(path)
    try:
        os.rename(replaced, path)
    except OSError:
        lie = f"the new one lies at {folder}, the one before at {replaced}: rename one of them to {path}"
        raise NotMovedBackError(f"{failure}; {lie}") from failure


def _remove(folder: Path) -> None:
    """Remove a folder, or a link: shardc 0.1 renamed a link that the user named."""
    if folder.is_symlink():
        folder.unlink()
    else:
        _unprotect(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _unprotect(folder: Path) -> None:
    """Let read-only folders be emptied: an export keeps those that the user has beside the weights."""
    for inner, _, _ in os.walk(folder):
        if not os.access(inner, os.W_OK):
            with suppress(OSError):
                os.chmod(inner, 0o700)


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _candidates(path: Path) -> Iterator[Path]:
    """Where a whole checkpoint may lie, the newest first: its manifest is written last, and the other two then move."""
    return (folder for folder in (*_begun(path), path, _replaced(path)) if (folder / MANIFEST).is_file())


def _begun(path: Path) -> list[Path]:
    pattern = re.compile(re.escape(path.name) + r"\.tmp-\d+(-[0-9a-f]{8})?")
    return (
        [sibling for sibling in path.parent.iterdir() if pattern.fullmatch(sibling.name)]
        if path.parent.is_dir()
        else []
    )


def _recover(path: Path) -> None:
    """Rename the newest whole checkpoint to `path` if a crash left it under another name."""
    try:
        newest = find(path)
    except ShardcError:
        return
    if newest == _replaced(path):
        shutil.rmtree(path, ignore_errors=True)
        os.rename(newest, path)
    elif newest != path:
        publish(newest, path)


def _replaced(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-replaced")
