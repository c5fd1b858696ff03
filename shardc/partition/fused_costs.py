"""The cost of calls as the kernels that they become, of a body that has none yet: stages are cut before they are fused.

    h.5, forward    mm  add  native_layer_norm  mm  gelu  mm         by its own:   3 products + 3 passes over memory
                        `------- a kernel ----'     `- another       as kernels:   3 products + 2 shorter ones

A layer's forward and its backward are each fused by themselves, as they are in a stage, but for the kernels at its
ends, which may join those of its neighbours, and for the bound of memory, which is the stage's (without any, layers
have kernels that stages do not). What kernels take is divided among the calls of memory (all but products, attention
and collectives) in proportion to what they took as calls. Of equal layers one is fused: those of one form, which are
the calls' ops, arguments and types, and which of their results others read.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import fx

from shardc.cost.call_seconds import Kind
from shardc.ir.graph import Graph, Port, info, operands, results
from shardc.ir.hardware import Hardware
from shardc.ir.mesh import Mesh
from shardc.partition.balance import costs_by_kind, divide_large_layers
from shardc.partition.extract_subgraph import extract_subgraph
from shardc.partition.step_analysis import StepAnalysis, result_values
from shardc.passes.bias_products import BiasProducts
from shardc.passes.fusion.clustering.excluded import excluded
from shardc.passes.fusion.fuse import Fuse

IN_KERNELS = frozenset(("elementwise", "reduction", "copy", "fused"))
Form = tuple[Hashable, ...]


def weighed_layers(
    body: Graph, stages: int, fuse: Fuse | None, hardware: Hardware, mesh: Mesh | None = None
) -> tuple[StepAnalysis, dict[fx.Node, float]]:
    """The layers of a body that is cut into so many stages, and the cost of each call: as kernels, if stages will be
    fused."""
    by_kind = costs_by_kind(body, hardware, mesh)
    costs = {call: cost for call, (_, cost) in by_kind.items()}
    layers = divide_large_layers(StepAnalysis(body), stages, hardware, mesh, costs)
    if fuse is None or not fuse.enabled:
        return layers, costs
    costs = fused_call_costs(layers, by_kind, fuse, hardware, mesh)
    return divide_large_layers(layers, stages, hardware, mesh, costs), costs


def fused_call_costs(
    analysis: StepAnalysis,
    single: Mapping[fx.Node, tuple[Kind, float]],
    fuse: Fuse,
    hardware: Hardware,
    mesh: Mesh | None = None,
) -> dict[fx.Node, float]:
    """What each call of the body costs where its stages will be fused so; by itself it costs `single`
    (`balance.costs_by_kind`)."""
    costs = {call: cost for call, (_, cost) in single.items()}
    apart = excluded(analysis.body, fuse.exclude) if fuse.exclude else frozenset[str]()
    shares: dict[Form, float] = {}
    for calls in _parts(analysis):
        in_kernels = [call for call in calls if single[call][0] in IN_KERNELS]
        if len(in_kernels) < 2:
            continue
        form = _form(calls, apart)
        if form not in shares:
            before = sum(costs[call] for call in in_kernels)
            shares[form] = _in_kernels(_graph(analysis.body, calls), fuse, hardware, mesh) / before if before else 1.0
        share = shares[form]
        for call in in_kernels:
            costs[call] *= share
    return costs


def _parts(analysis: StepAnalysis) -> list[list[fx.Node]]:
    """The calls of each unit's forward, and of its backward, in order."""
    parts: dict[tuple[int, bool], list[fx.Node]] = {}
    for call in analysis.calls:
        if (unit := analysis.unit_of.get(call)) is not None:
            parts.setdefault((unit, call in analysis.backward), []).append(call)
    return list(parts.values())


def _in_kernels(graph: Graph, fuse: Fuse, hardware: Hardware, mesh: Mesh | None) -> float:
    fused = fuse.run(BiasProducts().run(graph))
    return sum(cost for kind, cost in costs_by_kind(fused, hardware, mesh).values() if kind in IN_KERNELS)


def _graph(body: Graph, calls: Sequence[fx.Node]) -> Graph:
    held = set(calls)
    leaving = [value for call in calls for value in result_values(call) if _is_read_outside(value, held)]
    return extract_subgraph(body, "layer", calls, [(Port("value", info(value).name), value) for value in leaving])


def _is_read_outside(value: fx.Node, held: set[fx.Node]) -> bool:
    return any(user not in held for user in value.users)


def _form(calls: Sequence[fx.Node], apart: frozenset[str]) -> Form:
    """What equal layers have in common. `apart` are the names of calls that no kernel may have."""
    held, number = set(calls), dict[fx.Node, int]()
    lines: list[Hashable] = []

    def frozen(value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            return "value", number.setdefault(value, len(number))
        if isinstance(value, (list, tuple)):
            return tuple(map(frozen, value))
        if isinstance(value, Mapping):
            return tuple((key, None if key == "op_id" else frozen(item)) for key, item in value.items())
        return type(value).__name__, str(value)

    for call in calls:
        read = tuple(info(value).type for value in operands(call) if value not in number)
        made = tuple(None if v is None else (info(v).type, _is_read_outside(v, held)) for v in results(call))
        arguments = frozen(call.args), frozen(call.kwargs)
        for value in result_values(call):
            number.setdefault(value, len(number))
        lines.append((call.target, arguments, read, made, info(call).name in apart))
    return tuple(lines)
