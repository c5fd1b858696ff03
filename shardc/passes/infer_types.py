"""What a call yields, found anew: the op is run on tensors without data, of the operands' local shapes and dtypes.

    %h : f32[8@dp, 12@tp]   on dp=2, tp=2: f32[4, 6]
    mm(f32[4, 8], f32[8, 6])  ->  f32[4, 6]

Layers are alike, so a call is looked at once for all that have its op, operand types and arguments.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload

from shardc.ir.graph import info, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.kernels import KERNELS
from shardc.ir.ops.local import axis_offset
from shardc.ir.schema import schema_of
from shardc.ir.types import TensorType


class Local(NamedTuple):
    """A tensor as one rank holds it."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @staticmethod
    def of(type: TensorType, mesh: Mesh) -> Local:
        return Local(type.dtype, type.local_shape(mesh))


class UnfitOperandsError(Exception):
    """An op refuses its operands; the text says why."""


class _Operand(NamedTuple):
    """Stands for a tensor in a call's frozen arguments."""

    type: Local


class _Many(NamedTuple):
    items: tuple[Hashable, ...]


class _Number(NamedTuple):
    """1, 1.0 and True are equal, and different arguments."""

    kind: type
    text: str
    value: Any


def results_of(node: fx.Node, mesh: Mesh) -> tuple[Local | None, ...]:
    """The results of a call on one rank; None for a result that is not a tensor. Raises UnfitOperandsError."""
    args = tuple([_frozen(arg, mesh) for arg in node.args])
    kwargs = tuple([(name, _frozen(arg, mesh)) for name, arg in node.kwargs.items()])
    local_results = _results(node.target, args, kwargs)  # type: ignore[arg-type]
    if isinstance(local_results, str):
        raise UnfitOperandsError(local_results)
    return local_results


def declared(node: fx.Node) -> tuple[TensorType | None, ...]:
    about = info(node)
    return about.results if about.type is None else (about.type,)


def _frozen(arg: Any, mesh: Mesh) -> Hashable:
    if isinstance(arg, fx.Node):
        return _Operand(Local.of(type_of(arg), mesh))
    if isinstance(arg, list | tuple):
        return _Many(tuple([_frozen(item, mesh) for item in arg]))
    return _Number(type(arg), repr(arg), arg) if isinstance(arg, bool | int | float | complex) else arg


META = torch.device("meta")


@lru_cache(maxsize=65536)
def _results(
    op: OpOverload, args: tuple[Hashable, ...], kwargs: tuple[tuple[str, Hashable], ...]
) -> tuple[Local | None, ...] | str:
    if op is axis_offset:  # it has no operand that could lie on the meta device
        return (Local(torch.int64, ()),)
    with torch.no_grad():
        try:
            arguments = [_thawed(arg) for arg in args]
            keywords = {name: _thawed(arg) for name, arg in kwargs}
            if any(argument.name == "device" for argument in schema_of(op).arguments):
                keywords["device"] = META
            output: Any = KERNELS.get(op, op)(*arguments, **keywords)
        except Exception as wrong:  # whatever an op finds wrong with its operands
            return f"{type(wrong).__name__}: {str(wrong).strip().partition(chr(10))[0][:200]}"
    values: Sequence[Any] = output if isinstance(output, list | tuple) else (output,)
    tensors = [Local(v.dtype, tuple(v.shape)) if isinstance(v, torch.Tensor) else None for v in values]
    return tuple(tensors)


def _thawed(arg: Any) -> Any:
    if isinstance(arg, _Operand):
        return torch.empty(arg.type.shape, dtype=arg.type.dtype, device=META)
    if isinstance(arg, _Number):
        return arg.value
    return [_thawed(item) for item in arg.items] if isinstance(arg, _Many) else arg
