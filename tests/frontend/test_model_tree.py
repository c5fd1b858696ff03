"""The walks over a model's modules say what those of `nn.Module` say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shardc.frontend.model_tree import (
    _listed,  # pyright: ignore[reportPrivateUsage]
    modules,
    named_buffers,
    named_modules,
    named_parameters,
)


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

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return ((name or "renamed", module) for name, module in super().named_modules(*args, **kwargs))


def around(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.ReLU(), nn.Sequential(module))


def hiding() -> nn.Module:
    """A module with a walk of its own, which its class does not have."""
    model = nn.Linear(2, 2)
    model.named_parameters = lambda *_, **__: iter([("hidden", model.weight)])  # type: ignore[method-assign,assignment]
    return model


MODELS = [Shared(), around(Shared()), around(Renamed(2, 2)), hiding(), torch.jit.script(nn.Linear(2, 2))]


@pytest.mark.parametrize("model", MODELS, ids=["shared", "around", "renamed", "hiding", "script"])
def test_the_same_as_of_torch(model: nn.Module) -> None:
    def same(mine: list[tuple[str, Any]], theirs: Iterator[tuple[str, Any]]) -> bool:
        return [(name, id(value)) for name, value in mine] == [(name, id(value)) for name, value in theirs]

    assert [*map(id, modules(model))] == [*map(id, model.modules())]
    for once in (True, False):
        assert same(named_modules(model, once), model.named_modules(remove_duplicate=once))
        assert same(named_parameters(model, once), model.named_parameters(remove_duplicate=once))
        assert same(named_buffers(model, once), model.named_buffers(remove_duplicate=once))


def test_torch_is_asked_where_a_walk_is_another() -> None:
    assert [name for name, _ in named_parameters(hiding())] == ["hidden"]
    assert _listed(hiding(), True) == _listed(around(Renamed(2, 2)), True) == []
    assert [name for name, _ in _listed(around(nn.ReLU()), True)] == ["", "0", "1", "1.0"]


def test_a_module_inside_of_itself() -> None:
    model = nn.Linear(2, 2)
    model.add_module("own", model)
    assert modules(model) == [model]
    with pytest.raises(RecursionError):
        named_modules(model, remove_duplicate=False)
