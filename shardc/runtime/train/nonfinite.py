"""Which gradients are not finite? Asked only when a step that looks for them has found that some are.

The step itself knows no more than one bool, the same on every rank. As it changed nothing, it can be run again, up to
the squares of each gradient, which the global norm is made of: their sums are the `probe`'s outputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from shardc.ir.diagnostic import ShardcError, error
from shardc.ir.graph import Graph, Port, info

SHOWN = 5  # names in a message


def probe(body: Graph, params: Iterable[str] | None = None) -> Graph:
    """The body up to the squares of each parameter's gradient, whose sum it returns instead, by parameter.

    `params` are their names, by default the body's own.
    """
    copy = body.copy()
    known = {port.name for port in body.inputs if port.role == "param"} if params is None else set(params)
    named = ((re.fullmatch(r"opt\.(.+)\.norm\.sum_of_squares", info(node).name), node) for node in copy.calls())
    squares = {match[1]: node for match, node in named if match is not None and match[1] in known}
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
