"""Eager code with its casts to narrow floats made to a wider dtype, as a run in float64 lifts those of a graph.

Muon casts to bfloat16 by itself. Compared in float64, a step that does so differs by 1e-2 from a graph whose casts are
lifted, and a mistake of that size would not be seen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

NARROW = (torch.bfloat16, torch.float16)
_METHODS = {"bfloat16": torch.bfloat16, "half": torch.float16}


class LiftedCasts(TorchFunctionMode):
    """While it is entered, a cast to a narrow float is one to `dtype`, and a copy, as the cast would have been."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        asked = (*args[1:], *kwargs.values()) if name in ("to", "type") else ()
        if name in _METHODS or any(isinstance(value, torch.dtype) and value in NARROW for value in asked):
            x: Tensor = args[0]
            return x.to(self.dtype, copy=x.dtype not in NARROW)
        if kwargs.get("dtype") in NARROW:
            kwargs = {**kwargs, "dtype": self.dtype}
        return func(*args, **kwargs)
