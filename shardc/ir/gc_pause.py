"""Compiling and launching without the cyclic garbage collector, whose own a quarter of their time would be.

A graph is a hundred thousand objects that all live until the compile ends, and hardly one of them is in a cycle that is
left behind. The collector finds nothing, and looks at each of them again and again.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Generator[None]:
    """A context, or a decorator of a function; the collector then runs as it did before."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def earlier_objects_set_aside() -> Generator[None]:
    """A context, or a decorator of a function: a collection within it looks at objects that are made in it alone. Those
    that there were then count as old ones. Where a process has set objects aside itself, it changes nothing."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
