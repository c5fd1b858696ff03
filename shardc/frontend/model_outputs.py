"""The tensors that a model returns, by name: what `outputs:` of a plan and a result call them.

a tensor                 output
a tuple or a list        0, 1, 1.0
a dict, a dataclass,     loss, logits, hidden.0
a Hugging Face output
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from torch import Tensor

from shardc.torch_compat import flatten_with_paths


def output_tensors(output: Any) -> dict[str, Tensor]:
    """Every tensor in what a model returned."""
    leaves = flatten_with_paths(_opened(output))
    return {path or "output": leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


def _opened(value: Any) -> Any:
    """Dataclasses, which are no trees to torch unless they are registered, as dicts of their fields."""
    if type(value) in (tuple, list):
        return [_opened(item) for item in value]
    if type(value) is dict:
        return {key: _opened(item) for key, item in cast("dict[Any, Any]", value).items()}
    if not dataclasses.is_dataclass(value) or isinstance(value, type) or len(flatten_with_paths(value)) != 1:
        return value
    ((path, leaf),) = flatten_with_paths(value)
    if path or leaf is not value:  # a tree already
        return value
    return {field.name: _opened(getattr(value, field.name)) for field in dataclasses.fields(value)}
