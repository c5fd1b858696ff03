"""Says why a call failed during a step: an index out of range, or operands that its op does not take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from shardc.ir.diagnostic import ShardcError, error
from shardc.ir.graph import info, op_name, operands
from shardc.ir.index_operands import declared_shape, positions
from shardc.ir.ops.assumed import assume
from shardc.runtime.execute.index_check import assumption_diagnostic, counts_on, index_diagnostic
from shardc.runtime.execute.instructions import CallInstruction

# What torch's ops raise for operands that they do not take. Their subclasses say something else: no memory, a singular
# matrix, a lost device.
_REFUSALS = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError)


def out_of_range(
    instruction: CallInstruction, rank: int, operand_values: Sequence[torch.Tensor | None]
) -> ShardcError | None:
    """The error for a failed instruction, if one of its operands (`operand_values`) held an index out of range."""
    operand = dict(zip(operands(instruction.node), operand_values, strict=True))

    def held_shape(value: fx.Node) -> Sequence[int]:  # a rank's rows of a table
        tensor = operand[value]
        return declared_shape(value) if tensor is None else tensor.shape

    for p in positions(instruction.node, held_shape):
        value = operand[p.value]
        if value is None or value.device.type != "cpu":  # after an assertion on a GPU nothing can be read from it
            continue
        first_bad = p.first_outside(value)
        if first_bad is not None:
            name = f"%{info(p.value).name}"
            what, counts = f"{name} holds {first_bad[0]} on rank {rank}", counts_on(value, p, first_bad[1])
            return ShardcError(index_diagnostic(instruction.node, p, what, name, counts=counts))
    return None


def instruction_failed(instruction: CallInstruction, failure: Exception, location: str) -> ShardcError | None:
    """The error for a call whose op refused its operands; None for a failure of another kind. `location`: its rank.

    A program that was compiled here gives every op what it takes. A file can say what no check of types sees.
    """
    if type(failure) not in _REFUSALS:
        return None
    about = info(instruction.node)
    if instruction.target is assume:
        return ShardcError(assumption_diagnostic(instruction.node))
    reason = str(failure).strip().partition("\n")[0]
    return error(
        "SC511",
        f"%{about.name}, {location}: {type(failure).__name__}: {reason}",
        location=about.source or None,
        source_text=about.source_text or None,
        fqn=about.fqn or None,
        tensor=about.name,
        op=op_name(instruction.node.target),
        hint="was the program's file altered? if `compile` has just made it, this is a fault of shardc",
    )
