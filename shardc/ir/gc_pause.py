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


def count_as_old() -> None:
    """What there is by now is old to the collector, which looks at young objects alone when it is asked to: those that
    are made from here on. Nothing is looked at for it. Where objects were set aside, all stays as it is."""
    if not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()  # into the oldest generation, wherever they came from


@contextmanager
def made_old() -> Generator[None]:
    """A context in which objects are made that live on. While the collector is paused, they are old to it afterwards,
    so that it does not look at them all when it runs again. It looks at what was made before, and frees the garbage."""
    paused = not gc.isenabled() and not gc.get_freeze_count()
    if paused:
        gc.collect(0)
    yield
    if paused:
        count_as_old()


@contextmanager
def all_objects_seen() -> Generator[None]:
    """A context in which `gc.get_objects` and `gc.get_referrers` know all objects: those too that the process has set
    aside by `gc.freeze`, as servers do before they fork. Afterwards they are set aside again, and with them what has
    been made since and is no garbage."""
    aside = gc.get_freeze_count() > 0
    gc.unfreeze()
    try:
        yield
    finally:
        if aside:
            gc.collect(1)  # what is young; those that were set aside are old
            gc.freeze()
