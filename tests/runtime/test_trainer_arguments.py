"""What a trainer's methods are given: what they cannot use, or would use for nothing, is refused with a code."""

from __future__ import annotations

import errno
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import shardc
from shardc.ir.diagnostic import ShardcError
from shardc.runtime.train.trainer import Trainer

X = torch.ones(4, 6)


def net(device: str = "cpu") -> nn.Module:
    with torch.device(device):
        return nn.Linear(6, 6)


def compiled(model: nn.Module, **options: Any) -> shardc.Program:
    return shardc.compile(model, X, mesh="dp=2", loss=lambda y, _: y.square().mean(), **options)


@pytest.fixture
def trainer() -> Trainer:
    return compiled(net()).launch()


@pytest.fixture
def updating() -> Trainer:
    model = net()
    return compiled(model, optimizer=torch.optim.SGD(model.parameters(), 0.1)).launch()


def refused(code: str, what: str, call: Callable[[], object]) -> None:
    with pytest.raises(ShardcError, match=what) as caught:
        call()
    assert caught.value.code == code


def test_sgd_where_it_would_do_nothing(trainer: Trainer, updating: Trainer) -> None:
    updating.step(X)
    refused("SC544", "has an optimizer(.|\n)*would do nothing", lambda: updating.sgd(0.1))
    refused("SC544", "no gradients to descend along", lambda: trainer.sgd(0.1))
    trainer.step(X)
    refused("SC553", "step size nan", lambda: trainer.sgd(float("nan")))
    before = {name: value.clone() for name, value in trainer.state.items()}
    trainer.sgd(0.1)
    assert not torch.equal(before["weight"], trainer.state["weight"])


def test_schedulers_of_another_optimizer(trainer: Trainer, updating: Trainer) -> None:
    other = torch.optim.SGD(net().parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(other, 1)
    for one, whose in ((trainer, "the program has none"), (updating, "not that of the program")):
        refused(
            "SC553", f"would change nothing(.|\n)*{whose}", lambda one=one: next(one.train([X], 1, scheduler=scheduler))
        )
    refused("SC553", "the scheduler, a int", lambda: next(updating.train([X], 1, scheduler=7)))
    assert updating.optimizer is not None
    own = torch.optim.lr_scheduler.StepLR(updating.optimizer, 1)
    assert len(list(updating.train([X], 1, scheduler=own, progress=False))) == 1


@pytest.mark.parametrize(
    ("what", "arguments"),
    [
        ("steps=2.5", {"steps": 2.5}),
        ("steps=-1", {"steps": -1}),
        ("steps=True", {"steps": True}),
        ("every='a'", {"every": "a"}),
        ("every=-2", {"every": -2, "checkpoint": "run"}),
        ("every 2 steps, and nowhere", {"every": 2}),
        ("a NoneType as batches", {"batches": None}),
    ],
)
def test_arguments_of_train(trainer: Trainer, what: str, arguments: dict[str, Any]) -> None:
    refused("SC553", what, lambda: next(trainer.train(**{"batches": [X], "steps": 1, **arguments})))


@pytest.mark.parametrize("roles", ["param", ("parm",)])
def test_roles_of_a_state_dict(trainer: Trainer, roles: Any) -> None:
    refused("SC553", "knows the roles param, buffer, state", lambda: trainer.state_dict(roles))


@pytest.mark.parametrize("path", ["a\0b", "/", None, 7])
def test_paths_that_name_no_folder(trainer: Trainer, path: Any) -> None:
    what = "of a checkpoint (holds a NUL byte|is the root|is a NoneType|is a int)"
    refused("SC408", what, lambda: trainer.save(path))
    refused("SC408", what, lambda: trainer.load(path))
    if path is not None:
        refused("SC408", what, lambda: next(trainer.train([X], 1, checkpoint=path)))


def test_weights_that_cannot_be_exported(trainer: Trainer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        refused("SC408", "the weights could not be written", lambda path=path: trainer.export_safetensors(path))
    refused("SC408", "NUL byte", lambda: trainer.export_safetensors(f"{tmp_path}/a\0b"))
    assert (tmp_path / "file").read_text() == "mine"


def test_weights_on_a_full_disk_are_those_that_were(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.export_safetensors(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    trainer.step(X)
    trainer.sgd(0.1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    refused("SC408", "No space left", lambda: trainer.export_safetensors(tmp_path))
    assert {file.name for file in tmp_path.iterdir()} == {"model.safetensors"}
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("what", "init"),
    [
        (r"a tensor of \[3\]", lambda *_: torch.zeros(3)),
        ("a NoneType", lambda *_: None),
        ("a tensor of .* without values", lambda name, shape, dtype: torch.zeros(shape, device="meta")),
    ],
)
def test_what_init_makes(what: str, init: Any) -> None:
    refused("SC504", f"init made {what}", lambda: compiled(net("meta")).launch(init=init))


def test_models_on_meta_and_their_weights(trainer: Trainer, tmp_path: Path) -> None:
    model = net("meta")
    program = compiled(model, optimizer=torch.optim.AdamW(model.parameters()))
    refused("SC504", r"on the meta device and has no values: pass state=(.|\n)*trainer.load", program.launch)
    refused("SC504", "state= is a int", lambda: program.launch(state=7))
    trainer.save(tmp_path / "ck")
    refused("SC504", "it is a checkpoint: launch with init=", lambda: program.launch(state=tmp_path / "ck"))

    def zeros(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    with program.launch(init=zeros) as other:
        refused("SC406", r"saved without an optimizer(.|\n)*load\(strict=False\)", lambda: other.load(tmp_path / "ck"))
        other.load(tmp_path / "ck", strict=False)
        assert torch.equal(other.state["weight"], trainer.state["weight"])
        other.save(tmp_path / "with_optimizer")
    without_state = r"saved with an optimizer(.|\n)*load\(strict=False\) leaves that one's state out"
    refused("SC406", without_state, lambda: trainer.load(tmp_path / "with_optimizer"))


def stepped(optimizer: Any = None, descends: bool = False, scheduled: bool = False) -> list[str]:
    """The warnings of two steps of `train`."""
    model = net()
    steps = None if optimizer is None else optimizer(model.parameters())
    trainer = compiled(model, optimizer=steps).launch()
    scheduler = LambdaLR(steps, lambda _: 0.0) if scheduled else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in trainer.train([X, X], 2, progress=False, scheduler=scheduler):
            if descends:
                trainer.sgd(0.1)
    return [str(w.message) for w in caught if "SC553" in str(w.message)]


def test_steps_that_change_nothing_are_warned_of_once() -> None:
    (said,) = stepped()
    assert re.search(r"the program has no optimizer(.|\n)*optimizer= to compile", said)
    (said,) = stepped(lambda params: torch.optim.SGD(params, lr=0.0))
    assert re.search(r"every learning rate of the optimizer is 0(.|\n)*scheduler", said)
    assert not stepped(descends=True)
    assert not stepped(lambda params: torch.optim.SGD(params, lr=0.1))
    assert not stepped(lambda params: torch.optim.SGD(params, lr=0.0), scheduled=True)


@pytest.mark.parametrize("rate", [float("nan"), float("inf")])
def test_learning_rates_that_are_no_numbers(rate: float) -> None:
    model = net()
    refused(
        "SC107", f"group 0 is {rate}", lambda: compiled(model, optimizer=torch.optim.SGD(model.parameters(), lr=rate))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = compiled(model, optimizer=optimizer).launch()
    optimizer.param_groups[0]["lr"] = rate
    refused("SC107", f"group 0 is {rate}", lambda: trainer.step(X))
