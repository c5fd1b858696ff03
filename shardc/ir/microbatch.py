"""What of a graph runs once a microbatch, and what once a step: read off the graph, by reachability.

    casts of weights  ->  forward, backward  ->  accumulate  ->  reduction, clipping, update
    once a step           once a microbatch                      once a step

A call runs in every microbatch if an `accumulate` hangs on it, or one of the outputs that each microbatch has of its
own: the model's outputs, and its buffers, which the next microbatch starts from. Of these, what makes fewer bytes of
weights alone, as a cast to half precision does, runs once, before the first microbatch, and all microbatches read it;
so does the bucket that such casts are packed into. All else runs once, at the end.

Where weights stay gathered from forward to backward (`Graph.gathers_once`), the first microbatch gathers what was made
of them for all: among its own calls, behind which the collectives hide, and later ones find the results.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import fx

from shardc.ir.diagnostic import error
from shardc.ir.graph import Graph, Role, info, operands, producer, results
from shardc.ir.ops.accumulate import SUMS
from shardc.ir.ops.buckets import PACK, UNPACK
from shardc.ir.ops.collectives import COLLECTIVES, all_gather

SHARE = "loss:share"  # the input that a microbatch's loss is multiplied by, where the step's counts by tokens
HALVES = 2  # parts that run interleaved, where a microbatch is split: `Graph.halves`
MOST = 2**16  # microbatches of a step
SCALE = "loss:scale"  # the state that the loss is multiplied by, where gradients are of half precision
CACHE = "_cache."  # prefix of the buffers that a program for generation has beside the model's: keys and values
NEVER_NARROWED = frozenset((*SUMS, *COLLECTIVES, operator.getitem))
GIVEN: tuple[Role, ...] = ("input", "seed", "share")  # inputs that each microbatch is given
FED: tuple[Role, ...] = (*GIVEN, "buffer")  # inputs that a microbatch has of its own
MADE: tuple[Role, ...] = ("output", "buffer")  # and outputs


def checked_count(count: object) -> int:
    """A number of microbatches as a file gives it. Raises ShardcError (SC402) where it is none, or beyond MOST."""
    if type(count) is int and 1 <= count <= MOST:
        return count
    hint = "compile the program anew, and save it"
    raise error("SC402", f"a step has 1 to {MOST} microbatches, not {str(count)[:40]}", hint=hint)


def checked_halves(halves: object) -> int:
    """In how many interleaved parts a microbatch runs, as a file says. Raises ShardcError (SC402) where it is none."""
    if type(halves) is int and halves in (1, HALVES):
        return halves
    hint = "compile the program anew, and save it"
    raise error("SC402", f"a microbatch runs whole or in {HALVES} halves, not in {str(halves)[:40]}", hint=hint)


def checked_once(once: object) -> bool:
    """Whether the first microbatch gathers weights for all, as a file says. Raises ShardcError (SC402) for neither."""
    if isinstance(once, bool):
        return once
    hint = "compile the program anew, and save it"
    raise error("SC402", f"weights are gathered once a step or not: true or false, not {str(once)[:40]}", hint=hint)


def fewest_microbatches(rows: int, most: int) -> int:
    """As few as divide so many rows, and have no more than `most` of them each."""
    return next(count for count in range(1, rows + 1) if rows % count == 0 and rows // count <= most)


class Sections(NamedTuple):
    """The nodes of a step by when they run. What is in none runs once, after all microbatches."""

    before: set[fx.Node]  # calls that run once, before the first of several microbatches
    microbatch: set[fx.Node]  # what runs once a microbatch, inputs included; of a graph of one microbatch, all
    first: set[fx.Node]  # calls that run among those, but of several only in the first: see `_gathered_once`

    def in_order(self, graph: Graph) -> list[fx.Node]:
        """The calls of the graph in the order in which they run."""
        if graph.microbatches == 1:
            return list(graph.calls())
        in_each = self.microbatch | self.first
        return sorted(graph.calls(), key=lambda node: 0 if node in self.before else 1 if node in in_each else 2)


def sections(graph: Graph) -> Sections:
    """When each node runs: found by several walks over the graph, so what asks for more than one asks once."""
    needed = _for_microbatches(graph)
    if graph.microbatches == 1:
        return Sections(set(), needed, set())
    before = narrowed_weights(graph, needed)
    first = _gathered_once(graph, needed, before)
    return Sections(before, needed - before - first, first)


def in_microbatch(graph: Graph) -> set[fx.Node]:
    """The nodes that run once a microbatch, inputs included; of a graph of one microbatch, all."""
    return sections(graph).microbatch


def in_first_microbatch(graph: Graph) -> set[fx.Node]:
    """The calls that run among those of a microbatch, but of several only in the first."""
    return sections(graph).first if graph.microbatches > 1 and graph.gathers_once else set()


def _gathered_once(graph: Graph, needed: set[fx.Node], early: set[fx.Node]) -> set[fx.Node]:
    """Gathers and what unpacks their buckets, among the nodes of a microbatch, by what is made early. What backward
    gathers again is not kept."""
    if not graph.gathers_once:
        return set()
    known = {value for call in early for value in results(call) if value is not None}
    gathers = [call for call in graph.calls_of(all_gather) if call in needed]
    times = Counter(cast for call in gathers for cast in _gathered(call))
    again = {cast for cast, count in times.items() if count > 1}
    returned = {producer(value)[0] for value in graph.output_values}
    kept: set[fx.Node] = set()
    for call in graph.calls():  # a gather along a second axis reads what one along the first has made
        if call not in needed or call in returned or call.target not in (all_gather, UNPACK):
            continue
        if known.issuperset(operands(call)) and (call.target is UNPACK or again.isdisjoint(_gathered(call))):
            kept.add(call)
            known.update(value for value in results(call) if value is not None)
    return kept


def _gathered(gather: fx.Node) -> list[fx.Node]:
    """The values that a call gathers, of a bucket its members."""
    (operand,) = operands(gather)
    return operands(operand) if operand.target is PACK else [operand]


def before_microbatches(graph: Graph) -> set[fx.Node]:
    """The calls that run once a step, before the first of several microbatches."""
    return set() if graph.microbatches == 1 else sections(graph).before


def narrowed_weights(graph: Graph, nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The calls among some nodes that make fewer bytes of parameters alone, and the buckets of such results; neither
    outputs nor collectives."""
    ports = zip(graph.inputs, graph.placeholders, strict=True)
    weights = {node for port, node in ports if port.role == "param"}
    among, returned = set(nodes), {producer(value)[0] for value in graph.output_values}
    narrowed: set[fx.Node] = set()
    todo = [user for node in weights for user in node.users]
    while todo:
        call = todo.pop()
        if call not in among or call in narrowed or call in returned or call.target in NEVER_NARROWED:
            continue
        read = dict.fromkeys(operands(call))
        if all(value in weights for value in read):
            made = [value for value in results(call) if value is not None]
            packs = call.target is PACK and any(producer(value)[0] in narrowed for value in read)
            if packs or _bytes(graph, made) < _bytes(graph, read):
                narrowed.add(call)
                weights.update(made)
                todo += [user for value in made for user in value.users]
    return narrowed


def _bytes(graph: Graph, values: Iterable[fx.Node]) -> int:
    return sum(type.local_bytes(graph.mesh) for value in values if (type := info(value).type) is not None)


def _for_microbatches(graph: Graph) -> set[fx.Node]:
    if graph.microbatches == 1:
        return {node for node in graph.fx.nodes if node.op != "output"}
    sums = [node for target in SUMS for node in graph.calls_of(target)]
    after_sums = _reached(sums, lambda node: node.users)
    outputs = zip(graph.outputs, graph.output_values, strict=True)
    needed = {*sums, *(value for port, value in outputs if port.role in MADE and value not in after_sums)}
    for node in reversed(graph.fx.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return needed


def calls_as_run(graph: Graph) -> list[fx.Node]:
    """The calls in the order in which they run: before the microbatches, once a microbatch, and after all of them."""
    return list(graph.calls()) if graph.microbatches == 1 else sections(graph).in_order(graph)


def crossing(graph: Graph) -> list[str]:
    """Values of a single microbatch that a call reads which runs once a step: a line each."""
    if graph.microbatches == 1:
        return []
    microbatch_nodes = in_microbatch(graph)
    sums = {node for node in microbatch_nodes if node.target in SUMS}
    fed = [n for p, n in zip(graph.inputs, graph.placeholders, strict=True) if p.role in FED]
    microbatch_values = _reached(fed, lambda node: [user for user in node.users if user.target not in SUMS])
    faults: list[str] = []
    for node in graph.calls():
        if node not in microbatch_nodes:
            read = [value for value in node.all_input_nodes if value in microbatch_values and value not in sums]
            faults += [f"{info(node).name} runs once a step, but reads {info(v).name} of a microbatch" for v in read]
    return faults


def _reached(start: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """Everything that can be reached from some nodes, them included; the output node is none."""
    reached: set[fx.Node] = set()
    todo = list(start)
    while todo:
        node = todo.pop()
        if node not in reached and node.op != "output":
            reached.add(node)
            todo.extend(step(node))
    return reached
