"""Checks a step's batch against the sample of compilation: it must have the same leaves and the same Python values.

    compiled for {"x": tensor, "scale": 2.0}    given {"x": tensor, "scale": 3.0}    SC501: 'scale' is 3.0, not 2.0

Tensors are inputs and may have any content of their shape and dtype. Everything else was read while tracing and is part
of the program. The program stores a description of its sample, as plain data, in its file: each leaf's path in the
batch, its name by forward's parameters, and its kind: a tensor, a value (with its text), or an object. Of an object,
the contents of its tensors count, since tracing read those too.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, cast

import torch
from torch import Tensor

from shardc.ir.diagnostic import error, nearest
from shardc.ir.overlap import refuse_overlap
from shardc.ir.trees import flatten, flatten_with_paths
from shardc.ir.types import kind_of

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
Sample = Mapping[str, Any]  # from `describe_sample` or from JSON


class Inputs(dict[str, Tensor]):
    """A batch's tensors by the names of the program's inputs. It is already checked, and used unchanged."""


def describe_sample(batch: Any, names: Sequence[str], written: Sequence[str] = ()) -> dict[str, Any]:
    """A sample batch as plain data; `names` are those of its leaves, `written` those that forward changes in place."""
    leaves = [[path, name, *_leaf_signature(leaf)] for (path, leaf), name in zip(leaves_of(batch), names, strict=True)]
    return {"by_name": isinstance(batch, Mapping), "leaves": leaves, "written": list(written)}


def batch_inputs(batch: Any, names: Sequence[str], sample: Sample | None = None) -> Inputs:
    """A batch's tensors by the names that tracing gave them: a mapping's by their keys, others' in order.

    Raises ShardcError: SC501 where it is not like the sample, SC125 where an input that forward changes in place shares
    memory with another. Without a sample, what a mapping has beyond the names comes along, so that an error over a
    missing name can suggest it.
    """
    if isinstance(batch, Inputs):
        return batch
    leaves = leaves_of(batch)
    if sample is not None:
        _check_sample(sample, leaves, isinstance(batch, Mapping))
    tensors = [(path, leaf) for path, leaf in leaves if isinstance(leaf, Tensor)]
    by_name = isinstance(batch, Mapping)
    inputs = Inputs(tensors) if by_name else Inputs(zip(names, (leaf for _, leaf in tensors), strict=False))
    for name, tensor in inputs.items():
        if (kind := kind_of(tensor)) is not None:
            hint = "give a dense one, as the program was compiled for"
            raise error("SC501", f"input '{name}' is a {kind} tensor", tensor=name, hint=hint)
    if sample is not None:
        refuse_overlap(sample["written"], inputs)
    return inputs


def _check_sample(sample: Sample, leaves: list[tuple[str, Any]], by_name: bool) -> None:
    # A mapping fits a positional sample by forward's names; for a single leaf, it does not matter how it is passed.
    expected: dict[str, tuple[str, list[str]]] = {
        (name if by_name else path): (name, seen) for path, name, *seen in sample["leaves"]
    }
    if sample["by_name"] and not by_name:
        if not len(expected) == len(leaves) == 1:
            names = ", ".join(f"'{name}'" for name, _ in expected.values())
            message = f"the program was compiled for a batch that is a mapping, of {names}; {len(leaves)} leaves came"
            raise error("SC501", message + " without names", hint="pass a dict, as the sample batch was")
        expected = {leaves[0][0]: next(iter(expected.values()))}
    differences: list[tuple[str, str]] = []
    leaf_at = dict(leaves)
    for path, (name, seen) in expected.items():
        if path not in leaf_at:
            similar = [other for other in nearest(path, leaf_at) if other not in expected][:1]
            differences.append((name, f"it has no '{name}'" + (f" (but '{similar[0]}')" if similar else "")))
        elif (signature := _leaf_signature(leaf_at[path])) != seen:
            differences.append((name, f"'{name}' {_difference(seen, signature)}"))
    differences += [(path, f"'{path}' is new") for path in leaf_at if path not in expected]
    if differences:
        message = "the batch is not like the sample that the program was compiled for: "
        hint = "Python values are part of the program: pass tensors for what changes, or compile again with this batch"
        raise error("SC501", message + "; ".join(text for _, text in differences), tensor=differences[0][0], hint=hint)


def _difference(expected: list[str], actual: list[str]) -> str:
    def describe(signature: list[str]) -> str:
        return signature[1] if signature[0] == "value" else "a tensor" if signature[0] == "tensor" else "an object"

    if expected[0] == actual[0] == "object":
        return "holds other tensors"
    return f"is {describe(actual)}, not {describe(expected)}"


def leaves_of(batch: Any) -> list[tuple[str, Any]]:
    """Every leaf of a batch, with its path."""
    if isinstance(batch, Mapping):  # a BatchEncoding, say, is not a tree to torch
        return flatten_with_paths(dict(cast("Mapping[str, Any]", batch)))
    return flatten_with_paths(tuple(cast("Sequence[Any]", batch)) if isinstance(batch, tuple | list) else (batch,))


def _leaf_signature(leaf: Any) -> list[str]:
    """The properties of a leaf that the program depends on."""
    if isinstance(leaf, Tensor):
        return ["tensor"]
    if type(leaf) in PLAIN or isinstance(leaf, Enum):
        return ["value", repr(leaf)]
    return ["object", *map(_fingerprint, _tensors_within(leaf))]


def _tensors_within(leaf: Any) -> list[Tensor]:
    """The tensors and arrays of an object."""
    if type(leaf).__module__.partition(".")[0] == "numpy":
        try:
            return [torch.as_tensor(leaf)]
        except TypeError:  # an array of strings
            return []
    if isinstance(leaf, type) or not (dataclasses.is_dataclass(leaf) or hasattr(leaf, "__dict__")):
        return []
    fields = (
        vars(leaf) if hasattr(leaf, "__dict__") else {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf)}
    )
    return [value for value in flatten(dict(fields))[0] if isinstance(value, Tensor)]


def _fingerprint(value: Tensor) -> str:
    type_text = f"{value.dtype}{list(value.shape)}"
    if value.is_meta:
        return type_text
    content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{type_text}{hashlib.sha256(content).hexdigest()}"
