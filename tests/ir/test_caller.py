"""Warnings and plans name the line of the user's code, whatever decorates the functions of the package."""

from __future__ import annotations

import inspect
import warnings

import torch
from torch import nn

import shardc


def test_a_warning_is_at_the_users_line() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    program = shardc.compile(model, x, mesh="dp=1", loss=lambda output, _: output.sum())
    model.eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, here = program.launch(), inspect.currentframe()
        assert here is not None
        line = here.f_lineno - 2
        with torch.no_grad():
            model.weight.mul_(2.0)
        trainer.step(x)
        stepped = line + 5
    assert [(one.filename, one.lineno) for one in caught] == [(__file__, line), (__file__, stepped)]
