"""lower_reshards: each reshard becomes slices and collectives, one a step.

Needs: reshards whose source and target types are final. Ensures: no `reshard` is left; every collective
names its mesh axes and carries, as plain data, the local atoms it moves, the same on every rank. Rows that go to their
experts become exchanges (see `dispatch`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx
from torch._ops import OpOverload

from shardc.ir.blocks import Axes, Blocks
from shardc.ir.graph import Graph, info, op_name, type_of
from shardc.ir.hardware import DEFAULT, Hardware
from shardc.ir.mesh import Mesh
from shardc.ir.ops import collectives, local
from shardc.ir.ops.local import told
from shardc.ir.provenance import Derivation
from shardc.passes.base import Pass
from shardc.passes.sharding.dispatch import Exchanges, is_exchange
from shardc.passes.sharding.reshard_steps import Step, plan


@dataclass(frozen=True)
class LowerReshards(Pass):
    """Replace reshards by the steps that `reshard_steps.plan` finds."""

    hardware: Hardware = DEFAULT

    def run(self, graph: Graph) -> Graph:
        exchanges: Exchanges | None = None
        for node in list(graph.calls()):
            if node.target is not collectives.reshard:
                continue
            source = node.args[0]
            assert isinstance(source, fx.Node)
            if is_exchange(type_of(source), type_of(node)):
                exchanges = exchanges or Exchanges(graph)
                with graph.fx.inserting_before(node):
                    _replace(graph, node, exchanges.lower(node, source))
                continue
            planned = plan(type_of(source), type_of(node), graph.mesh, self.hardware)
            assert planned is not None
            value = source
            origin = info(node).origin or Derivation("moved", info(source).name)  # a graph's text has none
            with graph.fx.inserting_before(node):
                for step in planned[0]:
                    value = emit_step(graph, value, step, node, origin)
            _replace(graph, node, value)
        if exchanges is not None:
            exchanges.make_room()
        return graph


def _replace(graph: Graph, node: fx.Node, value: fx.Node) -> None:
    node.replace_all_uses_with(value)
    graph.activations = {k: value if v is node else v for k, v in graph.activations.items()}
    graph.fx.erase_node(node)


def emit_step(graph: Graph, value: fx.Node, step: Step, like: fx.Node, origin: Derivation) -> fx.Node:
    """One step as a call on `value`, at the current insertion point."""
    target, args = call_of(value, step, graph.mesh)
    name = f"{origin.of}.{op_name(target).removeprefix('shardc.')}"
    return graph.call(target, args, like=like, type=step.after, name=name, origin=origin)


def call_of(value: fx.Node, step: Step, mesh: Mesh) -> tuple[OpOverload, tuple[object, ...]]:
    """The op and its arguments for a step."""
    atoms = list(step.before.local_atoms(mesh))
    shape = list(step.after.local_shape(mesh))
    axes = [step.axis]
    if step.kind == "all_reduce":
        return collectives.all_reduce, (value, step.reduction, axes)
    if (moved := _moved_blocks(step)) is not None:
        pos, blocks = moved
        counts, units, reverse = told(
            blocks.local(step.before.placement[pos] if step.kind == "slice" else step.after.placement[pos], mesh)
        )
        op = local.slice_blocks if step.kind == "slice" else collectives.gather_blocks
        turned = (reverse,) if reverse else ()
        return op, (value, axes, atoms, pos, counts, units, shape, *turned)
    if step.kind == "reduce_scatter":
        blocks = _told_blocks(step, step.target, step.before.placement[step.target], mesh)
        return collectives.reduce_scatter, (value, step.reduction, axes, atoms, step.target, shape, *blocks)
    if step.kind == "slice":
        return local.shard_slice, (value, axes, atoms, step.target, shape)
    if step.kind == "all_gather":
        size = step.after.atoms[step.source].local(mesh)
        return collectives.all_gather, (value, axes, atoms, step.source, size, shape)
    if step.kind == "all_to_all":
        size = step.after.atoms[step.source].local(mesh)
        ends = ((step.target, step.before.placement, (True,)), (step.source, step.after.placement, ()))
        told_of = [(*told_, *splits) for pos, p, splits in ends if (told_ := _told_blocks(step, pos, p[pos], mesh))]
        (blocks,) = told_of or [()]
        return collectives.all_to_all, (value, axes, atoms, step.target, step.source, size, shape, *blocks)
    assert step.kind == "permute", step.kind
    return collectives.permute_ranks, (
        value,
        [step.axis, step.to_axis],
        transposition(mesh.size(step.axis), mesh.size(step.to_axis)),
    )


def _told_blocks(step: Step, pos: int, axes: Axes, mesh: Mesh) -> tuple[list[int], list[int], list[str]] | tuple[()]:
    """The blocks of an atom that a step cuts, or joins, where it lies over `axes`; nothing if it has none."""
    size = step.before.atoms[pos].size
    return told(size.local(axes, mesh)) if isinstance(size, Blocks) else ()


def _moved_blocks(step: Step) -> tuple[int, Blocks] | None:
    """The atom of blocks that a step takes a share of, or gathers."""
    pos = {"slice": step.target, "all_gather": step.source}.get(step.kind, -1)
    size = step.before.atoms[pos].size if pos >= 0 else 0
    return (pos, size) if isinstance(size, Blocks) else None


def transposition(rows: int, columns: int) -> list[int]:
    """For a group of rows x columns: position (i, j) receives from the one that would be (j, i) of columns x rows."""
    return [j * rows + i for i in range(rows) for j in range(columns)]
