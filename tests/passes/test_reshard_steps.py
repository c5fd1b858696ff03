"""Every pair of placements of a small tensor: the steps end at the target, on every rank, and are no detour."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import fx

from shardc.ir.graph import Graph, Port, ValueInfo, set_info, type_of
from shardc.ir.hardware import DEFAULT
from shardc.ir.mesh import Mesh
from shardc.ir.ops import collectives
from shardc.ir.types import Atom, Axes, TensorType
from shardc.passes.sharding.lower_reshards import LowerReshards
from shardc.passes.sharding.reshard_steps import plan
from shardc.plan.hardware import named
from shardc.runtime.execute.layout import replica_spread
from shardc.runtime.oracle.simulate import simulate

aten = torch.ops.aten
MESHES = [Mesh(a=2, b=2), Mesh(a=2, b=3)]
# One atom that nothing divides, and a dim of two; both meshes make uneven shards of some.
WHOLE = TensorType(torch.float64, ((Atom(5),), (Atom(3), Atom(4))))

BLOCKED = TensorType.parse("f64[3|-2|4*2, (3 4)]")
FIRST_ROWS = TensorType.parse("f64[5/7, (3 4)]")
ZIGZAG = TensorType.parse("f64[4|3~a, (3 4)]")


def placements() -> Iterator[tuple[Axes, ...]]:
    """Each axis on one atom or on none; two on one atom in both orders."""
    for a, b in product(range(-1, 3), repeat=2):
        for order in ("ab", "ba") if a == b >= 0 else ("ab",):
            where = {"a": a, "b": b}
            yield tuple(tuple(axis for axis in order if where[axis] == atom) for atom in range(3))


def types(kind: str = "sum", whole: TensorType = WHOLE) -> Iterator[TensorType]:
    """Every placement, with the axes that shard nothing pending or not."""
    for placement in placements():
        free = [axis for axis in "ab" if not any(axis in axes for axes in placement)]
        for pending in product((False, True), repeat=len(free)):
            yield whole.place(placement, [(axis, kind) for axis, p in zip(free, pending, strict=True) if p])


def resharding(before: TensorType, after: TensorType, mesh: Mesh) -> Graph:
    """x -> its reduction over a leading dim for each pending axis, sharded by it -> reshard."""
    made = fx.Graph()
    leading = tuple((Atom(mesh.size(axis), (axis,)),) for axis, _ in before.partial)
    x = made.placeholder("x")
    source = TensorType(before.dtype, (*leading, *before.place(before.placement).dims))
    set_info(x, ValueInfo("x", source))
    reduce = aten.amax.default if ("max" in dict(before.partial).values()) else aten.sum.dim_IntList
    value = made.call_function(reduce, (x, list(range(len(leading))))) if leading else x
    set_info(value, ValueInfo("value" if leading else "x", before))
    target = made.call_function(collectives.reshard, (value,))
    set_info(target, ValueInfo("value.reshard", after))
    made.output((target,))
    return Graph(made, mesh, [Port("input", "x")], [Port("output", "y")])


def check(before: TensorType, after: TensorType, mesh: Mesh) -> None:
    planned = plan(before, after, mesh)
    if not set(after.partial) <= set(before.partial):
        assert planned is None, "a pending reduction cannot be made up"
        return
    assert planned is not None
    steps, cost = planned
    at = before
    for step in steps:
        assert step.before == at
        at = step.after
    assert at == after
    graph = resharding(before, after, mesh)
    x = torch.randn(
        type_of(graph.placeholders[0]).shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    lowered = LowerReshards().run(graph)
    spreads: list[float] = []

    def observe(node: fx.Node, values: object) -> None:
        if node is lowered.output_values[0]:
            spreads.append(replica_spread(dict(enumerate(values)), type_of(node), mesh))  # type: ignore[arg-type]

    (found,) = simulate(lowered, {"x": x}, observe=observe).values()
    dims = tuple(range(len(before.partial)))
    reduced = (x.amax(dims) if "max" in dict(before.partial).values() else x.sum(dims)) if dims else x
    torch.testing.assert_close(found, reduced, rtol=1e-14, atol=1e-14)
    assert spreads == [0.0]
    # Never dearer than the plain way: resolve everything, gather everything, slice. Each step may cost its start.
    whole = plan(before, before.replicated(), mesh)
    assert whole is not None
    if not after.partial:
        most = whole[1] + DEFAULT.link_start_bytes
        assert cost <= most, f"{before} -> {after} costs {cost}, by way of the whole {whole[1]}"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("before", list(types()), ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_pair_of_placements(mesh: Mesh, before: TensorType) -> None:
    for after in types():
        check(before, after, mesh)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("before", list(types(whole=BLOCKED)), ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_pair_of_placements_of_blocks(mesh: Mesh, before: TensorType) -> None:
    for after in types(whole=BLOCKED):
        check(before, after, mesh)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("before", [*types(whole=ZIGZAG), *types(whole=FIRST_ROWS)], ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_pair_of_placements_in_zigzag(mesh: Mesh, before: TensorType) -> None:
    for after in types(whole=before.replicated()):
        check(before, after, mesh)


@pytest.mark.parametrize(
    ("before", "after", "kinds"),
    [
        ("f64[4|3~a] |sum a", "f64[4|3~a@a]", ["reduce_scatter"]),
        ("f64[4|3~a@a, 4]", "f64[4|3~a, 4@a]", ["all_to_all"]),
        ("f64[4|3~a, 4@a]", "f64[4|3~a@a, 4]", ["all_to_all"]),
        ("f64[4|3~a@a] |sum b", "f64[4|3~a@a.b]", ["reduce_scatter"]),
        ("f64[4|4~a@a]", "f64[4|4~a@b]", ["all_gather", "slice"]),
    ],
)
def test_what_an_axis_reverses_moves_as_other_dims_do(before: str, after: str, kinds: list[str]) -> None:
    planned = plan(TensorType.parse(before), TensorType.parse(after), Mesh(a=2, b=2))
    assert planned is not None
    assert sorted(step.kind for step in planned[0]) == sorted(kinds)
    check(TensorType.parse(before), TensorType.parse(after), Mesh(a=2, b=2))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_pending_maxima_reshard_like_sums(mesh: Mesh) -> None:
    for before in types("max"):
        for placement in placements():
            check(before, WHOLE.place(placement), mesh)


def test_a_reduction_is_scattered_where_its_axis_is_wanted() -> None:
    before, after = TensorType.parse("f32[8, 4] |sum tp"), TensorType.parse("f32[8@tp, 4]")
    planned = plan(before, after, Mesh(tp=2))
    assert planned is not None
    assert [step.kind for step in planned[0]] == ["reduce_scatter"]


@pytest.mark.parametrize("mesh", [Mesh(dp=2, tp=2), Mesh(dp=2, tp=3), Mesh(dp=3, tp=2)], ids=str)
@pytest.mark.parametrize("dim", ["12", "(3 12)", "12|-1|12*2"])
def test_two_axes_of_an_atom_change_their_order_in_one_step(dim: str, mesh: Mesh) -> None:
    text = {"12": "f64[12@{}, 2]", "(3 12)": "f64[(3 12@{}), 2]", "12|-1|12*2": "f64[12|-1|12*2@{}, 2]"}[dim]
    for a, b in (("dp.tp", "tp.dp"), ("tp.dp", "dp.tp")):
        before, after = TensorType.parse(text.format(a)), TensorType.parse(text.format(b))
        planned = plan(before, after, mesh)
        assert planned is not None
        ((step,), cost) = planned
        assert step.kind == "permute"
        assert cost == DEFAULT.link_bytes(before.local_bytes(mesh), ("dp", "tp")) + DEFAULT.link_start_bytes
        check(before, after, mesh)


def test_steps_cost_what_the_hardware_says_of_their_collectives() -> None:
    """By its tables too, which know the size of a message and where a group lies."""
    machine, mesh = named("h200-nvlink"), Mesh(dp=2, tp=8)
    before, after = TensorType.parse("f32[4096@tp, 4096]"), TensorType.parse("f32[4096, 4096@tp]")
    planned = plan(before, after, mesh, machine.on(mesh))
    assert planned is not None
    (steps, cost), group = planned, machine.group_of(mesh, ("tp",))
    assert [step.kind for step in steps] == ["all_to_all"]
    seconds = machine.collective_seconds("all_to_all", before.local_bytes(mesh), group)
    assert cost == pytest.approx(seconds * machine.link_bytes_per_second)
    default = plan(before, after, mesh)
    assert default is not None
    assert default[1] == DEFAULT.link_bytes(before.local_bytes(mesh) * 7 / 8, ("tp",)) + DEFAULT.link_start_bytes
    across = Mesh(tp=8, dp=2)  # the same over nodes
    farther = plan(before, after, across, machine.on(across))
    assert farther is not None
    assert farther[1] > cost


def test_an_uneven_atom_is_gathered_instead() -> None:
    before, after = TensorType.parse("f64[5@dp.tp]"), TensorType.parse("f64[5@tp.dp]")
    planned = plan(before, after, Mesh(dp=2, tp=2))
    assert planned is not None
    assert "permute" not in [step.kind for step in planned[0]]
    check(before, after, Mesh(dp=2, tp=2))


def test_an_axis_moves_between_dims_by_one_all_to_all() -> None:
    before, after = TensorType.parse("f32[8@tp, 4]"), TensorType.parse("f32[8, 4@tp]")
    planned = plan(before, after, Mesh(tp=2))
    assert planned is not None
    assert [step.kind for step in planned[0]] == ["all_to_all"]
