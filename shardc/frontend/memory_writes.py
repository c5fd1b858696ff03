"""Which calls of a recording have written to the memory of a value, through whatever view of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import fx

from shardc import torch_compat


def writes_of(graph: fx.Graph) -> list[fx.Node]:
    """The calls recorded so far that write to one of their arguments."""
    return [n for n in graph.nodes if torch_compat.mutates(n)]


def writes_to(wanted: Mapping[fx.Node, bool], writes: Sequence[fx.Node]) -> list[tuple[fx.Node, bool]]:
    """The calls that write to the memory of some values, and are not among them."""
    memory = {memory_of(n) for n in wanted} if writes else set[fx.Node]()
    return [
        (n, False)
        for n in writes
        if wanted.get(n, True) and not memory.isdisjoint(map(memory_of, torch_compat.written_by(n)))
    ]


def memory_of(node: fx.Node) -> fx.Node:
    """The call whose memory a view lies in, and what is written in place."""
    while True:
        if torch_compat.shares_memory(node):
            node = node.all_input_nodes[0]
        elif written := torch_compat.written_by(node):  # out=
            node = written[0]
        else:
            return node


def is_written(node: fx.Node) -> bool:
    """Whether a call has written to the memory of a value."""
    return bool(writes_to({node: False}, writes_of(node.graph)))


def has_views(node: fx.Node, besides: Collection[fx.Node] = ()) -> bool:
    """Whether a value is a view, or some value is one of it, besides these."""
    readers = [user for user in node.users if user not in besides and torch_compat.shares_memory(user)]
    return torch_compat.shares_memory(node) or any(user.all_input_nodes[0] is node for user in readers)
