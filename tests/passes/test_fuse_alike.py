"""The caches of lowered calls and of kernels, and the facts by which the search for a space is skipped."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import shardc
from benchmarks.fusion_census import body_of, traced
from shardc.ir.graph import Graph, info, results, update
from shardc.ir.mesh import Mesh
from shardc.ir.types import TensorType
from shardc.passes.fusion.analysis.iteration_space import (
    Prim,
    Read,
    contiguous_runs,
    find_space,
    space_constraint,
    structure,
)
from shardc.passes.fusion.analysis.view_analysis import ViewAnalysis
from shardc.passes.fusion.clustering import clustering
from shardc.passes.fusion.clustering.fusion_graph import build_fusion_graph
from shardc.passes.fusion.emit.kernel_builder import KernelCache, build_kernel
from shardc.passes.fusion.fuse import fuse
from shardc.passes.fusion.lowering.lower_op import lower_op
from shardc.passes.fusion.lowering.lowered_op import LOWERINGS, LoweredOp
from shardc.passes.fusion.lowering.lowering_cache import LoweringCache
from tests.handmade import Builder
from tests.passes.fuse_graphs import chains

aten = torch.ops.aten


class Layers(nn.Module):
    """Twice the same and more, with what must be told apart: seeds, numbers of other types, and how operands lie."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            y = nn.functional.layer_norm(x, (16,), self.weight)
            y = nn.functional.dropout(y, 0.1)
            a, b = y[..., :8], y[..., 8:]
            z = torch.cat([-b, a], -1) * y.transpose(1, 2).reshape(y.shape)
            x = x + torch.softmax(z, -1) * (z > 0) + z * z - y * z
        return x.amax(-1).square().sum()


def scaled() -> Graph:
    """Clusters, a product between one and the next, that differ in a number alone; two of them do not."""
    b = Builder(Mesh())
    x, w = b.input("x", "f32[8, 16]", "input"), b.input("w", "f32[16, 16]")
    for at, number in enumerate((2.0, 3.0, 2.0, 0.0, -0.0)):
        h = b.call(f"h{at}", "f32[8, 16]", aten.mm.default, x, w)
        scaled = b.call(f"scaled{at}", "f32[8, 16]", aten.mul.Tensor, h, number)
        x = b.call(f"x{at}", "f32[8, 16]", aten.tanh.default, scaled)
    b.output("output", "x", x)
    return b.graph()


MAKE: dict[str, Callable[[], Graph]] = {
    "scaled": scaled,
    "layers": lambda: shardc.compile(Layers(), {"x": torch.zeros(2, 4, 16)}, mesh="dp=1").body,
    "traced": lambda: traced(300),
    "chains": lambda: chains(300),
    "gpt2": lambda: body_of("gpt2", 2, True),
    "t5": lambda: body_of("t5", 2, True),
}


@pytest.fixture(scope="module", params=MAKE)
def graph(request: pytest.FixtureRequest) -> Graph:
    return MAKE[request.param]()


@pytest.mark.sampled(6)
def test_cached_lowerings_equal_fresh_ones(graph: Graph) -> None:
    views = ViewAnalysis(graph, LOWERINGS)
    cache = LoweringCache(views)
    for node in graph.calls():
        assert repr(cache.lower(node)) == repr(lower_op(views, node)), info(node).name
    calls = sum(1 for node in graph.calls() if node.target in LOWERINGS)
    assert len(cache.entries) < calls, "the cache was never hit"


def numbers() -> tuple[Graph, dict[str, fx.Node]]:
    """Calls of one op whose arguments are equal to Python, or whose operands have one shape."""
    b = Builder(Mesh())
    x, y, i = b.input("x", "f32[8, 16]"), b.input("y", "f32[8, 16]"), b.input("i", "i64[8, 16]", "input")
    h = b.input("h", "bf16[8, 16]")
    t = b.call("t", "f32[16, 8]", aten.t.default, x)
    low = b.call("low", "f32[8, 8]", aten.slice.Tensor, x, 1, 0, 8)
    high = b.call("high", "f32[8, 8]", aten.slice.Tensor, x, 1, 8, 16)
    one = b.call("one", "f32[8, 16]", aten.full.default, [8, 16], 1.0)
    two = b.call("two", "f32[8, 16]", aten.full.default, [8, 16], 2.0)
    made: dict[str, fx.Node] = {}

    def call(name: str, type: str, target: Any, *args: Any) -> None:
        made[name] = b.call(name, type, target, *args)

    for name, number in (("whole", 1), ("float", 1.0), ("bool", True), ("zero", 0.0), ("less", -0.0)):
        call(f"number.{name}", "f32[8, 16]", aten.mul.Tensor, x, number)
    for name, number in (("whole", 1), ("bool", True)):
        call(f"integer.{name}", "i64[8, 16]", aten.mul.Tensor, i, number)
    for name, args in (("x", (x, x)), ("y", (x, y)), ("h", (x, h)), ("one", (x, one)), ("two", (x, two))):
        call(f"operand.{name}", "f32[8, 16]", aten.mul.Tensor, *args)
    call("part.low", "f32[8, 8]", aten.neg.default, low)
    call("part.high", "f32[8, 8]", aten.neg.default, high)
    call("turned", "f32[16, 8]", aten.neg.default, t)
    call("plain", "f32[8, 16]", aten.neg.default, x)
    for name, node in made.items():
        b.output("output", name, node)
    return b.graph(), made


def test_different_calls_are_lowered_separately() -> None:
    graph, made = numbers()
    views = ViewAnalysis(graph, LOWERINGS)
    cache = LoweringCache(views)
    for name, node in made.items():
        assert repr(cache.lower(node)) == repr(lower_op(views, node)), name
    assert len(cache.entries) == len(made)


def test_a_call_of_which_less_is_used_is_another() -> None:
    b = Builder(Mesh())
    x = b.input("x", "f32[8, 16]")
    nodes: list[fx.Node] = []
    for used in ((0, 1, 2), (0,), (0, 1, 2)):
        call = b.call(f"n{len(nodes)}", None, aten.native_layer_norm.default, x, [16], None, None, 1e-5)
        nodes.append(call)
        types = ("f32[8, 16]", "f32[8, 1]", "f32[8, 1]")
        update(call, results=tuple(map(TensorType.parse, types)))
        for at in used:
            item = b.call(f"{call.name}.{at}", types[at], operator.getitem, call, at)
            b.output("output", item.name, item)
    graph = b.graph()
    views = ViewAnalysis(graph, LOWERINGS)
    cache = LoweringCache(views)
    assert [len(one.prims) if (one := cache.lower(node)) else 0 for node in nodes] == [
        len(one.prims) if (one := lower_op(views, node)) else 0 for node in nodes
    ]
    assert len(cache.entries) == 2


@pytest.mark.sampled(3)
def test_cached_kernels_equal_fresh_ones(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    builds, build = 0, KernelCache.build

    def checked(self: KernelCache, *args: Any) -> Any:
        nonlocal builds
        builds += 1
        cached = build(self, *args)
        fresh = self._with_template_name(build_kernel(self.graph, self.lowerings.views, *args))  # pyright: ignore[reportPrivateUsage]
        assert (cached.kernel, cached.inputs, cached.outputs) == (fresh.kernel, fresh.inputs, fresh.outputs)
        return cached

    monkeypatch.setattr(KernelCache, "build", checked)
    fuse(graph)
    assert builds > 1


@pytest.mark.sampled(3)
def test_clusters_whose_spaces_agree_have_a_common_space(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    agreed, merged = 0, clustering._Merger.merged  # pyright: ignore[reportPrivateUsage]

    def checked(self: Any, a: int, b: int) -> Any:
        nonlocal agreed
        result = merged(self, a, b)
        if not isinstance(result, str):
            both = result[0]
            if clustering.spaces_agree(self.clusters[a], self.clusters[b], both.constraint):
                agreed += 1
                assert clustering.find_space(self.clustering.prims(both.calls), both.constraint) is not None
        return result

    monkeypatch.setattr(clustering._Merger, "merged", checked)  # pyright: ignore[reportPrivateUsage]
    fuse(graph)
    assert agreed > 2


@pytest.mark.sampled(3)
def test_an_elementwise_call_has_a_space(graph: Graph) -> None:
    ops = build_fusion_graph(graph).lowered.values()
    elementwise = [op for op in ops if op.access.is_elementwise and not op.access.strided_reads]
    assert len(elementwise) > 2
    assert all(find_space(op.prims, op.constraint) is not None for op in elementwise)


@pytest.mark.sampled(3)
def test_the_facts_of_a_renamed_call_are_those_of_its_operations(graph: Graph) -> None:
    """They are renamed with it, instead of being found anew."""
    kinds: dict[object, object] = {}
    for op in build_fusion_graph(graph).lowered.values():
        fresh = LoweredOp(op.node, op.prims, op.constraint)
        assert (op.access, op.reads, op.is_float64) == (fresh.access, fresh.reads, fresh.is_float64)
        assert op.structure == fresh.structure
        numbers: dict[Any, int] = {}
        assert kinds.setdefault(op.structure[0], structure(op.prims, numbers)) == structure(op.prims, {})
        assert set(op.structure[1]) == {value for value in numbers if isinstance(value, fx.Node)}
    assert len(kinds) < len(graph.fx.nodes)


@pytest.mark.sampled(3)
def test_a_cluster_writes_what_others_read(graph: Graph) -> None:
    several = 0

    def watch(result: clustering.Clustering, _: object) -> None:
        nonlocal several
        readers = result.graph.readers
        for each in result.clusters.values():
            inside, calls = set(each.calls), [result.graph.calls[i] for i in each.calls]
            values = {value for call in calls for value in results(call) if value is not None}
            assert each.writes == {v for v in values if readers.get(v, set()) - inside}
            assert each.result_count == len(values)
            several += len(each.writes) < len(values)

    fuse(graph, watch=watch)
    assert several


def test_the_first_of_joined_parts_is_read_from_memory() -> None:
    """In order and of the size of what joins them, but nothing in a kernel reads what it stores in parts."""
    b = Builder(Mesh())
    x = b.input("x", "f32[4, 16]", "input")
    parts = [b.call(f"part{at}", "f32[4, 16]", op, x) for at, op in enumerate((aten.neg.default, aten.abs.default))]
    merged = b.call("joined", "f32[12, 16]", aten.cat.default, [*parts, x], 0)
    first = b.call("first", "f32[4, 16]", aten.slice.Tensor, merged, 0, 0, 4)
    b.output("output", "joined", merged)
    b.output("output", "y", b.call("y", "f32[4, 16]", aten.tanh.default, first))
    kernels = [call for call in fuse(b.graph()).calls() if call.target is torch.ops.shardc.fused.default]
    assert len(kernels) == 1, "%y is none of it"


def test_complex_numbers_are_no_kernels() -> None:
    b = Builder(Mesh())
    z = b.input("z", "c64[8, 16]")
    one = b.call("one", "c64[8, 16]", aten.full.default, [8, 16], 1.0, dtype=torch.complex64)
    b.output("output", "m", b.call("m", "c64[8, 16]", aten.mul.Tensor, z, one))
    assert [info(call).name for call in fuse(b.graph()).calls()] == ["one", "m"]


def test_what_reads_joined_parts_whole_beside_what_is_larger() -> None:
    """Of parts that are stored one by one nothing in the kernel reads; nor do they say where a smaller call runs."""
    group = Prim("part", "neg", (Read("x", contiguous_runs(64)),), 64, torch.float32)
    merged = Prim(
        "joined", "cat", (Read("part", contiguous_runs(64)),) * 3, 64, torch.float32, seed=16, index=((4, 48), (16, 1))
    )
    small = Prim("small", "neg", (Read("joined", contiguous_runs(192)),), 192, torch.float32)
    large = Prim("large", "add", (Read("z", contiguous_runs(384)), Read("part", ((6, 0), (64, 1)))), 384, torch.float32)
    biased = Prim(
        "biased", "add", (Read("large", contiguous_runs(384)), Read("b", ((24, 0), (16, 1)))), 384, torch.float32
    )
    wanted = space_constraint((group, merged, small, large, biased))
    assert wanted is not None
    assert find_space((group, merged, large, biased), wanted) is not None
    assert find_space((group, merged, small, large, biased), wanted) is None
