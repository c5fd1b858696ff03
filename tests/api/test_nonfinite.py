"""Gradients that are not finite: skipped with float16's loss scale, or raised, and by all ranks alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import shardc
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import info, type_of
from shardc.runtime.execute.layout import replica_spread
from shardc.runtime.oracle.simulate import simulate
from tests.api.test_precision import compiled


def overflowing(batch: Any, value: float = 1e6) -> Any:
    """One element that float16 cannot hold."""
    x = batch["x"].clone()
    x[3, 3] = value
    return {"x": x}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.sampled(6)
def test_an_overflow_skips_the_step_halves_the_scale_and_recovers(zero: int, train: bool) -> None:
    precision = {"compute": "fp16", "loss_scale": 1024, "growth_interval": 3}
    program, batch = compiled("mlp", precision, zero=zero, train=train, clip_grad_norm=1.0)
    trainer = program.launch()
    plain, good = compiled("mlp", None, zero=zero, clip_grad_norm=1.0)[0].launch(), []
    scales: list[float] = []
    for step in range(9):
        before = {name: value.clone() for name, value in trainer.state.items()}
        result = trainer.step(overflowing(batch) if step in (1, 5) else batch)
        assert result.loss_scale is not None
        assert result.skipped is not None
        scales.append(float(result.loss_scale))
        assert bool(result.skipped) == (step in (1, 5))
        if not train:
            trainer.sgd(0.1)
        if result.skipped:
            changed = {name for name, value in before.items() if not torch.equal(value, trainer.state[name])}
            assert "loss:scale" in changed <= {"loss:scale", "loss:good_steps"}
            continue
        good.append(float(result.loss))
        if train:  # neither the loss nor the norm shows the scale
            want = plain.step(batch)
            assert float(result.loss) == pytest.approx(float(want.loss), rel=2e-3)
            assert result.grad_norm is not None
            assert want.grad_norm is not None
            assert float(result.grad_norm) == pytest.approx(float(want.grad_norm), rel=5e-3)
    #                           bad                      bad              three good ones
    assert scales == [1024, 512, 512, 512, 1024, 512, 512, 512, 1024]
    assert good == sorted(good, reverse=True)
    assert len(set(good)) == 7


@pytest.mark.long  # the test of an overflow halves and doubles the scale
def test_the_scale_finds_its_size() -> None:
    """From far too large it halves until gradients fit; the losses are then those of a scale that fitted at once."""
    large, batch = compiled("mlp", {"compute": "fp16", "loss_scale": 2**32})
    fitting, _ = compiled("mlp", {"compute": "fp16", "loss_scale": 1024})
    trainer, other = large.launch(), fitting.launch()
    skipped = 0
    while bool(trainer.step(batch).skipped):
        skipped += 1
        assert skipped < 24
    assert skipped > 4
    other.step(batch)
    first, second = trainer.step(batch), other.step(batch)
    assert float(first.loss) == pytest.approx(float(second.loss), rel=5e-3)


def test_every_rank_decides_alike() -> None:
    """Of an overflow in one rank's shard of one gradient; and what is held twice stays one value."""
    program, batch = compiled("mlp", "fp16", zero=1)
    decisions: list[list[bool]] = []
    spreads: list[float] = []
    names = {info(v).name for v in program.body.output_values}

    def watch(node: fx.Node, values: Any) -> None:
        if info(node).name == info(finite).name:
            decisions.append([bool(v) for v in values])
        if info(node).name in names and type_of(node).dtype.is_floating_point:
            held = {rank: v.nan_to_num(7.0) for rank, v in enumerate(values)}
            spreads.append(replica_spread(held, type_of(node), program.mesh))

    outputs = zip(program.body.outputs, program.body.output_values, strict=True)
    finite = next(v for port, v in outputs if port.name == "finite")
    simulate(program.body, program.inputs(overflowing(batch)), observe=watch)
    simulate(program.body, program.inputs(batch), observe=watch)
    assert decisions == [[False] * 4, [True] * 4]
    assert max(spreads) == 0.0


def test_one_collective_tells_them() -> None:
    """The check costs no collective beyond the norm's."""
    clipped = compiled("mlp", "bf16", zero=1, clip_grad_norm=1.0)[0]
    checked, batch = compiled("mlp", "bf16", zero=1, clip_grad_norm=1.0, nonfinite="skip")
    alone = compiled("mlp", "bf16", zero=1, nonfinite="skip")[0]
    moved = [[(c.kind, c.axes, c.bytes_per_rank) for c in p.collectives()] for p in (clipped, checked, alone)]
    assert moved[0] == moved[1] == moved[2]
    found = checked.launch().step(batch)
    assert found.finite is not None
    assert found.grad_norm is not None


def test_a_skipped_step_changes_no_buffer() -> None:
    program, batch = compiled("cnn", "bf16", nonfinite="skip")
    trainer = program.launch()
    assert not trainer.step(batch).skipped
    before = {name: value.clone() for name, value in trainer.state.items()}
    name = next(key for key, x in batch.items() if x.is_floating_point())
    assert trainer.step({**batch, name: batch[name] * float("inf")}).skipped
    assert all(torch.equal(value, trainer.state[name]) for name, value in before.items())


def test_raise_names_the_step_and_the_parameters() -> None:
    program, batch = compiled("mlp", None, nonfinite="raise", accumulate=2)
    trainer = program.launch()
    trainer.step(batch)
    trainer.state["down.bias"][3] = float("nan")
    before = {name: value.clone() for name, value in trainer.state.items()}
    with pytest.raises(ShardcError, match=r"SC509(.|\n)*step 1: the gradients of up.weight, up.bias, down.weight"):
        trainer.step(batch)
    assert trainer.steps == 1
    assert all(
        torch.equal(
            value,
            trainer.state[name],
        )
        or value.isnan().any()
        for name, value in before.items()
    )


def test_a_model_may_check_by_itself() -> None:
    """A gradient that is not finite where the loss is: of sqrt at 0."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(4))
            self.v = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.v + self.w.sqrt()).sum()

    batch = {"x": torch.ones(2, 4)}
    program = shardc.compile(Root(), batch, mesh="dp=2", plan={"inputs": {"x": "dp"}, "nonfinite": "raise"})
    with pytest.raises(ShardcError, match=r"step 0: the gradients of w are not finite, at a loss of 8"):
        program.launch().step(batch)


def test_checkpoints_carry_the_scale_and_the_master(tmp_path: Path) -> None:
    """Saved under one mesh, plan and ZeRO stage, loaded under another."""
    precision = {"compute": "fp16", "loss_scale": 4096}
    program, batch = compiled("mlp", precision, zero=1)
    with program.launch() as trainer:
        trainer.step(batch)
        trainer.step(overflowing(batch))
        trainer.step(batch)
        trainer.save(tmp_path / "step-3")
        wanted = trainer.step(batch)
    other, _ = compiled("mlp", precision, "dp=4, tp=1", zero=3)
    with other.launch() as trainer:
        trainer.load(tmp_path / "step-3")
        assert float(trainer.state["loss:scale"]) == 2048
        assert int(trainer.state["loss:good_steps"]) == 1
        found = trainer.step(batch)
    assert float(found.loss) == pytest.approx(float(wanted.loss), rel=1e-3)
    assert "loss:scale" not in trainer.state_dict()


def test_a_saved_program_starts_with_its_scale(tmp_path: Path) -> None:
    program, batch = compiled("mlp", {"compute": "fp16", "loss_scale": 4096})
    program.save(tmp_path / "program.json")
    loaded: Any = shardc.Program.load(tmp_path / "program.json")
    state = program.launch().state
    trainer = loaded.launch(state={k: v for k, v in state.items() if ":" not in k})
    assert float(trainer.state["loss:scale"]) == 4096
    result = trainer.step(batch)
    assert not result.skipped


def test_float16_cannot_raise_or_ignore() -> None:
    for mode in ("raise", "ignore"):
        with pytest.raises(ShardcError, match=f"SC208(.|\n)*skips steps that overflow, and cannot {mode} them"):
            compiled("mlp", "fp16", nonfinite=mode)
