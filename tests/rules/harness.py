"""One call on whole tensors, and the same call on every rank's shards: do they agree?

A `Trial` is a graph of one call. Its dims are refined to the factors of the op's rule, the chosen pieces
are split over mesh axes, `localize` makes the call local, each rank runs it, and the shards are put
together as the rule says. Padding of uneven shards is garbage: NaN, or a valid but wrong integer.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import fx

from shardc.ir.graph import Graph, Port, ValueInfo, info, operands, set_info, type_of, update
from shardc.ir.mesh import Mesh
from shardc.ir.ops import local as _local  # noqa: F401 (registers shard_slice, mask_pad and axis_offset)
from shardc.ir.ops.collectives import COLLECTIVES, Exchange
from shardc.ir.ops.context import RankContext, running
from shardc.ir.ops.kernels import KERNELS
from shardc.ir.ops.local import span
from shardc.ir.types import Atom, Axes, TensorType
from shardc.passes.sharding.localize import _Walk
from shardc.rules.notation import FactorRule
from shardc.rules.projection import Projection, project
from shardc.rules.registry import Example, OpRule, find_rule, rule_of
from shardc.runtime.execute.layout import assemble, replica_spread, shard
from shardc.runtime.oracle.simulate import exchange, finish

UNINITIALISED = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
# Ops that take nothing else.
COMPLEX = {getattr(torch.ops.aten, name).default for name in ("view_as_real", "_fft_c2c", "_fft_c2r", "conj_physical")}
PIVOTS = ("pivots", "LU_pivots")  # of LAPACK, which takes int32 alone
PRECISION = {torch.float32: 2e-5, torch.bfloat16: 0.1, torch.float16: 0.02}


@dataclass
class Call:
    """An op with real arguments."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> list[torch.Tensor | None]:
        try:
            return as_list(self.op(*self.args, **self.kwargs))
        except NotImplementedError as missing:
            pytest.skip(f"no CPU kernel: {str(missing).partition('.')[0]}")

    def map(self, function: Callable[[torch.Tensor], Any]) -> Call:
        """Every tensor replaced, in the order of the graph's operands."""

        def visit(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return function(value)
            if isinstance(value, (list, tuple)):
                return type(value)(visit(v) for v in value)
            return value

        return Call(self.op, visit(self.args), {k: visit(v) for k, v in self.kwargs.items()})

    @property
    def tensors(self) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        self.map(lambda t: found.append(t) or t)
        return found


def as_list(result: Any) -> list[torch.Tensor | None]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def call_of(entry: OpRule, example: Example, seed: int, dtype: torch.dtype = torch.float64) -> Call:
    """Random tensors of an example's shapes."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(name: str, shape: Any) -> Any:
        if not isinstance(shape, (list, tuple)):
            return shape  # a number where a tensor could stand, or None
        if name in example.ints:
            values = example.ints[name]
            if callable(values):
                return values(shape)
            low, high = (values.start, values.stop) if isinstance(values, range) else (0, values)
            kind = torch.int32 if name in PIVOTS else torch.int64
            return torch.randint(low, high, tuple(shape), generator=generator, dtype=kind)
        if name in example.bools:
            return torch.rand(tuple(shape), generator=generator) < 0.6
        kind = torch.complex128 if entry.op in COMPLEX else torch.float64
        value = torch.randn(tuple(shape), generator=generator, dtype=kind)
        return value if entry.op in COMPLEX else value.to(dtype)

    def build(argument: Any, value: Any) -> Any:
        kind = str(argument.type)
        if kind in ("Tensor", "Optional[Tensor]"):
            return tensor(argument.name, value)
        if kind in ("List[Tensor]", "List[Optional[Tensor]]"):
            return [tensor(argument.name, v) for v in value]
        return list(value) if isinstance(value, tuple) else value

    schema = {a.name: a for a in entry.op._schema.arguments}
    positional = [a for a in entry.op._schema.arguments if not a.kwarg_only]
    args = tuple(build(a, v) for a, v in zip(positional, example.args, strict=False))
    return Call(entry.op, args, {k: build(schema[k], v) for k, v in example.kwargs.items()})


@dataclass
class Trial:
    """A graph of one call, its types still unplaced."""

    call: Call
    mesh: Mesh
    whole: list[torch.Tensor | None] = field(init=False)
    graph: Graph = field(init=False)
    node: fx.Node = field(init=False)
    inputs: list[fx.Node] = field(init=False)
    outputs: list[fx.Node] = field(init=False)  # one for each result that is a tensor

    def __post_init__(self) -> None:
        self.whole = self.call.run()
        self._build()

    def _build(self) -> None:
        graph = fx.Graph()
        self.inputs = []

        def placeholder(value: torch.Tensor) -> fx.Node:
            name = f"x{len(self.inputs)}"
            node = graph.placeholder(name)
            set_info(node, ValueInfo(name, TensorType.of(value)))
            self.inputs.append(node)
            return node

        call = self.call.map(placeholder)
        self.node = graph.call_function(call.op, call.args, call.kwargs)
        raw = self.call.op(*self.call.args, **self.call.kwargs)
        if isinstance(raw, (list, tuple)):
            types = tuple(TensorType.of(t) if isinstance(t, torch.Tensor) else None for t in raw)
            set_info(self.node, ValueInfo("y", None, results=types))
            self.outputs = []
            for i, t in enumerate(types):
                if t is not None:
                    item = graph.call_function(operator.getitem, (self.node, i))
                    set_info(item, ValueInfo(f"y{i}", t))
                    self.outputs.append(item)
        else:
            set_info(self.node, ValueInfo("y", TensorType.of(raw)))
            self.outputs = [self.node]
        graph.output(tuple(self.outputs))
        self.graph = Graph(graph, self.mesh, [Port("input", n.name) for n in self.inputs], [])

    @property
    def expected(self) -> list[torch.Tensor]:
        return [t for t in self.whole if isinstance(t, torch.Tensor)]

    def refine(self, cut: Callable[[str, int], Sequence[int]]) -> FactorRule:
        """Give every dim the atoms that its factors have; `cut` says into which sizes a factor falls."""
        rule = rule_of(self.node)
        parts = {f: tuple(cut(f, size)) for f, size in rule.sizes.items()}
        for values, labelled in ((self.inputs, rule.operands), (self.outputs, rule.results)):
            for value, labels in zip(values, labelled, strict=True):
                old = type_of(value)
                dims = tuple(
                    tuple(Atom(n) for f in names for n in parts[f]) if names else dim
                    for names, dim in zip(labels, old.dims, strict=True)
                )
                update(value, type=TensorType(old.dtype, dims))
        if info(self.node).type is None:
            at = iter(self.outputs)
            update(self.node, results=tuple(None if t is None else type_of(next(at)) for t in info(self.node).results))
        return rule

    def place(self, projection: Projection, split: dict[int, Axes], pending: dict[str, Sequence[int]]) -> None:
        """Shard the pieces; on each axis of `pending`, the operands listed there are pending sums."""
        for i, (value, pieces) in enumerate(zip(self.inputs, projection.operands, strict=True)):
            sums = [(axis, "sum") for axis, which in pending.items() if i in which]
            update(value, type=type_of(value).place([split.get(p, ()) for p in pieces], sums))
        for k, (value, pieces) in enumerate(zip(self.outputs, projection.results, strict=True)):
            partial = [*projection.partial(split, k), *((axis, "sum") for axis in pending)]
            update(value, type=type_of(value).place([split.get(p, ()) for p in pieces], partial))
        assignment = tuple((projection.names[p], axes) for p, axes in split.items())
        update(self.node, assignment=assignment, passes=tuple(pending))

    def agree(
        self, split: dict[int, Axes], pending: dict[str, Sequence[int]], zero: bool, seed: int, tolerance: float
    ) -> None:
        """Split, run on every rank, and compare. `zero`: padding of the operands is 0, and known to be."""
        self.place(project(self.node), self._fitting(split), pending)
        inputs = [self._shards(i, zero, seed) for i in range(len(self.inputs))]
        walk = _Walk(self.graph)
        if zero:
            walk.zero = {v: set(type_of(v).uneven_atoms(self.mesh)) for v in self.inputs}
        walk.visit(self.node)
        self.outputs = list(self.graph.output_values)
        found = {v: dict[int, torch.Tensor]() for v in self.outputs}
        for rank, values in enumerate(self._run(inputs)):
            for v in self.outputs:
                found[v][rank] = values[v]
        for k, (value, expected) in enumerate(zip(self.outputs, self.expected, strict=True)):
            self._compare(k, type_of(value), found[value], expected, tolerance)
            for atom in walk.zero.get(value, ()):
                for rank, t in found[value].items():
                    padding = _padding(t, type_of(value), atom, self.mesh, rank)
                    assert not padding.any(), f"result {k}: the padding of atom {atom} was said to be 0"

    def _shards(self, i: int, zero: bool, seed: int) -> list[torch.Tensor]:
        """What each rank holds of operand i: addends that sum to it, or it, sharded, its padding filled."""
        type, tensor = type_of(self.inputs[i]), self.call.tensors[i]
        settled = TensorType(type.dtype, type.dims)
        addends = {(): tensor}
        for axis in sorted(type.partial_axes):
            addends = {
                (*key, c): part
                for key, t in addends.items()
                for c, part in enumerate(_addends(t, self.mesh.size(axis), seed + i))
            }
        held: list[torch.Tensor] = []
        for rank in range(self.mesh.world_size):
            coordinate = self.mesh.coordinate(rank)
            own = addends[tuple(coordinate[axis] for axis in sorted(type.partial_axes))]
            x = shard(own, settled, self.mesh, rank)
            if not zero:
                for atom in type.uneven_atoms(self.mesh):
                    padding = _padding(x, type, atom, self.mesh, rank)
                    padding.copy_(_garbage(tensor, padding, seed))
            held.append(x)
        return held

    def _fitting(self, split: dict[int, Axes]) -> dict[int, Axes]:
        """Without the pieces that the rule says cannot be split so on this mesh."""
        unfit = find_rule(self.node.target).unfit
        wrong = unfit(self.node, project(self.node), split, self.mesh) if unfit is not None else ()
        return {piece: axes for piece, axes in split.items() if piece not in wrong}

    def _run(self, inputs: Sequence[Sequence[torch.Tensor]]) -> list[dict[fx.Node, Any]]:
        """The values of all ranks, call by call."""
        ranks = range(self.mesh.world_size)
        env = [dict[fx.Node, Any](zip(self.inputs, [shards[r] for shards in inputs], strict=True)) for r in ranks]
        contexts = [RankContext(self.mesh, self.mesh.coordinate(r), None) for r in ranks]  # type: ignore[arg-type]
        for node in self.graph.fx.nodes:
            if node.op != "call_function":
                continue
            calls = [fx.map_arg((node.args, node.kwargs), values.__getitem__) for values in env]
            run = self._meet if node.target in COLLECTIVES else self._each
            try:
                yielded = run(node.target, calls, contexts)
            except Exception as failure:
                failure.add_note(node.format_node())
                raise
            for values, result in zip(env, yielded, strict=True):
                values[node] = result
        return env

    def _each(self, target: Any, calls: Sequence[Any], contexts: Sequence[RankContext]) -> list[Any]:
        kernel, results = KERNELS.get(target, target), list[Any]()
        for (args, kwargs), context in zip(calls, contexts, strict=True):
            with running(context):
                results.append(kernel(*args, **kwargs))
        return results

    def _meet(self, target: Any, calls: Sequence[Any], contexts: Sequence[RankContext]) -> list[Any]:
        """A collective: each rank up to the exchange, then each group's."""
        steps = [COLLECTIVES[target](*args, **kwargs) for args, kwargs in calls]
        brought: list[Exchange] = []
        for own, context in zip(steps, contexts, strict=True):
            with running(context):
                brought.append(next(own))
        results: list[Any] = [None] * len(steps)
        for group in self.mesh.groups(brought[0].axes):
            for rank, received in zip(group, exchange([brought[r] for r in group]), strict=True):
                results[rank] = finish(steps[rank], received)
        return results

    def _compare(
        self, k: int, type: TensorType, shards: dict[int, torch.Tensor], expected: torch.Tensor, tolerance: float
    ) -> None:
        for rank, t in shards.items():
            assert tuple(t.shape) == type.local_shape(self.mesh), (
                f"result {k} of rank {rank}: {tuple(t.shape)} for {type}"
            )
            assert t.dtype == expected.dtype, f"result {k} is {t.dtype}, not {expected.dtype}"
        if self.call.op in UNINITIALISED:
            return
        whole = assemble(shards, type, self.mesh)
        if not expected.dtype.is_floating_point and not expected.dtype.is_complex:
            assert torch.equal(whole, expected), f"result {k}: {type}\n{whole}\n{expected}"
            return
        tolerance = max(tolerance, PRECISION.get(expected.dtype, 0.0))
        finite = expected[expected.isfinite()]
        scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
        whole, expected = (t if t.is_complex() else t.double() for t in (whole, expected))
        same = torch.isclose(whole, expected, rtol=0, atol=tolerance * scale, equal_nan=True)
        assert same.all(), f"result {k}: {type}\n{whole}\n{expected}"
        assert replica_spread(shards, type, self.mesh) <= tolerance * scale, f"result {k}: replicas differ, {type}"


def _addends(t: torch.Tensor, count: int, seed: int) -> Iterator[torch.Tensor]:
    """`count` random tensors that sum to t."""
    generator = torch.Generator().manual_seed(seed)
    rest = t
    for _ in range(count - 1):
        part = torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype)
        yield part
        rest = rest - part
    yield rest


def _padding(x: torch.Tensor, type: TensorType, atom: int, mesh: Mesh, rank: int) -> torch.Tensor:
    """A view of the padding that a rank holds along an atom; `x` is contiguous, or only read."""
    a = type.atoms[atom]
    held = span(a.size, a.axes, mesh, mesh.coordinate(rank))
    parts = x.view(type.local_atoms(mesh)) if x.is_contiguous() else x.reshape(type.local_atoms(mesh))
    return parts.narrow(atom, held.extent, held.local - held.extent)


def _garbage(tensor: torch.Tensor, padding: torch.Tensor, seed: int) -> torch.Tensor:
    """What padding may hold: for numbers that could be indices, other values of the same tensor."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return torch.full_like(padding, math.nan)
    generator = torch.Generator().manual_seed(seed)
    pick = torch.randint(0, tensor.numel(), padding.shape, generator=generator)
    return tensor.reshape(-1)[pick]


def splittable(trial: Trial, projection: Projection) -> list[int]:
    """Pieces that an axis may split and that are part of some tensor."""
    used = {p for tensor in (*projection.operands, *projection.results) for p in tensor}
    return sorted(p for p in used if p not in projection.blocked)


def pending_choices(trial: Trial, projection: Projection) -> list[tuple[int, ...]]:
    """Sets of operands that may be pending sums together."""
    values = operands(trial.node)
    if not values:
        return []
    together = tuple(range(len(values)))
    choices = [together] if projection.linear == "joint" else [(i,) for i in projection.linear]
    return [c for c in choices if all(type_of(values[i]).dtype.is_floating_point for i in c)]
