"""The moving average of parameters: torch's, sharded, saved, handed on, evaluated and exported."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardc
from shardc.ir.diagnostic import ShardcError
from shardc.runtime.checkpoint.checkpoint import load_state_dict

BATCH: dict[str, Any] = {"inputs": {"x": "dp"}}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero1": ("dp=2, tp=2", BATCH | {"params": {"a.weight": "tp, -"}, "storage": {"zero": 1, "axes": ["dp"]}}),
    "zero3": ("dp=3", BATCH | {"storage": {"zero": 3, "axes": ["dp"]}}),
    "pp2": ("pp=2", {"pipeline": {"microbatches": 1, "split": ["b"]}}),
}
DECAY = 0.7


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)
        self.a.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)).tanh()).square().mean()


def net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def batches(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(6, 6, generator=draw, dtype=torch.float64).to(dtype) for _ in range(4)]


def launched(layout: str, model: nn.Module | None = None, **more: Any) -> shardc.Trainer:
    mesh, plan = LAYOUTS[layout]
    model = net() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)
    return shardc.compile(model, batches()[0], mesh=mesh, plan=plan | more, optimizer=optimizer).launch()


def eager(steps: int = 4) -> tuple[Net, AveragedModel]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for batch in batches()[:steps]:
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
        averaged.update_parameters(model)
    return model, averaged


def adam_after(steps: int) -> dict[str, Any]:
    """The state of eager's optimizer."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)
    for batch in batches()[:steps]:
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
    return optimizer.state_dict()


def close(found: dict[str, Tensor], expected: nn.Module) -> None:
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_torchs_average(layout: str, tmp_path: Path) -> None:
    model, averaged = eager()
    trainer = launched(layout)
    ema = shardc.EMA(trainer, DECAY)
    for batch in batches():
        trainer.step(batch)
    assert ema.updates == 4
    assert set(ema.averages) == {"a.weight", "norm.weight", "norm.bias", "b.weight", "b.bias"}
    close(ema.state_dict(), averaged.module)
    x = batches()[0]
    with ema.swapped():
        close(trainer.state_dict(), averaged.module)
        assert trainer.evaluate([x]).loss == pytest.approx(float(averaged.module.eval()(x)), rel=1e-12)
        trainer.export_safetensors(tmp_path / "averaged")
    close(trainer.state_dict(), model)
    assert trainer.evaluate([x]).loss == pytest.approx(float(model.eval()(x)), rel=1e-12)
    (file,) = (tmp_path / "averaged").glob("*.safetensors")
    close(load_file(file), averaged.module)


def test_a_checkpoint_has_it_on_another_mesh(tmp_path: Path) -> None:
    _, averaged = eager()
    first = launched("zero1")
    shardc.EMA(first, DECAY)
    for _ in first.train(batches(), 2, checkpoint=tmp_path / "run", progress=False):
        pass
    _, halfway = eager(2)
    stored = load_state_dict(tmp_path / "run", roles=("average",))
    torch.testing.assert_close(stored["a.weight:average"], halfway.module.a.weight.detach(), rtol=1e-11, atol=1e-12)
    second = launched("zero3")
    ema = shardc.EMA(second, DECAY)
    for _ in second.train(batches(), 4, checkpoint=tmp_path / "run", progress=False):
        pass
    assert ema.updates == 4
    close(ema.state_dict(), averaged.module)
    with pytest.raises(ShardcError, match=r"SC406(.|\n)*moving averages(.|\n)*before load"):
        launched("zero1").load(tmp_path / "run")
    launched("zero1").load(tmp_path / "run", strict=False)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_averages_that_a_checkpoint_lacks_start_from_its_parameters(layout: str, strict: bool, tmp_path: Path) -> None:
    """As those of an AveragedModel that is made then."""
    plain, late = launched("zero1"), launched(layout)
    for batch in batches()[:2]:
        plain.step(batch)
    plain.save(tmp_path / "plain")
    ema = shardc.EMA(late, DECAY)
    late.step(batches()[3])
    with pytest.warns(UserWarning, match=r"warning\[SC406(.|\n)*no moving averages"):
        late.load(tmp_path / "plain", strict=strict)
    assert ema.updates == 0
    trained = {name: value for name, value in plain.state_dict().items() if name in ema.averages}
    assert all(torch.equal(ema.state_dict()[name], value) for name, value in trained.items())
    model, _ = eager(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)
    optimizer.load_state_dict(adam_after(2))
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for batch in batches()[2:]:
        late.step(batch)
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
        averaged.update_parameters(model)
    close(ema.state_dict(), averaged.module)


@pytest.mark.parametrize("layout", ["zero3", "pp2"])
def test_averages_of_what_was_frozen_when_it_was_saved_start_from_the_parameters_that_are_read(
    layout: str, tmp_path: Path
) -> None:
    model = net()
    model.b.requires_grad_(False)
    first, second = launched("zero1", model), launched(layout)
    averages = [shardc.EMA(trainer, DECAY) for trainer in (first, second)]
    for batch in batches()[:2]:
        first.step(batch)
    for batch in batches():
        second.step(batch)
    first.save(tmp_path / "run")
    second.load(tmp_path / "run", strict=False)
    assert averages[1].updates == 2
    found, saved, read = averages[1].state_dict(), averages[0].state_dict(), second.state_dict()
    assert all(torch.equal(found[name], read[name]) for name in ("b.weight", "b.bias"))
    assert torch.equal(found["a.weight"], saved["a.weight"])
    assert not torch.equal(found["a.weight"], read["a.weight"])


def test_a_run_that_resumes_may_have_averages_from_now_on(tmp_path: Path) -> None:
    first, second = launched("zero1"), launched("zero3")
    for _ in first.train(batches(), 2, checkpoint=tmp_path / "run", progress=False):
        pass
    ema = shardc.EMA(second, DECAY)
    with pytest.warns(UserWarning, match=r"warning\[SC406(.|\n)*no moving averages"):
        for _ in second.train(batches(), 4, checkpoint=tmp_path / "run", progress=False):
            pass
    assert (second.steps, ema.updates) == (4, 2)


def test_a_skipped_step_is_no_update() -> None:
    trainer = launched("zero1", nonfinite="skip")
    ema = shardc.EMA(trainer, DECAY)
    trainer.step(batches()[0])
    before = ema.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.step(batches()[1] * float("inf"))
    assert ema.updates == 1
    assert all(torch.equal(value, before[name]) for name, value in ema.state_dict().items() if "norm" not in name)


def test_gradient_descent_updates_it() -> None:
    mesh, plan = LAYOUTS["zero1"]
    trainer = shardc.compile(net(), batches()[0], mesh=mesh, plan=plan).launch()
    ema = shardc.EMA(trainer, DECAY)
    start = trainer.state_dict()["b.weight"]
    for batch in batches()[:2]:
        trainer.step(batch)
        trainer.sgd(0.1)
    assert ema.updates == 2
    assert not torch.equal(ema.state_dict()["b.weight"], start)


def test_half_precision_is_averaged_in_float32() -> None:
    """Of steps that are smaller than a bfloat16's last digit nothing would be left."""
    mesh, plan = LAYOUTS["zero3"]
    model = net(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    trainer = shardc.compile(model, batches(torch.bfloat16)[0], mesh=mesh, plan=plan, optimizer=optimizer).launch()
    ema = shardc.EMA(trainer, 0.999)
    for batch in batches(torch.bfloat16)[:2]:
        trainer.step(batch)
    average, weight = ema.averages["b.weight"], trainer.state["b.weight"]
    assert (average.dtype, weight.dtype) == (torch.float32, torch.bfloat16)
    assert not torch.equal(average, average.bfloat16().float())
    with ema.swapped():
        assert trainer.state_dict()["b.weight"].dtype == torch.bfloat16


def test_it_follows_what_is_compiled_again() -> None:
    model = net()
    trainer = launched("zero3", model)
    ema = shardc.EMA(trainer, DECAY)
    trainer.step(batches()[0])
    before = ema.state_dict()
    model.a.bias.requires_grad_(True)
    trainer.recompile()
    assert trainer.ema is ema
    assert "a.bias" in ema.averages
    assert all(torch.equal(value, before[name]) for name, value in ema.state_dict().items())
    trainer.step(batches()[1])
    assert ema.updates == 2
    assert not torch.equal(ema.state_dict()["a.bias"], before["a.bias"])


def test_what_is_refused(tmp_path: Path) -> None:
    trainer = launched("zero1")
    for decay in (1.0, -0.1, float("nan"), True):
        with pytest.raises(ShardcError, match=r"SC553(.|\n)*decay="):
            shardc.EMA(trainer, decay)
    ema = shardc.EMA(trainer, DECAY)
    with pytest.raises(ShardcError, match=r"SC553(.|\n)*has an EMA already"):
        shardc.EMA(trainer, DECAY)
    calls = {
        "step": lambda: trainer.step(batches()[0]),
        "sgd": lambda: trainer.sgd(0.1),
        "save": lambda: trainer.save(tmp_path / "run"),
        "load": lambda: trainer.load(tmp_path / "run"),
        "recompile": trainer.recompile,
        "swapped in already": lambda: ema.swapped().__enter__(),
    }
    with ema.swapped():
        for what, call in calls.items():
            with pytest.raises(ShardcError, match=rf"SC553(.|\n)*{what}"):
                call()
    trainer.step(batches()[0])


def test_what_was_frozen_after_some_steps_stays_averaged_on_all_ranks(tmp_path: Path) -> None:
    """A checkpoint has its average: on ranks of a pipeline, too, that do not hold the parameter. It is taken up by a
    program in which it was frozen from the start."""
    model = net()
    trainer = launched("pp2", model)
    ema = shardc.EMA(trainer, DECAY)
    for batch in batches()[:2]:
        trainer.step(batch)
    model.b.requires_grad_(False)
    trainer.recompile()
    trainer.step(batches()[2])
    trainer.save(tmp_path / "run")
    again = net()
    again.b.requires_grad_(False)
    resumed = launched("zero3", again)
    other = shardc.EMA(resumed, DECAY)
    resumed.load(tmp_path / "run")
    for each in (trainer, resumed):
        each.step(batches()[3])
    expected = ema.state_dict()
    assert not torch.equal(expected["b.weight"], trainer.state_dict()["b.weight"])
    for name, value in other.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-11, atol=1e-12, msg=name)
    for name in ("b.weight", "b.bias"):  # as on a rank of the other stage
        del ema.averages[name]
        del trainer.state[name]
    before = ema.held().keys()
    ema.include()
    assert ema.held().keys() == before
