"""Recomputation across a cut: forward calls that backward repeats (passes/memory/recompute.py), in several stages.

    stage 0     x -> a -> b          kept: x           backward: r.a = f(x), r.b = g(r.a), ...
    stage 1     b -> c -> loss       kept: b           backward: r.c = h(r.b)

Stage 1 receives b in forward. It needs no transfer for its r.c: it keeps b and reads it where the graph, which is not
stage-aware, reads r.b. A recomputed call runs in the stage of its original, from the values that the stage received.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import fx

from shardc.ir.graph import Graph, info, producer, set_info


def recomputed_calls(calls: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """By recomputed call of backward: the forward call that it repeats, on the same or on recomputed operands.

    Empty unless the plan recomputes: gathers that backward repeats do not count.
    """
    call_list = list(calls)
    if not any(info(call).is_recomputed for call in call_list):
        return {}
    originals: dict[fx.Node, fx.Node] = {}
    forward_calls: dict[tuple[object, str, str], fx.Node] = {}

    def first(value: fx.Node) -> tuple[str, int]:
        call, position = producer(value)
        return originals.get(call, call).name, position

    for call in call_list:
        key = (call.target, repr(fx.map_arg(call.args, first)), repr(fx.map_arg(call.kwargs, first)))
        if info(call).phase == "fwd":
            forward_calls.setdefault(key, call)
        elif key in forward_calls:
            originals[call] = forward_calls[key]
    return originals


def original_of(value: fx.Node, recomputed: Mapping[fx.Node, fx.Node]) -> fx.Node | None:
    """The forward value that a recomputed value repeats. None if it is not recomputed, or forward's is unused."""
    call, position = producer(value)
    if call not in recomputed:
        return None
    if value is call:
        return recomputed[call]
    return next((user for user in recomputed[call].users if producer(user)[1] == position), None)


def reuse_received_values(graph: Graph, stage_of: dict[fx.Node, int], recomputed: Mapping[fx.Node, fx.Node]) -> None:
    """Make a stage read forward's own value where it would read a value that another stage recomputes."""
    existing = set(graph.fx.nodes)
    for copy in [copy for copy in recomputed if copy in existing]:
        for value in [copy] if info(copy).type is not None else list(copy.users):
            other_stage_users = [user for user in value.users if stage_of.get(user, stage_of[copy]) != stage_of[copy]]
            if other_stage_users:
                original = original_of(value, recomputed) or _original_result(graph, value, recomputed[copy])
                for user in other_stage_users:
                    user.replace_input_with(value, original)
    graph.erase_dead()
    for erased in existing - set(graph.fx.nodes):
        stage_of.pop(erased, None)


def _original_result(graph: Graph, value: fx.Node, call: fx.Node) -> fx.Node:
    """A new result of a forward call, of which so far only the recomputed call has used this position."""
    with graph.fx.inserting_after(call):
        result = graph.fx.call_function(value.target, (call, producer(value)[1]))  # type: ignore[arg-type]
    about = info(value)
    name = about.origin.of if about.origin is not None and about.is_recomputed else about.name
    set_info(result, replace(about, name=graph.unique(name), phase="fwd", origin=info(call).origin))
    return result
