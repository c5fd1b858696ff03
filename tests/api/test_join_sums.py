"""Small sums over microbatches take one call in each microbatch of a body: the same bits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import shardc
from shardc.cost.call_seconds import call_costs
from shardc.cost.memory import memory
from shardc.ir.buckets import is_summed, pieces
from shardc.ir.graph import Graph, info, operands, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.microbatch import crossing, in_microbatch
from shardc.ir.ops.accumulate import ACCUMULATE
from shardc.ir.ops.buckets import PACK, UNPACK
from shardc.ir.parse import parse
from shardc.ir.plain import graph_from_plain, graph_to_plain
from shardc.ir.small_sums import SMALL, TOGETHER, joined
from shardc.passes import join_sums
from shardc.passes.join_sums import JoinSums, separate_sums
from shardc.plan.hardware import named
from shardc.runtime.execute import body_code
from shardc.runtime.execute.body_code import BodyCode
from shardc.runtime.execute.instructions import rank_context
from shardc.runtime.oracle.simulate import simulate
from tests.api.test_weight_casts import LAYOUTS, assert_same, compiled, trained
from tests.cost.test_memory_calls import check
from tests.handmade import Builder
from tests.runtime.test_executor import given
from tests.sums import sums_apart


def small(body: Graph) -> list[str]:
    """The accumulates of small sums that are alone."""
    sums = [call for call in body.calls_of(ACCUMULATE) if operands(call)[0].target is not PACK]
    return [info(call).name for call in sums if type_of(call).local_bytes(body.mesh) <= SMALL]


def flats(body: Graph) -> list[Any]:
    return [pack for pack in body.calls_of(PACK) if is_summed(pack)]


# ---------------------------------------------------------------------- bodies
@pytest.mark.sampled(3)
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("precision", ["bf16", None])
def test_one_call_a_microbatch(precision: str | None, fuse: bool) -> None:
    """Of a model like GPT: those of 4 biases and norms a layer, and the loss. Kernels, casts and sums write their terms
    in place."""
    with sums_apart():
        before = compiled("alone", precision=precision, fuse=fuse).body
    body = compiled("alone", precision=precision, fuse=fuse).body
    (flat,) = flats(body)
    assert len(operands(flat)) == len(small(before)) - len(small(body)) > 12
    assert not small(body)
    made = [value for value, piece in pieces(body).items() if piece.layout.pack is flat]
    assert len(made) >= len(operands(flat)) - (1 if precision or fuse else 11)  # torch's layer norm makes two at once
    counted = [
        Counter(call.target for call in graph.calls() if call in in_microbatch(graph)) for graph in (before, body)
    ]
    assert counted[1] - counted[0] == Counter({PACK: 1})
    assert counted[0] - counted[1] == Counter({ACCUMULATE: len(small(before)) - 1})
    assert crossing(body) == []


def calls_in_microbatches(body: Graph) -> list[int]:
    code = BodyCode(body, rank_context(body.mesh, 0, None), 0, torch.device("cpu"))  # type: ignore[arg-type]
    first, later = code._first_microbatch, code._later_microbatches
    added = [line for line in later if line[1] is torch.Tensor.add_]
    taken = [line for line in first if line[1] is body_code._taken]
    return [len(first), len(later), len(added), len(taken)]


@pytest.mark.parametrize("fuse", [False, True])
def test_a_rank_calls_it_once_and_the_first_microbatch_copies_nothing(fuse: bool) -> None:
    with sums_apart():
        before = compiled("alone", fuse=fuse).body
    body = compiled("alone", fuse=fuse).body
    (first, later, added, taken), was = calls_in_microbatches(body), calls_in_microbatches(before)
    large = len(body.calls_of(ACCUMULATE)) - 1
    assert (added, taken) == (1 + large, 1)
    assert was[2:] == [len(small(before)) + large, 0]
    copies = len(operands(flats(body)[0])) - sum(p.layout.pack in flats(body) for p in pieces(body).values())
    assert was[0] - first == was[1] - later == len(small(before)) - 1 - bool(copies)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("precision", ["bf16", None])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "fp16"])
def test_the_same_bits(layout: str, precision: str | None) -> None:
    """Over steps that change the weights, simulated; and of a rank alone as its own code runs."""
    with sums_apart():
        before = compiled(layout, precision=precision)
    program = compiled(layout, precision=precision)
    assert flats(program.body)
    assert not flats(before.body)
    assert_same(trained(program, 3), trained(before, 3))
    if program.mesh.world_size == 1:
        assert_same(run_alone(program), run_alone(before))


def run_alone(program: shardc.Program) -> dict[str, torch.Tensor]:
    """Two steps of a rank without others, one after the other, as its prepared code runs them."""
    body = program.body
    code = BodyCode(body, rank_context(body.mesh, 0, None), 0, torch.device("cpu"))  # type: ignore[arg-type]
    held, fed = given(program)
    found: dict[str, torch.Tensor] = {}
    for _ in range(2):
        outputs = code.run(held, fed)
        held |= {port.name: value for port, value in outputs.items() if port.role in ("param", "state", "buffer")}
        found = {f"{port.role} {port.name}": value.clone() for port, value in outputs.items()}
    return found


@pytest.mark.parametrize("layout", ["alone", "tp", "zero2", "fused-buckets"])
def test_in_float64_too(layout: str) -> None:
    with sums_apart():
        before = compiled(layout)
    program = compiled(layout)
    found, expected = (simulate(one.body, one.inputs(), dtype=torch.float64) for one in (program, before))
    assert {value.dtype for value in found.values()} >= {torch.float64}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[port], value) for port, value in expected.items())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("more", [{}, {"bucket": False}], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_as_reported_and_verified(layout: str, more: dict[str, Any]) -> None:
    program = compiled(layout, **more)
    assert flats(program.body)
    check(program.body)
    report = program.verify()
    assert report, str(report)
    assert (report.eager_error or 0.0) < 1e-12


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("plan", [{"clip_grad_norm": 0.5}, {"nonfinite": "skip", "precision": "fp16"}], ids=str)
def test_with_what_else_reads_sums(plan: dict[str, Any], split: int) -> None:
    more = {**plan, "overlap": {"split": split}}
    with sums_apart():
        before = compiled("tp", **more)
    program = compiled("tp", **more)
    assert flats(program.body)
    assert_same(trained(program), trained(before))
    report = program.verify()
    assert report, str(report)


def test_text_and_file_keep_it() -> None:
    program = compiled("zero2")
    body = parse(program.text())
    assert [info(pack).name for pack in flats(body)] == [info(pack).name for pack in flats(program.body)] != []
    kept = graph_from_plain(graph_to_plain(program.body)).gradients
    names = {name: info(value).name for name, value in program.body.gradients.items()}
    assert {name: info(value).name for name, value in kept.items()} == names
    assert all(value in program.body.fx.nodes for value in program.body.gradients.values())
    again = shardc.Program.from_json(program.to_json())
    assert again.text() == program.text()
    assert again.verify()


def test_the_prediction_is_shorter_and_counts_what_is_copied() -> None:
    """Where data parallelism packs sums into buckets, they are copied there, once a step."""
    plan = {"inputs": {"*": "dp, -"}, "hardware": "h200-nvlink", "bucket": "1MiB"}
    for layout in ("alone", "dp"):
        with sums_apart():
            before = compiled(layout, **(plan if layout == "dp" else {}))
        program = compiled(layout, **(plan if layout == "dp" else {}))
        took, takes = before.predict("h200-nvlink"), program.predict("h200-nvlink")
        assert takes.step_ms < took.step_ms
    costs = call_costs(program.body, named("h200-nvlink"))
    copied = [costs[u] for u in program.body.calls_of(UNPACK) if operands(u)[0].target is ACCUMULATE]
    assert [cost.launches for cost in copied] == [1]


# ---------------------------------------------------------------------- hostile bodies
class Hostile(nn.Module):
    """Sums of all kinds that small ones may be: used twice, frozen, tied, of another dtype, without gradient, of what
    another gradient is made of; a buffer that microbatches change."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.frozen, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.shift, self.scaled = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.tied = self.twice.bias
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.unused, self.number = nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(()))
        self.steps = nn.Parameter(torch.arange(4), requires_grad=False)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.norm(self.twice(torch.relu(self.twice(x))) + self.tied)
        x = self.frozen(x) + (self.shift + 2 * self.scaled) * self.number + self.steps.sum()
        loss = (x**2).mean() + self.wide.sum() ** 2 + self.shift.square().sum()
        return {"loss": loss, "first": x[:, 0]}


@pytest.mark.parametrize("kind", [None, "sgd"])
@pytest.mark.parametrize("plan", [{}, {"inputs": {"*": "dp, -"}}, {"params": {"twice.bias": "dp"}}], ids=str)
def test_hostile_sums(plan: dict[str, Any], kind: str | None) -> None:
    torch.manual_seed(0)
    model, batch = Hostile(), {"x": torch.randn(8, 8)}
    trainable = [p for name, p in model.named_parameters() if p.requires_grad and name != "unused"]
    optimizer = None if kind is None else torch.optim.SGD(trainable, lr=1e-2, momentum=0.5)
    asked = {"accumulate": 4, "outputs": {"first": ""}, **plan}

    def made() -> shardc.Program:
        return shardc.compile(model, batch, mesh="dp=2", plan=asked, optimizer=optimizer)

    with sums_apart():
        before = made()
    program = made()
    assert flats(program.body)
    assert {type_of(flat).dtype for flat in flats(program.body)} <= {torch.float32, torch.float64}
    report = program.verify()
    assert report, str(report)
    assert (report.eager_error or 0.0) < 1e-12
    if kind is not None:
        assert_same(trained(program, 3), trained(before, 3))
    else:
        found, expected = (one.launch().step(batch).grads for one in (program, before))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    check(program.body)


def test_a_loss_that_is_kept_keeps_nothing_else() -> None:
    """It is a copy, so that who holds the losses of many steps does not hold their gradients."""
    program = compiled("alone")
    body = program.body
    outputs = zip(body.outputs, body.output_values, strict=True)
    (loss,) = [value for port, value in outputs if port.role == "loss"]
    assert loss.target is join_sums.CLONE
    code = BodyCode(body, rank_context(body.mesh, 0, None), 0, torch.device("cpu"))  # type: ignore[arg-type]
    found = {port.name: value for port, value in code.run(*given(program)).items() if port.role == "loss"}
    assert [value.untyped_storage().nbytes() for value in found.values()] == [4]


def sums_of(sizes: list[int], microbatches: int = 2, **dtypes: str) -> Graph:
    builder = Builder(Mesh())
    x = builder.input("x", "f32[1]", "input")
    for k, size in enumerate(sizes):
        dtype = dtypes.get(f"s{k}", "f32")
        value = builder.call(f"t{k}", f"{dtype}[{size}]", torch.ops.aten.expand.default, x, [size], phase="bwd")
        value = builder.call(f"u{k}", f"{dtype}[{size}]", torch.ops.aten.neg.default, value, phase="bwd")
        builder.output("grad", f"s{k}", builder.call(f"s{k}", f"{dtype}[{size}]", ACCUMULATE, value, phase="bwd"))
    graph = builder.graph()
    graph.microbatches = microbatches
    return graph


def test_what_is_joined_is_bounded() -> None:
    most = SMALL // 4
    together = TOGETHER // SMALL
    body = JoinSums().run(sums_of([most] * (together + 2) + [most + 1, 0, 3]))
    assert [len(operands(flat)) for flat in flats(body)] == [together, 3]
    assert {operands(call)[0].target for call in body.calls_of(ACCUMULATE)} == {PACK, torch.ops.aten.neg.default}
    graph = sums_of([2, 3], 1)
    assert JoinSums().run(graph) is graph
    alone = sums_of([2, most + 1])
    assert JoinSums().run(alone) is alone


def test_a_small_view_of_a_large_tensor_is_not_kept_with_it() -> None:
    builder = Builder(Mesh())
    x = builder.input("x", f"f32[{SMALL}]", "input")
    large = builder.call("y", f"f32[{SMALL}]", torch.ops.aten.neg.default, x, phase="bwd")
    for k in range(3):
        term = builder.call(f"t{k}", "f32[4]", torch.ops.aten.slice.Tensor, large, 0, 4 * k, 4 * k + 4, phase="bwd")
        builder.output("grad", f"s{k}", builder.call(f"s{k}", "f32[4]", ACCUMULATE, term, phase="bwd"))
    graph = builder.graph()
    graph.microbatches = 2
    assert JoinSums().run(graph) is graph


def test_groups_are_of_one_key_and_in_order() -> None:
    graph = sums_of([1, 2, 3, 4])
    values = graph.calls_of(ACCUMULATE)
    halves = joined(values, lambda value: values.index(value) % 2, lambda _: 1)
    assert halves == [values[::2], values[1::2]]
    assert joined(values, lambda _: 0, lambda _: TOGETHER) == [[value] for value in values]


@pytest.mark.parametrize("layout", ["alone", "zero2"])
def test_it_can_be_undone(layout: str) -> None:
    with sums_apart():
        before = compiled(layout).body
    body = compiled(layout).body.copy()
    separate_sums(body)
    assert not flats(body)
    for one in (body, before):
        assert sorted(small(one)) == sorted(small(before))
    assert {info(value).name for value in body.output_values} == {info(value).name for value in before.output_values}
    assert memory(body).peak <= 1.01 * memory(before).peak
