"""Eager code with its casts to narrow floats made to a wider dtype, as a run in float64 lifts those of a graph.

Muon casts to bfloat16 by itself. Compared in float64, a step that does so differs by 1e-2 from a graph whose casts are
lifted, and a mistake of that size would not be seen. A norm that casts to float32 differs by 1e-5.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

NARROW = (torch.bfloat16, torch.float16)
_METHODS = {"bfloat16": torch.bfloat16, "half": torch.float16, "float": torch.float32}
_COMPLEX = {torch.complex32: torch.complex128, torch.complex64: torch.complex128}


class LiftedCasts(TorchFunctionMode):
    """While it is entered, a cast to a narrow float is one to `dtype`, and a copy, as the cast would have been.

    With a dtype that is the code's `own`, casts to that are lifted too: they copy nothing where the tensor was lifted.
    """

    def __init__(self, dtype: torch.dtype, own: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype, self.own = dtype, own

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        asked = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, torch.dtype)]
        if name in ("to", "type", *_METHODS):
            target = _METHODS.get(name, asked[0] if asked else None)
            if target in NARROW:
                return args[0].to(self.dtype, copy=args[0].dtype not in NARROW)
            if target is not None and self._lifted(target) is not target:
                return args[0].to(self._lifted(target), copy=bool(kwargs.get("copy")))
        elif isinstance(target := kwargs.get("dtype"), torch.dtype):
            kwargs = {**kwargs, "dtype": self._lifted(target)}
        return func(*args, **kwargs)

    def _lifted(self, dtype: torch.dtype) -> torch.dtype:
        if dtype in NARROW or dtype == self.own:
            return self.dtype
        return _COMPLEX.get(dtype, dtype) if self.own is not None else dtype


@contextmanager
def lifted_code(dtype: torch.dtype, own: torch.dtype) -> Generator[None]:
    """Code whose floats are `own` makes them `dtype`, by its casts and by default."""
    original = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with LiftedCasts(dtype, own):
            yield
    finally:
        torch.set_default_dtype(original)
