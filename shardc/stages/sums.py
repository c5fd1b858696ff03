"""A step's sums over its microbatches, each made in the stages that have its terms: what makes tied weights work.

    %d.wte = add(%d.head, %d.embedding)            %d.wte.sum.s3 = accumulate(%d.head)
    %d.wte.sum = accumulate(%d.wte)          ->    %d.wte.sum.s0 = accumulate(%d.embedding)
                                                   %d.wte.sum = add(%d.wte.sum.s3, %d.wte.sum.s0)

Accumulating is linear, so a sum of terms from several stages is the sum of what each of them accumulates: nothing is
sent before the last microbatch, and then once. Linear calls between the addition and the `accumulate` (casts, views,
reductions, the gradient of an embedding) are made by each stage of its own terms. The graph stays a body: run whole,
it computes what it did before, up to rounding in another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import fx

from shardc.ir.graph import Graph, info, operands, producer, set_info, type_of, update
from shardc.ir.ops import collectives
from shardc.ir.ops.accumulate import ACCUMULATE

aten = torch.ops.aten
ADD = aten.add.Tensor
# Calls that are linear in their first operand, whatever their other arguments; and if those are plain numbers.
LINEAR = {
    *(aten.view.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim),
    *(aten.expand.default, aten.clone.default, aten.neg.default, aten._to_copy.default, aten.sum.dim_IntList),
    *(aten.slice.Tensor, aten.narrow.default, aten.embedding_dense_backward.default),
    *(collectives.all_gather, collectives.all_to_all, collectives.permute_ranks),
}
SCALING = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}
SUMMING = {collectives.all_reduce, collectives.reduce_scatter}


@dataclass(frozen=True)
class Sum:
    """What is summed over the microbatches. `total` is the value that the rest of the step reads, `parts` its
    accumulates by stage: one, but for the gradient of a tied weight."""

    total: fx.Node
    parts: Mapping[int, fx.Node]

    @property
    def name(self) -> str:
        return info(self.total).name


def linear(call: fx.Node) -> bool:
    """Is f(a + b) = f(a) + f(b) in the call's first operand?"""
    if not operands(call) or operands(call)[0] is not call.args[0]:
        return False
    if call.target in SCALING:
        return len(operands(call)) == 1
    if call.target in SUMMING:
        return call.args[1] == "sum"
    return call.target in LINEAR


def plain_add(call: fx.Node) -> bool:
    """The sum of two tensors of one shape and dtype, as they are."""
    if call.target is not ADD or len(operands(call)) != 2 or call.kwargs or len(call.args) != 2:
        return False
    kinds = {(type_of(v).dtype, type_of(v).shape) for v in (*operands(call), call)}
    return len(kinds) == 1


def terms_end(graph: Graph) -> set[fx.Node]:
    """The calls between the terms of a sum and its `accumulate`: what `split_sums` may make stage by stage."""
    found: set[fx.Node] = set()
    todo = [v for node in graph.calls() if node.target is ACCUMULATE for v in operands(node)]
    while todo:
        value = todo.pop()
        if value.op == "call_function" and len(value.users) == 1 and info(value).type is not None:
            if plain_add(value):
                todo += operands(value)
            elif linear(value):
                todo.append(operands(value)[0])
            else:
                continue
            found.add(value)
    return found


def split_sums(graph: Graph, stage_of: dict[fx.Node, int]) -> list[Sum]:
    """Give each stage the sum of its own terms. Edits the graph, and says in `stage_of` where new calls run."""
    found: list[Sum] = []
    for node in [node for node in graph.calls() if node.target is ACCUMULATE]:
        (value,) = operands(node)
        stages = _stages(value, stage_of)
        if len(stages) == 1:
            found.append(Sum(node, dict.fromkeys(stages, node)))
            continue
        made: dict[int, fx.Node] = {}
        for stage in sorted(stages, reverse=True):
            with graph.fx.inserting_before(node):
                term = _own(graph, value, stage, stage_of)
                assert term is not None
                name = f"{info(node).name}.s{stage}"
                made[stage] = graph.call(ACCUMULATE, (term,), like=node, type=type_of(node), name=name)
        # The addition takes the place, and the name, of the accumulate that all else reads.
        with graph.fx.inserting_before(node):
            total = reduce(lambda a, b: _add(graph, a, b, node), made.values())
        node.replace_all_uses_with(total)
        graph.gradients = {name: total if v is node else v for name, v in graph.gradients.items()}
        name = info(node).name
        update(node, name=graph.unique(f"{name}.whole"))
        update(total, name=name)
        graph.fx.erase_node(node)
        found.append(Sum(total, made))
    before = set(graph.fx.nodes)
    graph.erase_dead()
    for gone in before - set(graph.fx.nodes):
        stage_of.pop(gone, None)
    return found


def _stages(value: fx.Node, stage_of: Mapping[fx.Node, int]) -> set[int]:
    """The stages that make the terms of a value: one, unless it is a sum over several that nothing else reads."""
    home = {stage_of.get(producer(value)[0], 0)}
    if value.op != "call_function" or len(value.users) != 1 or info(value).type is None:
        return home
    if plain_add(value):
        found = {stage for operand in operands(value) for stage in _stages(operand, stage_of)}
    else:
        found = _stages(operands(value)[0], stage_of) if linear(value) else home
    return found if len(found) > 1 else home


def _own(graph: Graph, value: fx.Node, stage: int, stage_of: dict[fx.Node, int]) -> fx.Node | None:
    """What a stage has of a value: its own terms, added up, under the same linear calls."""
    stages = _stages(value, stage_of)
    if stage not in stages:
        return None
    if len(stages) == 1:
        return value
    if plain_add(value):
        mine = [one for v in operands(value) if (one := _own(graph, v, stage, stage_of)) is not None]
        return reduce(lambda a, b: _placed(_add(graph, a, b, value), stage, stage_of), mine)
    first = operands(value)[0]
    term = _own(graph, first, stage, stage_of)
    assert term is not None
    copy = graph.fx.node_copy(value, lambda n: term if n is first else n)
    set_info(copy, info(value))
    update(copy, name=graph.unique(f"{info(value).name}.s{stage}"))
    return _placed(copy, stage, stage_of)


def _add(graph: Graph, a: fx.Node, b: fx.Node, like: fx.Node) -> fx.Node:
    return graph.call(ADD, (a, b), like=like, type=type_of(a), assignment=info(like).assignment)


def _placed(call: fx.Node, stage: int, stage_of: dict[fx.Node, int]) -> fx.Node:
    stage_of[call] = stage
    return call
