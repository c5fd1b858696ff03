"""`compile --print-after` and `--diff`: graphs as passes leave them."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import typer

from shardc.ir.annotation import Annotation
from shardc.ir.diagnostic import did_you_mean, error
from shardc.ir.graph import Graph, info
from shardc.ir.placement import Placement
from shardc.ir.text import print_graph
from shardc.passes.base import Pass


@dataclass
class Printer:
    """Prints graphs after passes, or what passes changed, as they run.

    `before` has the text of each graph after the last pass over it, and that pass: the step's, and those of stages.
    """

    pass_names: tuple[str, ...]
    diff: bool
    module_filter: str | None
    seen: list[str] = field(default_factory=list[str])
    before: dict[str, tuple[str, list[str]]] = field(default_factory=dict[str, tuple[str, list[str]]])

    @property
    def used(self) -> bool:
        return bool(self.pass_names) or self.diff

    def watch(self, pass_: Pass, graph: Graph, _: float) -> None:
        chosen = pass_.name in self.pass_names or (self.diff and not self.pass_names)
        self.seen.append(pass_.name)
        if not self.used:
            return
        if self.diff:
            after = print_graph(graph, comments=False, keep=keep_only(self.module_filter)).splitlines()
            if chosen and graph.name in self.before:
                last, previous = self.before[graph.name]
                for line in difflib.unified_diff(previous, after, last, pass_.name, n=1, lineterm=""):
                    typer.echo(line)
            self.before[graph.name] = pass_.name, after
        elif chosen:
            typer.echo(f"# after {pass_.name}\n{print_graph(graph, keep=keep_only(self.module_filter))}")

    def check(self) -> None:
        """Every pass that was asked for did run."""
        for name in self.pass_names:
            if name not in self.seen:
                hint = did_you_mean(name, self.seen, "passes")
                raise error("SC105", f"--print-after: there is no pass '{name}'", hint=hint)


def keep_only(module_filter: str | None) -> Callable[[Any], bool] | None:
    if module_filter is None:
        return None
    pattern = Annotation(module_filter, Placement())
    return lambda node: pattern.matches(info(node).fqn)
