"""Values as text that tells all of their content, in each process the same, and a digest of such texts.

    P("dp", None) in a plan        its class, and each of its fields
    {"b", "a"}                     in order
    an object of a user's own      UncacheableError, as nobody knows what it holds

So whatever has no text makes no key, and two values with one text are equal to all that compiles them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any, cast

import torch
from pydantic import BaseModel
from torch import Tensor, fx

_BY_REPR = frozenset(
    (int, float, complex, bool, str, bytes, type(None), type(...), range)
    + (torch.dtype, torch.device, torch.layout, torch.memory_format)
)


class UncacheableError(Exception):
    """Why a request has no key, or its program is not kept."""


class Digest:
    """Of the values that are added, in their order."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, *values: object) -> None:
        for value in values:
            self._hash.update(text_of(value).encode("utf-8", "surrogatepass"))
            self._hash.update(b"\0")

    def text(self) -> str:
        return self._hash.hexdigest()


def text_of(value: object) -> str:
    """Raises UncacheableError for what has no text."""
    kind = type(value)
    if kind in _BY_REPR:
        return repr(value)
    if kind is tuple or kind is list:
        return f"({','.join(map(text_of, cast('list[object]', value)))})"
    return _writer(kind)(value)


@functools.cache
def _writer(kind: type) -> Callable[[Any], str]:
    """How values of a type are written."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    if issubclass(kind, Enum):
        return lambda value: f"{name}.{value.name}"
    if issubclass(kind, fx.Node):
        return lambda value: f"%{value.name}"
    if issubclass(kind, Tensor):
        return _tensor
    if issubclass(kind, PurePath):
        return lambda value: f"{name}{str(value)!r}"
    if issubclass(kind, BaseModel):
        return functools.partial(_model, name)
    if is_dataclass(kind):
        names = tuple(field.name for field in fields(kind))
        return lambda value: f"{name}{text_of([getattr(value, field) for field in names])}"
    if issubclass(kind, (frozenset, set)):
        return lambda value: f"{{{','.join(sorted(map(text_of, value)))}}}"
    if issubclass(kind, Mapping):
        return lambda value: f"{{{','.join(f'{text_of(k)}:{text_of(v)}' for k, v in value.items())}}}"
    if issubclass(kind, (tuple, list)):  # of torch.fx, and named tuples
        return lambda value: f"{name}{text_of(list(value))}"
    raise UncacheableError(f"a value of type {name} has no content that can be told")


def _model(name: str, value: BaseModel) -> str:
    """With the keys that were said, and what it remembers of its place in a file."""
    said = {key: getattr(value, key) for key in type(value).model_fields}
    return f"{name}{text_of([said, value.model_fields_set, value.__pydantic_private__ or {}])}"


def _tensor(value: Tensor) -> str:
    """Of a tensor with data: its bytes."""
    if value.is_meta or value.layout is not torch.strided or type(value) not in (Tensor, torch.nn.Parameter):
        raise UncacheableError(f"a tensor of type {type(value).__name__} on {value.device} has no bytes to tell")
    data = value.detach().cpu().contiguous().reshape(-1)
    content = hashlib.sha256(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"").hexdigest()
    return f"tensor({value.dtype},{tuple(value.shape)},{value.stride()},{value.device},{content})"
