"""No module of tests leaves functions of a library replaced: others would test another library afterwards.

A patch of `transformers.masking_utils` that outlived its test once made Llama 4's packed sequences look like one.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch._dynamo  # noqa: F401  # pyright: ignore[reportUnusedImport]  (replaces `torch.manual_seed` as it is imported)

WATCHED = (
    *("torch", "torch.nn.functional", "torch.nn.init", "torch.distributed", "torch.autograd"),
    *("transformers.masking_utils", "transformers.modeling_utils", "transformers.cache_utils"),
    *("shardc.frontend.trace", "shardc.compiler.preparation", "shardc.torch_compat"),
)
OURS = {"shardc", "kernels_triton", "benchmarks", "examples", "tests"}
_known: dict[str, dict[str, Any]] = {}


def left_replaced() -> list[str]:
    """Functions that are not what they were when this first saw their module, or that no library has."""
    found: list[str] = []
    for name in WATCHED:
        module = sys.modules.get(name)
        if module is None:
            continue
        functions = {key: value for key, value in vars(module).items() if type(value) is types.FunctionType}
        known = _known.setdefault(name, {})
        for key, value in functions.items():
            first = key not in known and name.partition(".")[0] not in OURS
            foreign = first and value.__module__.partition(".")[0] in OURS
            if foreign or known.setdefault(key, value) is not value:
                found.append(f"{name}.{key}")
                known[key] = value  # said once, of the module that did it
    return found
