"""One walk over a model finds the parameters and buffers that it tells of itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shardc.frontend.model_tree import modules_of, named_modules, named_tensors, own_buffers


class Shared(nn.Module):
    """One module twice, one parameter in two, one under two names of its own, and names that are None."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.inner = nn.ModuleList([nn.Linear(2, 2), self.first, nn.BatchNorm1d(2)])
        self.again = self.inner[0]
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.first.weight
        self.tied.register_parameter("second", self.tied.bias)
        self.nothing = None
        self.register_module("absent", None)
        self.register_buffer("table", torch.zeros(1))
        self.register_buffer("missing", None)


class Renamed(nn.Linear):
    """A class with a walk of its own."""

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        return ((f"{name}.renamed", module) for name, module in super().named_modules(*args, **kwargs))


class Telling(nn.Module):
    """One that tells of other parameters than it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        yield "told", self.inner.weight


def around(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.ReLU(), nn.Sequential(module))


def hiding() -> nn.Module:
    """A module with a walk of its own, which its class does not have."""
    model = nn.Linear(2, 2)
    model.named_parameters = lambda *_, **__: iter([("hidden", model.weight)])  # type: ignore[method-assign,assignment]
    return model


MODELS = {
    "shared": Shared(),
    "around": around(Shared()),
    "renamed": around(Renamed(2, 2)),
    "telling": Telling(),
    "hiding": hiding(),
    "script": torch.jit.script(nn.BatchNorm1d(2)),
}


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_same_as_of_torch(model: nn.Module, once: bool) -> None:
    parameters, buffers = named_tensors(model, once)
    assert _ids(parameters.items()) == _ids(model.named_parameters(remove_duplicate=once))
    assert _ids(buffers.items()) == _ids(model.named_buffers(remove_duplicate=once))
    for module in model.modules():
        assert _ids(own_buffers(module)) == _ids(module.named_buffers(recurse=False))


def test_what_a_model_tells_itself() -> None:
    assert [*named_tensors(Telling())[0]] == ["told"]
    assert [*named_tensors(hiding())[0]] == ["hidden"]
    assert [*named_tensors(around(Renamed(2, 2)))[0]] == ["1.0.renamed.weight", "1.0.renamed.bias"]


def _ids(items: Iterable[tuple[str, Any]]) -> list[tuple[str, int]]:
    return [(name, id(value)) for name, value in items]


def itself() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model.add_module("itself", model)
    return model


@pytest.mark.parametrize("build", [Shared, lambda: around(Renamed(2, 2)), lambda: Renamed(2, 2), Telling, itself])
def test_modules_are_those_of_torch_in_their_order(build: Any) -> None:
    model = build()
    assert named_modules(model) == [*model.named_modules()]
    assert modules_of(model) == [*model.modules()]


def test_a_walk_of_one_instance_or_of_all_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    object.__setattr__(model[0], "named_modules", lambda memo, prefix, remove_duplicate: [(f"{prefix}!", model[0])])
    assert [name for name, _ in named_modules(model)] == ["", "0!"]
    monkeypatch.setattr(nn.Module, "named_modules", lambda self: iter([("all", self)]))
    assert [name for name, _ in named_modules(nn.Linear(2, 2))] == ["all"]
