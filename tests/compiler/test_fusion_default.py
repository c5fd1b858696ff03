"""Plans that leave `fuse` open: kernels where the plan runs on GPUs, by its hardware or by where the model lies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import shardc
from shardc.cli.summary import fusion
from shardc.compiler import fusion_default
from shardc.ir.graph import op_name
from shardc.ir.hardware import Hardware
from shardc.plan.schema import Plan
from shardc.runtime.train.agreement import facts_of

GPU, CPU = {"hardware": "h200"}, {"hardware": "cpu-gloo"}
PIPELINE = {"mesh": "pp=2", "pipeline": {"microbatches": 2}}


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).square().mean()


def compiled(plan: dict[str, Any], **options: Any) -> shardc.Program:
    return shardc.compile(Chain(), torch.randn(8, 8), plan={"mesh": "dp=1", **plan}, **options)


def kernels(program: shardc.Program) -> int:
    return sum(op_name(call.target).startswith("shardc.fused") for g in program.staged.graphs() for call in g.calls())


def lies_on(device: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion_default, "cuda_device", lambda *_: device)
    monkeypatch.setattr(fusion_default, "HAS_TRITON", True)


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (GPU, "hardware h200 is a GPU"),
        (GPU | PIPELINE, "hardware h200 is a GPU"),
        ({"hardware": {"like": "a100", "bucket_bytes": 4096}}, "hardware a100 is a GPU"),
        ({"hardware": {"device": "gpu"}}, "the plan's hardware is a GPU"),
        (GPU | {"fuse": "auto"}, "hardware h200 is a GPU"),
        (GPU | {"fuse": False}, ""),
        (GPU | {"fuse": True}, None),
        (CPU, ""),
        (CPU | {"fuse": True}, None),
        ({}, ""),
        ({"hardware": {"bucket_bytes": 4096}}, ""),
        ({"fuse": True}, None),
    ],
    ids=str,
)
def test_hardware_says_whether_there_are_kernels(plan: dict[str, Any], why: str | None) -> None:
    """`why` is None where the plan asks for them."""
    program = compiled(plan)
    assert (kernels(program) > 0) == (why != "")
    assert program.plan.get("fused_on") == (why or None)
    said = f"fused: {why}; off by fuse: false"
    assert (said in fusion(program)) == bool(why)
    assert program.verify().ok
    again = shardc.Program.from_json(program.to_json())
    assert again.plan == program.plan
    assert Plan.parse(again.plan.get("text", "")).fuse.enabled is (bool(why is None or why) or plan.get("fuse"))


@pytest.mark.parametrize(
    ("plan", "on"),
    [
        ({}, True),
        (PIPELINE, True),
        ({"fuse": False}, False),
        (CPU, False),
        ({"hardware": {"bucket_bytes": 4096}}, True),
        ({"symbols": {"B": "x.0"}}, False),
        ({"symbols": {"B": "x.0"}, "fuse": True}, True),
    ],
    ids=str,
)
def test_a_model_on_a_gpu_has_kernels(plan: dict[str, Any], on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lies_on("cuda:1", monkeypatch)
    program = compiled(plan)
    assert (kernels(program) > 0) == on
    asked = plan.get("fuse", "auto") != "auto"
    assert program.plan.get("fused_on") == ("the model lies on cuda:1" if on and not asked else None)


@pytest.mark.parametrize("device", [None, "meta"])
@pytest.mark.parametrize(("plan", "on"), [({}, True), ({"fuse": False}, False), (CPU, False)], ids=str)
def test_a_rank_of_a_job_on_gpus_has_kernels(
    plan: dict[str, Any], on: bool, device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most scripts make their model on the CPU, or on the meta device; `launch` takes the GPU."""
    monkeypatch.setattr(fusion_default, "HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def program() -> shardc.Program:
        return shardc.compile(Chain().to(device), torch.randn(8, 8), plan={"mesh": "dp=1", **plan})

    assert kernels(program()) == 0, "no job: all ranks are simulated, on the CPU"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    in_job = program()
    assert (kernels(in_job) > 0) == on
    assert in_job.plan.get("fused_on") == ("this job has GPUs" if on else None)


def test_ranks_may_have_kernels_for_different_reasons() -> None:
    """One has the weights on its own GPU, the others are on the meta device: their programs are the same."""
    program = compiled(GPU)
    said = [
        facts_of({**program.plan, "fused_on": why}, {}, 0, 100)
        for why in ("the model lies on cuda:0", "the model lies on cuda:1", "this job has GPUs")
    ]
    assert said[0] == said[1] == said[2] == facts_of(program.plan, {}, 0, 100)
    assert facts_of(compiled(GPU | {"fuse": False}).plan, {}, 0, 100) != said[0]


def test_without_triton_a_gpu_alone_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a fused program runs there are references; a GPU that the plan names has them, whatever compiles for it."""
    lies_on("cuda:0", monkeypatch)
    monkeypatch.setattr(fusion_default, "HAS_TRITON", False)
    assert kernels(compiled({})) == 0
    assert kernels(compiled(GPU)) > 0


def test_where_a_model_lies() -> None:
    assert fusion_default.cuda_device(Chain(), (torch.ones(1), [1, "x"])) is None
    assert fusion_default.cuda_device(Chain().to("meta"), {"x": torch.ones(1, device="meta")}) is None
    with FakeTensorMode():
        on_gpu = torch.ones(1, device="cuda:0")
    assert fusion_default.cuda_device(Chain(), {"x": [torch.ones(1), on_gpu]}) == "cuda:0"
    model = Chain()
    model.register_buffer("scale", on_gpu)
    assert fusion_default.cuda_device(model, torch.ones(1)) == "cuda:0"


def test_kernels_of_other_programs_of_one_plan() -> None:
    """A step, its evaluation and what a plan's own text compiles to have kernels alike."""
    step = compiled(GPU)
    assert kernels(compiled(GPU, mode="eval")) > 0
    same = shardc.compile(Chain(), torch.randn(8, 8), plan=Plan.parse(step.plan.get("text", "")))
    assert same.text() == step.text()
    assert "fused_on" not in same.plan


def test_models_say_it_for_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    lies_on("cuda:0", monkeypatch)
    model = shardc.annotate(Chain(), {"fuse": False})
    assert kernels(shardc.compile(model, torch.randn(8, 8), mesh="dp=1")) == 0
    assert kernels(shardc.compile(model, torch.randn(8, 8), mesh="dp=1", plan={"fuse": "auto"})) > 0


@pytest.mark.parametrize("fuse", [None, True, False, "auto", {"enabled": False, "exclude": ["tanh"]}])
def test_what_a_plan_says_is_written(fuse: Any) -> None:
    plan = Plan.of(fuse=fuse)
    assert Plan.parse(plan.dump()).fuse == plan.fuse
    assert ("fuse" in plan.dump()) == (fuse not in (None, "auto"))


def test_a_kind_of_device() -> None:
    assert Hardware(device="gpu").quantities()["device"] == "gpu"
    assert "device" not in Hardware().quantities()
    with pytest.raises(shardc.ShardcError, match=r"SC208.*'hardware.device' should be gpu or cpu, not 'tpu'"):
        Plan.of(hardware={"device": "tpu"})
    with pytest.raises(shardc.ShardcError, match="should be gpu or cpu, not 1"):
        Hardware.of({"device": 1})
