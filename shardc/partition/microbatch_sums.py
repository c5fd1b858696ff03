"""Splits a step's sums over microbatches by stage: each stage accumulates its own terms. Tied weights need this.

    %d.wte = add(%d.head, %d.embedding)            %d.wte.sum.s3 = accumulate(%d.head)
    %d.wte.sum = accumulate(%d.wte)          ->    %d.wte.sum.s0 = accumulate(%d.embedding)
                                                   %d.wte.sum = add(%d.wte.sum.s3, %d.wte.sum.s0)

Accumulation is linear, so a sum of terms from several stages equals the sum of the stages' own accumulations. Nothing
is sent before the last microbatch, and then only once. Each stage applies the linear calls between the addition and
the `accumulate` (casts, views, reductions, the gradient of an embedding) to its own terms. The graph stays a complete
body: run as a whole it computes the same values, up to rounding in another order.
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
from shardc.ir.provenance import Derivation

aten = torch.ops.aten
ADD = aten.add.Tensor
# LINEAR: linear in the first operand for all other arguments. SCALING: linear if the other arguments are plain numbers.
LINEAR = {
    *(aten.view.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim),
    *(aten.expand.default, aten.clone.default, aten.neg.default, aten._to_copy.default, aten.sum.dim_IntList),
    *(aten.slice.Tensor, aten.narrow.default, aten.embedding_dense_backward.default),
    *(collectives.all_gather, collectives.all_to_all, collectives.permute_ranks),
}
SCALING = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}
SUMMING = {collectives.all_reduce, collectives.reduce_scatter}


@dataclass(frozen=True)
class MicrobatchSum:
    """What is summed over the microbatches. `total` is the value that the rest of the step reads, `accumulates` its
    accumulates by stage: one, but for the gradient of a tied weight."""

    total: fx.Node
    accumulates: Mapping[int, fx.Node]

    @property
    def name(self) -> str:
        return info(self.total).name


def is_linear(call: fx.Node) -> bool:
    """Is f(a + b) = f(a) + f(b) in the call's first operand?"""
    if not operands(call) or operands(call)[0] is not call.args[0]:
        return False
    if call.target in SCALING:
        return len(operands(call)) == 1
    if call.target in SUMMING:
        return call.args[1] == "sum"
    return call.target in LINEAR


def is_plain_add(call: fx.Node) -> bool:
    """Is this an addition of two tensors of its own type, without scaling or broadcasting?

    Where cuts of a dim do not nest, (2 3) may be added to (3 2): it is no term of the sum as it is.
    """
    if call.target is not ADD or len(operands(call)) != 2 or call.kwargs or len(call.args) != 2:
        return False
    return all(type_of(term) == type_of(call) for term in operands(call))


def linear_tail(graph: Graph) -> set[fx.Node]:
    """The linear calls between the terms of a sum and its `accumulate`. `split_sums` may repeat them in each stage."""
    tail: set[fx.Node] = set()
    todo = [v for node in graph.calls() if node.target is ACCUMULATE for v in operands(node)]
    while todo:
        value = todo.pop()
        if value.op == "call_function" and len(value.users) == 1 and info(value).type is not None:
            if is_plain_add(value):
                todo += operands(value)
            elif is_linear(value):
                todo.append(operands(value)[0])
            else:
                continue
            tail.add(value)
    return tail


def split_sums(graph: Graph, stage_of: dict[fx.Node, int]) -> list[MicrobatchSum]:
    """Give each stage the sum of its own terms. Edits the graph, and adds the new calls to `stage_of`."""
    sums: list[MicrobatchSum] = []
    for node in [node for node in graph.calls() if node.target is ACCUMULATE]:
        (value,) = operands(node)
        stages = _term_stages(value, stage_of)
        if len(stages) == 1:
            sums.append(MicrobatchSum(node, dict.fromkeys(stages, node)))
            continue
        accumulates: dict[int, fx.Node] = {}
        for stage in sorted(stages, reverse=True):
            with graph.fx.inserting_before(node):
                term = _stage_term(graph, value, stage, stage_of)
                assert term is not None
                name = f"{info(node).name}.s{stage}"
                origin = Derivation("stage_term", info(node).name)
                accumulates[stage] = graph.call(
                    ACCUMULATE, (term,), like=node, type=type_of(node), name=name, origin=origin
                )
        # The addition replaces the accumulate for all its readers, and takes its name.
        with graph.fx.inserting_before(node):
            total = reduce(lambda a, b: _add(graph, a, b, node), accumulates.values())
        node.replace_all_uses_with(total)
        graph.gradients = {name: total if v is node else v for name, v in graph.gradients.items()}
        name = info(node).name
        update(node, name=graph.unique(f"{name}.whole"))
        update(total, name=name)
        graph.fx.erase_node(node)
        sums.append(MicrobatchSum(total, accumulates))
    existing = set(graph.fx.nodes)
    graph.erase_dead()
    for erased in existing - set(graph.fx.nodes):
        stage_of.pop(erased, None)
    return sums


def _term_stages(value: fx.Node, stage_of: Mapping[fx.Node, int]) -> set[int]:
    """The stages that make the terms of a value: several only if it is a sum over stages with a single reader."""
    home = {stage_of.get(producer(value)[0], 0)}
    if value.op != "call_function" or len(value.users) != 1 or info(value).type is None:
        return home
    if is_plain_add(value):
        stages = {stage for operand in operands(value) for stage in _term_stages(operand, stage_of)}
    else:
        stages = _term_stages(operands(value)[0], stage_of) if is_linear(value) else home
    return stages if len(stages) > 1 else home


def _stage_term(graph: Graph, value: fx.Node, stage: int, stage_of: dict[fx.Node, int]) -> fx.Node | None:
    """A stage's share of a value: the sum of its own terms, after the same linear calls."""
    stages = _term_stages(value, stage_of)
    if stage not in stages:
        return None
    if len(stages) == 1:
        return value
    if is_plain_add(value):
        terms = [own_term for v in operands(value) if (own_term := _stage_term(graph, v, stage, stage_of)) is not None]
        return reduce(lambda a, b: _assign_stage(_add(graph, a, b, value), stage, stage_of), terms)
    first = operands(value)[0]
    term = _stage_term(graph, first, stage, stage_of)
    assert term is not None
    copy = graph.fx.node_copy(value, lambda n: term if n is first else n)
    set_info(copy, info(value))
    about = info(value)
    update(copy, name=graph.unique(f"{about.name}.s{stage}"), origin=Derivation("stage_term", about.name))
    return _assign_stage(copy, stage, stage_of)


def _add(graph: Graph, a: fx.Node, b: fx.Node, like: fx.Node) -> fx.Node:
    return graph.call(ADD, (a, b), like=like, type=type_of(a), assignment=info(like).assignment)


def _assign_stage(call: fx.Node, stage: int, stage_of: dict[fx.Node, int]) -> fx.Node:
    stage_of[call] = stage
    return call
