"""Embeddings add the rows of their tokens to the sums over microbatches: no term, no cast, and no second sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc.ir.graph import Graph, info, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.accumulate import (
    ACCUMULATE,
    ACCUMULATE_ROWS,
    add_row_sums,
    write_row_sums,
)
from shardc.ir.parse import parse
from shardc.ir.plain import graph_from_plain, graph_to_plain
from shardc.ir.text import print_graph
from shardc.passes.sum_products import SumProducts, separate_terms
from shardc.runtime.execute.body_code import BodyCode
from shardc.runtime.execute.instructions import rank_context
from tests.api.test_weight_casts import LAYOUTS
from tests.cost.test_memory_calls import check
from tests.handmade import Builder

VOCAB, WIDTH = 64, 32
EMBEDDING = torch.ops.aten.embedding_dense_backward.default


class Words(nn.Module):
    """An embedding of words and one of positions, a layer, and a head of its own or the embedding's."""

    def __init__(self, tied: bool = False, padding: int | None = None, twice: bool = False) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH, padding_idx=padding), nn.Embedding(8, WIDTH)
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.twice = twice
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1], device=input_ids.device))
        x = x + F.gelu(self.up(self.norm(x)))
        if self.twice:
            x = x + self.wte(labels)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


LAYOUTS_HERE: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: LAYOUTS[name]
        for name in ("alone", "dp", "zero1", "zero2", "zero3", "full", "fused", "fused-zero3", "buckets")
    },
    "tp": ("tp=2", {"params": {"wte.weight": "tp, -"}}),
    "tp-whole": ("tp=2", {"params": {"up.weight": "tp, -"}}),
    "tp-width": ("tp=2", {"params": {"wte.weight": "-, tp", "wpe.weight": "-, tp"}}),
    "sp": ("tp=2", {"params": {"wte.weight": "tp, -"}, "activations": {"norm": "-, tp, -"}}),
    "dp-tp": ("dp=2,tp=2", {"params": {"wte.weight": "tp, -"}, "inputs": {"*": "dp, -"}}),
}


def batch() -> dict[str, Tensor]:
    """Tokens that occur often, and many that do not."""
    ids = torch.randint(VOCAB // 4, (8, 8))
    return {"input_ids": ids, "labels": ids.roll(-1, 1)}


def compiled(layout: str = "alone", model: nn.Module | None = None, **more: Any) -> shardc.Program:
    torch.manual_seed(0)
    mesh, plan = LAYOUTS_HERE[layout]
    model = Words() if model is None else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)
    asked = {"precision": "bf16", "accumulate": 4, **plan, **more}
    return shardc.compile(model, batch(), mesh=mesh, plan=asked, optimizer=optimizer)


def rows_of(body: Graph) -> list[str]:
    return [info(call).fqn for call in body.calls_of(ACCUMULATE_ROWS)]


def verified(program: shardc.Program) -> None:
    report = program.verify()
    assert report, str(report)
    assert (report.eager_error or 0.0) < 1e-12


@pytest.mark.sampled(6)
@pytest.mark.parametrize("precision", ["bf16", "fp16", None])
@pytest.mark.parametrize("layout", LAYOUTS_HERE)
def test_embeddings_add_their_rows(layout: str, precision: str | None) -> None:
    program = compiled(layout, precision=precision)
    assert sorted(rows_of(program.body)) == ["wpe", "wte"]
    assert not program.body.calls_of(EMBEDDING)
    assert not [call for call in program.body.calls_of(ACCUMULATE) if type_of(call).ndim == 2]
    verified(program)
    check(program.body)


@pytest.mark.parametrize("precision", ["bf16", None])
@pytest.mark.parametrize("layout", ["alone", "dp-tp", "zero3"])
def test_rows_of_padding_get_nothing(layout: str, precision: str | None) -> None:
    program = compiled(layout, Words(padding=3), precision=precision)
    assert (program.sample["input_ids"] == 3).any()
    assert len(rows_of(program.body)) == 2
    verified(program)


def test_an_embedding_that_is_frozen_has_no_sum() -> None:
    model = Words()
    model.wte.weight.requires_grad_(False)
    program = compiled(model=model)
    assert rows_of(program.body) == ["wpe"]
    verified(program)


def test_a_gradient_that_is_scaled_by_frequency_stays() -> None:
    """How often a token occurs in a microbatch is not how often it occurs in a step."""
    model = Words()
    model.wte.scale_grad_by_freq = True
    program = compiled(model=model)
    assert rows_of(program.body) == ["wpe"]
    verified(program)


@pytest.mark.parametrize("precision", ["bf16", None])
@pytest.mark.parametrize("layout", ["alone", "dp-tp"])
def test_gradients_that_are_returned(layout: str, precision: str | None) -> None:
    torch.manual_seed(0)
    mesh, plan = LAYOUTS_HERE[layout]
    asked = {"precision": precision, "accumulate": 4, **plan}
    program = shardc.compile(Words(), batch(), mesh=mesh, plan=asked)
    assert len(rows_of(program.body)) == 2
    verified(program)
    grads = program.launch().step(program.sample).grads
    assert grads["wte.weight"][: VOCAB // 4].abs().sum() > 0
    assert grads["wte.weight"][VOCAB // 4 :].eq(0).all()


@pytest.mark.parametrize("precision", ["bf16", None])
@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_runs_what_is_simulated(tied: bool, precision: str | None) -> None:
    program = compiled(model=Words(tied), precision=precision)
    body = program.body
    executor = BodyCode(body, rank_context(program.mesh, 0, None), 0, torch.device("cpu"))  # type: ignore[arg-type]
    trainer = program.launch()
    held = {name: value.clone().contiguous() for name, value in trainer.state.items()}
    for _ in range(3):
        fed = trainer._programs.first.feeding.feeds(program.sample, trainer.seed, trainer.steps)  # pyright: ignore[reportPrivateUsage]
        rates = trainer.rates()
        trainer.step(program.sample)
        for port, value in executor.run(held | rates, fed).items():
            if port.role in ("param", "state"):
                held[port.name] = value
                torch.testing.assert_close(value, trainer.state[port.name], rtol=1e-5, atol=1e-6)


def without_lines(body: Graph) -> list[str]:
    """A graph's text without the lines of the user's code."""
    return [line.partition("    #")[0] for line in print_graph(body).splitlines()]


def test_text_and_files_keep_the_sums() -> None:
    body = compiled("dp-tp").body
    for again in (parse(print_graph(body)), graph_from_plain(graph_to_plain(body))):
        assert len(again.calls_of(ACCUMULATE_ROWS)) == 2
        assert without_lines(again) == without_lines(body)
    loaded = shardc.Program.from_json(compiled("dp-tp").to_json())
    assert loaded.verify().ok


def test_sums_are_terms_again_where_stages_are_cut() -> None:
    body = compiled("dp-tp", model=Words(padding=3)).body
    cut = body.copy()
    separate_terms(cut)
    assert not rows_of(cut)
    assert len(cut.calls_of(EMBEDDING)) == 2
    again = SumProducts().run(cut)
    assert rows_of(again) == rows_of(body)
    for mine, theirs in zip(again.calls_of(ACCUMULATE_ROWS), body.calls_of(ACCUMULATE_ROWS), strict=True):
        assert (type_of(mine), info(mine).assignment, mine.args[2:]) == (
            type_of(theirs), info(theirs).assignment, theirs.args[2:],
        )  # fmt: skip


@pytest.mark.parametrize("read_again", [False, True])
def test_a_gradient_that_something_else_reads_stays(read_again: bool) -> None:
    builder = Builder(Mesh())
    g, index = builder.input("g", "f32[8, 4]", "input"), builder.input("index", "i64[8]", "input")
    term = builder.call("d.w", "f32[6, 4]", EMBEDDING, g, index, 6, -1, False, phase="bwd")
    builder.output("grad", "w", builder.call("d.w.sum", "f32[6, 4]", ACCUMULATE, term, phase="bwd"))
    if read_again:
        builder.output("output", "y", builder.call("y", "f32[6, 4]", torch.ops.aten.neg.default, term))
    graph = builder.graph()
    graph.microbatches = 2
    assert bool(rows_of(SumProducts().run(graph))) != read_again


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [(2, 5), (7,), (0,), ()])
@pytest.mark.parametrize("padding", [-1, 2])
def test_made_written_and_added_alike(dtype: torch.dtype, rows: tuple[int, ...], padding: int) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    torch.manual_seed(0)
    g, index = torch.randn(6, *rows).movedim(0, -1).to(dtype), torch.randint(5, rows)
    exact = EMBEDDING(g.double(), index, 9, padding, False)
    term = ACCUMULATE_ROWS(g, index, 9, padding, wide)
    assert term.dtype == wide
    torch.testing.assert_close(term.double(), exact, rtol=1e-5, atol=1e-6)
    place = torch.full((64,), 7.0, dtype=wide)
    assert write_row_sums(g, index, 9, padding, wide, out=place[5:59].view(9, 6)).equal(term)
    assert place[:5].eq(7).all()
    total = torch.ones(9, 6, dtype=wide)
    assert add_row_sums(total, g, index, padding) is total
    torch.testing.assert_close(total.double(), 1 + exact, rtol=1e-5, atol=1e-6)
    assert total[5:].eq(1).all()


def test_positions_out_of_range_add_nothing() -> None:
    """As in torch's gradient: whoever looks rows up has refused them."""
    g, index = torch.randn(4, 3), torch.tensor([1, -1, 5, 1 << 40])
    theirs = EMBEDDING(g, index, 5, -1, False)
    assert ACCUMULATE_ROWS(g, index, 5, -1, torch.float32).equal(theirs)
    with pytest.raises(RuntimeError, match="do not fit"):
        ACCUMULATE_ROWS(g.to("meta"), index[:3].to("meta"), 5, -1, torch.float32)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", ["bf16", None])
def test_pipelines(schedule: str, tied: bool, precision: str | None) -> None:
    torch.manual_seed(0)
    model = Stack(tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    pipeline = {"axis": "pp", "schedule": schedule, "microbatches": 4}
    plan = {"precision": precision, "pipeline": pipeline}
    program = shardc.compile(model, batch(), mesh="pp=2", plan=plan, optimizer=optimizer)
    graphs = [graph for stage in program.staged.stages for graph in stage.parts.values()]
    assert {fqn for graph in graphs for fqn in rows_of(graph)} == {"wpe", "wte"}
    assert not [call for graph in graphs for call in graph.calls_of(EMBEDDING)]
    report = program.verify()
    assert report, str(report)


class Stack(nn.Module):
    """Layers that a pipeline cuts."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(8, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())
