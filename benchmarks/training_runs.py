"""One training step, by shardc and by each peer: what `train_step.py` measures.

A run is made from a shape, the weights to start from and a device, and then called with whole batches; every rank is
given the same ones and works on its part. It returns the loss, of the whole batch or (`local`) of this rank's part.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardc
from benchmarks.gpt import Shape, loss_of

Batch = Mapping[str, Tensor]
State = Mapping[str, Tensor]
RATE = 3e-4


@dataclass
class Run:
    """A way to train, ready to step."""

    step: Callable[[Batch], Tensor]
    local: bool = False
    compile_s: float | None = None
    close: Callable[[], None] = lambda: None
    about: dict[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True)
class Setting:
    """What every run is made from."""

    shape: Shape
    state: State  # on the CPU
    sample: Batch  # a batch of the size that the run will get
    device: torch.device
    ranks: int
    master: bool = False  # parameters and AdamW's state in float32, computed with in bfloat16

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.master else torch.bfloat16


def optimizer_of(model: nn.Module, fused: bool | None = None) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=RATE, fused=fused)


# ---------------------------------------------------------------------- shardc
def ours(setting: Setting, mesh: str, plan: Mapping[str, Any]) -> Run:
    """The unmodified model, on the meta device, compiled with AdamW in the graph; each rank loads its own shards."""
    start = time.perf_counter()
    with torch.device("meta"):
        model = setting.shape.model(setting.dtype)
        sample = {name: torch.empty_like(x, device="meta") for name, x in setting.sample.items()}
    precision = {"precision": {"compute": "bf16", "master": "fp32", "reduce": "fp32"}} if setting.master else {}
    program = shardc.compile(model, sample, mesh=mesh, plan={**plan, **precision}, optimizer=optimizer_of(model))
    compile_s = time.perf_counter() - start
    trainer = program.launch(state=setting.state, device=setting.device.type, timeout=120)
    reported = program.memory()
    about: dict[str, object] = {
        "calls": sum(1 for _ in program.body.calls()),
        "collectives": len(program.collectives()),
        "reported_peak_gib": round(reported.peak / 2**30, 3),
    }
    return Run(lambda batch: trainer.step(batch).loss, False, round(compile_s, 1), trainer.close, about)


def dp(setting: Setting, fuse: bool = False, bucket: bool = False) -> Run:
    return ours(setting, f"dp={setting.ranks}", {"inputs": _over_dp(setting), "fuse": fuse, "bucket": bucket})


def zero3(setting: Setting, fuse: bool = False, bucket: bool = False) -> Run:
    plan = {"inputs": _over_dp(setting), "storage": {"zero": 3, "axes": ["dp"]}, "fuse": fuse, "bucket": bucket}
    return ours(setting, f"dp={setting.ranks}", plan)


def one(setting: Setting) -> Run:
    """A mesh of one: what fusion alone does, with no collective."""
    return ours(setting, "dp=1", {"fuse": True})


def tp(setting: Setting, fuse: bool = False) -> Run:
    return ours(setting, f"tp={setting.ranks}", {"params": setting.shape.tensor_parallel, "fuse": fuse})


def _over_dp(setting: Setting) -> dict[str, str]:
    return dict.fromkeys(setting.sample, "dp, -")


# ---------------------------------------------------------------------- peers
def eager(setting: Setting) -> Run:
    """One GPU (each for itself) and its part of the batch; the peers' optimizer is torch's fused one."""
    return _peer(setting, fused=True)


def compiled(setting: Setting) -> Run:
    """As eager, its model and loss by `torch.compile`, as one graph."""
    return _peer(setting, fused=True, wrap=lambda model: torch.compile(model, fullgraph=True))  # type: ignore[arg-type]


def reference(setting: Setting) -> Run:
    """One GPU and the whole batch: whose losses the others are held against.

    As ours it casts every parameter that is not bfloat16 (autocast leaves norms be). Its AdamW is torch's default one.
    """

    def forward(model: nn.Module, batch: Batch) -> Any:
        cast = {name: p.to(torch.bfloat16) for name, p in model.named_parameters()}
        return torch.func.functional_call(model, cast, (), dict(batch))

    return _peer(setting, fused=None, whole=True, forward=forward)


def float32(setting: Setting) -> Run:
    """As the reference, with nothing rounded to bfloat16, from the same weights."""
    return _peer(replace(setting, master=True), fused=None, whole=True, forward=lambda model, batch: model(**batch))


def ddp(setting: Setting, compile: bool = False) -> Run:
    """Compiled from the outside: torch then cuts the graph where buckets end, so that they are sent during backward."""

    def wrap(model: nn.Module) -> nn.Module:
        devices = [setting.device] if setting.device.type == "cuda" else None
        spread = nn.parallel.DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
        return torch.compile(spread) if compile else spread  # type: ignore[return-value]

    return _peer(setting, fused=True, wrap=wrap)


def fsdp2(setting: Setting, compile: bool = False) -> Run:
    """Compiled block by block, so that gathers stay between them."""

    def wrap(model: nn.Module) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(setting.device.type, (setting.ranks,))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if setting.master else MixedPrecisionPolicy()
        for block in model.get_submodule(setting.shape.blocks).children():
            if compile:
                block.compile()
            fully_shard(block, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)

    return _peer(setting, fused=True, wrap=wrap, forward=lambda model, batch: model(**batch))


def _peer(
    setting: Setting,
    *,
    fused: bool | None,
    whole: bool = False,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    forward: Callable[[nn.Module, Batch], Any] | None = None,
) -> Run:
    """Eager torch; under autocast where the parameters are float32, unless `forward` casts in a way of its own."""
    with setting.device:  # not on meta and then to_empty, which unties weights
        model = setting.shape.model(setting.dtype)
    model.load_state_dict(setting.state)
    model = wrap(model) if wrap is not None else model
    optimizer = optimizer_of(model, fused)
    rank = int(os.environ["RANK"])

    def step(batch: Batch) -> Tensor:
        if not whole:
            batch = {name: x.chunk(setting.ranks)[rank] for name, x in batch.items()}
        if forward is not None:
            loss = loss_of(forward(model, batch))
        else:
            with torch.autocast(setting.device.type, torch.bfloat16, enabled=setting.master):
                loss = loss_of(model(**batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Run(step, local=not whole)


def whole_loss(run: Run, loss: Tensor, ranks: int) -> float:
    if run.local:
        loss = loss.float().clone()
        dist.all_reduce(loss)
        loss /= ranks
    return float(loss)


# By name: who makes the run, and by which other runs its step time is divided.
RUNS: dict[str, tuple[Callable[[Setting], Run], tuple[str, ...]]] = {
    "float32": (float32, ()),
    "reference": (reference, ()),
    "eager": (eager, ()),
    "compiled": (compiled, ("eager",)),
    "ours-one-fused": (one, ("compiled", "eager")),
    "ddp": (ddp, ()),
    "ddp-compiled": (partial(ddp, compile=True), ("ddp",)),
    "fsdp2": (fsdp2, ()),
    "fsdp2-compiled": (partial(fsdp2, compile=True), ("fsdp2",)),
    "ours-dp": (dp, ("ddp", "eager")),
    "ours-dp-zero3": (zero3, ("fsdp2", "ddp", "eager")),
    "ours-tp": (tp, ("ddp", "fsdp2", "eager")),
    "ours-dp-fused": (partial(dp, fuse=True), ("ddp-compiled", "ddp", "eager", "ours-dp")),
    "ours-dp-zero3-fused": (
        partial(zero3, fuse=True),
        ("fsdp2-compiled", "fsdp2", "ddp", "eager", "ours-dp-zero3"),
    ),
    "ours-dp-fused-bucketed": (
        partial(dp, fuse=True, bucket=True),
        ("ddp-compiled", "ddp", "eager", "ours-dp-fused"),
    ),
    "ours-dp-zero3-fused-bucketed": (
        partial(zero3, fuse=True, bucket=True),
        ("fsdp2-compiled", "fsdp2", "ddp", "eager", "ours-dp-zero3-fused"),
    ),
    "ours-tp-fused": (partial(tp, fuse=True), ("ddp-compiled", "ddp", "fsdp2", "eager", "ours-tp")),
}
WHOLE = ("float32", "reference")  # each GPU trains on the whole batch
ALONE = ("eager", "compiled")  # each GPU trains on its own part of the batch
ONE = ("ours-one-fused",)  # only where there is one GPU
