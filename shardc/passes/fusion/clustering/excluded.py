"""Calls that are not fused, by the patterns of a plan's `fuse: {exclude: [...]}`.

tanh, aten.tanh.default      every call of an op
**.mlp.act                   a module: the calls of it and of its submodules, in backward too
h.0.mlp.act.tanh             a value
cross_entropy                a template: the generated kernel is used instead
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import fx

from kernels_triton.match.table import NAMES
from shardc.ir.annotation import Annotation
from shardc.ir.diagnostic import Diagnostic, ShardcError, nearest
from shardc.ir.graph import Graph, info, op_name, results
from shardc.ir.placement import P


def excluded(graph: Graph, patterns: Collection[str]) -> frozenset[str]:
    """The patterns, and the names of the calls that they match."""
    annotations = [Annotation(pattern, P()) for pattern in patterns]
    names = set(patterns)
    for node in graph.calls() if annotations else ():
        if any(annotation.matches(name) for name in _names(node) for annotation in annotations):
            names.add(info(node).name)
    return frozenset(names)


def check_excluded(graph: Graph, annotations: Sequence[Annotation]) -> None:
    """Raise ShardcError (SC202) for a pattern that matches nothing in the graph."""
    if not annotations:
        return
    names = dict.fromkeys(name for node in graph.calls() for name in _names(node))
    names |= dict.fromkeys([*NAMES, *(f"shardc.{name}" for name in NAMES)])
    diagnostics: list[Diagnostic] = []
    for annotation in annotations:
        if not any(annotation.matches(name) for name in names):
            message = f"'{annotation.pattern}' of what is not fused matches no op, module or value"
            hint = _hint(annotation.pattern, names)
            diagnostics.append(Diagnostic("SC202", message, location=annotation.origin, hint=hint))
    if diagnostics:
        raise ShardcError(*diagnostics)


def _hint(pattern: str, names: Iterable[str]) -> str:
    anywhere = Annotation(f"**.{pattern}", P())
    deeper = next((name for name in names if anywhere.matches(name)), None)
    if deeper is not None:
        return f"write '{anywhere.pattern}': it matches {deeper}"
    near = nearest(pattern, names)
    if near:
        return "did you mean " + " or ".join(f"'{name}'" for name in near) + "?"
    return "name an op (tanh), a module (transformer.h.0.mlp.act), or a value that `shardc compile` prints"


def _names(node: fx.Node) -> Iterator[str]:
    """The names by which a pattern can match a call."""
    about = info(node)
    yield op_name(node.target)
    yield str(node.target)
    yield about.name
    yield from (info(value).name for value in results(node) if value is not None)
    parts = about.fqn.split(".") if about.fqn else []
    yield from (".".join(parts[: i + 1]) for i in range(len(parts)))
