"""Origin and cause are fields: they survive copies, files, pickles and parts; what lacks them has them derived."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from shardc.ir.derive_provenance import cause_of_text, module_of
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import Graph, Phase, info, update
from shardc.ir.parse import parse
from shardc.ir.plain import graph_from_plain, graph_to_plain
from shardc.ir.provenance import NO_CAUSE, Cause, Derivation, Requirement
from shardc.ir.text import print_graph
from shardc.partition.extract_subgraph import extract_subgraph

WEIGHT = Requirement("annotation", "fc.weight", "-, tp", "plan.yaml:3")
INPUT = Requirement("annotation", "x", "dp")
STORAGE = Requirement("storage", placement="dp")

TEXT = """graph @step mesh(dp=2) {
  %x = input "x" : f32[4, 4]
  %w = param "r.weight" : f32[4, 4]
  %weight = param "weight" : f32[2@dp, 4]
  %weight.tanh = tanh(%weight) : f32[2@dp, 4]
  %r.fc.mm = mm(%x, %w) : f32[4, 4]
  %d.mm = mm(%x, %w) : f32[4, 4]
  %r.fc.ln.0, %r.fc.ln.1, _ = native_layer_norm(%r.fc.mm, [4], None, None, 1e-05)
    : f32[4, 4], f32[4, 1], f32[4, 1]
bwd:
  %r.r.fc.mm = mm(%x, %w) : f32[4, 4]
  %r.r.fc.mm_1 = mm(%x, %r.r.fc.mm) : f32[4, 4]
  %r.r.fc.ln.0, %r.r.fc.ln.1, %r.r.fc.ln.2 = native_layer_norm(%r.r.fc.mm_1, [4], None, None, 1e-05)
    : f32[4, 4], f32[4, 1], f32[4, 1]
  %r.weight = shardc.all_gather(%weight.tanh, axes=["dp"], atoms=[2, 4], pos=0, size=4, shape=[4, 4]) : f32[4, 4]
  %r.gone.mm = mm(%r.weight, %r.r.fc.ln.0) : f32[4, 4]
  return output "y" = %r.gone.mm, output "z" = %r.fc.ln.0, output "d" = %d.mm
}"""


def graph() -> Graph:
    made = parse(TEXT)
    update(made.by_name("r.fc.mm"), cause=Cause((WEIGHT, INPUT), "fc.mm"))
    update(made.by_name("r.weight"), cause=Cause((STORAGE,), others=2), origin=Derivation("bucket", "weight"))
    return made


def provenance(graph: Graph) -> dict[str, tuple[str, str, Cause, Derivation | None]]:
    infos = [info(node) for node in graph.fx.nodes if node.op != "output"]
    return {about.name: (about.fqn, about.layer, about.cause, about.origin) for about in infos}


# ---------------------------------------------------------------------- what survives
def test_it_survives_copies_files_and_pickles() -> None:
    expected = provenance(graph())
    assert expected["r.weight"][2:] == (Cause((STORAGE,), others=2), Derivation("bucket", "weight"))
    assert provenance(graph().copy()) == expected
    assert provenance(graph_from_plain(json.loads(json.dumps(graph_to_plain(graph()))))) == expected
    assert pickle.loads(pickle.dumps(expected)) == expected


def test_it_survives_a_part() -> None:
    whole = graph()
    calls = [node for node in whole.calls() if info(node).phase == "bwd"]
    part = extract_subgraph(whole, "part", calls, [(whole.outputs[0], whole.output_values[0])])
    expected = provenance(whole)
    assert all(found == expected[name] for name, found in provenance(part).items())


def test_text_says_no_more_than_before() -> None:
    assert print_graph(graph(), comments=False) == print_graph(parse(TEXT), comments=False)


# ---------------------------------------------------------------------- what is derived
def test_origins_of_a_text() -> None:
    found = {name: origin for name, (_, _, _, origin) in provenance(parse(TEXT)).items() if origin is not None}
    names = ("fc.mm", "fc.ln", "fc.ln.0", "fc.ln.1", "fc.ln.2")
    expected = {f"r.r.{name}": Derivation("recomputed", f"r.{name}") for name in names}
    # A forward module is called r, a gather in backward is of its weight, and of what repeats nothing the name lies.
    assert found == expected | {"r.r.fc.mm_1": Derivation("recomputed", "r.fc.mm")}


def test_modules_of_a_text() -> None:
    found = provenance(parse(TEXT))
    assert found["r.fc.mm"][0] == found["r.r.fc.mm"][0] == "r.fc"
    assert found["d.mm"][0] == "d", "the module d of forward, and no gradient"


@pytest.mark.parametrize(
    ("name", "phase", "module"),
    [("d.h.0.mm", "bwd", "h.0"), ("d.h.0.mm", "fwd", "d.h.0"), ("d.mm", "bwd", ""), ("h.0.mm", "fwd", "h.0")],
)
def test_module_of(name: str, phase: Phase, module: str) -> None:
    assert module_of(name, phase) == module


def before(plain: dict[str, Any]) -> dict[str, Any]:
    """A graph as files had it that knew no origins, and causes as text."""
    old = {key: value for key, value in plain.items() if key != "origins"}
    nodes = [dict(node) for node in plain["nodes"]]
    for node, kept in zip(nodes, graph_from_plain(plain).fx.nodes, strict=False):
        if "cause" in node:
            node["cause"] = str(info(kept).cause)
    return {**old, "nodes": nodes}


def test_a_file_of_before_loads() -> None:
    old = before(graph_to_plain(graph()))
    assert [node["cause"] for node in old["nodes"] if "cause" in node] == [
        'fc.weight = "-, tp"   (plan.yaml:3); x = "dp" <- fc.mm',
        "storage over dp, and 2 more",
    ]
    found, expected = provenance(graph_from_plain(old)), provenance(graph())
    assert found["r.fc.mm"] == expected["r.fc.mm"]
    assert found["r.r.fc.mm"] == expected["r.r.fc.mm"]
    assert str(found["r.weight"][2]) == str(expected["r.weight"][2])


@pytest.mark.parametrize(
    ("key", "value"),
    [("cause", [[["guess", "w", "-", ""]], "", 0]), ("cause", [[["annotation", "w", "!", ""]], "", 0]),
     ("cause", [[], "", -1]), ("cause", [[]]), ("cause", [[["annotation", "w"] * 3], "", 0])],
)  # fmt: skip
def test_false_causes_are_refused(key: str, value: Any) -> None:
    plain = graph_to_plain(graph())
    plain["nodes"][1][key] = value
    with pytest.raises(ShardcError, match="SC402"):
        graph_from_plain(plain)


@pytest.mark.parametrize("origin", [["guess", "w"], ["bucket"], ["bucket", 1], "bucket"])
def test_false_origins_are_refused(origin: Any) -> None:
    plain = graph_to_plain(graph())
    plain["origins"]["r.weight"] = origin
    with pytest.raises(ValueError, match=r"kind|text|list|unpack"):
        graph_from_plain(plain)


# ---------------------------------------------------------------------- causes
@pytest.mark.parametrize(
    ("cause", "text"),
    [
        (NO_CAUSE, ""),
        (Cause((WEIGHT,)), 'fc.weight = "-, tp"   (plan.yaml:3)'),
        (Cause((INPUT,), "h.0.mm"), 'x = "dp" <- h.0.mm'),
        (Cause((WEIGHT, STORAGE)), 'fc.weight = "-, tp"   (plan.yaml:3); storage over dp'),
    ],
)
def test_text_of_a_cause(cause: Cause, text: str) -> None:
    assert str(cause) == text
    assert bool(cause) == bool(text)
    assert not text or cause_of_text(text) == cause


@pytest.mark.parametrize(
    "text", ["because", 'a = "b" c', 'w = "dp"   (a (copy)/plan.yaml:3)', "storage over dp, and 2 more", " <- "]
)
def test_any_text_of_before_is_said_again(text: str) -> None:
    assert str(cause_of_text(text)) == text


def test_axes_that_a_requirement_names() -> None:
    assert WEIGHT.axes == ("tp",)
    assert STORAGE.axes == ("dp",)
    assert Requirement("annotation", "w", "3*tp, dp.pp").axes == ("tp", "dp", "pp")
    assert Requirement("text", 'w = "tp"').axes == ()


def test_causes_of_several() -> None:
    one, two = Cause((WEIGHT,)), Cause((INPUT, WEIGHT))
    assert Cause.joined([one, NO_CAUSE, two]) == Cause((WEIGHT, INPUT))
    assert Cause.of_bucket([NO_CAUSE, one, one, two]) == Cause((WEIGHT,), others=1)
    assert not Cause.of_bucket([NO_CAUSE])
