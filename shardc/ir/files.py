"""A file of text, at a path that the user chose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardc.ir.diagnostic import ShardcError, error, suggest


def write_text(path: str | Path, text: str, suffixes: Sequence[str] = ()) -> None:
    """Write text of a form that one of these suffixes stands for; a path without a suffix may hold any.

    Raises ShardcError (SC409) for a path with another, and for one that cannot be written.
    """
    target = Path(path)
    check_suffix(target, suffixes)
    try:
        target.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as cannot:  # ValueError: a path with a NUL byte
        raise unwritable(path, cannot) from None


def unwritable(path: str | Path, cannot: OSError | ValueError) -> ShardcError:
    hint = "give the path of a file, in a folder that is there"
    return error("SC409", f"cannot write {path}: {getattr(cannot, 'strerror', None) or cannot}", hint=hint)


def check_suffix(path: Path, suffixes: Sequence[str]) -> None:
    """Raise ShardcError (SC409) where a path's suffix stands for something else than what is written."""
    if suffixes and path.suffix not in ("", *suffixes):
        likeliest = suggest(path.suffix, suffixes) or suffixes[0]
        message = f"'{path.suffix}' is no suffix of what is written to {path}: it is {' or '.join(suffixes)}"
        raise error("SC409", message, hint=f"write {path.with_suffix(likeliest)}")
