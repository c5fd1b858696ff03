"""Which gradients are not finite? Asked only when a step that looks for them has found that some are.

The step itself knows no more than one bool, the same on every rank. As it changed nothing, it can be run again, up to
the squares of each gradient, which the global norm is made of: their sums are the `probe`'s outputs.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from shardc.ir.diagnostic import ShardcError, error
from shardc.ir.graph import Graph, Port, type_of
from shardc.ir.ops.squares import TOTAL_OF_SQUARES
from shardc.ir.schema import given

SHOWN = 5  # names in a message


def probe(body: Graph, params: Iterable[str] | None = None) -> Graph:
    """The body up to the squares of each parameter's gradient, whose sum it returns instead, by parameter.

    `params` are their names, by default the body's own.
    """
    copy = body.copy()
    known = [port.name for port in body.inputs if port.role == "param"] if params is None else list(params)
    squares: dict[str, fx.Node] = {}
    for total in copy.calls_of(TOTAL_OF_SQUARES):
        args = given(total)
        for gradient, name in zip(args["xs"], args["of"], strict=True):
            if name in known:
                with copy.fx.inserting_before(total):
                    alone = copy.call(TOTAL_OF_SQUARES, ([gradient], [name]), like=total, type=type_of(total))
                squares[name] = alone
    squares = {name: squares[name] for name in known if name in squares}
    copy.outputs = tuple(Port("output", name) for name in squares)
    copy.output_node.args = (tuple(squares.values()),)
    copy.erase_dead()
    return copy


def nonfinite(step: int, loss: float, names: list[str]) -> ShardcError:
    """The error of a step whose plan says `nonfinite: raise`."""
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    message = f"step {step}: the gradients of {shown or 'some parameters'} are not finite, at a loss of {loss:.6g}"
    hint = "nothing was changed by the step; nonfinite: skip leaves such steps out and goes on"
    return error("SC509", message, tensor=names[0] if names else None, hint=hint)
