"""What stays calls, by the patterns of a plan's `fuse: {exclude: [...]}`.

tanh, aten.tanh.default      an op, whoever calls it
**.mlp.act                   the module: what it and the modules in it compute, in backward, too
h.0.mlp.act.tanh             a value
cross_entropy                a template: a generated kernel stays in its place
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import fx

from kernels_triton.templates.table import NAMES
from shardc.ir.annotation import Annotation
from shardc.ir.diagnostic import Diagnostic, ShardcError, nearest
from shardc.ir.graph import Graph, info, op_name, results
from shardc.ir.placement import P


def excluded(graph: Graph, patterns: Collection[str]) -> frozenset[str]:
    """The patterns, and by name the values of the calls that they stand for."""
    asked = [Annotation(pattern, P()) for pattern in patterns]
    found = set(patterns)
    for node in graph.calls() if asked else ():
        if any(one.matches(name) for name in _names(node) for one in asked):
            found.add(info(node).name)
    return frozenset(found)


def check_excluded(graph: Graph, asked: Sequence[Annotation]) -> None:
    """Raise ShardcError (SC202) for a pattern that nothing of the graph is called by."""
    if not asked:
        return
    known = dict.fromkeys(name for node in graph.calls() for name in _names(node))
    known |= dict.fromkeys([*NAMES, *(f"shardc.{name}" for name in NAMES)])
    found: list[Diagnostic] = []
    for one in asked:
        if not any(one.matches(name) for name in known):
            message = f"'{one.pattern}' of what is not fused matches no op, module or value"
            found.append(Diagnostic("SC202", message, location=one.origin, hint=_hint(one.pattern, known)))
    if found:
        raise ShardcError(*found)


def _hint(pattern: str, known: Iterable[str]) -> str:
    anywhere = Annotation(f"**.{pattern}", P())
    deeper = next((name for name in known if anywhere.matches(name)), None)
    if deeper is not None:
        return f"write '{anywhere.pattern}': it matches {deeper}"
    near = nearest(pattern, known)
    if near:
        return "did you mean " + " or ".join(f"'{name}'" for name in near) + "?"
    return "name an op (tanh), a module (transformer.h.0.mlp.act), or a value that `shardc compile` prints"


def _names(node: fx.Node) -> Iterator[str]:
    """What a call is known by."""
    about = info(node)
    yield op_name(node.target)
    yield str(node.target)
    yield about.name
    yield from (info(value).name for value in results(node) if value is not None)
    parts = about.fqn.split(".") if about.fqn else []
    yield from (".".join(parts[: i + 1]) for i in range(len(parts)))
