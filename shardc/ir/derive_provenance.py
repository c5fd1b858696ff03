"""Provenance of graphs that come without it: a graph's text, and program files of before the fields existed.

This is the only module that reads names. It decides as little as it can: a name alone is no proof, since a user's
module may be called `r`. What it takes for a recomputed call also has a forward call of the same op and name.

    bwd:  %r.fc.mm = mm(...)        and fwd has  %fc.mm = mm(...)      recomputed
    bwd:  %r.weight.all_gather      and fwd has no %weight.all_gather  a gather of the weight of a module r
"""

from __future__ import annotations

import operator
import re

from torch import fx

from shardc.ir.graph import Graph, Phase, info, op_name, operands, producer, update
from shardc.ir.provenance import Cause, Derivation, Requirement

_COUNTED = re.compile(r"_\d+$")  # what makes a name unique
_REQUIREMENT = re.compile(r'(?P<tensor>.+?) = "(?P<placement>[^"]*)"(?:   \((?P<location>.*)\))?')
_STATISTICS = re.compile(r"\.statistics(_\d+)?$")
_STORAGE = "storage over "


def module_of(name: str, phase: Phase) -> str:
    """The FQN of a call, or of a result of one, by its name in a text: `d.h.0.mlp.mm` in backward lies in h.0.mlp."""
    first, _, tail = name.partition(".")
    path = tail if phase == "bwd" and first == "d" else name
    return path.rpartition(".")[0]


def parameter_of_state(name: str) -> str:
    """The parameter that an optimizer's state belongs to: `fc.weight` of `fc.weight:exp_avg`; "" for none."""
    return name.rpartition(":")[0]


def derive_origins(graph: Graph) -> None:
    """Set the origin of recomputed calls, and of gathers that replace a softmax's all_reduce, as names and ops show."""
    node_of = {info(node).name: node for node in graph.fx.nodes if node.op != "output"}
    forward = {name: node for name, node in node_of.items() if info(node).phase == "fwd"}
    for node in graph.fx.nodes:
        if node.op != "call_function" or info(node).origin is not None:
            continue
        name, call = info(node).name, info(producer(node)[0])
        if node.target is operator.getitem and call.origin is not None and call.is_recomputed:
            # Forward may have no reader of this result.
            update(node, origin=Derivation("recomputed", f"{call.origin.of}.{node.args[1]}"), fqn=call.fqn)
            continue
        original = _original(name, node, forward) if info(node).phase == "bwd" else None
        if original is not None:
            update(node, origin=Derivation("recomputed", original), fqn=info(forward[original]).fqn)
        elif _gathers_statistics(node):
            of = re.sub(r"\.all_gather(?=$|_\d+$)", ".all_reduce", name)
            if of not in node_of:
                update(node, origin=Derivation("replacement", of))


def _original(name: str, node: fx.Node, forward: dict[str, fx.Node]) -> str | None:
    if not name.startswith("r."):
        return None
    names = (name[2:], _COUNTED.sub("", name[2:]))
    return next((of for of in names if of in forward and forward[of].target is node.target), None)


def _gathers_statistics(node: fx.Node) -> bool:
    """Is this the gather that `online_softmax` puts in the place of an all_reduce?"""
    return op_name(node.target) == "shardc.all_gather" and _STATISTICS.search(info(operands(node)[0]).name) is not None


def cause_of_text(text: str) -> Cause:
    """A cause in the text form of older files: `w = "-, tp"   (plan.yaml:9) <- fc.mm`. It prints as the same text."""
    requirement_text, arrow, through = text.partition(" <- ")
    cause = Cause(tuple(_requirement(part) for part in requirement_text.split("; ")), through if arrow else "")
    return cause if str(cause) == text else Cause((Requirement("text", text),))


def _requirement(text: str) -> Requirement:
    if text.startswith(_STORAGE):
        return Requirement("storage", placement=text.removeprefix(_STORAGE))
    match = _REQUIREMENT.fullmatch(text)
    if match is None:
        return Requirement("text", text)
    return Requirement("annotation", match["tensor"], match["placement"], match["location"] or "")
