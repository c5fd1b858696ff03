"""What a plan for training says to a step of generation.

    inputs        rows lie where those of the model's `input_ids` do; what shards their positions is left out
    params        as they are, and stored as the trainer holds them
    activations   as they are; a dim of one token is not sharded
    cache         placed by propagation, in the decode program; the prefill fills it as it lies there

Outputs, budgets and `strict` are about a step of training. A step of generation is of one microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardc.frontend.trace import Traced
from shardc.ir.annotation import Annotation, matches
from shardc.ir.placement import UNSHARDED, DimPlacement, Placement
from shardc.ir.types import Dim, TensorType
from shardc.passes.sharding.seed import Bound
from shardc.plan.schema import Plan

Held = tuple[tuple[str, TensorType], ...]
ROWS = ("tokens", "mask", "positions", "source_tokens", "source_mask")  # inputs of a step, each with a row a sequence
OF_ROWS = ("input_ids", "decoder_input_ids", "labels", "attention_mask")  # where a plan says how a batch lies


def step_plan(plan: Plan) -> Plan:
    """A plan for a step of generation, of the model's own."""
    found, _ = matches(plan.annotations("inputs"), OF_ROWS, "inputs")
    rows = next((found[name] for name in OF_ROWS if name in found), None)
    inputs: dict[str, Annotation] = {}
    if rows is not None and rows.placement.dims:
        placement = Placement(rows.placement.dims[:1])
        inputs = {name: Annotation(name, placement, rows.origin) for name in ROWS}
    changed: dict[str, object] = {"inputs": inputs, "outputs": {}, "strict": False, "budget": {}, "accumulate": 1}
    changed["overlap"] = plan.overlap.in_parts(1)
    if plan.pipeline is not None:
        changed["pipeline"] = plan.pipeline.model_copy(update={"microbatches": 1})
    return plan.model_copy(update=changed)


def bound_step(bound: Sequence[Bound], traced: Traced, held: Held) -> list[Bound]:
    """A plan's annotations as a step of generation has them, and the cache where it is held."""
    shapes = {name: tuple(node.meta["val"].shape) for name, node in traced.modules.items()}
    fitted: list[Bound] = []
    for binding in bound:
        if binding.kind == "activation":
            sizes = shapes[binding.name]
            dims = binding.placement.padded(len(sizes))
            kept = tuple(UNSHARDED if n == 1 else d for d, n in zip(dims, sizes, strict=True))
            binding = replace(binding, placement=Placement(kept))
        fitted.append(binding)
    names = {i.name for i in traced.inputs}
    fitted += [Bound("param", name, _placement(type), pattern=name) for name, type in held if name in names]
    return fitted


def _placement(type: TensorType) -> Placement:
    return Placement(tuple(map(_dim, type.dims)))


def _dim(atoms: Dim) -> DimPlacement:
    """The annotation of a dim that one of its atoms is sharded of."""
    blocks = 1
    for atom in atoms:
        if atom.axes:  # an annotation names whole axes, of which as much lands as the heads take
            return DimPlacement(tuple(dict.fromkeys(axis.partition(":")[0] for axis in atom.axes)), blocks)
        blocks *= atom.size
    return UNSHARDED
