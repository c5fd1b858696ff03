"""Fusion: the same values, no more memory, collectives and products in their order; kernels where they are due."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from kernels_triton.generated.op import FUSED
from kernels_triton.ir import text
from kernels_triton.ir.kernel import Kernel
from kernels_triton.match.op import KERNELS
from kernels_triton.transform.independent_outputs import independent_outputs
from shardc.cost.memory import memory
from shardc.ir.collectives import KINDS
from shardc.ir.graph import Graph, info, op_name
from shardc.ir.in_place import writes
from shardc.ir.ops.buckets import PACK, UNPACK
from shardc.ir.parse import parse
from shardc.ir.plain import graph_from_plain, graph_to_plain
from shardc.ir.text import print_graph
from shardc.ir.verify import violations
from shardc.passes.fusion.analysis.traffic import PRODUCTS, bytes_by_call, traffic
from shardc.passes.fusion.clustering.memory_budget import allowed_peak
from shardc.passes.fusion.fuse import fuse
from shardc.runtime.execute.body_code import BodyCode
from shardc.runtime.execute.instructions import rank_context
from shardc.runtime.oracle.verify import verify
from tests import before_kernels
from tests.models.zoo import PLANS, make
from tests.passes.fuse_graphs import chains

MODELS = ("gpt2", "llama", "bert", "t5", "vit")


def kernels(graph: Graph) -> list[Kernel]:
    return [text.parse(str(node.args[1])) for node in graph.calls() if node.target in KERNELS]


def fixed(graph: Graph) -> list[str]:
    """What keeps its place: collectives and products, by the names of their values."""
    return [info(n).name for n in graph.calls() if op_name(n.target) in KINDS or op_name(n.target) in PRODUCTS]


def sent_and_others(graph: Graph) -> tuple[int, int]:
    """The bytes that calls copy to send them and once they have come, collectives and their buckets; and all others."""
    by_call = bytes_by_call(graph)
    sent = sum(size for node, size in by_call.items() if op_name(node.target) in KINDS or node.target in (PACK, UNPACK))
    return sent, sum(by_call.values()) - sent


@pytest.mark.parametrize("spread", [False, True], ids=["1x1", "dp2tp2"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(10)
def test_a_fused_program_is_the_single_device(name: str, spread: bool) -> None:
    model, batch, loss = make(name)
    plan = shardc.Plan.load(PLANS / f"{name}.yaml") if spread else shardc.Plan.of(mesh="dp=1")
    plan = plan.merge(shardc.Plan.of(storage={"zero": 1, "axes": ["dp"]})) if spread else plan
    mine = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mesh = "dp=2,tp=2" if spread else "dp=1"
    program, plain = before_kernels.compiled(model, batch, plan, mesh=mesh, loss=loss, optimizer=mine)
    body = fuse(plain)
    assert not violations(body)
    assert fixed(body) == fixed(plain)
    assert memory(body).peak <= allowed_peak(memory(plain).peak)
    assert traffic(body).kernels < traffic(plain).kernels / 3
    (sent, others), (still_sent, fewer) = sent_and_others(plain), sent_and_others(body)
    assert still_sent == sent
    assert fewer < others / 2
    report = verify(body, program.reference, program.inputs(), torch.float64)
    assert report.ok, str(report)
    again = parse(print_graph(body))
    assert print_graph(again, comments=False) == print_graph(body, comments=False)
    assert graph_to_plain(graph_from_plain(graph_to_plain(body))) == graph_to_plain(body)
    assert print_graph(fuse(plain)) == print_graph(body), "two runs differ"


class Block(nn.Module):
    """Attention's neighbours: a residual, a norm, GELU, dropout, a tied product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))
        return nn.functional.log_softmax(self.norm(h), -1).square().mean()


def block(**plan: Any) -> shardc.Program:
    torch.manual_seed(0)
    model = Block()
    mine = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return shardc.compile(model, torch.randn(8, 4, 16), plan={"mesh": "dp=2", **plan}, optimizer=mine)


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"inputs": {"x": "dp, -, -"}},
        {"inputs": {"x": "dp, -, -"}, "accumulate": 2},
        {"recompute": "full"},
        {"clip_grad_norm": 0.1},
        {"precision": "bf16"},
        {"precision": "fp16", "inputs": {"x": "dp, -, -"}},
        {"storage": {"zero": 3, "axes": ["dp"]}, "inputs": {"x": "dp, -, -"}},
    ],
    ids=str,
)
@pytest.mark.sampled(8)
def test_with_everything_else_that_a_plan_asks_for(plan: dict[str, Any]) -> None:
    plain, program = block(**plan), block(**plan, fuse=True)
    assert kernels(program.body)
    assert memory(program.body).peak <= memory(plain.body).peak  # of values; an arena adds gaps between them
    assert program.verify().ok, str(program.verify())


def test_parameters_and_state_are_updated_in_place_by_few_kernels() -> None:
    program = block(fuse=True)
    updates = [n for n in program.body.calls() if info(n).phase == "opt"]
    assert all(n.target is FUSED for n in updates)
    parameters = [port for port in program.body.inputs if port.role == "param"]
    assert len(updates) <= len(parameters) + 1
    stored = [port for port in program.body.outputs if port.role in ("param", "state")]
    over = writes(program.body)
    assert len(over) == len(stored)
    assert all(write.op is not None for write in over)
    report = program.memory()
    assert report.row("optimizer state").most == 0


def test_a_rank_runs_kernels_as_the_simulation_does() -> None:
    program = block(fuse=True, mesh="dp=1")
    trainer = program.launch()
    executor = BodyCode(program.body, rank_context(program.mesh, 0, None), 0, torch.device("cpu"))  # type: ignore[arg-type]
    held = {name: value.clone().contiguous() for name, value in trainer.state.items()}
    homes = {name: value.data_ptr() for name, value in held.items()}
    for _ in range(3):
        fed = trainer._feeding.feeds(program.sample, trainer.seed, trainer.steps)  # pyright: ignore[reportPrivateUsage]
        rates = trainer.rates()
        loss = trainer.step(program.sample).loss
        found = executor.run(held | rates, fed)
        assert torch.equal(next(v for p, v in found.items() if p.role == "loss"), loss)
        held |= {p.name: v for p, v in found.items() if p.role in ("param", "state")}
        assert all(torch.equal(value, trainer.state[name]) for name, value in held.items())
    assert {name: value.data_ptr() for name, value in held.items()} == homes


def test_what_backward_can_make_again_is_not_kept() -> None:
    class Gelu(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.b(0.5 * h * (1 + torch.tanh(h + h**3))).sum()

    program = shardc.compile(Gelu(), torch.randn(32, 16), mesh="dp=1", plan={"fuse": True})
    forward = next(n for n in program.body.calls() if n.target in KERNELS)
    assert len(text.parse(str(forward.args[1])).outputs) == 1  # the activation: not its tanh, nor the sum with the bias


def test_excluded_ops_stay_calls() -> None:
    program = block(fuse={"exclude": ["native_layer_norm", "gelu"]})
    names = [op_name(node.target) for node in program.body.calls()]
    assert "native_layer_norm" in names
    assert "native_layer_norm_backward" not in names


def test_a_range_of_one_element_stays_a_call() -> None:
    """Its only number would be a literal, and no step of a kernel is of literals alone."""

    class OfOne(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.act = nn.Parameter(torch.ones(1)), nn.GELU()

        def forward(self, x: Tensor) -> Tensor:
            loss = 0.0 + (self.act(x).sum([0]) * torch.arange(1).reshape([]).cos()).sum()
            return loss * self.weight.sum()

    plan = {"activations": {"act": "dp"}, "fuse": True}
    program = shardc.compile(OfOne(), {"x": torch.randn(2)}, mesh="dp=2", plan=plan)
    assert kernels(program.body)
    assert program.verify().ok


def test_parts_of_numbers_are_joined_by_a_call() -> None:
    """Only a third of what is split is used: the other two have zeros for gradients, which no kernel computes."""

    class Third(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            y = nn.functional.linear(x, self.weight)
            y = torch.cat([y.chunk(3, 0)[2], y.chunk(3, 0)[1], y.chunk(3, 0)[0]], 0)
            return (y * torch.arange(3).cos()).sum()

    program = shardc.compile(Third(), {"x": torch.randn(3)}, mesh="dp=2", plan={"fuse": True})
    assert program.verify().ok


def test_a_sum_over_everything_is_apart_from_what_waits_for_it() -> None:
    """Of many elements the sum is made by many programs, none of which has it: a weight's update is another kernel."""
    model = nn.Linear(128, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = {"fuse": True, "clip_grad_norm": 1.0, "inputs": {"input": "dp, -"}}
    loss = model.forward
    model.forward = lambda input: loss(input).square().mean()  # type: ignore[method-assign]
    program = shardc.compile(model, {"input": torch.randn(4, 128)}, mesh="dp=2", plan=plan, optimizer=optimizer)
    assert program.verify().ok


def test_a_wrong_kernel_is_named() -> None:
    program = block(fuse=True)
    node = next(n for n in program.body.calls() if n.target is FUSED and info(n).phase != "opt")
    kernel = text.parse(str(node.args[1]))
    steps = tuple(
        type(s)(s.op, tuple(2 * o if isinstance(o, float) else o for o in s.operands), s.attributes, s.dtype)
        for s in kernel.steps
    )
    node.args = (node.args[0], text.text(Kernel(kernel.name, kernel.space, kernel.inputs, steps, kernel.outputs)))
    report = program.verify()
    assert not report.ok
    assert report.first_mismatch is not None
    assert report.first_mismatch.name in {info(user).name for user in node.users}


def test_float64_is_computed_in_float64() -> None:
    """Bias corrections near 1 - 0.999 lose half of their digits in float32: no kernel mixes the two."""
    body = block(fuse=True).body
    found = [text.parse(str(n.args[1])) for n in body.calls() if n.target in KERNELS and info(n).phase == "opt"]
    assert any(kernel.is_float64 for kernel in found)
    for kernel in found:
        assert kernel.is_float64 or torch.float64 not in {one.dtype for one in kernel.outputs}
        assert kernel.is_float64 or "pow" not in {step.op for step in kernel.steps}
        assert (
            kernel.is_float64 or len(independent_outputs(kernel)) == len(kernel.outputs) // 3
        )  # a parameter and its two moments each


def test_a_graph_of_three_thousand_calls() -> None:
    graph = chains(3000)
    fused = fuse(graph)
    products = sum(1 for node in graph.calls() if op_name(node.target) == "mm")
    calls = sum(1 for _ in fused.calls())
    assert calls < 5 * products
    x = {port.name: torch.rand(tuple(info(node).type.shape)) * 0.01 for port, node in ports(graph)}  # type: ignore[union-attr]
    assert verify(fused, graph, x).equal


def ports(graph: Graph) -> Any:
    return zip(graph.inputs, graph.placeholders, strict=True)


@pytest.mark.long  # `tests/explain/test_explain_kernels.py` and `tests/partition/test_gathers.py` fuse stages
def test_a_pipelines_parts_are_fused_one_by_one() -> None:
    model, batch, _ = make("gpt2")
    mine = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = {"mesh": "pp=2", "pipeline": {"axis": "pp", "microbatches": 2}, "fuse": True}
    program = shardc.compile(model, batch, plan=plan, optimizer=mine)
    assert program.pipelined is not None
    assert all(kernels(stage.forward) and kernels(stage.backward) for stage in program.pipelined.stages)
    assert program.verify().ok
