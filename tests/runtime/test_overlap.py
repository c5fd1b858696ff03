"""Collectives apart from their waits: everything still happens once, in an order that respects what reads what."""

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardc
from examples.gpt2 import gpt2
from shardc.ir.call_slots import slotted_calls
from shardc.ir.graph import operands
from shardc.ir.group_axes import axes_used, axes_used_twice
from shardc.ir.mesh import Mesh
from shardc.ir.ops.collectives import COLLECTIVES, Exchange, all_gather, all_reduce, reduce_scatter
from shardc.ir.overlap_schedule import AHEAD, IN_FLIGHT, Action, schedule_overlap, sums_gradients
from shardc.ir.parse import parse
from shardc.runtime.execute.instructions import CallInstruction, Numerics, list_calls
from shardc.runtime.execute.process_groups import ProcessGroupCommunicator
from tests.cost.rank_meter import fake_job

STORAGE = {"none": {}, "zero-1": {"zero": 1, "axes": ["dp"]}, "zero-3": {"zero": 3, "axes": ["dp"]}}


@pytest.fixture(scope="module", params=STORAGE)
def instructions(request: pytest.FixtureRequest) -> Sequence[CallInstruction]:
    model, batch = gpt2(layers=2)
    plan = {
        "params": {"**.wte.weight": "tp, -", "**.c_attn.weight": "-, 3*tp", "**.c_fc.weight": "-, tp"},
        "inputs": dict.fromkeys(batch, "dp, -"),
        "storage": STORAGE[request.param],
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    program = shardc.compile(model, batch, mesh="dp=2,tp=2", plan=plan, optimizer=optimizer)
    return list_calls(program.body, Numerics()).instructions


def where(actions: Sequence[Action], kind: str) -> dict[int, int]:
    """Instruction -> position of its one action of a kind."""
    found = [(action.at, position) for position, action in enumerate(actions) if action.kind == kind]
    assert len(dict(found)) == len(found), f"some instruction has two actions of kind {kind}"
    return dict(found)


@pytest.mark.sampled(3)
def test_slots_hold_what_is_read(instructions: Sequence[CallInstruction]) -> None:
    """Every instruction finds its operands arrived and not yet let go of, and the same slots die in the end."""
    actions = schedule_overlap(instructions, 0, len(instructions))
    written = {slot for one in instructions for _, _, slot in one.yields}
    there: set[int] = {slot for one in instructions for slot in one.reads} - written
    freed: list[int] = []
    for action in actions:
        one = instructions[action.at]
        if action.kind in ("run", "begin"):
            assert set(one.reads) <= there, one.where
        if action.kind in ("run", "wait"):
            there |= {slot for _, _, slot in one.yields}
        there -= set(action.free)
        freed += action.free
    assert sorted(freed) == sorted(slot for one in instructions for slot in one.free)


@pytest.mark.sampled(3)
def test_everything_happens_once_and_all_else_in_order(instructions: Sequence[CallInstruction]) -> None:
    actions = schedule_overlap(instructions, 0, len(instructions))
    run, begun, waited = (where(actions, kind) for kind in ("run", "begin", "wait"))
    assert begun.keys() == waited.keys() == {at for at, one in enumerate(instructions) if one.target in COLLECTIVES}
    assert sorted(run) == [action.at for action in actions if action.kind == "run"]
    assert run.keys() | begun.keys() == set(range(len(instructions)))
    under_way = 0
    for action in actions:
        under_way += {"begin": 1, "wait": -1}.get(action.kind, 0)
        assert 0 <= under_way <= IN_FLIGHT


@pytest.mark.sampled(3)
def test_reductions_are_waited_for_late(instructions: Sequence[CallInstruction]) -> None:
    actions = schedule_overlap(instructions, 0, len(instructions))
    begun, waited = where(actions, "begin"), where(actions, "wait")
    beside = [waited[at] - begun[at] > 1 for at in begun if instructions[at].target is reduce_scatter]
    assert sum(beside) >= len(beside) / 2


def test_stored_shards_are_gathered_early(instructions: Sequence[CallInstruction]) -> None:
    """But at most AHEAD collectives early. The first has nothing before it."""
    actions = schedule_overlap(instructions, 0, len(instructions))
    begun, run = where(actions, "begin"), where(actions, "run")
    made = {slot for one in instructions for _, _, slot in one.yields}
    moves = [at for at, one in enumerate(instructions) if one.target in COLLECTIVES]
    for k, at in enumerate(moves):
        skipped = [other for other in run if other < at and run[other] > begun[at]]
        if instructions[at].target is all_gather and made.isdisjoint(instructions[at].reads) and moves[0] < at:
            assert skipped
        assert all(other > moves[k - AHEAD] for other in skipped if k >= AHEAD)


def test_a_part_of_a_body_waits_for_what_it_began(instructions: Sequence[CallInstruction]) -> None:
    half = len(instructions) // 2
    for first, last in ((0, half), (half, len(instructions))):
        actions = schedule_overlap(instructions, first, last)
        assert {a.at for a in actions} == set(range(first, last))
        assert where(actions, "begin").keys() == where(actions, "wait").keys()


RING = """
graph @step mesh(cp=3) {
  %q = input "q" frozen : f64[1, 2, 12@cp, 4]
  %k = input "k" frozen : f64[1, 2, 12@cp, 4]
  %next = shardc.next_keys(%k, axes=["cp"]) : f64[1, 2, 12@cp, 4]
  %a = mul.Tensor(%q, %k) {~0: cp} : f64[1, 2, 12@cp, 4]
  %next.next = shardc.next_keys(%next, axes=["cp"]) : f64[1, 2, 12@cp, 4]
  %b = mul.Tensor(%a, %next) : f64[1, 2, 12@cp, 4]
  %c = mul.Tensor(%b, %next.next) : f64[1, 2, 12@cp, 4]
  return output "output" = %c
}
"""


def test_a_step_of_a_ring_is_under_way_while_others_compute() -> None:
    """The next step reads what the one before brings: begun early, it would wait for that before all else."""
    calls = slotted_calls(parse(RING)).calls
    actions = [(kind, at) for kind, at, *_ in schedule_overlap(calls, 0, len(calls))]
    assert actions == [
        ("begin", 0), ("run", 1), ("wait", 0), ("begin", 2), ("run", 3), ("wait", 2), ("run", 4)
    ]  # fmt: skip


def test_sums_of_gradients_hold_up_nothing() -> None:
    """Where other collectives of backward run along the same axis, they have a process group of their own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, use_cache=False))
    batch = {name: torch.zeros(2, 16, dtype=torch.int64) for name in ("input_ids", "labels")}
    plans = {"sequence": dict.fromkeys(batch, "-, cp"), "rows": dict.fromkeys(batch, "cp, -")}
    programs = {
        name: shardc.compile(model, batch, mesh="cp=2", plan={"inputs": it, "bucket": False})
        for name, it in plans.items()
    }
    assert axes_used_twice(programs["rows"].body) == []  # gradients alone are summed
    body = programs["sequence"].body
    assert axes_used_twice(body) == [("cp",)]
    sums = [call for call in body.calls() if call.target in COLLECTIVES and sums_gradients(call)]
    returned = [v for port, v in zip(body.outputs, body.output_values, strict=True) if port.role == "grad"]
    returned = [operands(v)[0] if v.target is torch.ops.aten.view.default else v for v in returned]  # norms' weights
    assert set(sums) == {value for value in returned if value.target is all_reduce}
    with fake_job(0, 2):
        comm = ProcessGroupCommunicator(body.mesh, 0, axes_used(body), timedelta(9), twice=axes_used_twice(body))
        alone = ProcessGroupCommunicator(body.mesh, 0, axes_used(body), timedelta(9))
        seen: list[object] = []
        for which in (comm, alone):
            which._all_reduce = lambda exchange, members: seen.append(members.group) or (lambda: exchange.x)  # type: ignore[method-assign]
            for late in (False, True):
                which.begin(Exchange("all_reduce", torch.zeros(1), ("cp",), "sum", late=late))
    assert seen[0] is not seen[1]
    assert seen[2] is seen[3]


def test_groups_that_compute_waits_for_are_of_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over NCCL alone; sums of gradients with a group of their own leave the way to what is waited for."""
    made: list[tuple[list[int], Any]] = []

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.high, self._timeout = is_high_priority_stream, timedelta(0)

    def new_group(ranks: list[int], timeout: timedelta, pg_options: Any = None) -> object:
        assert pg_options is None or pg_options._timeout == timeout
        made.append((ranks, pg_options))
        return object()

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(dist, "new_group", new_group)
    mesh = Mesh(dp=2, tp=2)
    for backend, high in (("nccl", True), ("gloo", False)):
        made.clear()
        monkeypatch.setattr(dist, "get_backend", lambda backend=backend: backend)
        with monkeypatch.context() as without_job:
            without_job.setattr(dist, "group", SimpleNamespace(WORLD=object()))
            ProcessGroupCommunicator(mesh, 0, [("tp",), ("dp",)], timedelta(9), twice=[("dp",)])
        kinds = [(ranks, options is not None and options.high) for ranks, options in made]
        assert kinds == [
            *(([0, 1], high), ([2, 3], high), ([0, 2], high), ([1, 3], high)),
            *(([0, 2], False), ([1, 3], False)),
        ]
