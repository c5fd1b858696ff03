"""Sums over microbatches as they are without `passes/join_sums.py`, and without what parts of pipelines do alike."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from unittest.mock import patch

from shardc.ir import account
from shardc.passes.join_sums import JoinSums
from shardc.runtime.execute import stage_code


@contextmanager
def sums_apart() -> Generator[None]:
    """Each sum has a call of its own."""
    with (
        patch.object(JoinSums, "run", lambda _, graph: graph),
        patch.object(account, "added_together", lambda *_: []),
        patch.object(stage_code, "added_together", lambda *_: []),
    ):
        yield
