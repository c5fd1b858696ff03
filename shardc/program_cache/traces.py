"""The content of a trace, and of the updates of optimizers, for a digest: all that passes may read of them."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch import Tensor, fx
from torch._ops import OpOverload

from shardc.frontend.optimizer import AppendUpdates
from shardc.frontend.traced import Traced
from shardc.ir.plain import graph_to_plain
from shardc.program_cache.digest import Digest, UncacheableError, text_of


def add_trace(digest: Digest, traced: Traced) -> None:
    """Raises UncacheableError for an argument or a constant whose content cannot be told."""
    digest.add("\n".join(map(_node, traced.graph.nodes)))
    inputs = (f"{i.role} {i.name!r} {i.aliases!r} {i.trainable} {i.node.name}" for i in traced.inputs)
    digest.add("\n".join(inputs), "\n".join(f"{o.role} {o.name!r} {o.node.name}" for o in traced.outputs))
    digest.add(traced.modules, traced.constants, traced.unused, traced.diagnostics, traced.written)
    digest.add(traced.changed_attributes, () if traced.layers is None else traced.layers.units)


def add_updates(digest: Digest, updates: AppendUpdates | None, traced: Traced) -> None:
    """Raises ShardcError (SC107) for an optimizer that no program can have."""
    if updates is None:
        digest.add(None)
        return
    asked = (updates.clip_grad_norm, updates.precision, updates.check_finite, updates.refuses_drops, updates.together)
    digest.add(asked)
    numbers: dict[int, int] = {}  # of updates by their ids, which many parameters share
    for name, index, kind, update in updates.of(traced):
        if id(update) not in numbers:
            numbers[id(update)] = len(numbers)
            digest.add(update.states, graph_to_plain(update.graph))
        digest.add(name, index, kind, numbers[id(update)])


def _node(node: fx.Node) -> str:
    said = node.meta.get  # texts, of all but the value
    about = f"{said('fqn')!r} {said('source')!r} {said('source_text')!r} {said('phase')!r} {said('fwd_node')!r}"
    call = f"{node.op} {node.name} {_target(node)} {text_of(node.args)} {text_of(node.kwargs)}"
    return f"{call} {about} {''.join(_value(said('val')))}"


def _target(node: fx.Node) -> str:
    """Of ops alone: they are found by their names."""
    target = node.target
    if isinstance(target, (str, OpOverload)):
        return str(target)
    if target is operator.getitem:
        return "getitem"
    raise UncacheableError(f"forward calls {getattr(target, '__qualname__', target)}, which is no op of torch")


def _value(value: object) -> Iterator[str]:
    """Of a fake tensor what is known of it; no data."""
    if isinstance(value, Tensor):
        yield f"<{value.dtype}{tuple(value.shape)}{value.stride()}{value.device}>"
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _value(each)
        yield ";"
    else:
        yield text_of(value)
