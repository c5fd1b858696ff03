"""The line of the user's code that called into this package: where a plan was written, and what a warning is about."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from pathlib import Path
from types import FrameType

PASSED_OVER = (str(Path(__file__).parents[1]), contextlib.__file__)  # and what decorates functions of the package


def _callers_frame() -> tuple[FrameType | None, int]:
    """The first frame outside of the package, and how many are inside, from the caller of this function's caller."""
    frame, depth = inspect.currentframe(), -1
    while frame is not None and frame.f_code.co_filename.startswith(PASSED_OVER):
        frame, depth = frame.f_back, depth + 1
    return frame, depth


def caller() -> str | None:
    """`train.py:12`; None where nothing but the package is on the stack."""
    frame, _ = _callers_frame()
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else None


def warn(message: str) -> None:
    """A UserWarning at the line of the user's code."""
    _, depth = _callers_frame()
    warnings.warn(message, stacklevel=depth + 1)
