"""A graph that is read from plain data when somebody first asks for anything of it.

A program of a cache is needed whole by few: a rank runs the body, and never reads the graph of the single device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from shardc.ir.diagnostic import Diagnostic
from shardc.ir.gc_pause import gc_paused
from shardc.ir.graph import Graph
from shardc.ir.plain import Plain, graph_from_plain

_LOCK = threading.RLock()


class LazyGraph(Graph):
    """Becomes a `Graph` at the first attribute that is read. The data is trusted: whoever has it knows its checksum."""

    def __init__(self, plain: Callable[[], Plain], diagnostics: Sequence[Diagnostic] = ()) -> None:
        vars(self).update(_plain=plain, _diagnostics=diagnostics)

    def __getattr__(self, name: str) -> Any:  # of what is not there yet
        with _LOCK:
            if "_plain" in vars(self):
                with gc_paused():
                    graph = graph_from_plain(vars(self)["_plain"]())
                graph.diagnostics = list(vars(self)["_diagnostics"])
                vars(self).clear()
                vars(self).update(vars(graph))
                self.__class__ = Graph  # type: ignore[assignment]
        return object.__getattribute__(self, name)
