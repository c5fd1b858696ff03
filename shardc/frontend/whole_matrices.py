"""Updates that need whole matrices, as Muon's: those of equal shapes are computed together, a matrix each.

    momentum, grad   elementwise, of a shard         before
    [L, m, n]        L matrices, stacked             products of whole matrices: Newton-Schulz
    param            elementwise, of a shard         after

A product of a matrix with itself needs all of it. To gather every matrix on every rank would send as many copies as
there are ranks, and all ranks would compute the same. So the part of an update that lies between its products is traced
once more, for a batch of L matrices (by `torch.vmap`, so it is the optimizer's own arithmetic), and the pass `store`
splits L over the ranks: each computes its matrices whole. What is sent is the stack, once there and once back, by
all-to-all where the matrices are stored as shards. A batch has as many matrices as the mesh has ranks, so that no rank
holds more than its share of one.

The part begins and ends at elementwise calls, a cast to half precision stays before it: half of the bytes. An update
without products of matrices (Adafactor's means, LAMB's norms) needs none of this: its sums over shards are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from shardc import torch_compat
from shardc.frontend.append import Append, module_of
from shardc.frontend.optimizer_trace import Update, graph_of
from shardc.ir.graph import Graph, operands, type_of
from shardc.rules.registry import find_rule

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)


@dataclass(frozen=True)
class Core:
    """The calls of an update that need whole matrices. `shared` are those of its `inputs` that all parameters of a
    group have in common: they follow from the learning rate alone."""

    calls: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    shared: frozenset[fx.Node]


def core_of(update: Update) -> Core | None:
    """The part of an update that multiplies matrices, and what lies between; None if nothing does."""
    graph = update.graph
    calls = list(graph.calls())
    products = [c for c in calls if c.target in PRODUCTS and type_of(operands(c)[-1]).shape[-2] > 1]
    if not products:
        return None
    above, below = _reached(calls, products, up=True), _reached(calls, products, up=False)
    whole = {c for c in calls if (c in above or c in below) and not _is_elementwise(c)}
    above, below = _reached(calls, whole, up=True), _reached(calls, whole, up=False)
    core = {c for c in calls if c in above and c in below}
    for call in calls:  # what only goes on with the core's results, in no more bytes
        read = operands(call)
        widest = max((type_of(v).dtype.itemsize for v in read), default=0)
        if read and core.issuperset(read) and call not in core and type_of(call).dtype.itemsize <= widest:
            core.add(call)
    core |= _derived(graph, core)
    ordered = tuple(c for c in calls if c in core)
    inputs = tuple(dict.fromkeys(v for c in ordered for v in operands(c) if v not in core))
    results = set(graph.output_values)
    outputs = tuple(c for c in ordered if c in results or any(user not in core for user in c.users))
    states = {graph.placeholders[i] for i in range(len(graph.placeholders)) if i != 2}  # all but the learning rate
    own = _reached(calls, states, up=False)
    return Core(ordered, inputs, outputs, frozenset(v for v in inputs if v not in own and v not in states))


def batched(core: Core, count: int) -> Graph:
    """The core as a graph of `count` matrices, stacked along dim 0."""
    sub = fx.Graph()
    of: dict[fx.Node, fx.Node] = {v: sub.placeholder(f"x{i}") for i, v in enumerate(core.inputs)}
    for call in core.calls:
        of[call] = sub.node_copy(call, of.__getitem__)
    sub.output(tuple(of[v] for v in core.outputs))
    one = fx.GraphModule({}, sub)
    dims = tuple(None if v in core.shared else 0 for v in core.inputs)

    def several(*values: Tensor) -> Any:
        return torch.vmap(lambda *x: _Core(one).run(*x), in_dims=dims)(*values)

    mode = torch_compat.fake_mode()
    shapes = [(*(() if v in core.shared else (count,)), *type_of(v).shape) for v in core.inputs]
    metas = [torch.empty(s, dtype=type_of(v).dtype, device="meta") for s, v in zip(shapes, core.inputs, strict=True)]
    with torch.no_grad():
        fakes = [torch_compat.fake_like(mode, t) for t in metas]
        gm = torch_compat.record(several, fakes, mode, {}, lambda _: None)
    inputs = [f"in{i}" for i in range(len(core.inputs))]
    return graph_of(gm, inputs, [f"out{i}" for i in range(len(core.outputs))])


class _Core(fx.Interpreter):
    """Runs a core under `vmap`, which would take a product with a term apart, and round twice."""

    def call_function(self, target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if target is aten.addmm.default and args[0].shape == (args[1].shape[0], args[2].shape[1]):
            return _Added.apply(*args, kwargs.get("beta", 1), kwargs.get("alpha", 1))
        return super().call_function(target, args, kwargs)


class _Added(torch.autograd.Function):
    """addmm of matrices, for a batch baddbmm: the same numbers."""

    @staticmethod
    def forward(term: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
        return torch.addmm(term, a, b, beta=beta, alpha=alpha)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, *given: Any) -> tuple[Tensor, int]:
        tensors = [
            x.movedim(dim, 0) if dim is not None else x.expand(info.batch_size, *x.shape)
            for x, dim in zip(given[:3], in_dims[:3], strict=True)
        ]
        return torch.baddbmm(*tensors, beta=given[3], alpha=given[4]), 0


def append_together(
    append: Append,
    update: Update,
    core: Core,
    body: Graph,
    members: Sequence[tuple[str, tuple[fx.Node, ...]]],
    optimizer: str,
) -> list[list[fx.Node]]:
    """Append the update of several parameters, each given by its name and the update's inputs. `body` is the core for
    as many. Returns the results of each."""
    graph, inside = update.graph, set(core.calls)
    after = _reached(list(graph.calls()), inside, up=False) - inside
    tables = [dict(zip(graph.placeholders, values, strict=True)) for _, values in members]

    def copied(calls: Sequence[fx.Node]) -> None:
        for (name, _), table in zip(members, tables, strict=True):
            append.copies(calls, table, f"opt.{name}", module_of(name))

    copied([c for c in graph.calls() if c not in inside and c not in after])
    name = f"opt.{optimizer.lower()}"
    fqn = module_of(members[0][0]) if len(members) == 1 else ""
    stacks: list[fx.Node] = []
    for value in core.inputs:
        if value in core.shared:
            stacks.append(tables[0][value])
            continue
        each = [append.call(name, fqn, aten.unsqueeze.default, table[value], 0) for table in tables]
        stacks.append(append.call(name, fqn, aten.cat.default, each, 0) if len(each) > 1 else each[0])
    of: dict[fx.Node, fx.Node] = dict(zip(body.placeholders, stacks, strict=True))
    append.copies(list(body.calls()), of, name, fqn, optimizer=optimizer)
    for value, result in zip(core.outputs, body.output_values, strict=True):
        for i, ((member, _), table) in enumerate(zip(members, tables, strict=True)):
            table[value] = append.call(f"opt.{member}", module_of(member), aten.select.int, of[result], 0, i)
    copied([c for c in graph.calls() if c in after])
    return [[table[node] for node in graph.output_values] for table in tables]


def _derived(graph: Graph, core: set[fx.Node]) -> set[fx.Node]:
    """Elementwise calls before the core that need no more than the earliest of what it reads: its squares of it."""
    read = {v for c in core for v in operands(c)} - core
    derived: set[fx.Node] = set()
    kept: set[fx.Node] = set()

    def chain(value: fx.Node) -> set[fx.Node] | None:
        """The calls that make a value of those that are kept; None if it takes others."""
        if value in kept:
            return set()
        if value.op != "call_function" or not operands(value):
            return None
        chains = [chain(v) for v in operands(value)]
        return None if None in chains else {value}.union(*(c for c in chains if c is not None))

    for value in (v for v in graph.values() if v in read):
        calls = chain(value)
        derived |= calls or set()
        kept |= {value} if calls is None else set()
    return derived


def _reached(calls: Sequence[fx.Node], start: Any, *, up: bool) -> set[fx.Node]:
    """The calls that some depend on (`up`), or that depend on them; themselves too."""
    reached: set[fx.Node] = set(start)
    for call in reversed(calls) if up else calls:
        if not up and not reached.isdisjoint(operands(call)):
            reached.add(call)
        elif up and call in reached:
            reached.update(operands(call))
    return reached


def _is_elementwise(call: fx.Node) -> bool:
    rule = find_rule(call.target)
    return (
        rule is not None
        and rule.kind == "pointwise"
        and all(type_of(v).shape in ((), type_of(call).shape) for v in operands(call))
    )
