"""Stand-ins for TensorBoard and W&B where they are not installed: what a page logs, as those libraries take it."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any, ClassVar

import pytest

Logged = list[tuple[str, float, int | None]]


class SummaryWriter:
    """As `torch.utils.tensorboard` has it, as far as the pages go."""

    logged: ClassVar[Logged] = []

    def __init__(self, log_dir: str | None = None) -> None:
        assert log_dir

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        assert type(scalar_value) is float
        self.logged.append((tag, scalar_value, global_step))


class Run:
    """As `wandb.init` returns it, as far as the pages go."""

    logged: ClassVar[Logged] = []

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        for name, value in data.items():
            assert type(value) is float
            self.logged.append((name, value, step))


def stand_in(patch: pytest.MonkeyPatch) -> list[Logged]:
    """Put stand-ins in the place of what is not installed; what each is given is appended to its list."""
    lists: list[Logged] = []
    if importlib.util.find_spec("tensorboard") is None:
        SummaryWriter.logged = []
        module: Any = ModuleType("torch.utils.tensorboard")
        module.SummaryWriter = SummaryWriter
        patch.setitem(sys.modules, "torch.utils.tensorboard", module)
        lists.append(SummaryWriter.logged)
    if importlib.util.find_spec("wandb") is None:
        Run.logged = []
        module = ModuleType("wandb")
        module.init = lambda project: Run()
        patch.setitem(sys.modules, "wandb", module)
        lists.append(Run.logged)
    else:  # it logs to a folder, and asks for no account
        patch.setenv("WANDB_MODE", "offline")
    return lists
