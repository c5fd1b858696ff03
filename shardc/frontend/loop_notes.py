"""Notes on loops over time that stay loops: where each is, and what keeps it from being one op.

    note[SC113 loop-unrolled]: the loop over 4096 steps is traced step by step: `if h.sum() > 0:` is no step of a scan
      --> model.py:11

A loop is noted only if its body indexes a tensor by the number of the step: others, as over layers, are no recurrence.
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import CodeType

from shardc.frontend.loop_values import UnrolledError
from shardc.frontend.provenance import place
from shardc.ir.diagnostic import Diagnostic

HERE = str(Path(__file__).parent)
HINT = "each step adds the nodes of its body; a body of tensor operations alone, which carries only tensors, is one op"
_notes: ContextVar[dict[str, Diagnostic] | None] = ContextVar("_notes", default=None)  # by the place of the loop


@contextmanager
def noting() -> Generator[dict[str, Diagnostic]]:
    """Meanwhile loops that stay loops are noted, each once."""
    notes: dict[str, Diagnostic] = {}
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def note_unrolled(step: CodeType, steps: int, problem: Exception) -> None:
    """Note a loop whose body, which became the function `step`, failed on stand-ins."""
    notes = _notes.get()
    if notes is None:
        return
    source, text = place(step.co_filename, step.co_firstlineno)
    message = f"the loop over {steps} steps is traced step by step: {_reason(step, problem)}"
    notes.setdefault(source, Diagnostic("SC113", message, "note", location=source, source_text=text, hint=HINT))


def _reason(step: CodeType, problem: Exception) -> str:
    if isinstance(problem, UnrolledError) and problem.why:
        return problem.why
    frames = [frame for frame in traceback.extract_tb(problem.__traceback__) if not frame.filename.startswith(HERE)]
    line = linecache.getline(frames[-1].filename, frames[-1].lineno or 0).strip() if frames else ""
    inner = next((frame for frame in reversed(frames) if frame.filename == step.co_filename), None)
    if inner is not None and inner.lineno:
        line = linecache.getline(inner.filename, inner.lineno).strip()
    if not isinstance(problem, UnrolledError):
        said = str(problem).strip().partition("\n")[0]
        return f"`{line}` fails on a stand-in for a tensor: {type(problem).__name__}: {said}"
    return f"`{line}` is no step of a scan" if line else "its body is no step of a scan"
