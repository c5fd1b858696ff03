"""A loader's state as plain data, which is what a checkpoint's `extra` holds, and back.

    {"sampler": tensor([3, 1]), "seen": (2, b"x")}
    {"sampler": {"!": "tensor", "dtype": "int64", "shape": [2], "data": "AwAA..."}, "seen": {"!": "tuple", ...}}

Known are numbers, text, bytes, tensors, arrays, and lists, tuples, sets and mappings of them. Whatever else a state
holds would need code to be read, which a checkpoint does not have: it is refused when it is saved (SC557).
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch

from shardc.ir.diagnostic import error

KIND = "!"  # the key that tells an encoded value from a mapping
PLAIN = (type(None), bool, int, float, str)
SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
DEPTH = 64


def encode(value: Any, path: str = "") -> Any:
    """A copy as plain data. Raises ShardcError (SC557) for what could not be read back."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return _tensor(value, path)
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        array = np.asarray(value)
        return {KIND: "array", "dtype": array.dtype.str, "shape": list(array.shape), "data": _text(array.tobytes())}
    if isinstance(value, bytes | bytearray):
        return {KIND: "bytes", "data": _text(bytes(value))}
    if isinstance(value, Mapping):
        pairs = [(key, encode(item, f"{path}.{key}")) for key, item in cast("Mapping[Any, Any]", value).items()]
        if all(type(key) is str and key != KIND for key, _ in pairs):
            return dict(pairs)
        return {KIND: "dict", "items": [[encode(key, f"{path}.{key}"), item] for key, item in pairs]}
    if isinstance(value, list | tuple | set | frozenset):
        items = [encode(item, f"{path}.{i}") for i, item in enumerate(cast("list[Any]", value))]
        kinds = [kind for kind, type_ in SEQUENCES.items() if isinstance(value, type_)]
        return {KIND: kinds[0], "items": items} if kinds else items
    raise _unknown(path, f"is a {type(value).__module__}.{type(value).__qualname__}")


def decode(value: Any) -> Any:
    """What was encoded. Raises ShardcError (SC557) for what `encode` does not write."""
    try:
        return _decoded(value, DEPTH)
    except (KeyError, TypeError, ValueError, RuntimeError, binascii.Error) as wrong:
        hint = "go on with resume=False, or from another checkpoint"
        raise error("SC557", f"a loader's state in the checkpoint cannot be read: {wrong!r}", hint=hint) from None


def _decoded(value: Any, depth: int) -> Any:
    if not depth:
        raise ValueError("nested too deeply")
    if type(value) in PLAIN:
        return value
    if isinstance(value, list):
        return [_decoded(item, depth - 1) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        raise TypeError(f"a {type(value).__name__} is not plain")
    fields = cast("dict[str, Any]", value)
    kind = fields.get(KIND)
    if kind is None:
        return {key: _decoded(item, depth - 1) for key, item in fields.items()}
    if kind in SEQUENCES:
        return SEQUENCES[kind](_decoded(item, depth - 1) for item in fields["items"])
    if kind == "dict":
        return {_decoded(key, depth - 1): _decoded(item, depth - 1) for key, item in fields["items"]}
    data = base64.b64decode(fields["data"], validate=True)
    if kind == "bytes":
        return data
    shape = fields["shape"]
    if kind == "array":
        dtype = np.dtype(fields["dtype"])
        if dtype.kind not in "biufc":
            raise ValueError(f"no dtype of numbers: {dtype}")
        return np.frombuffer(data, dtype).reshape(shape).copy()
    if kind == "tensor":
        dtype = DTYPES[fields["dtype"]]
        if len(data) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{len(data)} bytes are no {fields['dtype']} of {shape}")
        return (
            torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
        )
    raise ValueError(f"unknown kind {kind!r}")


def _tensor(value: torch.Tensor, path: str) -> dict[str, Any]:
    if value.is_meta or value.layout != torch.strided or value.is_quantized or value.is_nested:
        raise _unknown(path, "is a tensor without dense values")
    flat = value.detach().cpu().contiguous().flatten()
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    name = str(value.dtype).removeprefix("torch.")
    return {KIND: "tensor", "dtype": name, "shape": list(value.shape), "data": _text(data)}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _unknown(path: str, what: str) -> Exception:
    message = f"the loader's state cannot be kept in a checkpoint: {path.removeprefix('.') or 'it'} {what}"
    hint = "have state_dict() return numbers, text, bytes, tensors, arrays, and lists, tuples and mappings of them"
    return error("SC557", message, hint=hint)
