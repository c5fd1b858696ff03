"""What an op's schema knows of a call: the op of a name, its arguments by name, and the words for torch's constants.

Text and program files name ops; a name is looked up in `torch.ops.aten` and `torch.ops.shardc`, and among the ops of
other libraries that this process has admitted, by a rule or a model, so reading a graph can neither import nor run
anything foreign.
"""

from __future__ import annotations

import math
import pkgutil
import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from shardc.ir import ops
from shardc.ir.graph import op_name
from shardc.ir.types import DTYPE_NAMES

# The constants that arguments hold beside numbers and strings; a graph's text writes them as these words.
WORDS: dict[str, Any] = {
    "None": None,
    "True": True,
    "False": False,
    "inf": math.inf,
    "nan": math.nan,
    **{name: dtype for dtype, name in DTYPE_NAMES.items()},
    **{str(f).removeprefix("torch."): f for f in (torch.contiguous_format, torch.preserve_format)},
    **{str(f).removeprefix("torch."): f for f in (torch.channels_last, torch.channels_last_3d)},
    "strided": torch.strided,
}
_WORD_OF: dict[Any, str] = {
    v: w for w, v in WORDS.items() if isinstance(v, torch.dtype | torch.memory_format | torch.layout)
}


def word_of(value: Any) -> str | None:
    """The word for one of torch's constants; None for any other value."""
    return _WORD_OF.get(value) if isinstance(value, torch.dtype | torch.memory_format | torch.layout) else None


@cache
def register_ops() -> None:
    """Make every op of the `shardc::` library known: its files register them when they are imported."""
    for module in pkgutil.iter_modules(ops.__path__):
        import_module(f"{ops.__name__}.{module.name}")


OWN = ("aten", "shardc", "prims")
_ADMITTED: dict[str, OpOverload] = {}


def admit(op: OpOverload) -> bool:
    """Let programs of this process call an op of another library; False if one of ours has its name."""
    if op.namespace in OWN:
        return True
    _ADMITTED[op_name(op)] = op
    return find_op(op_name(op)) is op


def find_op(name: str) -> OpOverload | None:
    """The op of a name as `op_name` writes it: "mm", "add.Tensor", "shardc.all_reduce"; None when there is none."""
    return _find_own(name) or _ADMITTED.get(name)


@lru_cache(maxsize=4096)
def _find_own(name: str) -> OpOverload | None:
    namespace, parts = torch.ops.aten, name.split(".")
    if parts[0] == "shardc":
        register_ops()
        namespace, parts = torch.ops.shardc, parts[1:]
    if len(parts) not in (1, 2) or not all(part.isidentifier() for part in parts):
        return None
    packet = getattr(namespace, parts[0], None)
    if not isinstance(packet, OpOverloadPacket):  # a namespace has attributes that are no ops
        return None
    overload = getattr(packet, parts[1] if len(parts) == 2 else "default", None)
    return overload if isinstance(overload, OpOverload) else None


# What an argument of a functional op is spelled as; a file's name is none of these.
_TEXTS = {
    *("approximate", "rounding_mode", "reduce", "padding", "padding_mode", "mode", "equation"),
    *("UPLO", "driver", "side"),
}
_ARGUMENTS = re.compile(
    r"(Optional\[)?(List\[)?(Optional\[)?(Tensor|number|int|float|bool|str|Device|Layout|MemoryFormat|ScalarType"
    r"|complex|SymInt|Dimname|Scalar)\]*"
)


@lru_cache(maxsize=4096)
def unfit(op: OpOverload) -> str:
    """Why no program may hold an op, in words; "" of one that may.

    A program's calls are functions of their operands: they write over nothing, reach for nothing outside, and yield
    tensors. Text and files may come from anywhere, and are read by this.
    """
    schema = schema_of(op)
    if schema.is_mutable or any(
        argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments
    ):
        return "writes over its operands"
    if not any("Tensor" in str(result.type) for result in schema.returns):
        return "yields no tensor"
    if op.namespace != "shardc":
        for argument in schema.arguments:
            kind = str(argument.type)
            if _ARGUMENTS.fullmatch(kind) is None and argument.name != "generator":
                return f"takes a {kind}"
            if "str" in kind and argument.name not in _TEXTS:
                return f"takes the text '{argument.name}'"
    return ""


def schema_of(op: Any) -> Any:
    """The schema of an op; torch has no public name for it."""
    return op._schema


@lru_cache(maxsize=4096)
def yields_one_tensor(op: OpOverload) -> bool:
    """Does a call hold its value itself, or does it take getitems to get at several?"""
    returns = schema_of(op).returns
    return len(returns) == 1 and str(returns[0].type) == "Tensor"


def given(node: fx.Node) -> dict[str, Any]:
    """The arguments that a call gives, by schema name and in the schema's order."""
    assert isinstance(node.target, OpOverload), f"{node.target} is no op"
    arguments = schema_of(node.target).arguments
    bound = {arg.name: value for arg, value in zip(arguments, node.args, strict=False)} | dict(node.kwargs)
    return {arg.name: bound[arg.name] for arg in arguments if arg.name in bound}


def arrange(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The one way a parsed call holds its arguments: by position as far as the schema lets it.

    ValueError, in words for the user, when they do not fit the schema.
    """
    arguments = schema_of(op).arguments
    positional = [arg for arg in arguments if not arg.kwarg_only]
    if len(args) > len(positional):
        raise ValueError(f"{op_name(op)} takes {len(positional)} arguments by position, here are {len(args)}")
    bound = {arg.name: value for arg, value in zip(positional, args, strict=False)}
    names = [arg.name for arg in arguments]
    for name, value in kwargs.items():
        if name not in names:
            raise ValueError(f"{op_name(op)} has no argument '{name}', only {', '.join(names)}")
        if name in bound:
            raise ValueError(f"{op_name(op)} is given '{name}' twice")
        bound[name] = value
    missing = [arg.name for arg in arguments if arg.name not in bound and not arg.has_default_value()]
    if missing:
        raise ValueError(f"{op_name(op)} lacks its argument '{missing[0]}'")
    count = max((i + 1 for i, arg in enumerate(positional) if arg.name in bound), default=0)
    front = tuple(bound.get(arg.name, arg.default_value) for arg in positional[:count])
    return front, {arg.name: bound[arg.name] for arg in arguments if arg.kwarg_only and arg.name in bound}
