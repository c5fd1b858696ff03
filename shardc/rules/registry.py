"""The table of ops: one line, in factor notation, for each.

    rule(aten.bmm.default, "b m k, b k n -> b m n", sum="k", linear="each")

    @rule(aten.transpose.int, linear="joint", examples=[((4, 6, 2), 0, 2)])
    def transpose(x: Dims, dim0: int, dim1: int) -> str:
        return f"{x} -> {x.swap(dim0, dim1)}"

A rule function receives the call's arguments by the schema's order, tensors as `Dims` (a list of
them for Tensor[], None for an absent one), and returns the notation. Examples are argument tuples in
which a tensor stands as its shape; `example(...)` adds keywords and says which tensors hold indices or
truth values. Rules given as text have theirs drawn from the notation, unless they list some.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx
from torch._ops import OpOverload

from shardc.ir.graph import info, operands, type_of
from shardc.ir.schema import admit
from shardc.ir.types import TensorType
from shardc.rules.notation import Dims, FactorRule, Notation, RuleError, divided, fit, kept_together, validate

Shape = tuple[int, ...]
Integers = int | range | Callable[[Sequence[int]], torch.Tensor]
RuleFunction = Callable[..., "str | Notation"]
Localize = Callable[..., Any]  # (LocalCall) -> what to emit; see rules/local.py
Unfit = Callable[..., "set[int]"]  # (call, projection, split, mesh) -> the pieces that cannot be split so


@dataclass(frozen=True)
class Example:
    """Arguments to try a rule on. Tensors stand as shapes, floating unless named in `ints` or `bools`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ints: dict[str, Integers]  # argument -> exclusive upper bound of its values, all that they may be, or a function
    bools: tuple[str, ...] = ()


def example(
    *args: Any, ints: Mapping[str, Integers] | None = None, bools: Sequence[str] = (), **kwargs: Any
) -> Example:
    """`example((8, 4), 0, (3, 4), ints={"index": 8})`: a gather whose indices are below 8."""
    return Example(args, kwargs, dict(ints or {}), tuple(bools))


@dataclass(frozen=True)
class OpRule:
    """What is known of one op."""

    op: OpOverload
    defaults: Notation  # the text, or the options that a function's text is combined with
    function: RuleFunction | None = None
    examples: tuple[Example, ...] = ()
    shape_arg: str = ""  # the argument that holds the result's shape and becomes the local one
    localize: Localize | None = None
    kind: Literal["compute", "view", "create", "pointwise"] = "compute"
    exact: bool = True  # False: shards agree with the whole only up to rounding of a different algorithm
    ragged: bool = False  # its notation names the ragged dims of its tensors
    # What its sums do not notice: 0, a value that no bin holds, or all padding, which it does not read.
    padding: Literal["zero", "largest", "unread"] = "zero"
    unfit: Unfit | None = None  # of pieces that the notation leaves free, those that a mesh does not fit


# What makes calls local of shapes alone, and not of positions: an atom of blocks is to them one like others.
BY_BLOCK: set[Localize] = set()


def by_block(localize: Localize) -> Localize:
    """Say of a `localize` that it asks for shapes, never for where in a dim a rank's share lies."""
    BY_BLOCK.add(localize)
    return localize


MASKS = (torch.bool, torch.uint8)  # as indices they pick the places where they are true
_RULES: dict[Any, OpRule] = {}
_FITTED: dict[Any, FactorRule] = {}


def rule(
    ops: Any,
    text: str | None = None,
    *,
    sum: str = "",
    max: str = "",
    min: str = "",
    whole: str = "",
    linear: Literal["joint", "each"] | tuple[int, ...] = (),
    examples: Sequence[tuple[Any, ...] | Example] = (),
    shape_arg: str = "",
    localize: Localize | None = None,
    kind: Literal["compute", "view", "create", "pointwise"] = "compute",
    ragged: bool = False,
    padding: Literal["zero", "largest", "unread"] = "zero",
    unfit: Unfit | None = None,
) -> Any:
    """Register one rule for an op or several. With `text`, at once; without, as a decorator of a rule function."""
    targets = ops if isinstance(ops, (list, tuple)) else [ops]
    options = Notation(text or "", sum, max, min, whole, linear)
    tries = tuple(e if isinstance(e, Example) else Example(tuple(e), {}, {}) for e in examples)

    def register(function: RuleFunction | None) -> RuleFunction | None:
        for op in targets:
            if op in _RULES:
                raise RuleError(f"{op} has a rule already")
            admit(op)
            _RULES[op] = OpRule(
                op, options, function, tries, shape_arg, localize, kind, ragged=ragged, padding=padding, unfit=unfit
            )
        return function

    if text is None:
        return register
    validate(options)
    return register(None)


def find_rule(target: Any) -> OpRule | None:
    """The rule of an op, or None."""
    return _RULES.get(target)


def all_rules() -> list[OpRule]:
    return list(_RULES.values())


def rule_of(node: fx.Node) -> FactorRule:
    """The rule of a call fitted to its global shapes; KeyError when the op has none, RuleError when it does not fit."""
    outs = _result_types(node)
    key = (node.target, _freeze(node.args), _freeze(node.kwargs), tuple([_sizes(t) for t in outs]))
    fitted = _FITTED.get(key)
    if fitted is None:
        entry = _RULES[node.target]
        ins = tuple(type_of(v) for v in operands(node))
        extents = tuple(t.extents for t in ins), tuple(t.extents for t in outs)
        ragged = tuple(t.ragged for t in ins), tuple(t.ragged for t in outs)
        fitted = _FITTED[key] = fit_call(notation_of(entry, bind(node)), *extents, *ragged, of=entry)
    return fitted


def rule_in_blocks(node: fx.Node) -> FactorRule:
    """The rule of a call as it would be if all of its tensors' dims had atoms of blocks."""
    entry, outs = _RULES[node.target], _result_types(node)
    ins = tuple(type_of(v) for v in operands(node))
    dims = range(max((t.ndim for t in (*ins, *outs)), default=0))
    arguments = bind_call(
        node.target,
        node.args,
        dict(node.kwargs),
        lambda name, v: Dims(name, type_of(v).shape, in_blocks=dims, made_in_blocks=dims),
    )
    extents = tuple(t.extents for t in ins), tuple(t.extents for t in outs)
    ragged = tuple(t.ragged for t in ins), tuple(t.ragged for t in outs)
    return fit_call(notation_of(entry, arguments), *extents, *ragged, of=entry)


def fit_call(
    notation: Notation,
    operands: tuple[Shape, ...],
    results: tuple[Shape, ...],
    ragged_operands: tuple[int, ...],
    ragged_results: tuple[int, ...],
    *,
    of: OpRule,
) -> FactorRule:
    """The rule of a call whose tensors have these extents, of which so many, at the end, are ragged dims."""
    if of.ragged or not any((*ragged_operands, *ragged_results)):
        fitted = fit(notation, operands, results)
        return fitted if of.localize is None or of.localize in BY_BLOCK else kept_together(fitted)

    def cut(extents: tuple[Shape, ...], counts: tuple[int, ...]) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
        pairs = [(e[: len(e) - n], e[len(e) - n :]) for e, n in zip(extents, counts, strict=True)]
        return tuple(stored for stored, _ in pairs), tuple(ragged for _, ragged in pairs)

    shapes, by = cut(operands, ragged_operands)
    result_shapes, results_by = cut(results, ragged_results)
    return divided(fit(notation, shapes, result_shapes), by, results_by)


def notation_of(entry: OpRule, arguments: dict[str, Any]) -> Notation:
    """The notation of a call whose tensors, in `arguments`, are `Dims`."""
    if entry.function is None:
        return entry.defaults
    notation = entry.function(*arguments.values())
    if isinstance(notation, str):
        return replace(entry.defaults, text=notation)
    return notation


def bind(node: fx.Node) -> dict[str, Any]:
    """The call's arguments by schema name, defaults filled in, tensors as `Dims`."""
    made = next((t.in_blocks for t in _result_types(node)), ())

    def dims(name: str, value: fx.Node) -> Dims:
        type = type_of(value)
        shape = type.extents if _RULES[node.target].ragged else type.shape
        return Dims(name, shape, boolean=type.dtype in MASKS, in_blocks=type.in_blocks, made_in_blocks=made)

    return bind_call(node.target, node.args, dict(node.kwargs), dims)


def bind_call(
    target: Any, args: Sequence[Any], kwargs: dict[str, Any], tensor: Callable[[str, Any], Any]
) -> dict[str, Any]:
    """Arguments by schema name; fx nodes and real tensors go through `tensor(name, value)`."""
    bound: dict[str, Any] = {}
    for i, arg in enumerate(target._schema.arguments):
        if i < len(args) and not arg.kwarg_only:
            value = args[i]
        elif arg.name in kwargs:
            value = kwargs[arg.name]
        else:
            value = arg.default_value if arg.has_default_value() else None
        if isinstance(value, (fx.Node, torch.Tensor)):
            value = tensor(arg.name, value)
        elif isinstance(value, (list, tuple)):
            value = [
                tensor(f"{arg.name}{k}_", v) if isinstance(v, (fx.Node, torch.Tensor)) else v
                for k, v in enumerate(value)
            ]
        bound[arg.name] = value
    return bound


def result_shapes(node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """Global shapes of all results that are tensors, used or not."""
    return tuple(t.shape for t in _result_types(node))


def _result_types(node: fx.Node) -> tuple[TensorType, ...]:
    if info(node).type is not None:
        return (type_of(node),)
    return tuple(t for t in info(node).results if t is not None)


def _sizes(type: TensorType) -> tuple[Shape, int, tuple[int, ...]]:
    return type.extents, type.ragged, type.in_blocks


def _freeze(value: Any) -> Any:
    kind = type(value)
    if kind is fx.Node:
        return ("tensor", *_sizes(type_of(value)))
    if kind in NUMBERS:  # 1, 1.0 and True are equal
        return kind, value
    if isinstance(value, (list, tuple)):
        return tuple([_freeze(v) for v in value])
    if isinstance(value, dict):
        return tuple([(k, _freeze(v)) for k, v in value.items()])
    return (kind, value) if isinstance(value, (bool, int, float)) else value


NUMBERS = {bool, int, float}
