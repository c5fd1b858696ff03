"""Updates of torch's own optimizers are traced once a process, and shared only where nothing tells two apart."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.frontend import optimizer as appended
from shardc.frontend import update_cache
from shardc.frontend.update_cache import remember, shared_options


class Own(torch.optim.SGD):
    """A class of a user's, whose methods may be any."""


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 2, dtype=dtype))]


def options(optimizer: torch.optim.Optimizer) -> object:
    return shared_options(optimizer, optimizer.param_groups[0])


def compiled(**changed: Any) -> shardc.Program:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(model.parameters(), **{"betas": (0.8, 0.93), **changed})
    return shardc.compile(
        model,
        torch.ones(4, 6),
        loss=lambda y, _: y.square().mean(),
        optimizer=optimizer,
        mesh="dp=2",
        plan={"inputs": {"input": "dp"}},
    )


def test_a_second_program_traces_nothing_and_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiled()

    def traced(*_: object, **__: object) -> object:
        raise AssertionError("traced once more")

    monkeypatch.setattr(appended, "trace_update", traced)
    monkeypatch.setattr(appended, "check", traced)
    assert compiled().text() == first.text()
    with pytest.raises(AssertionError, match="traced once more"):
        compiled(betas=(0.8, 0.94))


def test_each_program_has_nodes_of_its_own() -> None:
    first, second = compiled(), compiled()
    assert not {*first.body.fx.nodes} & {*second.body.fx.nodes}
    assert all(node.graph is first.body.fx for node in first.body.fx.nodes)


@pytest.mark.parametrize(
    "other",
    [
        lambda: torch.optim.SGD(parameters(), lr=0.1),
        lambda: torch.optim.AdamW(parameters(), betas=(0.9, 0.9)),
        lambda: torch.optim.AdamW(parameters(), amsgrad=True),
        lambda: torch.optim.Adam(parameters(), weight_decay=0.01),
        lambda: torch.optim.AdamW(parameters(torch.float64)),
    ],
    ids=["class", "number", "flag", "base", "dtype"],
)
def test_others_are_not_shared(other: Callable[[], torch.optim.Optimizer]) -> None:
    ours = options(torch.optim.AdamW(parameters()))
    assert ours is not None
    assert options(other()) not in (None, ours)


def test_the_learning_rate_is_no_part_of_an_update() -> None:
    slow, fast = (torch.optim.AdamW(parameters(), lr=lr) for lr in (1e-3, torch.tensor(0.1)))
    torch.optim.lr_scheduler.StepLR(slow, 1)  # which puts a counting `step` into the instance
    assert options(slow) == options(fast)


def test_what_else_decides_an_update_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options(Own(parameters(), lr=0.1)) is None
    assert options(torch.optim.Adagrad(parameters())) is None  # its state is there, whatever was put into it
    instance = torch.optim.SGD(parameters(), lr=0.1)
    instance._init_group = instance._init_group  # type: ignore[method-assign]
    assert options(instance) is None
    tensors = torch.optim.Adam(parameters(), betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False)
    assert options(tensors) is None
    ours = options(torch.optim.SGD(parameters(), lr=0.1))

    def sgd(*_: Tensor, **__: object) -> None:
        """Another function in the place of torch's."""

    monkeypatch.setattr(sys.modules["torch.optim.sgd"], "sgd", sgd)
    assert options(torch.optim.SGD(parameters(), lr=0.1)) != ours


def test_callables_in_the_place_of_torchs_functions_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["torch.optim.sgd"]
    keys = []
    for scale in (1, 2):
        monkeypatch.setattr(module, "sgd", partial(module.sgd, scale=scale))
        keys.append(options(torch.optim.SGD(parameters(), lr=0.1)))
    assert keys[0] != keys[1]


def test_the_default_dtype_decides_of_what_a_count_is() -> None:
    ours = options(torch.optim.AdamW(parameters()))
    torch.set_default_dtype(torch.float64)
    try:
        assert options(torch.optim.AdamW(parameters())) != ours
    finally:
        torch.set_default_dtype(torch.float32)


def test_tables_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_cache, "LIMIT", 3)
    table: dict[Any, int] = {}
    for i in range(10):
        remember(table, i, i)
        assert len(table) <= 3
        assert table[i] == i
