"""Eager PyTorch without the float32 that libraries hard-code: what is left of a difference is ours."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class InDouble(TorchFunctionMode):
    """Whoever asks for float32 by name is given float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()

        def lift(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        return func(*map(lift, args), **{key: lift(value) for key, value in (kwargs or {}).items()})
