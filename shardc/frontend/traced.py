"""What a trace yields: a joint graph, and the names and roles of what goes in and comes out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from torch import Tensor, fx

from shardc.frontend.python_state import Snapshot
from shardc.ir.diagnostic import Diagnostic
from shardc.ir.graph import Graph
from shardc.ir.lengthened import lengthened
from shardc.ir.units import Units


@dataclass(frozen=True)
class TracedInput:
    """A placeholder. `name`: the tensor's FQN, or the path of an input ("input_ids", "x.0.key")."""

    role: Literal["param", "buffer", "input", "state", "share", "seed"]
    name: str
    aliases: tuple[str, ...]  # the other FQNs of a tied parameter or buffer
    trainable: bool
    node: fx.Node


@dataclass(frozen=True)
class TracedOutput:
    """An element of the output node. `name`: "loss", the FQN of the parameter or buffer, or the output's path."""

    role: Literal["loss", "grad", "buffer", "output"]
    name: str
    node: fx.Node


class FewLayers(Protocol):
    """What a trace knows of equal layers that it has no nodes of: the `units` that it lacks."""

    units: tuple[Units, ...]

    def graph(self) -> Graph:
        """Of the layers that have nodes; made when it is first asked for."""
        ...

    def check(self) -> None:
        """Raises UnequalError where what is recorded of layers does not tell what others do."""
        ...


@dataclass(frozen=True)
class Traced:
    """A joint graph: `inputs` pairs with its placeholders in order, `outputs` with its output node's tuple.

    Unless it has `few` of its equal layers: then several inputs may have one node, of a layer that is like theirs, and
    so may outputs.

    The meta of each node holds `val` (fakes), `fqn`, `source`, `source_text`, `phase`, `fwd_node`, and nothing else.
    """

    graph: fx.Graph
    inputs: tuple[TracedInput, ...]
    outputs: tuple[TracedOutput, ...]
    modules: dict[str, fx.Node]  # FQN of a module -> the first tensor that it returned; "FQN#2" of its second call
    constants: dict[str, Tensor]  # tensors that the model made from data: real, inputs of role "buffer"
    unused: tuple[str, ...]  # trainable parameters that the loss does not depend on
    diagnostics: tuple[Diagnostic, ...] = ()
    written: tuple[str, ...] = ()  # inputs that forward changes in place
    changed_attributes: frozenset[str] = frozenset()  # of the model, by forward itself
    layers: FewLayers | None = None  # of a trace that has few of its equal layers
    before: Snapshot | None = field(default=None, compare=False)  # the model and the loss, as the trace left them

    @property
    def few(self) -> Graph | None:
        """The graph of the layers that have nodes, where it lacks others."""
        return None if self.layers is None else self.layers.graph()

    def whole(self) -> Graph | None:
        """Of a trace that has few of its equal layers: the graph of all, made anew."""
        whole = self.few
        for units in reversed(whole.units if whole is not None else ()):
            assert whole is not None
            whole = lengthened(whole, units)
        return whole

    def copy(self) -> Traced:
        """The same with a graph of its own: to compile one consumes it."""
        graph, table = fx.Graph(), dict[fx.Node, fx.Node]()
        returned = graph.graph_copy(self.graph, table)
        graph.output(returned)
        inputs = tuple(replace(i, node=table[i.node]) for i in self.inputs)
        outputs = tuple(replace(o, node=table[o.node]) for o in self.outputs)
        modules = {name: table[node] for name, node in self.modules.items()}
        return replace(self, graph=graph, inputs=inputs, outputs=outputs, modules=modules)
