"""A step's batch against the sample that the program was compiled for: the same leaves, the same Python values.

    compiled for {"x": tensor, "scale": 2.0}    given {"x": tensor, "scale": 3.0}    SC501: 'scale' is 3.0, not 2.0

Tensors are inputs, and may hold anything of their shape and dtype; all else was read while tracing and is part of the
program. What the program remembers of its sample is plain data and goes into its file: each leaf's path in the batch,
its name by forward's parameters, and whether it is a tensor, a value (with its text), or an object, of which only the
tensors within count: those were read too.
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
Sample = Mapping[str, Any]  # as `describe` makes it, and as JSON gives it back


class Inputs(dict[str, Tensor]):
    """A batch's tensors by the names of the program's inputs: checked, and taken as they are."""


def describe(batch: Any, names: Sequence[str], written: Sequence[str] = ()) -> dict[str, Any]:
    """A sample batch as plain data; `names` are those of its leaves, `written` those that forward changes in place."""
    leaves = [[path, name, *_seen(leaf)] for (path, leaf), name in zip(_leaves(batch), names, strict=True)]
    return {"by_name": isinstance(batch, Mapping), "leaves": leaves, "written": list(written)}


def batch_inputs(batch: Any, names: Sequence[str], sample: Sample | None = None) -> Inputs:
    """A batch's tensors by the names that tracing gave them: a mapping's by their keys, others' in order.

    Raises ShardcError: SC501 where it is not like the sample, SC125 where an input that forward changes in place shares
    memory with another. Without a sample, what a mapping has beyond the names comes along, so that an error over a
    missing name can suggest it.
    """
    if isinstance(batch, Inputs):
        return batch
    leaves = _leaves(batch)
    if sample is not None:
        _check(sample, leaves, isinstance(batch, Mapping))
    tensors = [(path, leaf) for path, leaf in leaves if isinstance(leaf, Tensor)]
    by_name = isinstance(batch, Mapping)
    found = Inputs(tensors) if by_name else Inputs(zip(names, (leaf for _, leaf in tensors), strict=False))
    for name, tensor in found.items():
        if (kind := kind_of(tensor)) is not None:
            hint = "give a dense one, as the program was compiled for"
            raise error("SC501", f"input '{name}' is a {kind} tensor", tensor=name, hint=hint)
    if sample is not None:
        refuse_overlap(sample["written"], found)
    return found


def _check(sample: Sample, leaves: list[tuple[str, Any]], by_name: bool) -> None:
    # A mapping fits a positional sample by forward's names; for a single leaf, it does not matter how it is passed.
    known: dict[str, tuple[str, list[str]]] = {
        (name if by_name else path): (name, seen) for path, name, *seen in sample["leaves"]
    }
    if sample["by_name"] and not by_name:
        if not len(known) == len(leaves) == 1:
            wanted = ", ".join(f"'{name}'" for name, _ in known.values())
            message = f"the program was compiled for a batch that is a mapping, of {wanted}; {len(leaves)} leaves came"
            raise error("SC501", message + " without names", hint="pass a dict, as the sample batch was")
        known = {leaves[0][0]: next(iter(known.values()))}
    found: list[tuple[str, str]] = []
    given = dict(leaves)
    for path, (name, seen) in known.items():
        if path not in given:
            near = [other for other in nearest(path, given) if other not in known][:1]
            found.append((name, f"it has no '{name}'" + (f" (but '{near[0]}')" if near else "")))
        elif (now := _seen(given[path])) != seen:
            found.append((name, f"'{name}' {_difference(seen, now)}"))
    found += [(path, f"'{path}' is new") for path in given if path not in known]
    if found:
        message = "the batch is not like the sample that the program was compiled for: "
        hint = "Python values are part of the program: pass tensors for what changes, or compile again with this batch"
        raise error("SC501", message + "; ".join(text for _, text in found), tensor=found[0][0], hint=hint)


def _difference(seen: list[str], now: list[str]) -> str:
    def said(one: list[str]) -> str:
        return one[1] if one[0] == "value" else "a tensor" if one[0] == "tensor" else "an object"

    if seen[0] == now[0] == "object":
        return "holds other tensors"
    return f"is {said(now)}, not {said(seen)}"


def _leaves(batch: Any) -> list[tuple[str, Any]]:
    if isinstance(batch, Mapping):  # a BatchEncoding, say, is not a tree to torch
        return flatten_with_paths(dict(cast("Mapping[str, Any]", batch)))
    return flatten_with_paths(tuple(cast("Sequence[Any]", batch)) if isinstance(batch, tuple | list) else (batch,))


def _seen(leaf: Any) -> list[str]:
    """What of a leaf the program depends on."""
    if isinstance(leaf, Tensor):
        return ["tensor"]
    if type(leaf) in PLAIN or isinstance(leaf, Enum):
        return ["value", repr(leaf)]
    return ["object", *map(_fingerprint, _within(leaf))]


def _within(leaf: Any) -> list[Tensor]:
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
    head = f"{value.dtype}{list(value.shape)}"
    if value.is_meta:
        return head
    content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{head}{hashlib.sha256(content).hexdigest()}"
