"""A training step by shardc: the unmodified model, compiled on the meta device; each rank loads its own shards."""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import shardc
from benchmarks.train_step import switches
from benchmarks.train_step.models import Batch
from benchmarks.train_step.setting import LeftOutError, Run, Setting, optimizer_of
from benchmarks.train_step.switches import Switch
from shardc.ir.microbatch import before_microbatches

SEQUENCE = "sequence parallelism"
HARDWARE = {"H100": "h100-nvlink+ib", "H200": "h200-nvlink", "A100": "a100-nvlink+ib"}  # by a word of the GPU's name
WORDS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def compiled(setting: Setting, mesh: str, plan: Mapping[str, Any]) -> shardc.Program:
    with torch.device("meta"):
        model = setting.model.build(torch.float32 if setting.master else setting.dtype)
        sample = {name: torch.empty_like(x, device="meta") for name, x in setting.sample.items()}
    optimizer = optimizer_of(model) if setting.optimizer else None
    precision = {"precision": {"compute": WORDS[setting.dtype]}} if setting.master else {}
    with setting.switch.active():
        whole = {**plan, **precision, **setting.switch.plan}
        return shardc.compile(model, sample, mesh=mesh, plan=whole, optimizer=optimizer, cache=False)


def ours(setting: Setting, mesh: str, plan: Mapping[str, Any], graphs: bool = False) -> Run:
    start = time.perf_counter()
    program = compiled(setting, mesh, plan)
    compile_s = time.perf_counter() - start
    more: dict[str, Any] = {}
    if graphs:
        if "graphs" not in inspect.signature(program.launch).parameters:
            raise LeftOutError("launch has no CUDA graphs")
        if not setting.on_gpu:
            raise LeftOutError("CUDA graphs need a GPU")
        more["graphs"] = True
    state = {name: x.float() if setting.master and x.is_floating_point() else x for name, x in setting.state.items()}
    switch = setting.switch
    with switch.active():
        trainer = program.launch(state=state, device=setting.device.type, timeout=120, **more)

    def step(batch: Batch) -> Tensor:
        with switch.active():
            return trainer.step(batch).loss

    with switch.active():
        form = form_of(program, switch)
        about: dict[str, object] = {
            "compile_s": round(compile_s, 1),
            "calls": sum(1 for _ in program.body.calls()),
            "collectives": len(program.collectives()),
            "reported_peak_gib": round(program.memory().peak / 2**30, 3),
            "program": hashlib.sha256(form.encode()).hexdigest()[:16],
        }
        if (machine := machine_of(setting)) is not None:
            about["predicted_ms"] = round(program.predict(machine).step_ms, 2)
    return Run(step, trainer.gather_grads, close=trainer.close, about=about)


def form_of(program: shardc.Program, switch: Switch) -> str:
    """What a program is told apart by: its text, what runs before its microbatches, and a switch of what runs it."""
    early = [call.name for call in before_microbatches(program.body)]
    return "\n".join([program.text(), *sorted(early), switch.off if switch.runs else ""])


def without(setting: Setting, form: str, switch: Switch) -> Run:
    return FORMS[form](replace(setting, switch=switch))


def machine_of(setting: Setting) -> str | None:
    """The hardware file of the GPU at hand, if there is one."""
    name = torch.cuda.get_device_name() if setting.on_gpu else ""
    return next((file for part, file in HARDWARE.items() if part in name), None)


def alone(setting: Setting, fuse: bool = True, graphs: bool = False) -> Run:
    return ours(setting, "tp=1", {"fuse": fuse}, graphs)


def tensor(setting: Setting, fuse: bool = True, sequence: bool = False, graphs: bool = False) -> Run:
    plan: dict[str, Any] = {"params": setting.model.params, "fuse": fuse, "bucket": True}
    if sequence:
        if not setting.model.sequence_parallel:
            raise LeftOutError(f"no plan of {SEQUENCE} for {setting.model.name}")
        plan["activations"] = setting.model.sequence_parallel
    return ours(setting, f"tp={setting.ranks}", plan, graphs)


def data(setting: Setting, fuse: bool = True, zero: int = 0, graphs: bool = False) -> Run:
    plan: dict[str, Any] = {"inputs": dict.fromkeys(setting.sample, "dp, -"), "fuse": fuse, "bucket": True}
    if setting.microbatches > 1:
        plan["accumulate"] = setting.microbatches
    if zero:
        plan["storage"] = {"zero": zero, "axes": ["dp"]}
    return ours(setting, f"dp={setting.ranks}", plan, graphs)


def pipeline(setting: Setting, schedule: str, fuse: bool = True) -> Run:
    cut = {"schedule": schedule, "microbatches": setting.microbatches}
    return ours(setting, f"pp={setting.ranks}", {"pipeline": cut, "fuse": fuse})


def context(setting: Setting, attention: str = "auto", fuse: bool = True) -> Run:
    plan: dict[str, Any] = {
        "inputs": dict.fromkeys(setting.sample, "dp, cp"),
        "context": {"axis": "cp", "attention": attention},
        "fuse": fuse,
        "bucket": True,
    }
    return ours(setting, f"dp=1, cp={setting.ranks}", plan)


def experts(setting: Setting, dispatch: str = "all_to_all", fuse: bool = True) -> Run:
    """Experts over the axis of the batch."""
    if not setting.model.experts:
        raise LeftOutError(f"{setting.model.name} has no experts")
    plan: dict[str, Any] = {
        "inputs": dict.fromkeys(setting.sample, "ep, -"),
        "params": setting.model.experts,
        "experts": dispatch,
        "fuse": fuse,
        "bucket": True,
    }
    return ours(setting, f"ep={setting.ranks}", plan)


FORMS: dict[str, Callable[[Setting], Run]] = {
    "ours": partial(alone, fuse=False),
    "ours-fused": alone,
    "ours-fused-graphs": partial(alone, graphs=True),
    "ours-tp": tensor,
    "ours-tp-sp": partial(tensor, sequence=True),
    "ours-tp-graphs": partial(tensor, graphs=True),
    "ours-dp": data,
    "ours-dp-graphs": partial(data, graphs=True),
    "ours-zero3": partial(data, zero=3),
    "ours-pp-1f1b": partial(pipeline, schedule="1f1b"),
    "ours-pp-interleaved": partial(pipeline, schedule="interleaved"),
    "ours-pp-zb-h1": partial(pipeline, schedule="zb-h1"),
    "ours-pp-auto": partial(pipeline, schedule="auto"),
    "ours-cp": context,
    "ours-ep": experts,
    "ours-ep-gathered": partial(experts, dispatch="all_gather"),
}
CONTESTANTS = FORMS | {
    name: partial(without, form=form, switch=switch) for name, (form, switch) in switches.OFF.items()
}
