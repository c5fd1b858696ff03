"""What a kernel may never do: wait for what comes later, keep others waiting, or hold more than there was room for."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from examples.gpt2 import gpt2
from kernels_triton.match.op import KERNELS, kernel_of
from shardc.cost.memory import memory
from shardc.ir.collectives import KINDS
from shardc.ir.graph import Graph, info, op_name, producer, results
from shardc.ir.mesh import Mesh
from shardc.passes.bias_products import BiasProducts
from shardc.passes.fusion import fuse as fuse_module
from shardc.passes.fusion.analysis.traffic import PRODUCTS, traffic
from shardc.passes.fusion.clustering.fusion_graph import build_fusion_graph
from shardc.passes.fusion.clustering.memory_budget import MemoryBudget, allowed_peak
from shardc.passes.fusion.clustering.rematerialize import FusionGroup
from shardc.passes.fusion.fuse import fuse
from tests.handmade import Builder

aten = torch.ops.aten

TP = {"**.wte.weight": "tp, -", "**.c_attn.weight": "-, 3*tp", "**.c_fc.weight": "-, tp"}
PLANS: dict[str, dict[str, Any]] = {
    "dp": {"mesh": "dp=2"},
    "dp bucketed": {"mesh": "dp=2", "bucket": True},
    "zero-3": {"mesh": "dp=2", "storage": {"zero": 3, "axes": ["dp"]}, "precision": "bf16"},
    "tp": {"mesh": "dp=2,tp=2", "params": TP, "clip_grad_norm": 0.1},
    "accumulate": {"mesh": "dp=2", "accumulate": 2},
}


def unfused(plan: str) -> Graph:
    torch.manual_seed(0)
    model, batch = gpt2(batch=4, seq=8, layers=2, vocab=64, heads=4, width=32)
    mine = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wanted = {"inputs": dict.fromkeys(batch, "dp, -"), **PLANS[plan]}
    return shardc.compile(model, batch, plan=wanted, optimizer=mine).body


def fixed(body: Graph) -> list[str]:
    """Products and collectives, in order."""
    return [info(n).name for n in body.calls() if op_name(n.target) in PRODUCTS or op_name(n.target) in KINDS]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("plan", PLANS)
def test_a_fused_body_is_legal(plan: str) -> None:
    body = unfused(plan)
    made = fuse(body)
    before = iter(fixed(body))  # of which some are not needed any more
    assert all(name in before for name in fixed(made)), "a product or a collective runs later than it did"
    phase = {info(value).name: info(producer(value)[0]).phase for value in body.values()}
    started = False  # has backward?
    seen: set[Any] = set(made.placeholders)
    for node in made.calls():
        assert seen.issuperset(node.all_input_nodes), "kernels in a circle"
        seen |= {node, *(value for value in results(node) if value is not None)}
        started |= info(node).phase == "bwd" and op_name(node.target) in PRODUCTS
        if node.target in KERNELS:
            phases = {phase[info(value).name] for value in results(node) if value is not None}
            assert "opt" not in phases or phases == {"opt"}
            assert "bwd" not in phases or "fwd" not in phases or not started
    assert memory(made).peak <= memory(body).peak


class Heads(nn.Module):
    """Three products of one value, each with a bias, then a wide one, where a step holds most."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.norm, self.out, self.wide = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 256)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(x)
        y = self.norm(x)
        made = nn.functional.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y))
        return (self.wide(x + made) ** 2).mean()


def test_equal_small_kernels_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases that their products do not add."""
    monkeypatch.setattr(BiasProducts, "run", lambda _, graph: graph)
    body = fuse(shardc.compile(Heads(), torch.randn(4, 8, 16), mesh="dp=1").body)
    (attention,) = (n for n in body.calls() if op_name(n.target) == "shardc.sdpa")
    assert len({producer(x)[0] for x in attention.all_input_nodes}) == 1, "three biases, one kernel"


def test_gradients_are_added_in_the_kernel_that_reads_their_sum() -> None:
    """Three products send a gradient to the norm, whose backward adds them: no sum of two is written and read."""
    program = shardc.compile(Heads(), torch.randn(4, 8, 16), mesh="dp=1", plan={"fuse": True})
    assert "add.Tensor" not in [op_name(n.target) for n in program.body.calls() if info(n).phase == "bwd"]
    kernels = [k for n in program.body.calls() if info(n).phase == "bwd" and (k := kernel_of(n.target, n.args))]
    norms = [k for k in kernels if {"rsum", "csum"} <= {step.op for step in k.steps}]
    assert any(sum(tuple(one.shape) == (4, 8, 16) for one in k.inputs) >= 4 for k in norms)


def test_room_is_what_is_left_below_the_peak() -> None:
    body = unfused("dp")
    report = memory(body)
    budget = MemoryBudget.of(body, report, build_fusion_graph(body.copy()))
    assert min(budget.free) < 0 < max(budget.free)  # none at the peak: a little is kept
    at = budget.free.index(max(budget.free))
    most = budget.free[at]
    assert budget.allows(most, at, at)
    budget.reserve(most, at, at)
    assert not budget.allows(1, at, at)
    assert not budget.allows(1, 0, len(budget.free))
    assert not MemoryBudget.empty().allows(0, 0, 1)


@pytest.mark.parametrize(("rows", "kernel"), [(8, False), (4096, True)])
def test_a_bias_on_a_large_value_is_a_kernel_of_its_own(
    rows: int, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch adds what it repeats element by element; where it is small, that is no matter."""
    monkeypatch.setattr(BiasProducts, "run", lambda _, graph: graph)

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            return (self.down(y)[:8] @ y[:8].T.contiguous()[:16]).square().mean()

    body = fuse(shardc.compile(Biased(), torch.randn(rows, 16), mesh="dp=1").body)
    (add,) = (producer(v)[0] for v in body.values() if info(v).name == "up.add")
    assert (add.target in KERNELS) == kernel


class Distances(nn.Module):
    """All pairs of rows: what its backward makes of them is the step's peak, and two results of one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.w
        return (y[:, :, None] - y[:, None]).square().sum(-1).exp().neg().sum()


def test_a_kernel_too_many_at_the_peak_is_not_made_and_others_are() -> None:
    plan = {"inputs": {"x": "dp"}}
    plain = shardc.compile(Distances(), (torch.randn(8, 8, 16) / 4,), mesh="dp=2", plan=plan)
    program = shardc.compile(Distances(), (torch.randn(8, 8, 16) / 4,), mesh="dp=2", plan={**plan, "fuse": True})
    assert traffic(program.body).bytes < traffic(plain.body).bytes / 2
    assert memory(program.body).peak <= memory(plain.body).peak
    assert program.verify().ok
    assert not any(found.code == "SC217" for found in program.diagnostics)


class Scaled(nn.Module):
    """Tokens whose channels are scaled: what backward sums of them can all be one kernel, and is then held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.up = nn.Embedding(30, 16), nn.LayerNorm(16), nn.Linear(16, 16)
        self.scale, self.head = nn.Parameter(torch.rand(16, 1)), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.table(x))
        h = h.transpose(1, 2) + self.scale * self.up(h).transpose(1, 2)
        return self.head(nn.functional.gelu(h).mean(2)).square().mean()


def layers_tied_at_the_peak(count: int) -> Graph:
    """Equal layers: products of the values between six products, whose kernels would all be made at once."""
    b = Builder(Mesh())
    numbers = itertools.count()
    x, w = b.input("x", "f32[64, 64]", "input"), b.input("w", "f32[64, 64]")

    def call(op: Any, *args: Any) -> Any:
        return b.call(f"v{next(numbers)}", "f32[64, 64]", op, *args)

    for _ in range(count):
        wide = [call(aten.mm.default, x, w) for _ in range(6)]
        between = [call(aten.mul.Tensor, one, other) for one, other in itertools.pairwise(wide)]
        first, *rest = [call(aten.mm.default, product, w) for product in between]
        x = functools.reduce(lambda total, one: call(aten.add.Tensor, total, one), rest, first)
    b.output("output", "x", x)
    return b.graph()


def test_layers_that_are_tied_at_the_peak_are_repaired_together() -> None:
    """However many they are: as many rounds, and the same kernels a layer."""
    rounds_and_calls: dict[int, tuple[int, int]] = {}
    for layers in (20, 80):
        rounds: list[Any] = []
        graph = layers_tied_at_the_peak(layers)
        fused = fuse(graph, watch=lambda *seen, rounds=rounds: rounds.append(seen))
        assert memory(fused).peak <= memory(graph).peak
        assert not fused.diagnostics
        rounds_and_calls[layers] = len(rounds), sum(1 for _ in fused.calls()) // layers
    assert rounds_and_calls[20] == rounds_and_calls[80]
    assert rounds_and_calls[80][1] < 20  # calls of a layer


def test_where_nothing_is_fused_a_warning_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardc.passes.fusion.fuse.MAX_ROUNDS", 1)
    plan = {"fuse": True, "inputs": {"x": "dp"}}
    program = shardc.compile(Scaled(), (torch.randint(30, (4, 8)),), mesh="dp=2", plan=plan)
    (found,) = (one for one in program.diagnostics if one.code == "SC217")
    assert found.severity == "warning"
    assert "as far as they were split" in found.message


def test_kernels_that_hold_too_much_are_split_and_the_graph_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = {"inputs": {"x": "dp"}}
    body = shardc.compile(Scaled(), (torch.randint(30, (4, 8)),), mesh="dp=2", plan=plan).body
    read: list[Graph] = []
    emitted: list[list[FusionGroup]] = []
    build = fuse_module.build_fusion_graph
    monkeypatch.setattr(fuse_module, "build_fusion_graph", lambda *args: read.append(args[0]) or build(*args))
    fused = fuse_module.fuse(body, watch=lambda _, groups: emitted.append(groups))
    assert len(read) == 1
    assert 1 < len(emitted) <= 6
    assert memory(fused).peak <= allowed_peak(memory(body).peak)
    assert traffic(fused).bytes < traffic(body).bytes
    calls = [{i for group in groups for i in group.calls} for groups in emitted]
    assert calls[-1] <= calls[0], "repair fuses nothing more"
    assert all(any(set(g.calls) <= set(f.calls) for f in emitted[0]) for g in emitted[-1]), "it only splits"


class Beside(nn.Module):
    """What `w` takes has to be gathered first; what becomes of `z` is not asked for so soon."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(8, 64, bias=False)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        scale, other = torch.sigmoid(x) * x, torch.tanh(z) * z
        return (self.w(scale).square().mean() + self.w(other).square().mean()) * 2


@pytest.mark.parametrize(("gap", "kernels"), [(1e-9, [1, 1]), (1e-6, [2])])
def test_an_urgent_collective_does_not_wait_for_what_it_does_not_need(gap: float, kernels: list[int]) -> None:
    """Two kernels of one shape may run at one time; together, where that is no later than a launch is."""
    plan = {"inputs": {"x": "-, tp, -", "z": "-, tp, -"}, "params": {"w.weight": "tp, -"}, "fuse": True}
    plan |= {"hardware": {"kernel_gap_seconds": gap, "memory_bytes_per_second": 1e10}}
    batch = {"x": torch.randn(2, 4, 8), "z": torch.randn(2, 4, 8)}
    made = shardc.compile(Beside(), batch, mesh="tp=2", plan=plan).body
    gathered = [n for n in made.calls() if op_name(n.target) == "shardc.all_gather" and info(n).phase == "fwd"]
    sources = dict.fromkeys(producer(n.all_input_nodes[0])[0] for n in gathered)
    assert [len(list(results(n))) for n in sources if n.target in KERNELS] == kernels
