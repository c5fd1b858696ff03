"""Forward that backward runs again (passes/recompute.py), where a cut goes through what is recomputed together.

    stage 0     x -> a -> b          kept: x           backward: r.a = f(x), r.b = g(r.a), ...
    stage 1     b -> c -> loss       kept: b           backward: r.c = h(r.b)

Stage 1 is given b in forward. So nothing need be sent for its r.c: it keeps b, and reads that where the graph, which
knows no stages, reads r.b. What is run again runs where it ran first, each stage from what was sent to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import fx

from shardc.ir.graph import Graph, info, producer, set_info


def originals(calls: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """The calls of backward that repeat one of forward, on the same values or repeated ones: which one it is.

    There are none unless the plan recomputes, though backward may gather anew what forward did.
    """
    listed = list(calls)
    if not any(info(call).name.startswith("r.") for call in listed):
        return {}
    found: dict[fx.Node, fx.Node] = {}
    ran: dict[tuple[object, str, str], fx.Node] = {}

    def first(value: fx.Node) -> tuple[str, int]:
        call, position = producer(value)
        return found.get(call, call).name, position

    for call in listed:
        key = (call.target, repr(fx.map_arg(call.args, first)), repr(fx.map_arg(call.kwargs, first)))
        if info(call).phase == "fwd":
            ran.setdefault(key, call)
        elif key in ran:
            found[call] = ran[key]
    return found


def original_of(value: fx.Node, again: Mapping[fx.Node, fx.Node]) -> fx.Node | None:
    """What forward made in the place of a value that is made again; None if it made no use of it, or none is."""
    call, position = producer(value)
    if call not in again:
        return None
    if value is call:
        return again[call]
    return next((user for user in again[call].users if producer(user)[1] == position), None)


def keep_what_was_sent(graph: Graph, stage_of: dict[fx.Node, int], again: Mapping[fx.Node, fx.Node]) -> None:
    """Have a stage read forward's own value where it would read what another stage makes again."""
    before = set(graph.fx.nodes)
    for copy in [copy for copy in again if copy in before]:
        for value in [copy] if info(copy).type is not None else list(copy.users):
            elsewhere = [user for user in value.users if stage_of.get(user, stage_of[copy]) != stage_of[copy]]
            if elsewhere:
                first = original_of(value, again) or _result(graph, value, again[copy])
                for user in elsewhere:
                    user.replace_input_with(value, first)
    graph.erase_dead()
    for gone in before - set(graph.fx.nodes):
        stage_of.pop(gone, None)


def _result(graph: Graph, value: fx.Node, call: fx.Node) -> fx.Node:
    """The result of a forward call that only its repetition has used so far."""
    with graph.fx.inserting_after(call):
        made = graph.fx.call_function(value.target, (call, producer(value)[1]))  # type: ignore[arg-type]
    set_info(made, replace(info(value), name=graph.unique(info(value).name.removeprefix("r.")), phase="fwd"))
    return made
