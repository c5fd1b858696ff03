"""Text and plain data are faithful: what is read back prints the same, and means the same."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import fx

from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import Graph, Port, info, type_of, update
from shardc.ir.parse import parse
from shardc.ir.plain import graph_from_plain, graph_to_plain
from shardc.ir.schema import given as given_arguments
from shardc.ir.text import format_argument, print_graph
from tests.handmade import MESH, Builder, mlp
from tests.ir.grown import graphs

aten = torch.ops.aten


def meaning(graph: Graph) -> list[Any]:
    """What a text must keep: ops, arguments that are no default, types, phases, assignments, ports."""
    calls: list[Any] = [graph.name, graph.mesh, graph.inputs, graph.outputs]
    calls += [(info(v).name, type_of(v), info(v).phase, info(v).constant) for v in graph.placeholders]
    for node in graph.calls():
        about = info(node)
        arguments = node.target._schema.arguments  # type: ignore[union-attr]
        defaults = {a.name: format_argument(a.default_value) for a in arguments if a.has_default_value()}
        said = {k: format_argument(v) for k, v in given_arguments(node).items() if not isinstance(v, torch.device)}
        said = {k: v for k, v in said.items() if defaults.get(k) != v}
        items = {u.args[1]: (info(u).name, info(u).type) for u in node.users if u.target is operator.getitem}
        calls.append((node.target, said, about.type, about.results, items, about.phase, about.constant))
        calls.append((about.assignment, about.passes, about.fallback))
    return [*calls, [info(v).name for v in graph.output_values]]


@given(graphs())
def test_text_round_trip(graph: Graph) -> None:
    text = print_graph(graph, comments=False)
    read = parse(text)
    assert print_graph(read, comments=False) == text
    assert meaning(read) == meaning(graph)
    read.fx.lint()
    assert print_graph(parse(print_graph(graph)), comments=False) == text  # comments are the reader's alone


@given(graphs())
def test_plain_round_trip(graph: Graph) -> None:
    data = graph_to_plain(graph)
    read = graph_from_plain(data)
    assert graph_to_plain(read) == data
    assert print_graph(read) == print_graph(graph)
    assert [info(n) for n in nodes(read)] == [info(n) for n in nodes(graph)]
    assert (read.inputs, read.outputs, read.mesh, read.name) == (graph.inputs, graph.outputs, graph.mesh, graph.name)
    assert {k: info(v).name for k, v in read.activations.items()} == {
        k: info(v).name for k, v in graph.activations.items()
    }


def nodes(graph: Graph) -> list[fx.Node]:
    return [node for node in graph.fx.nodes if node.op != "output"]


def test_golden(golden: Callable[[str, str], None]) -> None:
    graph = mlp()
    w1, *rest = graph.inputs[1:]
    graph.inputs = (graph.inputs[0], Port("param", w1.name, ("head.weight", "tied"), trainable=False), *rest)
    golden("text/mlp.txt", print_graph(graph))


def test_golden_of_every_construct(golden: Callable[[str, str], None]) -> None:
    b = Builder(MESH)
    x = b.input("x", "f32[8@dp, 32]", "input")
    norm = b.call("h.0.ln.native_layer_norm", None, aten.native_layer_norm.default, x, [32], None, None, 1e-05)
    update(norm, results=tuple(b.type(t).replicated() for t in ("f32[8, 32]", "f32[8, 1]", "f32[8, 1]")))
    items = [
        b.call(f"h.0.ln.native_layer_norm.{i}", t, operator.getitem, norm, i)
        for i, t in ((0, "f32[8@dp, 32]"), (2, "f32[8@dp, 1]"))
    ]
    mask = b.call("mask", "bool[8, 32]", aten.ones.default, [8, 32], dtype=torch.bool, device=torch.device("cpu"))
    update(mask, constant=True)
    y = b.call("h.0.where", "f32[8@dp, 32]", aten.where.self, mask, items[0], items[1])
    update(y, assignment=(("~1", ("dp",)), ("~0", ())), passes=("tp",), fallback=(("tp", "~0"),))
    s = b.call("odd name", "f32[8@dp]", aten.sum.dim_IntList, y, [1], True, phase="bwd")
    b.output("output", "out", s)
    graph = b.graph()
    text = print_graph(graph, comments=False)
    golden("text/constructs.txt", text)
    assert meaning(parse(text)) == meaning(graph)


def test_names_tell_modules_and_calls() -> None:
    text = """graph @step mesh(dp=2) {
      %x = input "x" : f32[8, 4]
      %h.0.ln.0, _, _ = native_layer_norm(%x, [4], None, None, 1e-5) : f32[8, 4], f32[8, 1], f32[8, 1]
    bwd:
      %d.h.0.relu = relu(%h.0.ln.0) : f32[8, 4]
      return output "y" = %d.h.0.relu }"""
    graph = parse(text)
    assert [info(n).name for n in graph.calls()] == ["h.0.ln", "d.h.0.relu"]
    assert [info(n).fqn for n in graph.calls()] == ["h.0", "h.0"]
    assert [info(n).phase for n in graph.calls()] == ["fwd", "bwd"]
    assert next(iter(graph.calls())).args[1:] == ([4], None, None, 1e-5)


def body(line: str, head: str = 'graph @step mesh(dp=2, tp=2) {\n  %x = input "x" : f32[8@dp, 4]') -> str:
    return f"{head}\n  {line}\n  return\n}}"


ERRORS = {
    "no_graph": "grph @step mesh(dp=2) {",
    "bad_mesh": body("", "graph @step mesh(dp=2, dp=2) {"),
    "cut_short": 'graph @step mesh(dp=2) {\n  %x = input "x" : f32[8',
    "no_return": 'graph @step mesh(dp=2) {\n  %x = input "x" : f32[8]\n}',
    "unknown_value": body("%y = relu(%xx) : f32[8@dp, 4]"),
    "defined_twice": body("%x = relu(%x) : f32[8@dp, 4]"),
    "unknown_op": body("%y = rleu(%x) : f32[8@dp, 4]"),
    "foreign_op": body('%y = os.system(["rm"]) : f32[8@dp, 4]'),
    "unknown_role": body('%y = parm "w" : f32[8]'),
    "missing_argument": body("%y = mm(%x) : f32[8@dp, 4]"),
    "unknown_argument": body("%y = relu(%x, inplace=True) : f32[8@dp, 4]"),
    "argument_twice": body("%y = sum.dim_IntList(%x, [0], dim=[1]) : f32[8@dp, 4]"),
    "position_after_name": body("%y = sum.dim_IntList(%x, dim=[1], True) : f32[8@dp, 4]"),
    "bad_word": body("%y = sum.dim_IntList(%x, [1], true) : f32[8@dp, 4]"),
    "no_comma": body("%y = mm(%x %x) : f32[8@dp, 4]"),
    "bad_dtype": body("%y = relu(%x) : float32[8@dp, 4]"),
    "bad_type": body("%y = relu(%x) : f32[8@dp, 4x2]"),
    "loose_atoms": body("%y = relu(%x) : f32[8@dp, 2 2]"),
    "result_count": body("%y, %z = relu(%x) : f32[8@dp, 4], f32[8]"),
    "type_count": body("%y, %z = topk(%x, 2) : f32[8@dp, 2]"),
    "bad_string": body('%y = gelu(%x, approximate="\\q") : f32[8@dp, 4]'),
    "bad_assignment": body("%y = relu(%x) {k = tp} : f32[8@dp, 4]"),
    "after_the_end": body("") + " graph",
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str, golden: Callable[[str, str], None]) -> None:
    with pytest.raises(ShardcError) as caught:
        parse(ERRORS[name], "step.txt")
    assert caught.value.code == "SC404"
    golden(f"text_errors/{name}.txt", str(caught.value))


@settings(max_examples=30)
@given(graphs())
def test_damaged_text_never_crashes(graph: Graph) -> None:
    text = print_graph(graph, comments=False)
    for at in range(0, len(text) - 2, 1 + len(text) // 12):
        for damaged in (text[:at], text[:at] + "?" + text[at + 1 :], text[:at] + text[at + 1 :]):
            try:
                parse(damaged)
            except ShardcError as refused:
                if refused.code != "SC404":
                    raise
