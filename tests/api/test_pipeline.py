"""Pipelines through the public API: a plan's `pipeline`, and whatever else a plan can say beside it."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

import shardc
from shardc import Mesh, Program, ShardcError
from shardc.cost.flops import flops
from shardc.partition import rank_costs
from shardc.schedule.costs import Costs
from shardc.schedule.instructions import Backward, Dgrad, Forward, Recv, ReduceGrads, RunBody, Send
from shardc.schedule.prove import prove
from tests.models.zoo import PLANS, make
from tests.partition.whole import SIZES, only

ZERO: dict[str, Any] = {"storage": {"zero": 1, "axes": ["dp"]}}


class Net(nn.Module):
    """Four layers of one linear each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = layer(x)
        return x.square().mean()


def rows(count: int = 8) -> tuple[Tensor]:
    return (torch.randn(count, 6, generator=torch.Generator().manual_seed(1)),)


def net(mesh: str = "pp=2", model: nn.Module | None = None, optimizer: Any = None, **plan: Any) -> Program:
    model = model or Net()
    plan = {"pipeline": {"microbatches": 4}, **plan}
    made = optimizer and optimizer(model.parameters())
    return shardc.compile(model, rows(), mesh=Mesh.parse(mesh), plan=plan, optimizer=made)


def adamw(params: Any) -> torch.optim.Optimizer:
    # Adam divides by the root of squares, which makes much of the rounding of gradients near 0.
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-2)


def checked(program: Program, **options: Any) -> Program:
    report = program.verify(**options)
    assert report.ok, str(report)
    assert report.eager_error is not None or report.absent
    assert program.prove().ok
    return program


# ---------------------------------------------------------------------- real models
CASES = [
    ("gpt2", "1f1b", "pp=2, tp=2", {}),
    ("gpt2", "zb-v", "dp=2, pp=2", ZERO | {"clip_grad_norm": 0.1}),
    ("llama", "interleaved", "tp=2, pp=2", {}),
    ("llama", "gpipe", "pp=2, dp=2", ZERO),
    ("t5", "dualpipe-v", "pp=2, tp=2", {}),
    ("t5", "zb-h1", "pp=2, dp=2", {"clip_grad_norm": 0.1}),
    ("resnet", "1f1b", "pp=2, dp=2", {}),
    ("resnet", "bfs", "pp=2, dp=2", ZERO),
]


def real(name: str, mesh: str, optimizer: bool = True, **more: Any) -> Program:
    sizes = {**SIZES[name], "batch": 8}
    model, batch, loss = make(name, **(sizes | {"layers": 2} if "layers" in sizes else sizes))
    plan = yaml.safe_load((PLANS / f"{name}.yaml").read_text())
    axis = next(axis for axis in Mesh.parse(mesh).names if axis != "pp")
    plan = {key: {k: only(axis, v) for k, v in plan.get(key, {}).items()} for key in ("params", "inputs")}
    made = adamw(model.parameters()) if optimizer else None
    return shardc.compile(model, batch, mesh=mesh, plan={**plan, **more}, loss=loss, optimizer=made)


@pytest.mark.long  # five steps of AdamW and `partition/test_equivalence.py` are ordinary
@pytest.mark.parametrize(("name", "schedule", "mesh", "more"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
@pytest.mark.sampled(8)
def test_equals_the_single_device(name: str, schedule: str, mesh: str, more: dict[str, Any]) -> None:
    program = real(name, mesh, **more, pipeline={"schedule": schedule, "microbatches": 4})
    checked(program, order=1)
    assert program.mesh == Mesh.parse(mesh)


@pytest.mark.parametrize(
    "more", [{}, ZERO | {"clip_grad_norm": 0.1}, {"precision": "bf16"}], ids=["plain", "zero", "bf16"]
)
@pytest.mark.sampled(3)
def test_five_steps_of_adamw_are_those_without_a_pipeline(more: dict[str, Any]) -> None:
    """Simulated, from a batch to new parameters; what differs is rounding."""
    runs: list[tuple[list[float], dict[str, Tensor]]] = []
    for mesh, cut in (("dp=2", {"accumulate": 4}), ("dp=2, pp=2", {"pipeline": {"microbatches": 4}})):
        model, batch, loss = make("gpt2", **{**SIZES["gpt2"], "batch": 8, "layers": 2})
        plan = {"inputs": {"input_ids": "dp, -", "labels": "dp, -"}, **more, **cut}
        model = model.double() if "precision" not in more else model
        program = shardc.compile(model, batch, mesh=mesh, plan=plan, loss=loss, optimizer=adamw(model.parameters()))
        with program.launch() as trainer:
            runs.append(([float(trainer.step(batch).loss) for _ in range(5)], trainer.state_dict()))
    (losses, state), (others, other_state) = runs
    assert len(set(losses)) == 5, "it learns"
    # A gradient that is summed in another order rounds to bfloat16 another way.
    near = 1e-10 if "precision" not in more else 5e-3
    assert others == pytest.approx(losses, rel=near)
    assert state.keys() == other_state.keys()
    for name, value in state.items():
        torch.testing.assert_close(other_state[name], value, rtol=near, atol=near)


# ---------------------------------------------------------------------- whatever a plan says beside it
@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    "more",
    [
        {"recompute": "full"},
        {"recompute": "selective", "clip_grad_norm": 0.05},
        {"storage": {"zero": 2, "axes": "dp"}},
        {"storage": {"zero": 3, "axes": "dp"}, "clip_grad_norm": 0.05},
        {"precision": "bf16", "storage": {"zero": 1, "axes": "dp"}},
        {"precision": "fp16"},
        {"nonfinite": "skip"},
    ],
    ids=lambda more: "-".join(more),
)
def test_composes(more: dict[str, Any]) -> None:
    program = net("dp=2, pp=2", optimizer=adamw, inputs={"x": "dp, -"}, **more)
    checked(program, dtype=torch.float64)
    trainer = program.launch()
    losses = [float(trainer.step(rows()).loss) for _ in range(3)]
    assert losses[2] < losses[0]


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    program = net(optimizer=adamw, nonfinite="skip")
    trainer = program.launch()
    before = trainer.state_dict()
    (x,) = rows()
    result = trainer.step((x.index_fill(0, torch.tensor([5]), float("inf")) * 0,))
    assert result.skipped
    assert all(torch.equal(value, before[name]) for name, value in trainer.state_dict().items())
    assert not trainer.step((x,)).skipped


def test_raises_for_a_gradient_that_is_not_finite() -> None:
    trainer = net(optimizer=adamw, nonfinite="raise").launch()
    (x,) = rows()
    with pytest.raises(ShardcError, match="SC509"):
        trainer.step((x.index_fill(0, torch.tensor([5]), float("inf")) * 0,))


def test_one_microbatch_and_one_rank() -> None:
    for mesh, more in (("pp=2", {"microbatches": 1}), ("pp=1", {"microbatches": 2})):
        checked(net(mesh, pipeline=more))


# ---------------------------------------------------------------------- the plan's key
def test_defaults() -> None:
    def stages(**pipeline: Any) -> tuple[int, int]:
        program = net(pipeline={"microbatches": 2, **pipeline})
        assert program.pipelined is not None
        return len(program.pipelined.stages), len(program.pipelined.lists.ranks)

    assert stages() == (2, 2)
    assert stages(schedule="zb-v") == (4, 2), "a V has two stages a rank"
    assert stages(schedule="interleaved", split=["h.1", "h.2", "h.3"]) == (4, 2)
    assert stages(schedule="auto", stages=4) == (4, 2)
    assert net(pipeline={"microbatches": 2}).pipelined.lists.schedule == "1f1b"  # type: ignore[union-attr]


def test_split_says_where() -> None:
    program = checked(net(pipeline={"microbatches": 2, "split": "h.3"}))
    assert program.pipelined is not None
    assert {name for name in program.pipelined.held(1) if name.startswith("h")} == {"h.3.0.weight", "h.3.0.bias"}


def test_the_axis_may_have_any_name_and_place() -> None:
    program = net("tp=2, stage=2, dp=2", inputs={"x": "dp, -"}, params={"h.*.0.weight": "tp"}, pipeline=PIPE)
    checked(program)
    for rank in range(8):
        at = program.mesh.coordinate(rank)["stage"]
        assert program.rank(rank).stages == (at,)
        assert program.rank(rank).coordinate == program.mesh.coordinate(rank)


PIPE = {"axis": "stage", "microbatches": 2}


def test_a_plan_survives_yaml_and_merging() -> None:
    text = "pipeline:\n  axis: stage\n  schedule: auto\n  microbatches: 8\n  split:\n  - h.2\n  memory: 20 GiB\n"
    plan = shardc.Plan.parse(text)
    assert plan.dump() == text
    assert shardc.Plan.parse(plan.dump()) == plan
    other = shardc.Plan.of(pipeline={"microbatches": 2})
    assert plan.merge(other).pipeline == other.pipeline
    assert other.merge(shardc.Plan.of(seed=3)).pipeline == other.pipeline


def test_auto_keeps_to_the_memory_that_it_is_given() -> None:
    def auto(**limit: Any) -> Program:
        return checked(net(pipeline={"microbatches": 8, "schedule": "auto", **limit}))

    free = auto()
    assert free.pipelined is not None
    activation = max(one.activation for one in free.pipelined.costs.stages)
    assert max(auto(memory=int(activation)).timeline().peak_live) == 1 < max(free.timeline().peak_live)


def test_budget_counts_what_a_rank_sends_along_the_pipeline() -> None:
    program = net()
    assert program.pipelined is not None
    sent = max(sum(i.bytes for i in listed if isinstance(i, Send)) for listed in program.pipelined.lists.ranks)
    assert sent > 0
    net(budget={"pp": sent, "total": sent})
    with pytest.raises(ShardcError, match=r"SC213.*axis 'pp'"):
        net(budget={"pp": sent - 1})


def in_groups() -> Callable[..., Any]:
    """The schedule in the docstring of `register`, run as it stands."""
    lines = inspect.getsource(shardc.schedules.register).splitlines()
    begin, end = (next(i for i, x in enumerate(lines) if word in x) for word in ("from shardc.schedule", "plan ="))
    scope: dict[str, Any] = {"shardc": shardc}
    exec(textwrap.dedent("\n".join(lines[begin : end + 1])), scope)
    return scope["in_groups"]


def test_the_example_of_a_schedule_of_ones_own() -> None:
    in_groups()
    program = checked(net(pipeline={"schedule": "in-groups", "microbatches": 8}))
    assert program.timeline().peak_live == (2, 2)


# ---------------------------------------------------------------------- what a program tells
@cache
def told() -> Program:
    return net("pp=2, dp=2", inputs={"x": "dp, -"}, pipeline={"microbatches": 4, "split": "h.2"})


def test_text_of_a_rank_has_its_list_and_its_graphs() -> None:
    text = told().rank(3).text()
    assert text.startswith("# rank 3 of 4: pp=1, dp=1\nrank 1 of 2: 1f1b, 4 microbatches, stages 1\n")
    graphs = text.split("graph ")[1:]
    assert [part.split()[0] for part in graphs] == ["@forward1", "@backward1", "@reduce1", "@update"]
    assert shardc.parse("graph " + graphs[0]).name == "forward1"
    assert "@forward0" not in text
    assert told().text().count("@forward") == 2


def test_text_of_a_rank_without_a_pipeline_is_the_body() -> None:
    program = shardc.compile(Net(), rows(), mesh="dp=2", plan={"inputs": {"x": "dp, -"}})
    assert program.rank(1).text() == "# rank 1 of 2: dp=1\n" + "".join(program.text().splitlines(keepends=True)[2:])
    assert (program.rank(1).stages, program.rank(1).instructions) == ((0,), (RunBody(0),))
    proof = program.prove()
    assert proof.ok
    assert "2 ranks run one body" in str(proof)
    lists = program.staged.lists
    assert prove(lists).ok
    assert "the forward of stage 0 for microbatch 0 never runs" in str(prove(replace(lists, ranks=((),))))


def test_flops_and_parameters_are_those_of_the_fullest_rank() -> None:
    whole = shardc.compile(Net(), rows(), mesh="dp=2", plan={"inputs": {"x": "dp, -"}})
    assert told().flops().total < whole.flops().total
    assert told().parameter_bytes().per_rank == told().parameter_bytes().whole // 2
    assert told().parameter_bytes().whole == whole.parameter_bytes().whole


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("schedule", "sums"), [("zb-v", 0), ("1f1b", 2)])
def test_the_shares_of_all_stages_add_up_to_the_body(schedule: str, sums: int) -> None:
    """In a V the tied embedding's two stages are on one rank; else its gradient is summed over two."""
    pipeline = {"schedule": schedule, "microbatches": 4}
    program = real("gpt2", "pp=2, tp=2", optimizer=False, pipeline=pipeline)
    pipelined = program.pipelined
    assert pipelined is not None
    assert sum(rank_costs.rank_flops(pipelined, c).total for c in range(2)) == flops(program.body).total
    along = sum(one.bytes_per_step for one in program.collectives())
    assert sum(rank_costs.bytes_sent_by_axis(pipelined, c, program.mesh)["tp"] for c in range(2)) == along
    sent = sum(i.bytes for listed in pipelined.lists.ranks for i in listed if isinstance(i, Send))
    tied = pipelined.lists.pipeline.bytes["d.transformer.wte.add.sum"]
    in_all = sum(rank_costs.total_bytes_sent(pipelined, c) for c in range(2))
    assert in_all == along + sent + sums * tied


def test_collectives_of_the_other_axes_are_the_bodys() -> None:
    plan = {"inputs": {"x": "dp, -"}, "accumulate": 4, "bucket": False}  # stages have buckets of their own
    whole = shardc.compile(Net(), rows(), mesh="dp=2", plan=plan)
    assert [(c.kind, c.axes, c.value) for c in told().collectives()] == [
        (c.kind, c.axes, c.value) for c in whole.collectives()
    ]
    assert "\n  stage:    the end of the step; what changes" in str(told().explain(told().collectives()[0].value))


def test_lists_are_plain() -> None:
    """Four microbatches over two ranks: so many of each instruction."""
    kinds = [[type(i) for i in told().rank(rank).instructions] for rank in (0, 2)]
    for kind in (Forward, Backward):
        assert [listed.count(kind) for listed in kinds] == [4, 4]
    assert [listed.count(Send) for listed in kinds] == [listed.count(Recv) for listed in kinds] == [4, 4]
    assert all(listed.count(ReduceGrads) == 1 and Dgrad not in listed for listed in kinds)


def test_clipping_sums_no_further_gradient_over_stages() -> None:
    """Without an optimizer a step returns clipped gradients, each of which depends on all, by their norm."""
    plain, clipped = net(), net(clip_grad_norm={"norm": 0.1, "returned": True})
    sums = [[i for i in program.rank(0).instructions if isinstance(i, ReduceGrads)] for program in (plain, clipped)]
    assert sums[0] == sums[1]
    assert clipped.verify().ok


def test_timeline() -> None:
    found = told().timeline()
    assert found.ranks == 2
    assert found.peak_live == (2, 1)
    assert told().timeline(Costs.unit(2)).bubble == pytest.approx(1 / 4)


def test_a_program_from_a_file_is_the_same(tmp_path: Path) -> None:
    program = net("dp=2, pp=2", optimizer=adamw, inputs={"x": "dp, -"}, clip_grad_norm=0.1)
    program.save(tmp_path / "step.json")
    read = Program.load(tmp_path / "step.json")
    assert isinstance(read, Program)
    assert read.text() == program.text()
    assert read.to_json() == program.to_json()
    assert read.timeline() == program.timeline()
    assert read.verify().ok
    assert read.rank(3).text() == program.rank(3).text()


def test_a_file_without_a_pipeline_has_none() -> None:
    read = Program.from_json(shardc.compile(Net(), rows(), mesh=Mesh()).to_json())
    assert read.pipelined is None


# ---------------------------------------------------------------------- what is wrong is found
def broken(change: Callable[[dict[str, Any]], None]) -> Program:
    content = net("pp=2, dp=2", inputs={"x": "dp, -"}).to_plain()
    change(content)
    return Program(**Program.fields_of(content))


def test_a_wrong_stage_is_found_and_named() -> None:
    """Stage 1's first tanh becomes a sine: verify says so, with the ranks that run it."""

    def change(content: dict[str, Any]) -> None:
        nodes = content["pipelined"]["stages"][1]["forward"]["nodes"]
        next(node for node in nodes if node.get("call") == "tanh")["call"] = "sin"

    report = broken(change).verify()
    assert not report.ok
    assert report.first_mismatch is not None
    assert report.first_mismatch.op == "sin"
    assert report.first_mismatch.ranks == (2, 3)
    assert "%h.3.1.tanh" in str(report)


def test_a_wrong_list_is_refused() -> None:
    """A send that is left out: the proof fails, and nothing runs."""

    def change(content: dict[str, Any]) -> None:
        listed = content["pipelined"]["lists"]["ranks"][0]
        listed.remove(next(i for i in listed if i[0] == "Send"))

    program = broken(change)
    assert not program.prove().ok
    assert program.prove().errors[0].code == "SC521"
    with pytest.raises(ShardcError, match="SC521"):
        program.verify()
