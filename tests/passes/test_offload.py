"""What backward reads lies on the host meanwhile: no bit changes, and a rank holds so much less."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.cli.summary import offloaded
from shardc.cost.memory import memory
from shardc.ir.arena import planned
from shardc.ir.collectives import human_bytes
from shardc.ir.graph import Graph, info, operands, type_of
from shardc.ir.microbatch import calls_as_run
from shardc.ir.ops.host_copies import BEGIN_FETCH, BEGIN_OFFLOAD, END_FETCH, END_OFFLOAD, HOST_COPIES, on_host
from shardc.ir.parse import parse
from shardc.ir.storages import storages
from shardc.ir.text import print_graph
from shardc.passes.memory.copy_schedule import Clock, Copy, begins_of_fetches, ends_of_offloads
from shardc.runtime.oracle.simulate import simulate
from tests.cost.test_memory_calls import check
from tests.passes.test_late_gradients import BATCH, GATED, SEQUENCE, SMALL, flat, results_of, small
from tests.replanned import replanned

ALL = {"activations": "all", "least": 1}
BASE: dict[str, Any] = {"mesh": "dp=2, tp=2", **BATCH}
PLANS: dict[str, dict[str, Any]] = {
    "one rank": {"mesh": "dp=1", "params": {}},
    "tp": {"mesh": "tp=2"},
    "sequence": {"mesh": "tp=2", **SEQUENCE},
    "zero-3": {**BASE, "storage": {"zero": 3, "axes": "dp"}, "bucket": True},
    "zero-1, clipped": {**BASE, "storage": {"zero": 1, "axes": "dp"}, "clip_grad_norm": 0.1},
    "fuse": {**BASE, "fuse": True, "bucket": True},
    "accumulate": {**BASE, "accumulate": 2, "fuse": True},
    "halves": {"mesh": "tp=2", "overlap": {"split": 2}},
    "selective": {**BASE, "recompute": "selective"},
    "full": {"mesh": "tp=2", "recompute": "full", "accumulate": 2},
    "master": {"mesh": "tp=2", "precision": {"compute": "bf16", "master": "fp32"}, "fuse": True},
    "kept gathers": {**BASE, "storage": {"zero": 3, "axes": "dp", "regather": False}},
    "uneven": {"mesh": "tp=3"},
}


def moved(body: Graph) -> list[str]:
    """The values that are moved, in the order in which they are."""
    return [info(operands(call)[0]).name for call in body.calls_of(BEGIN_OFFLOAD)]


def bytes_moved(body: Graph) -> int:
    return sum(type_of(call).local_bytes(body.mesh) for call in body.calls_of(BEGIN_OFFLOAD))


@cache
def base(case: str = "") -> shardc.Program:
    return small(GATED if case in ("tp", "sequence", "full") else SMALL, PLANS.get(case, BASE))


@cache
def whole() -> Graph:
    return replanned(base(), offload=ALL).body


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", PLANS)
def test_no_bit_changes_and_a_rank_holds_what_the_report_says(case: str) -> None:
    before = base(case)
    program = replanned(before, offload=ALL)
    assert moved(program.body)
    for one, other in zip(results_of(program), results_of(before), strict=True):
        assert torch.equal(one, other)
    check(program.body)
    assert memory(program.body).host.most == bytes_moved(program.body)
    left, had = memory(program.body).row("activations"), memory(before.body).row("activations")
    assert left.most < had.most


def test_each_copy_ends_once_and_what_it_reads_stays_until_then() -> None:
    body = replanned(base("fuse"), offload=ALL).body
    order = {call: index for index, call in enumerate(body.calls())}
    of = storages(body)
    ends = dict(zip((BEGIN_OFFLOAD, BEGIN_FETCH), (END_OFFLOAD, END_FETCH), strict=True))
    for call in (call for call in order if call.target in ends):
        (end,) = (user for user in call.users if user.target is ends[call.target])
        assert operands(end) == [call, operands(call)[0]]
        assert set(call.users) == {end}, "nothing reads a copy that is under way"
        assert order[call] < order[end]
        assert of[call] is of[end] is not of[operands(call)[0]]
        assert on_host(call) == on_host(end) == (call.target is BEGIN_OFFLOAD)
        if call.target is BEGIN_OFFLOAD:
            (fetch,) = (user for user in end.users if user.target is BEGIN_FETCH)
            late = [u for u in operands(call)[0].users if u in order and info(u).phase != "fwd"]
            assert not late, "backward reads what came back"
            assert [info(c).phase for c in (call, end, fetch)] == ["fwd", "fwd", "bwd"]


def test_memory_that_is_planned_beforehand_is_free_meanwhile_too() -> None:
    """In the arena, what was copied has its place until the copy has ended, and what comes back another."""
    body = replanned(base("fuse"), offload=ALL).body
    order = {call: index for index, call in enumerate(calls_as_run(body))}
    slots = planned(body, most=2**30).values
    copied = {operands(call)[1]: order[call] for call in body.calls_of(END_OFFLOAD)}
    placed = {x: slots[x] for x in copied if x in slots}
    assert placed
    for x, slot in placed.items():
        assert copied[x] <= slot.dies < min(order[call] for call in body.calls_of(END_FETCH))


@pytest.mark.parametrize("budget", [0, 100, 5_000, 12_000])
def test_no_more_than_the_budget_is_moved(budget: int) -> None:
    program = replanned(base(), offload={"activations": budget, "least": 1})
    assert bytes_moved(program.body) <= budget < bytes_moved(whole())
    assert set(moved(program.body)) <= set(moved(whole()))
    assert budget < 5_000 or bytes_moved(program.body) > budget // 2
    assert memory(program.body).host.most == bytes_moved(program.body)


def test_without_a_budget_the_program_is_the_same() -> None:
    program = base("fuse")
    for said in (False, "none", {"activations": 0}, {"activations": "all"}):  # of a size above all that there is
        assert replanned(program, offload=said).text() == program.text()


def test_small_tensors_stay() -> None:
    sizes = {
        least: [type_of(c).local_bytes(body.mesh) for c in body.calls_of(BEGIN_OFFLOAD)]
        for least in (1, 200, 1500)
        for body in [replanned(base(), offload={"activations": "all", "least": least}).body]
    }
    assert min(sizes[1]) < 200 <= min(sizes[200]) < 1500 <= min(sizes[1500])


def test_what_backward_reads_last_is_moved_first() -> None:
    half = replanned(base(), offload={"activations": bytes_moved(whole()) // 2, "least": 1}).body
    assert not any(name.startswith("blocks.1.") for name in moved(whole())), "the last layer is read at once"
    order = [info(operands(operands(call)[0])[0]).name for call in whole().calls_of(BEGIN_FETCH)]
    assert order.index(f"{moved(half)[0]}.out") > len(order) // 2


def test_the_text_of_a_moved_program_parses_back() -> None:
    body = replanned(base("fuse"), offload=ALL).body
    text = print_graph(body, comments=False)
    assert print_graph(parse(text), comments=False) == text


# ------------------------------------------------------------------ models that make it hard
class Layer(nn.Module):
    """Its value is an output, is read twice by backward, and a view of it by a product; masks and indices are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bias = nn.Linear(8, 8), nn.Parameter(torch.randn(8))
        self.register_buffer("shift", torch.arange(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.fc(x)
        y.mul_(2).add_(self.bias)  # in place
        z = nn.functional.dropout(torch.tanh(y), 0.5, training=True)
        picked = z.gather(1, (x.argmax(1, keepdim=True) + self.shift) % 8)
        left, right = z.exp().chunk(2, dim=1)
        return torch.where(z > 0, z * z.t().mm(z).mean(), picked) + torch.cat([right * left, left], 1), z


class Hard(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        seen: list[Tensor] = []
        for layer in self.layers:
            x, z = layer(x)
            seen.append(z)
        return {"loss": x.square().mean() + self.layers[0].fc.weight.t().square().sum(), "first": seen[0]}


HARD: dict[str, dict[str, Any]] = {
    "one rank": {"mesh": "dp=1"},
    "dp": {"mesh": "dp=2", "inputs": {"x": "dp, -"}},
    "dp=3": {"mesh": "dp=3", "inputs": {"x": "dp, -"}},
    "tp": {"mesh": "tp=2", "params": {"layers.*.fc.weight": "tp, -"}},
    "fuse": {"mesh": "dp=2", "inputs": {"x": "dp, -"}, "fuse": True},
    "recompute": {"mesh": "dp=2", "inputs": {"x": "dp, -"}, "recompute": "selective"},
}


@cache
def hard(case: str, **more: str) -> tuple[shardc.Program, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, plan = Hard().double(), HARD[case] | {"offload": ALL if more else False}
    batch = {"x": torch.randn(8, 8, dtype=torch.float64)}
    return shardc.compile(model, batch, plan=plan, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)), batch


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", HARD)
def test_hard_models_change_no_bit(case: str) -> None:
    program, batch = hard(case, offload="all")
    plain, _ = hard(case)
    assert moved(program.body)
    assert program.verify().ok
    check(program.body)
    moved_results, results = (flat(simulate(p.body, p.inputs(batch))) for p in (program, plain))
    assert len(results) > 3
    for one, other in zip(moved_results, results, strict=True):
        assert torch.equal(one, other)


class Attends(nn.Module):
    """Backward has views of its own of what forward leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.tok(x)
        for layer in self.layers:
            h = layer(h)
        return nn.functional.cross_entropy((h @ self.tok.weight.t()).flatten(0, 1), x.flatten())


def test_views_that_backward_makes_view_what_came_back() -> None:
    plan = {"mesh": "dp=2", "inputs": {"x": "dp"}, "fuse": True, "accumulate": 2, "bucket": True}
    results: list[list[Tensor]] = []
    for said in (ALL, "none"):
        torch.manual_seed(0)
        model, batch = Attends().double(), {"x": torch.arange(40).view(8, 5) % 12}
        adam = torch.optim.Adam(model.parameters())
        program = shardc.compile(model, batch, plan={**plan, "offload": said}, optimizer=adam)
        results.append(flat(simulate(program.body, program.inputs(batch))))
        if said == ALL:
            assert moved(program.body)
            assert all(call.users for call in program.body.calls_of(torch.ops.aten.transpose.int)), "none is left over"
            check(program.body)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


class Counted(nn.Module):
    """Batch norm's statistics: only backward reads the view of them that forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()) for _ in "abc"))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize("more", [{}, {"overlap": {"split": 2}}, {"fuse": True}], ids=["plain", "halves", "kernels"])
def test_views_that_nothing_reads_any_more_are_gone(more: dict[str, Any]) -> None:
    plan = {"mesh": "dp=2", "inputs": {"x": "dp"}, "accumulate": 2, **more}
    results: list[list[Tensor]] = []
    for said in (ALL, "none"):
        torch.manual_seed(0)
        model, batch = Counted().double(), {"x": torch.randn(16, 4, 9, 9, dtype=torch.float64)}
        adam = torch.optim.Adam(model.parameters())
        program = shardc.compile(model, batch, plan={**plan, "offload": said}, optimizer=adam)
        results.append(flat(simulate(program.body, program.inputs(batch))))
        if said == ALL:
            assert moved(program.body)
            assert program.verify().ok
            check(program.body)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_what_must_stay_stays() -> None:
    program, _ = hard("one rank", offload="all")
    body, of = program.body, storages(program.body)
    kept = {of[v] for v in (*body.placeholders, *body.output_values)}
    kinds = {type_of(call).dtype for call in body.calls_of(BEGIN_OFFLOAD)}
    assert not any(of[operands(call)[0]] in kept for call in body.calls_of(BEGIN_OFFLOAD))
    assert {torch.bool, torch.int64, torch.float64} <= kinds
    assert len({of[operands(call)[0]] for call in body.calls_of(BEGIN_OFFLOAD)}) == len(moved(body))


def test_a_program_for_evaluation_moves_nothing() -> None:
    torch.manual_seed(0)
    model = Hard().double()
    program = shardc.compile(
        model, {"x": torch.randn(8, 8).double()}, plan={"mesh": "dp=1", "offload": "all"}, mode="eval"
    )
    assert not any(call.target in HOST_COPIES for call in program.body.calls())
    assert any(note.code == "SC218" and "'offload'" in note.message for note in program.diagnostics)


# ------------------------------------------------------------------ when copies run
def test_copies_are_hidden_where_there_is_time() -> None:
    waits: dict[str, float] = {}
    for name, rate in (("fast", 1e12), ("slow", 1e6)):
        program = small(SMALL, {**BASE, "hardware": {"bf16_flops_per_second": 1e9, "host_bytes_per_second": rate}})
        program = replanned(program, offload=ALL)
        rows = program.predict().exposed_ms
        copies = [row for row in rows if row.kind.startswith("copy ")]
        assert {(row.kind, row.phase) for row in copies} == {("copy to host", "fwd"), ("copy from host", "bwd")}
        assert sum(row.bytes for row in copies) == 2 * bytes_moved(program.body)
        assert math.isclose(sum(row.ms for row in copies), 1e3 * sum(row.bytes for row in copies) / rate, rel_tol=1e-6)
        waits[name] = sum(row.exposed_ms for row in copies) / sum(row.ms for row in copies)
    assert waits["fast"] == 0.0 < 0.5 < waits["slow"]


def test_copies_to_the_host_end_when_the_link_is_through() -> None:
    clock = Clock.of([1.0] * 10, bytes_per_second=10)
    copies = [Copy(20, 1), Copy(20, 2), Copy(5, 6)]  # 2 s each: from 1 to 3, 3 to 5, then from 6 to 6.5
    assert ends_of_offloads(copies, clock, 100, 9) == [3, 5, 7]
    assert ends_of_offloads(copies, clock, 100, 4) == [3, 4, 6]
    assert ends_of_offloads(copies, clock, 20, 9) == [2, 5, 7], "one at a time"


def test_copies_back_begin_as_late_as_they_may() -> None:
    clock = Clock.of([1.0] * 10, bytes_per_second=10)
    copies = [Copy(20, 6), Copy(20, 7), Copy(5, 9)]  # from 3 to 5, 5 to 7, 8.5 to 9
    assert begins_of_fetches(copies, clock, 100, 0) == [3, 5, 8]
    assert begins_of_fetches(copies, clock, 100, 4) == [4, 5, 8]
    assert begins_of_fetches(copies, clock, 20, 0) == [3, 6, 8], "one at a time"


def test_a_plan_that_moves_nothing_is_told_so() -> None:
    for said in ({"activations": "all"}, {"activations": 10, "least": 1}, {"activations": "1 GiB"}):
        (note,) = replanned(base(), offload=said).diagnostics
        assert note.code == "SC234"
        assert note.hint is not None
        size = note.hint.partition("least: ")[2].partition("}")[0]
        assert moved(replanned(base(), offload={"activations": "all", "least": size}).body)


def test_the_summary_says_what_is_moved() -> None:
    program = replanned(base("accumulate"), offload=ALL)
    size = human_bytes(bytes_moved(program.body))
    (line,) = offloaded(program)
    assert line.startswith(f"{len(moved(program.body))} values of each of 2 microbatches, {size} a rank")
    assert str(program.memory()).endswith(f"\non the host: {size}")
    assert not offloaded(base())
    assert "on the host" not in str(base().memory())


# ------------------------------------------------------------------ beside recomputation
def recomputed(program: shardc.Program) -> int:
    return sum(info(call).is_recomputed for call in program.body.calls())


@cache
def deep() -> shardc.Program:
    return small(replace(SMALL, layers=6), {"mesh": "tp=2"})


def test_less_runs_again_where_the_host_holds_what_would_not_fit() -> None:
    """Under one budget: what lies on the host need not be made again."""
    had = memory(deep().body, overlap=True).row("activations").most
    budget = {"recompute": {"budget": had // 2}}
    alone = replanned(deep(), **budget)
    beside = replanned(deep(), **budget, offload={"activations": had // 3, "least": 1})
    assert recomputed(alone) > 0
    assert moved(beside.body)
    assert recomputed(beside) <= recomputed(alone) // 2
    assert bytes_moved(beside.body) <= had // 3
    for program in (alone, beside):
        assert memory(program.body, overlap=True).row("activations").most <= had // 2
        assert not any(d.code == "SC214" for d in program.diagnostics)
    for one, other in zip(results_of(beside), results_of(alone), strict=True):
        assert torch.equal(one, other)


def test_what_may_not_be_moved_is_made_again_as_before() -> None:
    had = memory(deep().body, overlap=True).row("activations").most
    budget = {"recompute": {"budget": had // 2}}
    nothing = replanned(deep(), **budget, offload={"activations": "all", "least": "1 GiB"})
    names, before = ([info(c).name for c in p.body.calls()] for p in (nothing, replanned(deep(), **budget)))
    assert names == before
