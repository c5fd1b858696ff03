"""Embeddings add the rows of their tokens to the sums over microbatches: no term, no cast, and no second sum.

Longer than 400 lines: one model in all layouts, and what each of them asks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc.ir.buckets import pieces
from shardc.ir.graph import Graph, info, op_name, operands, type_of, update
from shardc.ir.mesh import Mesh
from shardc.ir.microbatch import in_microbatch
from shardc.ir.ops import accumulate
from shardc.ir.ops.accumulate import (
    ACCUMULATE,
    ACCUMULATE_MORE_ROWS,
    ACCUMULATE_ROWS,
    ACCUMULATE_WGRAD,
    add_row_sums,
    write_row_sums,
)
from shardc.ir.ops.linear import LINEAR_WGRAD
from shardc.ir.parse import parse
from shardc.ir.plain import graph_from_plain, graph_to_plain
from shardc.ir.storages import storages
from shardc.ir.sums import parts_of, row_bytes, whole_sum
from shardc.ir.text import print_graph
from shardc.ir.verify import violations
from shardc.passes import gemm_padding
from shardc.passes.infer_placement import placement_faults
from shardc.passes.sum_products import SumProducts, separate_terms
from shardc.runtime.execute.body_code import BodyCode
from shardc.runtime.execute.instructions import rank_context
from tests.api.test_weight_casts import LAYOUTS
from tests.cost.test_memory_calls import check
from tests.handmade import Builder
from tests.runtime.test_bucket import Alone

VOCAB, WIDTH, ODD = 64, 32, 61
ROWS = (ACCUMULATE_ROWS, ACCUMULATE_MORE_ROWS)
# Products of so slow a machine are worth padding, however small.
SLOW = {"bf16_flops_per_second": 1e6, "kernel_launch_seconds": 1e-9}
EMBEDDING = torch.ops.aten.embedding_dense_backward.default


class Words(nn.Module):
    """An embedding of words and one of positions, a layer, and a head of its own or the embedding's."""

    def __init__(self, tied: bool = False, padding: int | None = None, twice: bool = False, vocab: int = VOCAB) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, WIDTH, padding_idx=padding), nn.Embedding(8, WIDTH)
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, vocab, bias=False)
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
    torch.manual_seed(1)
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
    return [info(call).fqn for op in ROWS for call in body.calls_of(op)]


def verified(program: shardc.Program) -> None:
    report = program.verify()
    assert report, str(report)
    assert (report.eager_error or 0.0) < 1e-12


def all_are_summed(body: Graph) -> None:
    """No gradient of a matrix is a term."""
    assert not body.calls_of(EMBEDDING)
    assert not [call for call in body.calls_of(ACCUMULATE) if type_of(call).ndim == 2]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("precision", ["bf16", "fp16", None])
@pytest.mark.parametrize("layout", LAYOUTS_HERE)
@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_add_their_rows(tied: bool, layout: str, precision: str | None) -> None:
    """Those of a tied one to the sum that the product of the head makes, in its memory."""
    program = compiled(layout, Words(tied), precision=precision)
    body = program.body
    assert sorted(rows_of(body)) == ["wpe", "wte"]
    all_are_summed(body)
    for call in body.calls_of(ACCUMULATE_MORE_ROWS):
        head, rows = parts_of(call)
        assert (head.target, rows, whole_sum(head)) == (ACCUMULATE_WGRAD, call, call)
        storage_of = storages(body)
        assert storage_of[head] is storage_of[call]
    assert len(body.calls_of(ACCUMULATE_MORE_ROWS)) == tied
    verified(program)
    check(body)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("precision", ["bf16", None])
@pytest.mark.parametrize("layout", ["alone", "dp", "tp", "dp-tp", "zero3", "buckets", "fused"])
@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_that_is_read_twice_has_one_sum(tied: bool, layout: str, precision: str | None) -> None:
    program = compiled(layout, Words(tied, twice=True), precision=precision)
    body = program.body
    assert rows_of(body).count("wte") == 2
    all_are_summed(body)
    (whole,) = {whole_sum(call) for call in body.calls_of(ACCUMULATE_MORE_ROWS)}
    assert len(parts_of(whole)) == 2 + tied
    verified(program)
    check(body)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", ["alone", "dp", "dp-tp", "zero3", "buckets", "fused", "fused-zero3"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_sum_of_a_padded_product_is_padded(tied: bool, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of no multiple of 16 bytes: what was added to it is cut off once a step."""
    for name in ("GROWTH", "SLACK"):
        monkeypatch.setattr(gemm_padding, name, 100.0)
    program = compiled(layout, Words(tied, vocab=ODD), hardware=SLOW)
    body = program.body
    all_are_summed(body)
    assert not body.calls_of(LINEAR_WGRAD)
    (padded,) = [call for call in body.calls_of(ACCUMULATE_WGRAD) if type_of(call).local_shape(body.mesh)[0] % 8 == 0
                 and info(call).fqn == "head"]  # fmt: skip
    (cut,) = whole_sum(padded).users
    assert cut.target is torch.ops.aten.slice.Tensor or "fused" in layout  # a kernel reads the sum where it lies
    assert cut not in in_microbatch(body)
    verified(program)
    check(body)


def test_rows_are_in_a_bucket_where_their_sum_is() -> None:
    """A rank's step is the same to the bit, and the product is made where the bucket has its member."""
    bodies = [compiled("dp", Words(True), bucket=bucket).body for bucket in (False, "1MiB")]
    alone, rows = (call for body in bodies for call in body.calls_of(ACCUMULATE_MORE_ROWS))
    assert alone not in pieces(bodies[0])
    places = pieces(bodies[1])
    assert [places[part].at for part in parts_of(rows)] == [operands(places[rows].layout.pack).index(rows)] * 2
    results: list[dict[str, Tensor]] = []
    for body in bodies:
        torch.manual_seed(0)
        ports = zip(body.inputs, body.placeholders, strict=True)
        held = {port.name: whole(type_of(node).local_shape(body.mesh), type_of(node).dtype) for port, node in ports}
        fed = [{"input_ids": torch.randint(9, (1, 8)), "labels": torch.randint(9, (1, 8))} for _ in range(4)]
        code = BodyCode(body, rank_context(body.mesh, 0, Alone(body.mesh)), 0, torch.device("cpu"))  # type: ignore[arg-type]
        results.append({f"{port.role} {port.name}": value.clone() for port, value in code.run(held, fed).items()})
    assert results[0].keys() == results[1].keys()
    assert all(value.equal(results[1][name]) for name, value in results[0].items())


def whole(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.rand(shape).to(dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize("tied", [False, True])
def test_the_bytes_of_gradient_sums(tied: bool) -> None:
    """GPT-2's: at most 8 a parameter and microbatch, of a step of 8 microbatches, with casts of terms."""
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        config = transformers.GPT2Config(n_layer=2, use_cache=False, tie_word_embeddings=tied)
        for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
            setattr(config, name, 0.0)
        model = transformers.GPT2LMHeadModel(config)
        ids = torch.zeros(8, 1024, dtype=torch.long)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-4)
    plan = {"mesh": "dp=1", "precision": "bf16", "hardware": "h200-nvlink", "accumulate": 8, "fuse": False}
    body = shardc.compile(model, {"input_ids": ids, "labels": ids}, plan=plan, optimizer=adam).body
    all_are_summed(body)
    parameters = sum(p.numel() for p in model.parameters())
    assert added(body, first=False) / parameters <= 8.15
    assert (added(body, first=True) + 7 * added(body, first=False)) / (8 * parameters) <= 8


def added(body: Graph, first: bool) -> int:
    """The bytes of sums that a microbatch reads and writes, with all that is made of a term only to be added."""
    total = 0
    for call in body.calls():
        size, reads = type_of(call).local_bytes(body.mesh) if info(call).type is not None else 0, 1 if first else 2
        if call.target in (ACCUMULATE_WGRAD, ACCUMULATE_ROWS) and (first or call.target is ACCUMULATE_WGRAD):
            total += reads * size
        elif call.target in ROWS:
            total += 2 * row_bytes(body, call)
        elif call.target is ACCUMULATE:
            (term,) = operands(call)
            total += (1 + reads) * size
            total += 3 * size // 2 if op_name(term.target) == "_to_copy" else 0
    return total


@pytest.mark.parametrize("wrong", ["read", "returned", "a parameter", "another sum"])
def test_a_sum_that_is_added_to_is_nobody_elses(wrong: str) -> None:
    """It would be read with the rows, or too early; and no parameter may be written over."""
    body = compiled(model=Words(True)).body.copy()
    (rows,) = body.calls_of(ACCUMULATE_MORE_ROWS)
    head = operands(rows)[0]
    assert not violations(body)
    if wrong == "read":
        other = body.calls_of(torch.ops.aten.add.Tensor)[-1]
        other.args = (head, *other.args[1:])
    elif wrong == "returned":
        body.output_node.args = ((head, *body.output_values[1:]),)
    else:
        term = body.placeholders[0] if wrong == "a parameter" else body.calls_of(ACCUMULATE)[0]
        rows.args = (term, *rows.args[1:])
    assert [line for line in violations(body) if "adds to" in line]


def test_rows_are_added_to_what_lies_as_they_do() -> None:
    """A sum that is not pending would be added up over the ranks that have parts of the tokens."""
    body = compiled("dp", Words(True), accumulate=2).body.copy()
    (rows,) = body.calls_of(ACCUMULATE_MORE_ROWS)
    head, type = operands(rows)[0], type_of(rows)
    assert not placement_faults(rows, [type], body.mesh)
    whole_type = type.place(type.placement)
    assert whole_type != type
    update(head, type=whole_type)
    assert placement_faults(rows, [type], body.mesh)
    update(rows, type=whole_type)
    assert placement_faults(rows, [whole_type], body.mesh)


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
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("few", [0, 1 << 15])
def test_a_rank_runs_what_is_simulated(
    few: int, tied: bool, twice: bool, precision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accumulate, "FEW", few)
    program = compiled(model=Words(tied, twice=twice), precision=precision)
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


@pytest.mark.parametrize("tied", [False, True])
def test_text_and_files_keep_the_sums(tied: bool) -> None:
    body = compiled("dp-tp", Words(tied)).body
    for again in (parse(print_graph(body)), graph_from_plain(graph_to_plain(body))):
        assert len([call for op in ROWS for call in again.calls_of(op)]) == 2
        assert without_lines(again) == without_lines(body)
    loaded = shardc.Program.from_json(compiled("dp-tp", Words(tied)).to_json())
    assert loaded.verify().ok


@pytest.mark.parametrize("tied", [False, True])
def test_sums_are_terms_again_where_stages_are_cut(tied: bool) -> None:
    body = compiled("dp-tp", model=Words(tied, padding=3)).body
    cut = body.copy()
    separate_terms(cut)
    assert not rows_of(cut)
    assert not violations(cut)
    assert len(cut.calls_of(EMBEDDING)) == 2
    again = SumProducts().run(cut)
    assert rows_of(again) == rows_of(body)
    for op in ROWS:
        for mine, theirs in zip(again.calls_of(op), body.calls_of(op), strict=True):
            assert (type_of(mine), info(mine).assignment, mine.args[3:]) == (
                type_of(theirs), info(theirs).assignment, theirs.args[3:],
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
@pytest.mark.parametrize("few", [0, 1 << 15])
def test_made_written_and_added_alike(
    dtype: torch.dtype, rows: tuple[int, ...], padding: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accumulate, "FEW", few)
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


@pytest.mark.parametrize("few", [0, 1 << 15])
def test_positions_out_of_range_add_nothing(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch's gradient: whoever looks rows up has refused them."""
    monkeypatch.setattr(accumulate, "FEW", few)
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
