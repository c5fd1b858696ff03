"""Which sums over microbatches are small, so that their terms are added together, by one call.

A term of at most `SMALL` bytes is read with its sum, and that written, in less time than a GPU takes to launch the
kernel: 3 MiB at several TB/s. Terms wait until the last of them is there, so at most `TOGETHER` bytes do.

Bodies of several microbatches pack their terms (`passes/join_sums.py`). A part of a pipeline's stage, whose sums are
the executor's, adds lists of them: an action "add" of `ir.overlap_schedule`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping

from torch import fx

from shardc.ir.collectives import KINDS
from shardc.ir.graph import Graph, op_name, type_of
from shardc.ir.ops.accumulate import ADDS
from shardc.ir.storages import Storage, storages

SMALL = 1 << 20
TOGETHER = 8 << 20


def is_small(graph: Graph, term: fx.Node, of: Mapping[fx.Node, Storage]) -> bool:
    """Has a term elements, but few, and keeps it no large tensor, of which it may be a view?"""
    return type_of(term).local_bytes(graph.mesh) > 0 and of[term].bytes <= SMALL


def joined(
    values: Iterable[fx.Node], key: Callable[[fx.Node], Hashable], size: Callable[[fx.Node], int]
) -> list[list[fx.Node]]:
    """Values that are added together: in order, of one key, of at most `TOGETHER` bytes. One may be alone."""
    groups: list[list[fx.Node]] = []
    last: dict[Hashable, tuple[list[fx.Node], int]] = {}  # by key: the group that takes more, and its bytes
    for value in values:
        group, held = last.get(key(value), ([], 0))
        if not group or held + size(value) > TOGETHER:
            group, held = [], 0
            groups.append(group)
        group.append(value)
        last[key(value)] = group, held + size(value)
    return groups


def added_together(graph: Graph, terms: Iterable[fx.Node]) -> list[list[fx.Node]]:
    """The terms of a part's small sums, which are added by one call behind the last of them, given all that calls
    make, in order. Those that are added alone are left out, and those that products and rows add."""
    made = [term for term in dict.fromkeys(terms) if term.target not in ADDS]
    if len(made) < 2:
        return []
    of = storages(graph)
    small = [term for term in made if is_small(graph, term, of)]
    groups = joined(small, lambda term: type_of(term).dtype, lambda term: of[term].bytes)
    return [group for group in groups if len(group) > 1]


def may_be_sums(graph: Graph, terms: Iterable[fx.Node]) -> set[fx.Node]:
    """The terms of a part that are the only outputs in memory of their own: the first microbatch's become the sums."""
    of = storages(graph)
    ends = Counter(of[value] for value in graph.output_values)
    return {
        term
        for term in terms
        if of[term].value.op == "call_function"
        and op_name(of[term].value.target) not in KINDS  # whose buffers are their own
        and ends[of[term]] == 1
        and of[term].bytes == type_of(term).local_bytes(graph.mesh)
    }
