"""A step as a line of Triton: what its operands are called, converted to what the op takes, and what it yields.

A variable has a name and the type that Triton sees: `f32`, `i64`, `i32`, `i1`, or that of a tensor's elements as they
were loaded (`bf16`). Operands are converted where they are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels_triton.fused.kernel import Kernel, Operand, Ref, Step
from kernels_triton.fused.table import OPS, Class, call_class, class_of, literal_class

TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}
WORDS = {
    "bf16": "tl.bfloat16",
    "f16": "tl.float16",
    "f32": "tl.float32",
    "f64": "tl.float64",
    "i64": "tl.int64",
    "i32": "tl.int32",
    "i16": "tl.int16",
    "i8": "tl.int8",
    "u8": "tl.uint8",
    "i1": "tl.int1",
}
WORD = "word"  # of 32 random bits: what stands for a random number until it is used as one
FLOATS = ("bf16", "f16", "f32", "f64")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


@dataclass(frozen=True)
class Variable:
    name: str
    type: str


def word(kernel: Kernel, of: Class) -> str:
    """What a value of a class is computed in."""
    return {"f": "f64" if kernel.double else "f32", "i": "i64", "b": "i1"}[of]


def converted(variable: Variable, into: str) -> str:
    """The variable as an expression of another type."""
    if variable.type == into:
        return variable.name
    if variable.type == WORD:
        number = Variable(f"tl.uint_to_uniform_float({variable.name})", "f32")
        return converted(number, into)
    if into == "i1":
        return f"({variable.name} != 0)"
    return f"{variable.name}.to({WORDS[into]})"


def operand(kernel: Kernel, of: Operand, into: Class, find: Callable[[int], Variable], exact: bool = True) -> str:
    """`exact`: integers as int64; otherwise as they come, of at least 32 bits: all signed."""
    if isinstance(of, Ref):
        variable = find(of.index)
        if into == "i" and not exact and kernel.classes[of.index] == "i":
            return variable.name if variable.type in ("i32", "i64") else converted(variable, "i32")
        return converted(variable, word(kernel, into))
    if into == "f":
        value = float(of)
        text = repr(value) if math.isfinite(value) else f'float("{value}")'
        if kernel.double:  # Triton would take a literal for a float32 where it meets no tensor
            return f"tl.full((), {text}, tl.float64)"
        return text
    return repr(bool(of)) if into == "b" else repr(int(of))


def expression(kernel: Kernel, step: Step, find: Callable[[int], Variable]) -> tuple[str, str]:
    """(text, type) of a pointwise step."""
    op = OPS[step.op]
    given: list[Class] = [kernel.classes[o.index] if isinstance(o, Ref) else literal_class(o) for o in step.operands]
    if step.op == "cast":
        assert step.dtype is not None
        return cast(kernel, step.operands[0], step.dtype, find)
    common = call_class(op, given)
    letters: list[Class] = [common if letter in "na" else letter for letter in op.operands]  # type: ignore[misc]
    exact = step.op not in COMPARISONS
    words = [operand(kernel, o, c, find, exact) for o, c in zip(step.operands, letters, strict=True)]
    result: Class = common if op.result in ("n", "a") else op.result  # type: ignore[assignment]
    return op.triton.format(*words), word(kernel, result)


def cast(kernel: Kernel, of: Operand, dtype: torch.dtype, find: Callable[[int], Variable]) -> tuple[str, str]:
    into = TYPES[dtype]
    if not isinstance(of, Ref):
        return operand(kernel, of, class_of(dtype), find), word(kernel, class_of(dtype))
    variable = find(of.index)
    if into not in FLOATS:
        return converted(variable, into), into
    compute = word(kernel, "f")
    wide = converted(variable, compute)
    if into in ("f32", "f64") or variable.type == into:
        return wide, compute
    return f"{wide}.to({WORDS[into]}).to({WORDS[compute]})", compute


def functions(kernel: Kernel) -> set[str]:
    """What ops call of kernels_triton.kernels.functions."""
    return {OPS[step.op].function for step in kernel.steps} - {""}
