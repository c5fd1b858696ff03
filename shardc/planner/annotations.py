"""States of values over mesh axes, written as a plan's annotations: patterns over names, equal ones merged.

    transformer.h.0.attn.c_attn.weight   f32[1024, (3 16@tp 64)]     "transformer.h.*.attn.c_attn.weight": "-, 3*tp"
    transformer.h.0                      f32[8@dp, 1024@tp, 1024]    "transformer.h.*": "dp, tp, -"

Written is what the compiler does not find by itself: parameters of two dims or more, the batch, and what each layer
returns where it is sharded over a tensor axis. Biases, norms and all other values follow by propagation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from shardc.ir.annotation import Annotation
from shardc.ir.graph import Graph, type_of
from shardc.ir.layers import in_every_layer, layer_of, layers_of
from shardc.ir.placement import Placement
from shardc.planner.axis_roles import Divided, Role

Placed = Mapping[tuple[fx.Node, int], Sequence[str]]  # (value, flat atom) -> axes, major first


@dataclass(frozen=True)
class Annotations:
    """The three maps of a plan."""

    params: Mapping[str, str]
    inputs: Mapping[str, str]
    activations: Mapping[str, str]

    def as_plan(self) -> dict[str, dict[str, str]]:
        maps = {"params": self.params, "inputs": self.inputs, "activations": self.activations}
        return {key: dict(value) for key, value in maps.items() if value}


def annotations_of(divided: Divided, kept: Mapping[str, Iterable[str]], *, layers: Iterable[str]) -> Annotations:
    """Annotations of all values that axes divide, but for names that the user's plan has `kept`, by kind. `layers` are
    modules whose results may be annotated."""
    graph, mesh_axes = divided.graph, divided.mesh.names
    params: dict[str, str] = {}
    inputs: dict[str, str] = {}
    for port, value in zip(graph.inputs, graph.placeholders, strict=True):
        if port.role == "param":
            said = type_of(value).ndim > 1 and port.name not in kept.get("params", ())
            params[port.name] = text_of(divided, value, mesh_axes) if said else ""
        if port.role == "input" and type_of(value).ndim and port.name not in kept.get("inputs", ()):
            inputs[port.name] = text_of(divided, value, mesh_axes)
    activations: dict[str, str] = {}
    annotated = set(layers) - set(kept.get("activations", ()))
    for name, value in graph.activations.items():
        if name not in annotated:
            activations[name] = ""
            continue
        tensor = {axis for (v, _), axes in divided.placed.items() if v is value for axis in axes}
        activations[name] = text_of(divided, value, mesh_axes) if tensor else ""
    return Annotations(
        merged(params), {name: text for name, text in inputs.items() if is_sharded(text)}, merged(activations)
    )


def text_of(divided: Divided, value: fx.Node, order: Sequence[str]) -> str:
    """A placement's text, dim by dim. Axes on one dim are major first in the mesh's order; of those that need a
    different number of blocks, the first stays. An axis is on the first dim of those that it may shard: where rows and
    frames take each other's place in a forward, they are one class."""
    dims: list[str] = []
    taken: set[str] = set()
    flat = 0
    for sizes in type_of(value).sizes[: type_of(value).ndim]:
        blocks, axes = 1, list[str]()
        for i in range(len(sizes)):
            here = [axis for axis in order if axis in divided.axes(value, flat + i) and axis not in taken]
            before = math.prod(sizes[:i])
            if here and not axes:
                blocks, axes = before, here
        taken.update(axes)
        flat += len(sizes)
        dims.append("-" if not axes else f"{blocks}*{'.'.join(axes)}" if blocks > 1 else ".".join(axes))
    return ", ".join(dims)


def is_sharded(text: str) -> bool:
    return bool(text.replace(",", "").replace("-", "").strip())


def merged(texts: Mapping[str, str]) -> dict[str, str]:
    """Sharded names as patterns: all numbers in a name may differ, or the first, or none, as long as all names that the
    pattern matches are placed alike. `texts` has every name of a kind; "" for those that no annotation speaks of."""
    result: dict[str, str] = {}
    matched: dict[str, bool] = {}
    for name, text in texts.items():
        if not is_sharded(text):
            continue
        for pattern in (in_every_layer(name), _in_every_outer(name), name):
            if pattern not in matched:
                matches = Annotation(pattern, Placement()).matches
                matched[pattern] = pattern == name or all(t == text for n, t in texts.items() if matches(n))
            if matched[pattern]:
                result[pattern] = text
                break
    return result


def _in_every_outer(name: str) -> str:
    """The same with the first number alone left open."""
    outer = next(iter(layers_of(name)), "")
    return f"{outer.rpartition('.')[0]}.*{name[len(outer) :]}" if outer else name


def layer_modules(graph: Graph, names: Iterable[str] = ()) -> list[str]:
    """Modules that are layers: elements of lists, or, where a model has none, those that were found equal."""
    listed = [name for name in graph.activations if name and layer_of(name.partition("#")[0]) == name]
    return listed or [name for name in dict.fromkeys(names) if name in graph.activations]


def tensor_axes(roles: Mapping[str, Role]) -> list[str]:
    return [axis for axis, role in roles.items() if role == "tensor"]
