"""A graph that is read from plain data when somebody first asks for anything of it.

What program files lack of a graph, and later compiles, `verify` and `explain` read, comes beside: which values are the
gradients that the optimizer consumes, and how inputs are stored.

A program of a cache is needed whole by few: a rank runs the body, and never reads the graph of the single device.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from shardc.ir.diagnostic import Diagnostic
from shardc.ir.gc_pause import gc_paused
from shardc.ir.graph import Graph, info
from shardc.ir.plain import Plain, graph_from_plain

_LOCK = threading.RLock()


def beside(graph: Graph) -> Plain:
    """What `graph_to_plain` leaves out, by the names of values."""
    alive = set(graph.fx.nodes)
    return {
        "gradients": {name: info(node).name for name, node in graph.gradients.items() if node in alive},
        "stored": {info(node).name: [list(axes) for axes in p] for node, p in graph.stored.items() if node in alive},
    }


class LazyGraph(Graph):
    """Becomes a `Graph` at the first attribute that is read. The data is trusted: whoever has it knows its checksum."""

    def __init__(self, plain: Plain, more: Plain, diagnostics: Sequence[Diagnostic] = ()) -> None:
        vars(self).update(_plain=plain, _more=more, _diagnostics=diagnostics)

    def __getattr__(self, name: str) -> Any:  # of what is not there yet
        with _LOCK:
            if "_plain" in vars(self):
                with gc_paused():
                    graph = graph_from_plain(vars(self)["_plain"])
                graph.diagnostics = list(vars(self)["_diagnostics"])
                more, nodes = vars(self)["_more"], {info(n).name: n for n in graph.fx.nodes if n.op != "output"}
                graph.gradients = {name: nodes[value] for name, value in more["gradients"].items()}
                graph.stored = {nodes[name]: tuple(map(tuple, axes)) for name, axes in more["stored"].items()}
                vars(self).clear()
                vars(self).update(vars(graph))
                self.__class__ = Graph  # type: ignore[assignment]
        return object.__getattribute__(self, name)
