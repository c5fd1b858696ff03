"""A step as a line of Triton: its operands' names, converted to the op's types, and the type of its result.

A variable has a name and the type that Triton sees: `f32`, `i64`, `i32`, `i1`, or the dtype of a tensor's elements as
they were loaded (`bf16`). Operands are converted at their use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels_triton.ir.kernel import Kernel, KernelStep, Operand, Ref
from kernels_triton.ir.table import OPS, Class, class_of, common_class, literal_class

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
WORD = "word"  # the type of 32 random bits, which are converted to a random number at their use
FLOATS = ("bf16", "f16", "f32", "f64")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


@dataclass(frozen=True)
class Variable:
    name: str
    type: str


def compute_type(kernel: Kernel, of: Class) -> str:
    """The type in which values of a class are computed."""
    return {"f": "f64" if kernel.is_float64 else "f32", "i": "i64", "b": "i1"}[of]


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
    """An operand as an expression. `exact`: integers are int64; otherwise they keep their signed type, of 32 bits at
    least."""
    if isinstance(of, Ref):
        variable = find(of.index)
        if into == "i" and not exact and kernel.classes[of.index] == "i":
            return variable.name if variable.type in ("i32", "i64") else converted(variable, "i32")
        return converted(variable, compute_type(kernel, into))
    if into == "f":
        value = float(of)
        text = repr(value) if math.isfinite(value) else f'float("{value}")'
        if kernel.is_float64:  # without a tensor operand, Triton treats a literal as float32
            return f"tl.full((), {text}, tl.float64)"
        return text
    return repr(bool(of)) if into == "b" else repr(int(of))


def expression(kernel: Kernel, step: KernelStep, find: Callable[[int], Variable]) -> tuple[str, str]:
    """(text, type) of a pointwise step."""
    op = OPS[step.op]
    classes: list[Class] = [kernel.classes[o.index] if isinstance(o, Ref) else literal_class(o) for o in step.operands]
    if step.op == "cast":
        assert step.dtype is not None
        return cast(kernel, step.operands[0], step.dtype, find)
    common = common_class(op, classes)
    letters: list[Class] = [common if letter in "na" else letter for letter in op.operands]  # type: ignore[misc]
    exact = step.op not in COMPARISONS
    operands = [operand(kernel, o, c, find, exact) for o, c in zip(step.operands, letters, strict=True)]
    result: Class = common if op.result in ("n", "a") else op.result  # type: ignore[assignment]
    return op.triton.format(*operands), compute_type(kernel, result)


def cast(kernel: Kernel, of: Operand, dtype: torch.dtype, find: Callable[[int], Variable]) -> tuple[str, str]:
    into = TYPES[dtype]
    if not isinstance(of, Ref):
        return operand(kernel, of, class_of(dtype), find), compute_type(kernel, class_of(dtype))
    variable = find(of.index)
    if into not in FLOATS:
        return converted(variable, into), into
    compute = compute_type(kernel, "f")
    wide = converted(variable, compute)
    if into in ("f32", "f64") or variable.type == into:
        return wide, compute
    return f"{wide}.to({WORDS[into]}).to({WORDS[compute]})", compute


def library_functions(kernel: Kernel) -> set[str]:
    """The functions of kernels_triton.library.kernels.functions that a kernel's ops call."""
    return {OPS[step.op].function for step in kernel.steps} - {""}
