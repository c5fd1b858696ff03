"""A model that is changed after it was compiled is compiled again at launch, and refused by a running trainer."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.frontend.model_changes import CompiledModel
from shardc.ir.diagnostic import ShardcError
from tests.trained import MESH, PLAN, batches, made

DATA = batches(4, 6)
LEVEL = 1.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.act, self.b = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.LeakyReLU(0.2), nn.Linear(6, 2)
        self.scale, self.options, self.seen = 1.0, {"power": 2}, 0
        self.table = torch.ones(2)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        h = self.b(self.act(self.norm(self.a(x)))) * self.table
        return (self.scale * h).abs().pow(self.options["power"]).mean()


def replaced(m: Any) -> None:
    m.act = nn.Tanh()


CHANGES: dict[str, Callable[[Any], object]] = {
    "eval": lambda m: m.eval(),
    "eval of one module": lambda m: m.norm.eval(),
    "frozen": lambda m: m.a.requires_grad_(False),
    "a number": lambda m: setattr(m, "scale", 0.5),
    "a number of torch's module": lambda m: setattr(m.act, "negative_slope", 0.5),
    "in a dict": lambda m: m.options.update(power=3),
    "a hook on a module": lambda m: m.b.register_forward_hook(lambda _m, _i, y: y * 2),
    "values of a plain tensor": lambda m: m.table.mul_(3),
}
AT_LAUNCH = CHANGES | {
    "another module": replaced,
    "a hook on a parameter": lambda m: m.b.weight.register_hook(lambda g: g * 2),
    "another plain tensor": lambda m: setattr(m, "table", torch.full((2,), 3.0, dtype=torch.float64)),
}


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(x).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", AT_LAUNCH)
def test_a_launch_is_of_the_model_as_it_is(name: str) -> None:
    model, twin = made(Net), made(Net)
    program = shardc.compile(model, DATA[0], mesh=MESH, plan=PLAN)
    AT_LAUNCH[name](model)
    AT_LAUNCH[name](twin)
    with pytest.warns(UserWarning, match="the model was changed since it was compiled"):
        trainer = program.launch()
    trainer.step(DATA[0])
    found = trainer.gather_grads()
    expected = gradients(twin, DATA[0])
    assert found.keys() == expected.keys()
    for key, want in expected.items():
        torch.testing.assert_close(found[key], want, rtol=1e-11, atol=1e-12)
    trainer.step(DATA[1])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CHANGES)
def test_a_trainer_and_verify_refuse(name: str) -> None:
    model = made(Net)
    program = shardc.compile(model, DATA[0], mesh=MESH, plan=PLAN)
    trainer = program.launch()
    trainer.step(DATA[0])
    CHANGES[name](model)
    for act in (lambda: trainer.step(DATA[1]), program.verify, program.simulate):
        with pytest.raises(ShardcError, match="SC124"):
            act()
    assert trainer.steps == 1


def test_what_forward_changes_itself_is_no_change() -> None:
    """A counter goes on when the user runs the model beside training, and modes that are put back are no change."""
    model = made(Net)
    trainer = shardc.compile(model, DATA[0], mesh=MESH, plan=PLAN).launch()
    trainer.step(DATA[0])
    model.eval()(DATA[1])
    model.train()
    trainer.step(DATA[1])
    assert model.seen == 1


@pytest.mark.parametrize("kind", ["global", "closure", "tensor", "list"])
def test_what_a_loss_reads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    level, target, levels = 1.0, torch.zeros(2, dtype=torch.float64), [1.0]

    def of_global(y: Tensor, _x: Tensor) -> Tensor:
        return LEVEL * y.square().mean()

    def of_closure(y: Tensor, _x: Tensor) -> Tensor:
        return level * (y - target).square().mean() * levels[0]

    model = nn.Sequential(nn.Linear(6, 2)).double()
    loss = of_global if kind == "global" else of_closure
    trainer = shardc.compile(model, DATA[0], mesh=MESH, loss=loss).launch()
    trainer.step(DATA[0])
    trainer.step(DATA[0])
    if kind == "global":
        monkeypatch.setitem(globals(), "LEVEL", 2.0)
    elif kind == "closure":
        level = 2.0
    elif kind == "tensor":
        target += 1
    else:
        levels[0] = 2.0
    with pytest.raises(ShardcError, match="SC124"):
        trainer.step(DATA[0])


def test_values_that_are_written_to_the_model_are_spoken_of() -> None:
    """A trainer has values of its own: what is written to the model's after the launch reaches it by another launch."""
    model = made(Net)
    program = shardc.compile(model, DATA[0], mesh=MESH, plan=PLAN)
    trainer = program.launch()
    trainer.step(DATA[0])
    with torch.no_grad():
        model.b.weight.mul_(2)
    with pytest.warns(UserWarning, match=r"b\.weight"):
        trainer.step(DATA[1])
    again = program.launch(state=model.state_dict())
    torch.testing.assert_close(again.state["b.weight"], model.b.weight.detach())
    again.step(DATA[1])


SOURCE = """
import threading
from types import SimpleNamespace

class Monitor(threading.Thread):
    woken = 0

class Mark:
    woken = 0

version = SimpleNamespace(major=1)
"""


@pytest.fixture
def library(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of a folder on the path; if it is asked for by True, one where packages were installed."""
    name = f"a_module_{'installed' if (installed := getattr(request, 'param', True)) else 'of_a_project'}"
    (tmp_path / f"{name}.py").write_text(SOURCE, encoding="utf-8")
    if installed:
        (tmp_path / f"{name}-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module(name)
    del sys.modules[name]


@pytest.mark.parametrize("library", [True, False], indirect=True)
def test_a_librarys_thread_changes_for_itself(library: Any) -> None:
    """`tqdm` keeps a thread on its class, which forward may read: the model is the same whatever that thread does.
    What a user's own thread holds is a part of the model, as all that forward reads is."""
    monitor = library.Monitor()
    monitor.woken = 0

    class Watched(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2.0 if monitor.woken else 1.0)

    program = shardc.compile(made(Watched), DATA[0], mesh=MESH, plan=PLAN)
    monitor.woken += 1
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        program.launch().close()
    changed = [True] if library.__name__ == "a_module_of_a_project" else []
    assert [("woken" in str(warning.message)) for warning in said] == changed


def test_what_is_a_librarys_is_not_looked_into(library: Any) -> None:
    """A library's function reads another library's state; a user's function that was put there is looked into."""
    state = SimpleNamespace(calls=0)
    scope: dict[str, Any] = {"__name__": "transformers.fake", "LEVEL": 1.0}

    def scaled(h: Tensor) -> Tensor:
        return h * (2.0 if state.calls else 1.0)

    def wrapped(h: Tensor) -> Tensor:
        return of_transformers(h)

    source = "def of_transformers(h):\n    assert other.version\n    Mark.woken += 0\n    return LEVEL * user(h)\n"
    scope |= {"other": library, "Mark": library.Mark, "user": scaled}
    exec(source, scope)
    of_transformers = scope["of_transformers"]

    class Wrapping(Net):
        def forward(self, x: Tensor) -> Tensor:
            return wrapped(super().forward(x))

    program = shardc.compile(made(Wrapping), DATA[0], mesh=MESH, plan=PLAN)
    library.Mark.woken = 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program.launch().close()
    state.calls = 1
    with pytest.warns(UserWarning, match="calls"):
        program.launch().close()
    scope["LEVEL"] = 2.0
    with pytest.warns(UserWarning, match="LEVEL"):
        program.launch().close()


@pytest.mark.parametrize(
    "register",
    ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"],
)
def test_each_kind_of_hook_is_a_change(register: str) -> None:
    model = Net()
    compiled = CompiledModel(model)
    assert compiled.changes() == []
    getattr(model.b, register)(lambda *_: None)
    assert compiled.changes()
