"""A trace in which some of many equal layers are not recorded, and the graph of all layers that it stands for.

`unrecorded_layers` decides during forward which these are. Behind it, gradients and inputs are those of the layers that
are recorded; `of_all_layers` names those of the others, and has `ir.lengthened` make the whole graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from torch import Tensor, fx, nn

from shardc.frontend.ingest import ingest
from shardc.frontend.model_tree import named_modules
from shardc.frontend.traced import Traced, TracedInput, TracedOutput
from shardc.frontend.unrecorded_layers import KEPT_AT_END, UnrecordedLayers
from shardc.ir.equal_layers import LEAST
from shardc.ir.graph import Graph, Port
from shardc.ir.layers import layer_of
from shardc.ir.lengthened import lengthened, lengthened_ports
from shardc.ir.mesh import Mesh
from shardc.ir.units import UnequalError, Units


def long_lists(model: nn.Module) -> dict[str, int]:
    """The lists of modules with so many elements that some need not be recorded, and how many these are."""
    found: dict[str, int] = {}
    for name, module in named_modules(model):
        elements = list(vars(module)["_modules"])
        if (
            elements == [str(i) for i in range(len(elements))]
            and len(elements) >= LEAST + KEPT_AT_END + 3
            and not layer_of(name)
        ):
            found[name] = len(elements)
    return found


class _Few:
    """Of a trace that has nodes of few layers, the graph; and the ports of all layers, to check it by."""

    def __init__(
        self, units: tuple[Units, ...], recorded: Traced, inputs: list[Port], outputs: list[tuple[str, str]]
    ) -> None:
        self.units, self._recorded, self._inputs, self._outputs = units, recorded, inputs, outputs

    def graph(self) -> Graph:
        return self._graph

    @cached_property
    def _graph(self) -> Graph:
        short = ingest(self._recorded.copy(), Mesh())
        short.units = self.units
        return short

    def check(self) -> None:
        try:
            whole = self._graph
            for units in reversed(self.units[1:]):
                whole = lengthened(whole, units)
            inputs, outputs = lengthened_ports(whole, self.units[0])
        except Exception as fault:
            raise UnequalError(f"{type(fault).__name__} where all layers are made of few") from fault
        if inputs != self._inputs or [(p.role, p.name) for p in outputs] != self._outputs:
            raise UnequalError("inputs and outputs are others")


class Unrecorded:
    """Of one trace: `lists` of layers that may be left out, by name with their lengths, and `units` that are."""

    def __init__(self, lists: Mapping[str, int]) -> None:
        self.lists = lists
        self.units: list[Units] = []
        self.layers: UnrecordedLayers | None = None  # while forward runs

    def recorded(self, imitation: Tensor) -> Tensor | None:
        """See `UnrecordedLayers.recorded`."""
        return None if self.layers is None else self.layers.recorded(imitation)

    def on_node(self, node: fx.Node) -> None:
        if self.layers is not None:
            self.layers.on_node(node)

    def finish(self) -> None:
        """Forward is over. Raises UnequalError where layers were left out that should not have been."""
        layers, self.layers = self.layers, None
        if layers is not None:
            layers.finish()

    def leaves_out(self, name: str) -> bool:
        """Is a module, or a tensor of one, in a layer that is left out?"""
        return any(units.within(name)[0] in units.removed for units in self.units)

    def twin(self, name: str) -> str:
        """What a tensor or module is called in the layer that stands for its own."""
        return next((u.renamed(name, u.first) for u in self.units if u.within(name)[0] in u.removed), name)

    def recorded_inputs(self, inputs: Iterable[TracedInput]) -> tuple[list[TracedInput], list[TracedInput]]:
        """The inputs of what is recorded; and all of them, with the nodes of those that stand for them. Raises
        UnequalError where something reads parameters of layers that are left out."""
        own = {i.name: i for i in inputs if i.role not in ("param", "buffer") or not self.leaves_out(i.name)}
        every: list[TracedInput] = []
        for each in inputs:
            if each.name in own:
                every.append(each)
                continue
            if each.node.users or (twin := own.get(self.twin(each.name))) is None:
                raise UnequalError(f"{each.name} is read outside of its layer")
            each.node.graph.erase_node(each.node)
            every.append(replace(each, node=twin.node))
        return list(own.values()), every

    def of_all_layers(self, traced: Traced, every: Sequence[TracedInput], trained: Iterable[str]) -> Traced:
        """The trace of all layers, to be checked: its nodes are those of the recorded ones. Raises UnequalError where
        layers do what no other layer tells."""
        if not self.units:
            return traced
        if any(o.role == "buffer" and self._in_layer(o.name) for o in traced.outputs):
            raise UnequalError("layers change their buffers")
        grads = {o.name: o.node for o in traced.outputs if o.role == "grad"}
        outputs = [o for o in traced.outputs if o.role == "loss"]
        outputs += [TracedOutput("grad", n, grads[self.twin(n)]) for n in trained if self.twin(n) in grads]
        outputs += [o for o in traced.outputs if o.role not in ("loss", "grad")]
        ports = [Port(i.role, i.name, i.aliases, i.trainable) for i in every]
        modules = dict(self._of_all_modules(traced.modules))
        unused = tuple(name for name in trained if self.twin(name) in traced.unused)
        return replace(
            traced,
            inputs=tuple(every),
            outputs=tuple(outputs),
            modules=modules,
            unused=unused,
            layers=_Few(tuple(self.units), traced, ports, [(o.role, o.name) for o in outputs]),
        )

    def _in_layer(self, name: str) -> bool:
        """Is it in any layer of a list of which some are left out?"""
        return any(units.within(name)[0] is not None for units in self.units)

    def _of_all_modules(self, modules: Mapping[str, fx.Node]) -> Iterable[tuple[str, fx.Node]]:
        """Calls of modules, in the order of forward."""
        items = list(modules.items())
        for units in self.units:
            first = [(name, node) for name, node in items if units.within(name)[0] == units.first]
            spread: list[tuple[str, fx.Node]] = []
            for name, node in items:
                spread.append((name, node))
                if first and name == first[-1][0]:
                    spread += [(units.renamed(n, unit), of) for unit in units.removed for n, of in first]
            items = spread
        return items
