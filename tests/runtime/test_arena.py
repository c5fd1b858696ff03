"""Results of kernels have places in one arena: no two that live at once share a byte, and none leaves the step."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc.cost.memory import memory
from shardc.ir.arena import LINE, SPARE, Plan, Slot, placed, planned
from shardc.ir.collectives import KINDS
from shardc.ir.graph import Graph, info, op_name, type_of
from shardc.ir.storages import storages
from shardc.runtime.execute.arena import Arena
from shardc.runtime.execute.body_code import BodyCode
from shardc.runtime.execute.instructions import rank_context
from shardc.runtime.execute.layout import shard
from shardc.runtime.execute.microbatches import feeds
from tests.models.zoo import PLANS, make
from tests.runtime.poison import Late, poisoned

CPU = torch.device("cpu")
DP = {"inputs": {"input_ids": "dp, -", "labels": "dp, -"}, "fuse": True, "bucket": 40_000, "clip_grad_norm": 0.1}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dp": ("gpt2", "dp=2", {**DP, "accumulate": 2}),
    "zero-3": ("gpt2", "dp=2", {**DP, "storage": {"zero": 3, "axes": ["dp"]}, "precision": "bf16"}),
    "bucket": ("gpt2", "dp=2", DP),
    "tp": ("llama_sp", "dp=1, tp=2", {"fuse": True}),
}


@cache
def program_of(case: str) -> shardc.Program:
    name, mesh, wanted = CASES[case]
    torch.manual_seed(0)
    model, batch, loss = make(name.removesuffix("_sp"), layers=1, batch=4, seq=8, vocab=64, width=32)
    plan = shardc.Plan.from_dict(wanted)
    if name == "llama_sp":
        plan = shardc.Plan.load(PLANS / f"{name}.yaml").merge(plan)
    mine = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return shardc.compile(model, batch, mesh=mesh, plan=plan, optimizer=mine, loss=loss)


def executor_of(body: Graph, plan: Plan | None = None) -> BodyCode:
    context = rank_context(body.mesh, 0, Late(body.mesh))  # type: ignore[arg-type]
    return BodyCode(body, context, 0, CPU, None if plan is None else Arena({body: plan}, CPU))


def poisoned_executor(body: Graph, plan: Plan) -> BodyCode:
    executor = executor_of(body, plan)
    assert executor.arena is not None
    for part in ("_first_microbatch", "_later_microbatches", "_once_per_step"):
        setattr(executor, part, poisoned(getattr(executor, part), plan, executor.arena))
    return executor


def everything(body: Graph) -> Plan:
    """All that may have a place, whatever becomes of the peak."""
    return planned(body, 1 << 40)


def steps(executor: BodyCode, program: shardc.Program, count: int = 2) -> list[Tensor]:
    """Everything that a rank makes in some steps, each from what the one before left."""
    types = {name: type_of(node) for name, node in program.body.input_nodes().items()}
    whole = program.inputs()
    fed = [
        {name: shard(x, types[name], program.mesh, 0) for name, x in feed.items()}
        for feed in feeds(program.body, whole)
    ]
    local = {name: shard(x, types[name], program.mesh, 0) for name, x in whole.items() if name not in fed[0]}
    found: list[Tensor] = []
    for _ in range(count):
        made = executor.run(local, fed)
        local |= {port.name: value for port, value in made.items() if port.role in ("param", "state", "buffer")}
        found += [value.clone() for value in made.values()]
        assert not any(executor.arena and executor.arena.holds(value) for value in made.values())
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
def test_nothing_that_lives_is_written_over(case: str) -> None:
    """What is dead is filled with NaNs before each call, and results are bitwise those of separate tensors."""
    program = program_of(case)
    plan = everything(program.body)
    assert len(plan.slots) > 40
    executor = poisoned_executor(program.body, plan)
    found, expected = steps(executor, program), steps(executor_of(program.body), program)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert all(bool(x.isfinite().all()) for x in found)


def test_a_slot_that_is_too_short_is_found() -> None:
    """The poison works: of a plan in which something dies too early, the step is another."""
    program = program_of("dp")
    plan = everything(program.body)
    expected = steps(executor_of(program.body), program, 1)
    long = [slot for slot in plan.slots if slot.dies > slot.born + 20 and info(slot.value).phase == "fwd"]
    assert len(long) > 5
    for slot in long[::3]:
        wrong = Plan(tuple(replace(one, dies=(one.born + one.dies) // 2) if one is slot else one for one in plan.slots))
        found = steps(poisoned_executor(program.body, wrong), program, 1)
        assert not all(torch.equal(x, y) for x, y in zip(found, expected, strict=True)), info(slot.value).name


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
def test_the_peak_stays_where_it_was(case: str) -> None:
    program = program_of(case)
    plain, found = memory(program.body, overlap=True), program.memory()
    assert SPARE * found.peak <= (SPARE + 1) * plain.peak
    plan = planned(program.body)
    assert found.row("arena").most == plan.bytes > 0
    assert all(slot.bytes <= plan.bytes for slot in plan.slots)


def test_views_of_what_has_a_place_are_made_once() -> None:
    body = program_of("dp").body
    without, within = executor_of(body), executor_of(body, everything(body))
    fewer = len(without._first_microbatch) - len(within._first_microbatch)
    assert fewer >= 4
    held = len(without.routine._viewed)  # views of held tensors need no arena
    assert len(within.routine._viewed) == fewer + held


def test_each_executor_has_an_arena_that_goes_with_it() -> None:
    body = program_of("dp").body
    one, other = executor_of(body, everything(body)), executor_of(body, everything(body))
    assert one.arena is not None
    assert other.arena is not None
    assert not one.arena.holds(other.arena.buffer)
    gone = weakref.ref(one.arena.buffer)
    del one
    gc.collect()
    assert gone() is None
    assert other.arena.buffer.numel() == everything(body).bytes


# ---------------------------------------------------------------------- plans
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12), st.sampled_from([16, 48, 112, 128, 384, 4096]))))
@settings(max_examples=80, deadline=None)
def test_no_two_that_live_at_once_share_a_byte(drawn: list[tuple[int, int, int]]) -> None:
    value = next(iter(program_of("dp").body.calls()))
    slots = [Slot(value, born, born + length, size) for born, length, size in sorted(drawn)]
    plan = placed(slots)
    assert [(s.born, s.dies, s.bytes) for s in slots] == sorted((s.born, s.dies, s.bytes) for s in plan.slots)
    assert all(slot.offset % (LINE if slot.bytes >= LINE else 16) == 0 for slot in plan.slots)
    for a, b in combinations(plan.slots, 2):
        apart = a.end <= b.offset or b.end <= a.offset
        assert apart or a.dies < b.born or b.dies < a.born


class Leaving(nn.Module):
    """What a kernel makes of one number leaves as a view, of another as a gradient, and of a third only as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(16)), nn.Buffer(torch.ones(128))

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(x * self.a).softmax(-1)
        self.b = y.detach().view(-1)
        return (y @ y.t()).square().sum()


def test_what_leaves_has_no_place() -> None:
    body = shardc.compile(Leaving(), torch.randn(8, 16), mesh="dp=1", plan={"fuse": True}).body
    plan, of = everything(body), storages(body)
    assert {of[value] for value in body.output_values}.isdisjoint({of[value] for value in plan.values})
    assert {port.role for port in body.outputs} == {"loss", "grad", "buffer"}


def test_what_a_collective_reads_lives_until_it_is_waited_for() -> None:
    """Its result is read much later; until then nothing else is written there."""
    body = program_of("tp").body
    plan, calls = everything(body), list(body.calls())
    at = {node: i for i, node in enumerate(calls)}
    moved = [(slot, user) for slot in plan.slots for user in slot.value.users if op_name(user.target) in KINDS]
    assert moved
    for slot, user in moved:
        assert slot.dies >= min(at[one] for one in user.users)
