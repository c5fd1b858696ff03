"""What a page knows of a program: all of it, equal layers once, as data that nothing in a program's names can break."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import shardc
from shardc import Program
from shardc.page.content import PassRecorder, content
from shardc.page.render import frame, render


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return x.square().mean()


@cache
def program(layers: int = 4, pipeline: bool = False) -> Program:
    return compiled(layers, pipeline)


def compiled(layers: int, pipeline: bool, bucket: bool = True, **options: Any) -> Program:
    plan: dict[str, Any] = {"params": {"**.up.weight": "tp"}, "inputs": {"x": "dp"}, "bucket": bucket}
    mesh = "dp=2, tp=2"
    if pipeline:
        plan["pipeline"], mesh = {"microbatches": 4}, "pp=2, dp=2, tp=2"
    return shardc.compile(Model(layers), torch.randn(8, 8), mesh=mesh, plan=plan, **options)


@cache
def known(layers: int = 4, pipeline: bool = False, bucket: bool = True) -> dict[str, Any]:
    recorder = PassRecorder()
    of = compiled(layers, pipeline, bucket, watch=recorder.watch)
    return content(of, of.staged, recorder)


def lines(graph: dict[str, Any]) -> list[str]:
    return [line for segment in graph["segments"] for line in segment["lines"]]


def test_equal_layers_are_shown_once() -> None:
    """A bucket names all its members, of whatever layer."""
    sizes = [len(json.dumps(known(layers, bucket=False)["graphs"])) for layers in (4, 12)]
    assert sizes[1] < 1.1 * sizes[0]
    (graph,) = known(12, bucket=False)["graphs"]
    # The first layer reads what is no layer's, and the last one's result is read by the loss. Gradients of weights run
    # behind the collective of their own layer or of the next one.
    folded = [s for s in graph["segments"] if s["count"] > 1]
    assert sum(s["count"] >= 10 for s in folded) >= 4
    assert all(s["count"] >= 5 and s["layers"].startswith("h.") for s in folded)


def test_every_line_that_is_shown_has_its_facts() -> None:
    (graph,) = known()["graphs"]
    shown = [line for line in lines(graph) if line.startswith(("  %", "  _"))]
    defined = {name for line in shown for name in line.strip().partition(" = ")[0].split(", ") if name != "_"}
    assert defined == graph["values"].keys()
    assert all("test_content.py:" in value["source"] or not value["fqn"] for value in graph["values"].values())


def test_every_collective_of_a_program_is_an_edge_with_its_reason() -> None:
    of, (graph,) = program(1), known(1)["graphs"]
    collectives = {f"%{c.value}": c for c in of.collectives()}
    assert graph["edges"].keys() == collectives.keys()
    for name, edge in graph["edges"].items():
        c = collectives[name]
        assert (edge["axes"], edge["bytes"], edge["cause"]) == (list(c.axes), c.bytes_per_rank, c.cause)
        assert edge["why"], name
        assert of.collectives()[edge["number"]] == c
        assert {reason["why"] for reason in edge["why"]} == {trail.why for trail in of.explain(c.value).trails}  # type: ignore[union-attr]


def test_passes_add_up_to_the_graph() -> None:
    """What each pass changed, applied to what was before, is the graph that the program has."""
    passes = known()["passes"]
    assert passes[0]["name"] == "normalize"
    assert {"propagate", "insert_reshards", "localize", "fuse"} <= {p["name"] for p in passes}
    inserted = next(p for p in passes if p["name"] == "lower_reshards")
    assert inserted["added"] > 0
    assert any("all_reduce" in line for line in inserted["lines"] if line.startswith("+"))


def test_memory_and_totals_are_those_of_the_program() -> None:
    of, data = program(), known()
    assert (data["memory"]["peak"], data["memory"]["stored"]) == (of.memory().peak, of.memory().stored)
    assert sum(row["bytes"] for row in data["totals"]) == sum(c.bytes_per_step for c in of.collectives())
    assert sum(row["count"] for row in data["totals"]) == sum(c.times for c in of.collectives())


def test_a_pipeline_has_its_stages_timeline_and_lists() -> None:
    data = known(4, True)
    assert data["pipeline"] == "pp"
    assert len(data["graphs"]) > 3
    assert [len(work) for work in data["timeline"]["works"]] == [
        len(program(4, True).timeline().work(r)) for r in (0, 1)
    ]
    assert data["ranks"][0]["list"] == [" ".join(str(i).split()) for i in program(4, True).rank(0).instructions]
    sent = [(t["value"], t["bytes"]) for t in data["transfers"]]
    assert sent == [(t.value, t.bytes_per_rank) for t in program(4, True).transfers()] != []
    assert data["ranks"][5]["groups"]["pp"] == [1, 5]


def test_nothing_in_a_name_ends_the_script() -> None:
    data = known() | {"diagnostics": ["</script><script>alert(1)</script>", "\u2028"]}
    page = render(data, "</title><script>alert(2)</script>")
    assert page.count("<script") == 2
    assert page.count("</script>") == 2
    embedded = re.search(r'id="content">(.*?)</script>', page, re.S)
    assert embedded is not None
    assert json.loads(embedded[1]) == json.loads(json.dumps(data))
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page
    assert 'sandbox="allow-scripts"' in frame(page)
    assert "<script" not in frame(page)


def test_a_program_from_a_file_has_a_page_without_passes(tmp_path: Any) -> None:
    program().save(tmp_path / "step.json")
    read = Program.load(tmp_path / "step.json")
    written = read.show(tmp_path / "step.html")
    assert '"passes":[]' in written.read_text(encoding="utf-8")
