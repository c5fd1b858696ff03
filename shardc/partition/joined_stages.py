"""The graphs of all stages as one graph: what a microbatch runs through, from the inputs of the step to its sums.

    @forward0    %k.next = next_keys(%k, [cp])                           return value "k.next" = %k.next
    @forward1    %k.next = value "k.next"                                %o, %lse = sdpa_rows(%q, %k.next, ..., step=1)

    joined       %k.next = next_keys(%k, [cp])
                 %o, %lse = sdpa_rows(%q, %k.next, ..., step=1)

Some checks of a call ask where its operands come from, or who reads its results: how many places keys have come, whose
rows lie about a rank's own, what merges a part. In the graph of a part the answer ends at a port. Here a part reads
what the pipeline says that it is given, whichever stage makes it, and ports between parts are gone.

Where several stages run one call (a mask, the cast of a weight) on the same operands, it is added once, so that their
results count as one value. Needs a program in which `stage_faults` finds nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter

from torch import fx

from shardc.ir.graph import Graph, Port, info, producer, type_of, update
from shardc.ir.ops.experts import GROUP_ROWS
from shardc.partition.staged_program import StagedProgram
from shardc.passes.infer_placement import LINKED
from shardc.passes.type_check import Fault, copy_faults, type_faults, without_copies
from shardc.schedule.instructions import Backward, Dgrad
from shardc.schedule.pipeline import PARTS, PartName

Form = tuple[PartName, ...]
WHOLE: Form = ("forward", "backward")  # the parts of a stage whose backward is one graph; else they are PARTS


@dataclass(frozen=True, eq=False)
class _Part:
    """A graph of a stage, without copies to the host; and the names in the lists of what it reads and makes."""

    graph: Graph
    reads: tuple[str, ...]
    makes: tuple[str, ...]


def joined_faults(program: StagedProgram) -> list[Fault]:
    """What is false of the calls of all stages: dtypes, shapes, placements, and where their operands come from."""
    faults: list[Fault] = []
    for stage in program.stages:
        for graph in (*stage.gathers.values(), *stage.parts.values()):
            faults += copy_faults(graph)
    for forms in _forms(program):
        parts = list(_parts(program, forms))
        sources, wrong = _sources(program, parts)
        faults += wrong or _Joined(program.body).faults(sources)
    # A graph is looked at with every form of the others.
    return list({(f.graph, f.message, f.node and info(f.node).name): f for f in faults}.values())


def _forms(program: StagedProgram) -> list[tuple[Form, ...]]:
    """The combinations of whole and halved backwards to check: all whole, all halved; and if lists run both, and some
    call is followed across stages, enough others that each pair of stages occurs in all four."""
    count, forms = len(program.stages), (WHOLE, PARTS)
    if not program.lists.pipeline.trains:
        return [(WHOLE,) * count]
    run = {type(i) for listed in program.lists.ranks for i in listed}
    graphs = [graph for stage in program.stages for graph in stage.parts.values()]
    mixed = {Backward, Dgrad} <= run and any(call.target in LINKED for graph in graphs for call in graph.calls())
    bits = range((count - 1).bit_length() if mixed else 0)
    return [
        *((form,) * count for form in forms),
        *(tuple(forms[(stage >> bit & 1) ^ first] for stage in range(count)) for bit in bits for first in (0, 1)),
    ]


def _parts(program: StagedProgram, forms: Sequence[Form]) -> Iterator[_Part]:
    for number, (stage, form) in enumerate(zip(program.stages, forms, strict=True)):
        described = program.lists.pipeline.parts(number)
        for name, graph in stage.gathers.items():
            yield _Part(without_copies(graph), (), (name,))
        for name, graph in stage.parts.items():
            if name in form:
                yield _Part(without_copies(graph), described[name].reads, described[name].makes)


# ---------------------------------------------------------------------- which part makes what another reads
Sources = Mapping[_Part, Mapping[str, _Part]]  # by part, of each value that it reads, the part that makes it


def _sources(program: StagedProgram, parts: Sequence[_Part]) -> tuple[Sources, list[Fault]]:
    """The parts in an order in which they can run, each with those that make what it reads; and what is wrong."""
    faults: list[Fault] = []
    maker: dict[str, _Part] = {}
    for part in parts:
        for name in part.makes:
            if maker.setdefault(name, part) is not part:
                faults.append(Fault(part.graph.name, f"it makes {name}, which @{maker[name].graph.name} makes"))
    sources: dict[_Part, dict[str, _Part]] = {}
    for part in parts:
        names_of: dict[str, list[str]] = {}
        for name in part.reads:
            for member in program.members(name):
                names_of.setdefault(member, []).append(name)
        sources[part] = {}
        for port in part.graph.inputs:
            if port.role == "value":
                names = [name for name in names_of.get(port.name, ()) if name in maker]
                if len(names) == 1:
                    sources[part][port.name] = maker[names[0]]
                else:
                    who = " and ".join(f"@{maker[name].graph.name}" for name in names) or "nothing"
                    faults.append(Fault(part.graph.name, f"it reads value '{port.name}', which {who} makes"))
    try:
        order = list(
            TopologicalSorter({part: list(makers.values()) for part, makers in sources.items()}).static_order()
        )
    except CycleError as cycle:
        names = " and ".join(f"@{part.graph.name}" for part in dict.fromkeys(cycle.args[1]))
        return {}, [*faults, Fault(program.body.name, f"{names} wait for each other's values")]
    return {part: sources[part] for part in order}, faults


# ---------------------------------------------------------------------- one graph
class _Joined:
    """A graph that parts are added to, in an order in which they can run."""

    def __init__(self, body: Graph) -> None:
        self.graph = Graph(fx.Graph(), body.mesh, [], [], "all stages")
        self.graph_of: dict[fx.Node, str] = {}  # the graph that a node is of
        self.call_of_name: dict[str, fx.Node] = {}  # calls by name
        self.disagreements: list[Fault] = []  # in which graphs disagree

    def faults(self, sources: Sources) -> list[Fault]:
        """What is false of the calls of some parts, each of which is named with the graph that it is of."""
        self._join(sources)
        return self.disagreements or [
            fault if fault.node is None else replace(fault, graph=self.graph_of[fault.node])
            for fault in type_faults(self.graph)
        ]

    def _join(self, sources: Sources) -> None:
        inputs: dict[Port, fx.Node] = {}
        for part in sources:
            for port, node in zip(part.graph.inputs, part.graph.placeholders, strict=True):
                if port.role != "value" and port not in inputs:
                    inputs[port] = self._copy(node, part, {})
        values_of: dict[_Part, dict[str, fx.Node]] = {}
        outputs: list[tuple[Port, fx.Node]] = []
        for part, makers in sources.items():
            table = {
                node: values_of[makers[port.name]][port.name] if port.role == "value" else inputs[port]
                for port, node in zip(part.graph.inputs, part.graph.placeholders, strict=True)
            }
            for node in part.graph.fx.nodes:
                if node.op == "call_function":
                    self._add(node, part, table)
            returned = [(port, table[v]) for port, v in zip(part.graph.outputs, part.graph.output_values, strict=True)]
            values_of[part] = {port.name: value for port, value in returned if port.role == "value"}
            outputs += [(port, value) for port, value in returned if port.role != "value"]
        self.graph.fx.output(tuple(value for _, value in outputs))
        self.graph.inputs, self.graph.outputs = tuple(inputs), tuple(port for port, _ in outputs)

    def _copy(self, node: fx.Node, part: _Part, table: dict[fx.Node, fx.Node]) -> fx.Node:
        copied = self.graph.append_copy(node, table)
        self.graph_of[copied] = part.graph.name
        return copied

    def _add(self, node: fx.Node, part: _Part, table: dict[fx.Node, fx.Node]) -> None:
        """Add a call, unless one of its name, with the same operands and types, is there from another part: that one
        stands for both."""
        if node.target is operator.getitem:
            self._add_result(node, part, table)
            return
        about = info(node)
        twin = self.call_of_name.get(about.name)
        if twin is None:
            self.call_of_name[about.name] = self._copy(node, part, table)
            return
        arguments_here = [fx.map_arg(arguments, table.__getitem__) for arguments in (node.args, node.kwargs)]
        same = twin.target is node.target and repr([twin.args, twin.kwargs]) == repr(arguments_here)
        if same and (info(twin).type, info(twin).results) == (about.type, about.results):
            table[node] = twin
            return
        copied = self._copy(node, part, table)
        if node.target is GROUP_ROWS and not same:
            update(copied, name=f"{about.name} of @{part.graph.name}")  # groupings are told apart by name

    def _add_result(self, node: fx.Node, part: _Part, table: dict[fx.Node, fx.Node]) -> None:
        """Add a result of a call; or take the one that is there, which must be of the same type."""
        call, position = producer(node)
        twin = next((value for value in table[call].users if producer(value)[1] == position), None)
        if twin is None:
            self._copy(node, part, table)
            return
        table[node] = twin
        if type_of(twin) != type_of(node):
            message = f"it is {type_of(node)}, and {type_of(twin)} in @{self.graph_of[twin]}"
            self.disagreements.append(Fault(part.graph.name, message, node))
