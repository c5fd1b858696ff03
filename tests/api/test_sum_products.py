"""Products add gradients of linear layers to the sums over microbatches: 8 bytes a parameter, and no terms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardc
from examples.gpt2 import gpt2
from shardc.ir.graph import Graph, info, operands, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.accumulate import (
    ACCUMULATE,
    ACCUMULATE_WGRAD,
    add_wgrad,
    multiplies_wide,
    write_wgrad,
)
from shardc.ir.ops.linear import LINEAR_WGRAD
from shardc.ir.parse import parse
from shardc.passes.fusion.analysis.traffic import bytes_by_call
from shardc.passes.sum_products import SumProducts
from shardc.runtime.execute.body_code import BodyCode
from shardc.runtime.execute.instructions import rank_context
from shardc.runtime.execute.prepared_code import Routine
from tests.api.test_weight_casts import compiled, piped
from tests.handmade import Builder
from tests.sums import sums_apart

LINEARS = {f"blocks.{i}.{name}.weight" for i in range(2) for name in ("qkv", "out", "up", "down")}


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Terms are made, and added."""
    monkeypatch.setattr(SumProducts, "run", lambda _, graph: graph)
    return monkeypatch


def matrices(body: Graph, op: Any) -> list[str]:
    return [info(call).name for call in body.calls_of(op) if type_of(call).ndim == 2]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("precision", ["bf16", "fp16", None])
@pytest.mark.parametrize("layout", ["alone", "dp", "tp", "sp", "zero1", "zero2", "zero3", "full", "buckets"])
def test_all_linear_layers_and_equality(layout: str, precision: str | None) -> None:
    program = compiled(layout, precision=precision)
    body = program.body
    assert len(matrices(body, ACCUMULATE_WGRAD)) == len(LINEARS) + 1
    linears = {name.removesuffix(".weight") for name in LINEARS}
    assert {info(call).fqn for call in body.calls_of(ACCUMULATE_WGRAD)} == linears | {"head"}
    assert not matrices(body, ACCUMULATE)
    report = program.verify()
    assert report, str(report)
    assert (report.eager_error or 0.0) < 1e-12


def test_no_bytes_are_moved_for_terms(plain: pytest.MonkeyPatch) -> None:
    """Of a 16-bit product its cast and its sum were calls of their own."""
    with sums_apart():
        before = bytes_by_call(compiled("alone").body)
        plain.undo()
    with sums_apart():
        body = compiled("alone").body
    after = bytes_by_call(body)
    parameters = sum(type_of(call).local_bytes(body.mesh) // 4 for call in body.calls_of(ACCUMULATE_WGRAD))
    words, positions, tokens = 64 * 32, 8 * 32, 16 * 32
    assert parameters == 2 * 12 * 32 * 32 + words
    saved = (6 + 8) * parameters  # an accumulate counts as a copy
    saved += (2 + 6 + 8 - 8) * positions  # each of which is a token's
    saved += (2 + 3 * 2) * words - 8 * tokens  # of which a tied gradient was the sum of two in 16 bits
    assert sum(before.values()) - sum(after.values()) == saved
    assert len(before) - len(after) == 2 * (len(LINEARS) + 1) + 3


TURNED = {"params": {"**.attn.c_attn.weight": "-, 3*tp", "**.mlp.c_fc.weight": "-, tp"}}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize(
    ("mesh", "plan"),
    [
        ("dp=1", {}),
        ("dp=2,tp=2", {**TURNED, "inputs": {"*": "dp, -"}}),
        ("dp=2,tp=2", {**TURNED, "inputs": {"*": "dp, -"}, "activations": {"transformer.h.0": "dp, tp, -"}}),
        ("dp=2", {"inputs": {"*": "dp, -"}, "storage": {"zero": 3, "axes": ["dp"]}}),
    ],
)
def test_products_of_turned_matrices(mesh: str, plan: dict[str, Any], fuse: bool) -> None:
    """GPT-2's weights are stored [in, out]: their gradients are products of matrices."""
    model, batch = gpt2(batch=8, seq=8, layers=1, vocab=32, heads=4, width=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    asked = {"accumulate": 2, "precision": "bf16", "fuse": fuse, **plan}
    program = shardc.compile(model, batch, mesh=mesh, plan=asked, optimizer=optimizer)
    summed = {info(call).fqn for call in program.body.calls_of(ACCUMULATE_WGRAD)}
    turned = {f"transformer.h.0.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
    assert summed == turned | {"lm_head"}
    report = program.verify()
    assert report, str(report)
    assert (report.eager_error or 0.0) < 1e-12


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved"])
@pytest.mark.parametrize("precision", ["bf16", None])
def test_pipelines(schedule: str, precision: str | None) -> None:
    program = piped(schedule, precision=precision)
    found = {call for stage in program.staged.stages for graph in stage.parts.values() for call in made(graph)}
    assert len(found) == 4 * 4 + 1  # the head too: its stage has a sum of its own, although it is tied
    report = program.verify()
    assert report, str(report)


def made(graph: Graph) -> list[str]:
    assert not [c for c in graph.calls_of(LINEAR_WGRAD) if c.users.keys() <= {graph.output_node}]
    return matrices(graph, ACCUMULATE_WGRAD)


@pytest.mark.parametrize("precision", ["bf16", None])
def test_a_rank_runs_what_is_simulated(precision: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps after steps; a product is made once in a step, and added three times."""
    program = compiled("alone", precision=precision)
    body = program.body
    executor = BodyCode(body, rank_context(program.mesh, 0, None), 0, torch.device("cpu"))  # type: ignore[arg-type]
    added: list[int] = []
    run = Routine.run

    def counted(self: Routine, code: Any, *arguments: Any) -> None:
        added.append(sum(1 for line in code if line[1] is add_wgrad))
        run(self, code, *arguments)

    monkeypatch.setattr(Routine, "run", counted)
    trainer = program.launch()
    held = {name: value.clone().contiguous() for name, value in trainer.state.items()}
    for _ in range(2):
        fed = trainer._programs.first.feeding.feeds(program.sample, trainer.seed, trainer.steps)  # pyright: ignore[reportPrivateUsage]
        rates = trainer.rates()
        trainer.step(program.sample)
        added.clear()
        found = executor.run(held | rates, fed)
        assert [count for count in added if count] == [len(LINEARS) + 1] * 3
        for port, value in found.items():
            if port.role in ("param", "state"):
                held[port.name] = value
                torch.testing.assert_close(value, trainer.state[port.name], rtol=1e-5, atol=1e-6)


class Hostile(nn.Module):
    """A weight that is used twice, one that is frozen, one whose gradient is scaled, and one that is read as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.frozen = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.scaled, self.read = nn.Linear(8, 8), nn.Linear(8, 8)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(torch.relu(self.twice(x)))
        x = nn.functional.linear(self.frozen(x), 2.0 * self.scaled.weight)
        return (self.read(x) ** 2).mean() + self.read.weight.square().sum()


@pytest.mark.parametrize("precision", ["bf16", None])
@pytest.mark.parametrize("plan", [{}, {"inputs": {"*": "dp, -"}}, {"params": {"read.weight": "dp, -"}}])
def test_what_is_no_product_alone(precision: str | None, plan: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Hostile()
    batch = {"x": torch.randn(8, 8)}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    asked = {"accumulate": 4, "precision": precision, **plan}
    program = shardc.compile(model, batch, mesh="dp=2", plan=asked, optimizer=optimizer)
    assert len(program.body.calls_of(ACCUMULATE_WGRAD)) <= 1
    report = program.verify()
    assert report, str(report)
    assert (report.eager_error or 0.0) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [(2, 3), (4,), (0,)])
def test_made_written_and_added_alike(dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    g, x = torch.randn(*rows, 6).to(dtype), torch.randn(5, *rows).movedim(0, -1).to(dtype)
    exact = g.double().reshape(-1, 6).t() @ x.double().reshape(-1, 5)
    term = ACCUMULATE_WGRAD(g, x, wide)
    assert term.dtype == wide
    torch.testing.assert_close(term.double(), exact, rtol=1e-5, atol=1e-6)
    place = torch.full((40,), 7.0, dtype=wide)
    assert write_wgrad(g, x, wide, out=place[5:35].view(6, 5)).equal(term)
    assert place[:5].eq(7).all()
    total = torch.ones(6, 5, dtype=wide)
    assert add_wgrad(total, g, x) is total
    torch.testing.assert_close(total.double(), 1 + exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", ["cuda", "cpu", "xpu", "mps"])
def test_operands_are_cast_where_products_cannot_widen(device: str) -> None:
    half, wide = (torch.bfloat16, torch.float16), (torch.float32, torch.float64)
    able = {(a, b) for a in (*half, *wide) for b in wide if multiplies_wide(torch.device(device), a, b)}
    assert able == ({(narrow, torch.float32) for narrow in half} if device == "cuda" else set())


def test_a_product_of_a_value_with_itself() -> None:
    """In code, both operands lie in one slot."""
    graph = parse(
        """graph @step mesh(dp=1) microbatches(3) {
  %w = param "w" : f32[4, 4]
  %x = input "x" : f32[2, 4]
bwd:
  %x.t = transpose.int(%x, 0, 1) : f32[4, 2]
  %d.w = mm(%x.t, %x) : f32[4, 4]
  %d.w.sum = shardc.accumulate(%d.w) : f32[4, 4]
  return grad "w" = %d.w.sum
}
"""
    )
    body = SumProducts().run(graph)
    (summed,) = body.calls_of(ACCUMULATE_WGRAD)
    assert len({*operands(summed)}) == 1
    code = BodyCode(body, rank_context(body.mesh, 0, None), 0, torch.device("cpu"))  # type: ignore[arg-type]
    batches = torch.randn(3, 2, 4, dtype=torch.float32)
    (gradient,) = code.run({"w": torch.zeros(4, 4)}, [{"x": x} for x in batches]).values()
    torch.testing.assert_close(gradient, (batches.mT @ batches).sum(0))


@pytest.mark.parametrize("read_again", [False, True])
def test_a_product_that_something_else_reads_is_made_once(read_again: bool) -> None:
    """It stays as it is: to make it in the sum, too, would be a product more."""
    builder = Builder(Mesh())
    g, x = (builder.input(name, "f32[8, 4]", "input") for name in ("g", "x"))
    term = builder.call("d.w", "f32[4, 4]", LINEAR_WGRAD, g, x, phase="bwd")
    builder.output("grad", "w", builder.call("d.w.sum", "f32[4, 4]", ACCUMULATE, term, phase="bwd"))
    if read_again:
        builder.output("output", "y", builder.call("y", "f32[4, 4]", torch.ops.aten.neg.default, term))
    graph = builder.graph()
    graph.microbatches = 2
    after = SumProducts().run(graph)
    products = [call for call in after.calls() if call.target in (LINEAR_WGRAD, ACCUMULATE_WGRAD)]
    assert [call.target for call in products] == [LINEAR_WGRAD if read_again else ACCUMULATE_WGRAD]
