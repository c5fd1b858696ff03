"""Parameters that are trained after some steps, or are not any more: the steps that eager PyTorch makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.ir.diagnostic import ShardcError

BATCH: dict[str, Any] = {"inputs": {"x": "dp"}}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2": ("dp=2, tp=2", BATCH | {"params": {"a.weight": "tp, -"}}),
    "zero1": ("dp=2", BATCH | {"storage": {"zero": 1, "axes": ["dp"]}, "clip_grad_norm": 0.5}),
    "zero3": ("dp=2", BATCH | {"storage": {"zero": 3, "axes": ["dp"]}, "nonfinite": "skip"}),
    "pp2": ("pp=2, dp=2", BATCH | {"pipeline": {"microbatches": 2, "split": ["c"]}}),
}


class Net(nn.Module):
    """A frozen backbone, and a norm whose statistics go on."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.c = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.a.requires_grad_(False)
        self.b.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.norm(self.a(x)).tanh()).tanh()).square().mean()


class Training:
    """A model with its optimizer, and what happens to it between steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net().double()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.adamw = torch.optim.AdamW(trained, lr=0.01, eps=1e-3)
        draw = torch.Generator().manual_seed(1)
        self.batches = [torch.randn(4, 6, generator=draw, dtype=torch.float64) for _ in range(8)]

    def events(self) -> Iterable[tuple[int, Callable[[], object]]]:
        model, adamw = self.model, self.adamw
        yield 2, lambda: (model.b.requires_grad_(True), adamw.add_param_group({"params": model.b.parameters()}))
        yield 4, lambda: model.c.requires_grad_(False)
        yield 5, lambda: (model.c.requires_grad_(True), model.a.requires_grad_(True))  # a is in no group
        yield 6, lambda: adamw.param_groups[0].update(weight_decay=0.3)


def eager(plan: dict[str, Any]) -> dict[str, Tensor]:
    training, parts = Training(), plan.get("pipeline", {}).get("microbatches", 1)
    events = dict(training.events())
    for step, batch in enumerate(training.batches):
        events.get(step, lambda: None)()
        training.model.zero_grad()
        for part in batch.chunk(parts):
            (training.model(part) / parts).backward()
        if "clip_grad_norm" in plan:
            nn.utils.clip_grad_norm_(training.model.parameters(), plan["clip_grad_norm"])
        training.adamw.step()
    return {name: t.detach() for name, t in training.model.state_dict().items()}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_go_on_as_eagers(layout: str) -> None:
    mesh, plan = LAYOUTS[layout]
    training = Training()
    program = shardc.compile(training.model, training.batches[0], mesh=mesh, plan=plan, optimizer=training.adamw)
    trainer, events = program.launch(), dict(training.events())
    for step, batch in enumerate(training.batches):
        if step in events:
            events[step]()
            with pytest.raises(ShardcError, match=r"SC(124|107)(.|\n)*trainer\.recompile\(\)"):
                trainer.step(batch)
            trainer.recompile()
        trainer.step(batch)
    assert trainer.steps == len(training.batches)
    found = trainer.state_dict()
    for name, value in eager(plan).items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12, msg=name)
    counts = {name: int(t) for name, t in trainer.state_dict(roles=("state",)).items() if name.endswith("bias:step")}
    assert counts == {"norm.bias:step": 8, "c.bias:step": 7, "b.bias:step": 6}


def test_within_a_loop_with_checkpoints(tmp_path: Path) -> None:
    """The loop goes on, the checkpoint is the new program's, and a program of the unfrozen model resumes from it."""
    mesh, plan = LAYOUTS["zero1"]
    training = Training()
    event = dict(training.events())[2]
    program = shardc.compile(training.model, training.batches[0], mesh=mesh, plan=plan, optimizer=training.adamw)
    trainer = program.launch()
    for metrics in trainer.train(training.batches, 4, checkpoint=tmp_path / "run", every=1, progress=False):
        if metrics.step == 2:
            event()
            trainer.recompile()
    again = Training()
    dict(again.events())[2]()
    mesh, plan = LAYOUTS["zero3"]
    program = shardc.compile(again.model, again.batches[0], mesh=mesh, plan=plan, optimizer=again.adamw)
    resumed = program.launch()
    resumed.load(tmp_path / "run")
    assert resumed.steps == 4
    expected = trainer.state_dict(roles=("param", "buffer", "state"))
    found = resumed.state_dict(roles=("param", "buffer", "state"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_what_cannot_be_compiled_leaves_the_trainer(tmp_path: Path) -> None:
    training = Training()
    mesh, plan = LAYOUTS["zero1"]
    program = shardc.compile(training.model, training.batches[0], mesh=mesh, plan=plan, optimizer=training.adamw)
    trainer = program.launch()
    trainer.step(training.batches[0])
    training.adamw.register_step_pre_hook(lambda *_: None)
    with pytest.raises(ShardcError, match="SC107"):
        trainer.recompile()
    training.adamw._optimizer_step_pre_hooks.clear()  # type: ignore[attr-defined]
    trainer.step(training.batches[1])
    assert trainer.steps == 2
    with pytest.raises(ShardcError, match=r"SC546(.|\n)*compiled again"):
        shardc.Program.from_json(program.to_json()).launch(state=training.model.state_dict()).recompile()
