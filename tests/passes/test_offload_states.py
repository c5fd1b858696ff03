"""The optimizer's state lies on the host between steps: no bit changes, and it is written where it lies."""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardc
from benchmarks.measured_models import Decoder
from shardc.cli.summary import offloaded
from shardc.cost.memory import memory
from shardc.ir.collectives import human_bytes
from shardc.ir.graph import Graph, info, operands
from shardc.ir.group_axes import axes_used
from shardc.ir.in_place import writes
from shardc.ir.ops.host_copies import BEGIN_FETCH, BEGIN_OFFLOAD, BEGIN_OFFLOAD_INTO, END_FETCH, END_OFFLOAD, on_host
from shardc.runtime.execute.body_code import BodyCode
from shardc.runtime.execute.instructions import rank_context
from shardc.runtime.execute.process_groups import ProcessGroupCommunicator
from tests.cost.rank_meter import CPU, fake_job
from tests.cost.test_memory_calls import check
from tests.passes.test_late_gradients import BATCH, SMALL, results_of, small
from tests.replanned import replanned

ALL = {"optimizer": "all", "least": 200}
BASE: dict[str, Any] = {"mesh": "dp=2, tp=2", **BATCH}
PLANS: dict[str, dict[str, Any]] = {
    "one rank": {"mesh": "dp=1", "params": {}},
    "fuse": {**BASE, "fuse": True, "bucket": True},
    "zero-1": {**BASE, "storage": {"zero": 1, "axes": "dp"}, "clip_grad_norm": 0.1},
    "zero-3": {**BASE, "storage": {"zero": 3, "axes": "dp"}, "bucket": True, "fuse": True},
    "accumulate": {**BASE, "accumulate": 2, "fuse": True},
    "skips": {**BASE, "nonfinite": "skip", "fuse": True},
    "master": {"mesh": "tp=2", "precision": {"compute": "bf16", "master": "fp32"}, "fuse": True},
    "both": {**BASE, "fuse": True, "recompute": "selective"},
}


@cache
def base(case: str) -> shardc.Program:
    return small(SMALL, PLANS[case])


def on_the_host(body: Graph) -> list[str]:
    return [port.name for port, node in zip(body.inputs, body.placeholders, strict=True) if on_host(node)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", PLANS)
def test_no_bit_changes_and_a_rank_holds_what_the_report_says(case: str) -> None:
    before, said = base(case), {**ALL, "activations": "all" if case == "both" else 0}
    program = replanned(before, offload=said)
    moved = on_the_host(program.body)
    assert {name.partition(":")[2] for name in moved} == {"exp_avg", "exp_avg_sq"}
    assert program.staged.states_on_host == set(moved)
    for one, other in zip(results_of(program), results_of(before), strict=True):
        assert torch.equal(one, other)
    check(program.body)
    left, had = memory(program.body), memory(before.body)
    stored = left.row("optimizer state").stored
    assert left.host.stored == had.row("optimizer state").stored - stored > 5 * stored
    assert left.host.most == left.host.stored or case == "both"
    assert left.peak < had.peak


def test_new_state_is_copied_over_the_old() -> None:
    body = replanned(base("fuse"), offload=ALL).body
    over = {info(write.over).name: write for write in writes(body)}
    for name in on_the_host(body):
        assert over[name].op is BEGIN_OFFLOAD_INTO
        assert over[name].value.target is BEGIN_OFFLOAD
    for call in (*body.calls_of(BEGIN_FETCH), *body.calls_of(BEGIN_OFFLOAD)):
        assert [user.target for user in call.users] in ([END_FETCH], [END_OFFLOAD]), "nothing reads what is under way"
    (late, *_) = [n for n in body.calls_of(BEGIN_FETCH) if operands(n)[0].op == "placeholder"]
    assert info(late).phase == "opt"


def steps(body: Graph, inputs: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """What a rank that is alone holds after some steps, in the tensors that it held before."""
    held = {name: x.clone() for name, x in inputs.items()}
    feed = {p.name: held[p.name] for p in body.inputs if p.role in ("input", "seed")}
    homes = {name: x.data_ptr() for name, x in held.items()}
    with fake_job(0, body.mesh.world_size):
        comm = ProcessGroupCommunicator(body.mesh, 0, axes_used(body), timedelta(seconds=9))
        code = BodyCode(body, rank_context(body.mesh, 0, comm), 0, CPU)
        for _ in range(count):
            for port, value in code.run(held, [feed]).items():
                if port.role in ("param", "state"):
                    assert value is held[port.name], port.name
                    assert value.data_ptr() == homes[port.name]
    return {p.name: held[p.name] for p in body.outputs if p.role in ("param", "state")}


def test_a_rank_writes_state_where_it_lies() -> None:
    before = base("one rank")
    program = replanned(before, offload={**ALL, "activations": "all"})
    inputs = before.inputs()
    after, plain = (steps(p.body, inputs, 3) for p in (program, before))
    assert len(on_the_host(program.body)) > 10
    for name, value in plain.items():
        assert torch.equal(after[name], value), name
        assert ":" not in name or not torch.equal(value, inputs[name])


@pytest.mark.parametrize("budget", [0, 100, 3_000, 9_000])
def test_no_more_than_the_budget_is_moved(budget: int) -> None:
    program = replanned(base("fuse"), offload={"optimizer": budget, "least": 200})
    stored = memory(program.body).host.stored
    assert stored <= budget
    assert budget < 3_000 or stored > budget // 2
    assert [d.code for d in program.diagnostics] == (["SC234"] if budget == 100 else [])


def test_small_state_stays_and_a_plan_that_moves_none_is_told_so() -> None:
    (note,) = replanned(base("fuse"), offload={"optimizer": "all"}).diagnostics
    assert note.code == "SC234"
    assert note.hint is not None
    size = note.hint.partition("least: ")[2].partition("}")[0]
    assert on_the_host(replanned(base("fuse"), offload={"optimizer": "all", "least": size}).body)


# ------------------------------------------------------------------ trainers
def compiled(plan: dict[str, Any]) -> tuple[shardc.Program, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Decoder(SMALL).double()
    tokens = torch.randint(0, SMALL.vocabulary, (4, SMALL.sequence), generator=torch.Generator().manual_seed(1))
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1)}
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return shardc.compile(model, batch, plan=plan, optimizer=adam), batch


def trained(plan: dict[str, Any], steps: int, load: Path | None = None, save: Path | None = None) -> dict[str, Tensor]:
    program, batch = compiled(plan)
    with program.launch() as trainer:
        if load is not None:
            trainer.load(load)
        for _ in range(steps):
            trainer.step(batch)
        if save is not None:
            trainer.save(save)
        return trainer.state_dict(("param", "state"))


def test_checkpoints_go_from_one_to_the_other(tmp_path: Path) -> None:
    plain, moved = {**BASE, "params": {}}, {**BASE, "params": {}, "offload": {**ALL, "activations": "all"}}
    straight = trained(plain, 4)
    trained(moved, 2, save=tmp_path / "moved")
    for name, value in trained(plain, 2, load=tmp_path / "moved").items():
        assert torch.equal(value, straight[name]), name
    trained(plain, 2, save=tmp_path / "plain")
    for name, value in trained(moved, 2, load=tmp_path / "plain").items():
        assert torch.equal(value, straight[name]), name


def test_a_program_file_holds_its_copies(tmp_path: Path) -> None:
    program, _ = compiled({**BASE, "params": {}, "offload": {**ALL, "activations": "all"}, "fuse": True})
    program.save(tmp_path / "program.shardc")
    loaded = shardc.Program.load(tmp_path / "program.shardc")
    assert loaded.text() == program.text()
    assert loaded.staged.states_on_host == program.staged.states_on_host != frozenset()
    assert str(loaded.memory()) == str(program.memory())


def test_a_pipeline_keeps_the_state_of_its_stages_on_the_host() -> None:
    plan = {"mesh": "pp=2, dp=2", **BATCH, "pipeline": {"microbatches": 2}, "clip_grad_norm": 0.1}
    plain = trained(plan, 2)
    for name, value in trained({**plan, "offload": ALL}, 2).items():
        assert torch.equal(value, plain[name]), name
    program, before = (compiled({**plan, "offload": said})[0] for said in (ALL, "none"))
    for row, had in zip(program.memory().coordinates, before.memory().coordinates, strict=True):
        states, all_states = (each.report.row("optimizer state", each.ranks[0]).stored for each in (row, had))
        assert row.report.host.most == row.report.host.stored == all_states - states > 5 * states
        assert row.report.peak < had.report.peak
    assert "states of the optimizer" in offloaded(program)[0]


def test_the_summary_says_what_lies_on_the_host() -> None:
    program = replanned(base("fuse"), offload=ALL)
    (line,) = offloaded(program)
    size = human_bytes(memory(program.body).host.stored)
    states = f"{len(on_the_host(program.body))} states of the optimizer, {size} a rank"
    assert line == f"{states}, lie on the host between steps"
