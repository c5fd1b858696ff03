"""Sums over microbatches as they are without `passes/join_sums.py`."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from unittest.mock import patch

from shardc.passes.join_sums import JoinSums


@contextmanager
def sums_apart() -> Generator[None]:
    """Each sum has a call of its own."""
    with patch.object(JoinSums, "run", lambda _, graph: graph):
        yield
