"""Tensors that name no device lie on the CPU, whatever default device the user has set.

Graphs are traced on fake CPU tensors and constants are computed on the CPU, so what a model or a pass makes without a
device has to lie there too. On which device a rank runs is no matter of a graph's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., object])


def on_cpu(function: Function) -> Function:
    """The function, which runs with the CPU as the default device, whatever the caller has set."""

    @functools.wraps(function)
    def run(*args: object, **kwargs: object) -> object:
        if torch.get_default_device().type == "cpu":  # a mode would cost each of torch's functions microseconds
            return function(*args, **kwargs)
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]
