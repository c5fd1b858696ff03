"""Every kernel of `kernels_triton/library/kernels`, by launch name: all must be compiled and interpreted."""

from __future__ import annotations

import importlib
from pathlib import Path

from kernels_triton.library import kernels

# What kernels call, and no launch does.
CALLED = ("arithmetic", "bucket", "functions", "moments", "philox", "special")


def written() -> set[str]:
    found: set[str] = set()
    for path in Path(str(kernels.__file__)).parent.glob("[!_]*.py"):
        module = importlib.import_module(f"kernels_triton.library.kernels.{path.stem}")
        own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__]
        found |= {f"{path.stem}.{name}" for name in own if not name.startswith("_") and path.stem not in CALLED}
    return found
