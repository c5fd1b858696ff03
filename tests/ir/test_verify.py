"""Each structural check finds what it is for, on a sound graph damaged in one place."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import fx

from shardc.ir.graph import Graph, Port, info, set_info, type_of, update
from shardc.ir.mesh import Mesh
from shardc.ir.parse import parse
from shardc.ir.types import Atom, TensorType
from shardc.ir.verify import formed, names_unique, ports_match, types_sound, violations
from tests.handmade import mlp
from tests.ir.grown import graphs

aten = torch.ops.aten
TEXT = """graph @step mesh(dp=2, tp=2) {
  %x = input "x" : f32[8@dp, 4]
  %w = param "w" aliases("v") : f32[4, 4]
  %y = mm(%x, %w) {m: dp} : f32[8@dp, 4]
  %top.0, %top.1 = topk(%y, k=2) : f32[8@dp, 2], i64[8@dp, 2]
  %z = sum.dim_IntList(%top.0, [1], keepdim=True) : f32[8@dp, 1]
  return output "z" = %z, grad "w" = %w
}"""


def node(graph: Graph, name: str) -> fx.Node:
    return graph.by_name(name)


def retype(name: str, text: str) -> Callable[[Graph], None]:
    return lambda graph: update(node(graph, name), type=TensorType.parse(text))


def set_args(name: str, *args: object) -> Callable[[Graph], None]:
    def change(graph: Graph) -> None:
        target = node(graph, name)
        target.args = tuple(node(graph, a[1:]) if isinstance(a, str) and a.startswith("%") else a for a in args)  # type: ignore[assignment]

    return change


def early_output(graph: Graph) -> None:
    with graph.fx.inserting_before(node(graph, "z")):
        graph.fx.create_node("output", "output", ((node(graph, "x"),),))


def use_before(graph: Graph) -> None:
    node(graph, "y").prepend(node(graph, "z"))  # moves z, which reads y, before it


def late_input(graph: Graph) -> None:
    node(graph, "y").append(node(graph, "x"))  # moves x behind y


def use_whole(graph: Graph) -> None:
    node(graph, "z").args = (node(graph, "top"), [1])


def second_getitem(graph: Graph) -> None:
    with graph.fx.inserting_before(node(graph, "z")):
        again = graph.fx.call_function(operator.getitem, (node(graph, "top"), 0))
    set_info(again, replace(info(node(graph, "top.0")), name="again"))


def foreign(graph: Graph) -> None:
    node(graph, "y").target = torch.mm


def inputs(*ports: Port) -> Callable[[Graph], None]:
    def change(graph: Graph) -> None:
        graph.inputs = ports

    return change


DAMAGE: dict[str, tuple[Callable[[Graph], None], str]] = {
    "axis in two dims": (retype("y", "f32[8@dp, 4@dp]"), "uses an axis twice"),
    "axis sharded and pending": (retype("y", "f32[8@dp, 4] |sum dp"), "uses an axis twice"),
    "axis the mesh lacks": (retype("y", "f32[8@pp, 4]"), "lacks: ['pp']"),
    "pending what": (retype("y", "f32[8, 4] |mean dp"), "is pending by ['mean']"),
    "atom of size 1": (
        lambda g: update(node(g, "y"), type=TensorType(torch.float32, ((Atom(8), Atom(1)), (Atom(4),)))),
        "has an atom of size 1",
    ),
    "assignment off the mesh": (lambda g: update(node(g, "y"), assignment=(("m", ("pp",)),)), "['pp']"),
    "assignment twice": (lambda g: update(node(g, "y"), assignment=(("m", ("dp",)), ("k", ("dp",)))), "an axis twice"),
    "name twice": (lambda g: update(node(g, "y"), name="x"), "the name 'x' is 2 nodes'"),
    "no name": (lambda g: update(node(g, "y"), name=""), "the name ''"),
    "port missing": (inputs(Port("input", "x")), "2 inputs have 1 ports"),
    "port role": (inputs(Port("input", "x"), Port("loss", "w")), "has the role 'loss'"),
    "port twice": (inputs(Port("param", "x", ("w",)), Port("param", "w")), "2 inputs are param 'w'"),
    "call without a type": (lambda g: update(node(g, "y"), type=None), "for mm"),
    "argument count": (set_args("y", "%x", "%w", 3), "are not those of"),
    "argument missing": (set_args("y", "%x"), "lacks 'mat2'"),
    "argument kind": (set_args("y", "%x", "w"), "the schema wants Tensor"),
    "tensor for a number": (set_args("top", "%y", "%w"), "the schema wants int"),
    "word for a list": (set_args("z", "%top.0", ["a"]), "the schema wants"),
    "used before defined": (use_before, "before it is defined"),
    "an output before the end": (early_output, "is an output before the end"),
    "an input after a call": (late_input, "is an input after a call"),
    "used whole": (use_whole, "uses top whole"),
    "a result of an input": (set_args("top.1", "%x", 1), "takes a result of x, a tensor"),
    "one result twice": (second_getitem, "a second time"),
    "result out of range": (set_args("top.1", "%top", 5), "takes result 5"),
    "result of another shape": (retype("top.0", "f32[8@dp, 3]"), "top declares f32[8, 2]"),
    "foreign op": (foreign, "no op of aten or shardc"),
    "no info": (lambda g: node(g, "y").meta.clear(), "has no ValueInfo"),
}


def test_sound_graphs_have_no_violations() -> None:
    for graph in (parse(TEXT), mlp(), mlp(sharded=False)):
        assert violations(graph) == []


@pytest.mark.parametrize("sound_before", [False, True])
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found(name: str, sound_before: bool) -> None:
    """In a graph that was found to be sound too, of which only what has changed since is looked at; and each time."""
    change, expected = DAMAGE[name]
    graph = parse(TEXT)
    if sound_before:
        assert violations(graph) == []
    change(graph)
    for _ in range(2):
        assert any(expected in line for line in violations(graph)), violations(graph)


def test_another_mesh_is_another_graph() -> None:
    graph = parse(TEXT)
    assert violations(graph) == []
    graph.mesh = Mesh.parse("pp=2")
    assert any("names axes that the mesh lacks" in line for line in violations(graph))


def test_an_erased_output_is_found() -> None:
    graph = parse(TEXT)
    graph.fx.erase_node(graph.output_node)
    assert formed(graph)


@given(graphs())
def test_grown_graphs_are_sound(graph: Graph) -> None:
    """They are drawn freely, but never with an axis twice in a value, a bad port or a name twice."""
    assert formed(graph) == names_unique(graph) == ports_match(graph) == []
    assert not [line for line in types_sound(graph) if "assignment" not in line]
    assert all(type_of(value) is not None for value in graph.values())
