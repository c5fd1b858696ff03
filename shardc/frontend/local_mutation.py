"""In-place ops on values that nothing else sees, made functional where they stand.

    %w = topk(...)                       %w = topk(...)
    %_ = div_(%w, %s)           ->       %w.new = div(%w, %s)
    %y = mul(%w, %x)                     %y = mul(%w.new, %x)

A graph with mutation is traced once more, which takes as long as the trace itself. That is not needed where what is
written to is the fresh result of an op, of which there is no view: then the op's functional form computes what all
later readers see. A form of another dtype, shape or strides, or one that torch does not have, is left for the retrace.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from shardc import torch_compat
from shardc.ir.schema import schema_of

aten = torch.ops.aten
# They share memory, though their schemas do not say so.
UNSAID = (aten._unsafe_view.default, aten.reshape.default, aten.contiguous.default, aten.to.dtype)


def rewritten(graph: fx.Graph, mode: Any, on_new: Callable[[fx.Node, fx.Node], None], known: set[OpOverload]) -> bool:
    """Rewrite what can be; True if no mutation is left. `on_new(old, new)` is told of each; ops in `known` stay out."""
    done = True
    position = {node: place for place, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if not torch_compat.mutates(node):
            continue
        functional = _functional(node)
        able = functional is not None and functional not in known and _is_unseen(node.args[0])
        if not able or not _fits(node, functional, mode):
            done = False
            continue
        written = node.args[0]
        with graph.inserting_before(node):
            new = graph.call_function(functional, node.args, node.kwargs)  # pyright: ignore[reportArgumentType]
        new.meta.update(node.meta)
        position[new] = position[node]
        for user in [u for u in written.users if u is not new and position[u] > position[node]]:
            user.replace_input_with(written, new)
        node.replace_all_uses_with(new)
        on_new(node, new)
        graph.erase_node(node)
    return done


def _functional(node: fx.Node) -> OpOverload | None:
    """`div.Tensor` of `div_.Tensor`: the same arguments, of which the first alone is written to."""
    target = node.target
    assert isinstance(target, OpOverload)
    namespace, _, name = schema_of(target).name.partition("::")
    written = torch_compat.written_by(node)
    if namespace != "aten" or not name.endswith("_") or name.endswith("__") or written != [node.args[0]]:
        return None
    packet = getattr(aten, name[:-1], None)
    overload = getattr(target, "_overloadname", "default")
    if packet is None or overload not in packet.overloads():
        return None
    functional: OpOverload = getattr(packet, overload)
    mine, other = schema_of(target).arguments, schema_of(functional).arguments
    return functional if [a.name for a in mine] == [a.name for a in other] else None


def _is_unseen(value: Any) -> bool:
    """The fresh result of an op, without views."""
    producer = value
    if value.op == "call_function" and value.target is operator.getitem:
        producer = value.args[0]
    if producer.op != "call_function" or not isinstance(producer.target, OpOverload) or producer.target in UNSAID:
        return False
    if torch_compat.mutates(producer) or any(r.alias_info is not None for r in schema_of(producer.target).returns):
        return False
    return all(not _may_share(user) for user in value.users)


def _may_share(user: fx.Node) -> bool:
    if user.op == "output":
        return False
    if user.op != "call_function" or not isinstance(user.target, OpOverload) or user.target in UNSAID:
        return True
    returned = any(result.alias_info is not None for result in schema_of(user.target).returns)
    return returned and not torch_compat.mutates(user)


def _fits(node: fx.Node, functional: Any, mode: Any) -> bool:
    """Has the functional form's result what the written tensor has?"""

    def value(of: Any) -> Any:
        return fx.map_arg(of, lambda n: n.meta.get("val"))

    written = value(node.args[0])
    if not isinstance(written, Tensor):
        return False
    try:
        with mode, torch.no_grad():
            result = functional(*value(node.args), **value(node.kwargs))
    except Exception:
        return False
    return (
        isinstance(result, Tensor)
        and (result.dtype, result.shape, result.stride()) == (written.dtype, written.shape, written.stride())
    )  # fmt: skip
