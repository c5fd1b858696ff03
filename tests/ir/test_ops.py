"""Each collective against the global result: a change of placement never changes the tensor, a reduction reduces it.

Sizes that do not divide leave padding, and several axes leave nested padding; that is where DTensor goes wrong.
"""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardc.ir.mesh import Mesh
from shardc.ir.ops import collectives, local
from shardc.ir.ops.context import RankContext, running
from shardc.ir.ops.local import Span, span
from shardc.ir.types import TensorType
from shardc.runtime.execute.instructions import rank_context
from shardc.runtime.oracle.simulate import simulate
from tests.handmade import Builder, aten

OPS = torch.ops.shardc
AB = Mesh(a=2, b=2)
TP = Mesh(tp=2)

# mesh, type before, calls (op, arguments after x, type after): the global tensor stays the same throughout
MOVES = {
    "gather": (TP, "f64[6@tp, 3]", [("all_gather", (["tp"], [3, 3], 0, 6, [6, 3]), "f64[6, 3]")]),
    "gather the inner dim": (TP, "f64[3, 6@tp]", [("all_gather", (["tp"], [3, 3], 1, 6, [3, 6]), "f64[3, 6]")]),
    "gather uneven": (TP, "f64[2, 5@tp]", [("all_gather", (["tp"], [2, 3], 1, 5, [2, 5]), "f64[2, 5]")]),
    "slice blocks": (
        TP,
        "f64[2, 5|-1]",
        [("slice_blocks", (["tp"], [2, 6], 1, [5, -1], [1, 1], [2, 4]), "f64[2, 5|-1@tp]")],
    ),
    "gather blocks": (TP, "f64[3*2|-1@tp]", [("gather_blocks", (["tp"], [5], 0, [3, -1], [2, 1], [7]), "f64[3*2|-1]")]),
    "blocks masked": (
        TP,
        "f64[5|3@tp]",
        [("mask_blocks", ([5], 0, [5, 3], [1, 1], ["tp"], 9.0, False), "f64[5|3@tp]")],
    ),
    "gather what an axis reverses": (
        TP,
        "f64[3|4~tp@tp, 2]",
        [("gather_blocks", (["tp"], [4, 2], 0, [3, 4], [1, 1], [7, 2], ["", "tp"]), "f64[3|4~tp, 2]")],
    ),
    "slice, reversed": (
        TP,
        "f64[3|4~tp, 2]",
        [("slice_blocks", (["tp"], [7, 2], 0, [3, 4], [1, 1], [4, 2], ["", "tp"]), "f64[3|4~tp@tp, 2]")],
    ),
    "mask, reversed": (
        TP,
        "f64[2|5~tp@tp]",
        [("mask_blocks", ([4], 0, [2, 5], [1, 1], ["tp"], 9.0, False, ["", "tp"]), "f64[2|5~tp@tp]")],
    ),
    "from reversed rows to columns": (
        TP,
        "f64[3|4~tp@tp, 6]",
        [("all_to_all", (["tp"], [4, 6], 1, 0, 7, [7, 3], [3, 4], [1, 1], ["", "tp"]), "f64[3|4~tp, 6@tp]")],
    ),
    "from columns to reversed rows": (
        TP,
        "f64[3|4~tp, 6@tp]",
        [("all_to_all", (["tp"], [7, 3], 0, 1, 6, [4, 6], [3, 4], [1, 1], ["", "tp"], True), "f64[3|4~tp@tp, 6]")],
    ),
    "gather an atom": (TP, "f64[(3 5@tp 2)]", [("all_gather", (["tp"], [3, 3, 2], 1, 5, [30]), "f64[(3 5 2)]")]),
    "gather two axes at once": (AB, "f64[8@a.b]", [("all_gather", (["a", "b"], [2], 0, 8, [8]), "f64[8]")]),
    "gather the inner dim, minor first": (
        AB,
        "f64[3, 8@b.a]",
        [("all_gather", (["b", "a"], [3, 2], 1, 8, [3, 8]), "f64[3, 8]")],
    ),
    "gather behind two dims": (
        TP,
        "f64[2, 3, 4@tp, 5]",
        [("all_gather", (["tp"], [2, 3, 2, 5], 2, 4, [2, 3, 4, 5]), "f64[2, 3, 4, 5]")],
    ),
    "gather two axes, minor first": (AB, "f64[8@b.a]", [("all_gather", (["b", "a"], [2], 0, 8, [8]), "f64[8]")]),
    "uneven over two axes, gathered back": (  # DTensor returns wrong values here, without an exception
        AB,
        "f64[5@a.b, 2]",
        [
            ("all_gather", (["b"], [2, 2], 0, 3, [3, 2]), "f64[5@a, 2]"),
            ("all_gather", (["a"], [3, 2], 0, 5, [5, 2]), "f64[5, 2]"),
        ],
    ),
    "slice": (TP, "f64[6, 3]", [("shard_slice", (["tp"], [6, 3], 0, [3, 3]), "f64[6@tp, 3]")]),
    "slice uneven": (TP, "f64[2, 5]", [("shard_slice", (["tp"], [2, 5], 1, [2, 3]), "f64[2, 5@tp]")]),
    "slice an atom": (TP, "f64[(3 4 2)]", [("shard_slice", (["tp"], [3, 4, 2], 1, [12]), "f64[(3 4@tp 2)]")]),
    "slice over two axes": (AB, "f64[5]", [("shard_slice", (["a", "b"], [5], 0, [2]), "f64[5@a.b]")]),
    "slice the minor axis": (AB, "f64[5@a]", [("shard_slice", (["b"], [3], 0, [2]), "f64[5@a.b]")]),
    "all_to_all": (TP, "f64[4@tp, 6]", [("all_to_all", (["tp"], [2, 6], 1, 0, 4, [4, 3]), "f64[4, 6@tp]")]),
    "all_to_all forward": (TP, "f64[4, 6@tp]", [("all_to_all", (["tp"], [4, 3], 0, 1, 6, [2, 6]), "f64[4@tp, 6]")]),
    "all_to_all uneven": (
        TP,
        "f64[5@tp, 7, 2]",
        [("all_to_all", (["tp"], [3, 7, 2], 1, 0, 5, [5, 4, 2]), "f64[5, 7@tp, 2]")],
    ),
    "all_to_all within a dim": (
        TP,
        "f64[(5@tp 2 7)]",
        [("all_to_all", (["tp"], [3, 2, 7], 2, 0, 5, [40]), "f64[(5 2 7@tp)]")],
    ),
    "all_to_all over two axes": (
        AB,
        "f64[4@a.b, 8]",
        [("all_to_all", (["a", "b"], [1, 8], 1, 0, 4, [4, 2]), "f64[4, 8@a.b]")],
    ),
    "permute to another order": (AB, "f64[8@a.b]", [("permute_ranks", (["a", "b"], [0, 2, 1, 3]), "f64[8@b.a]")]),
    "pad masked": (TP, "f64[2, 5@tp]", [("mask_pad", ([2, 3], 1, 5, ["tp"], 9.0), "f64[2, 5@tp]")]),
    "nothing": (TP, "f64[5@tp]", [("reshard", (), "f64[5@tp]")]),
}  # fmt: skip


@pytest.mark.parametrize("case", MOVES)
def test_moves_keep_the_tensor(case: str) -> None:
    mesh, before, calls = MOVES[case]
    b = Builder(mesh)
    node = b.input("x", before, "input")
    for op, args, after in calls:
        node = b.call(op, after, getattr(OPS, op).default, node, *args)
    b.output("output", "y", node)
    shape = TensorType.parse(before).shape
    x = torch.arange(1.0, math.prod(shape) + 1, dtype=torch.float64).reshape(shape)
    seen: list[torch.Tensor] = []
    (y,) = simulate(b.graph(), {"x": x}, observe=lambda _, values: seen.extend(values)).values()
    assert torch.equal(y, x)
    assert tuple(seen[-1].shape) == TensorType.parse(calls[-1][2]).local_shape(mesh)
    assert seen[-1].is_contiguous()


REDUCTIONS = {
    "all_reduce": ("all_reduce", "{op}", (["a", "b"],), "f64[3, 5]"),
    "reduce_scatter": ("reduce_scatter", "{op}", (["a", "b"], [3, 8], 1, [3, 2]), "f64[3, 8@a.b]"),
    "reduce_scatter the first dim": ("reduce_scatter", "{op}", (["b", "a"], [8, 3], 0, [2, 3]), "f64[8@b.a, 3]"),
}


@pytest.mark.parametrize("op", ["sum", "max", "min"])
@pytest.mark.parametrize("case", REDUCTIONS)
def test_reductions_over_all_ranks(case: str, op: str) -> None:
    name, _, args, after = REDUCTIONS[case]
    b = Builder(AB)
    shape = TensorType.parse(after).shape
    x = b.input("x", f"f64[4@a.b, {shape[0]}, {shape[1]}]", "input")
    own = b.call("own", f"f64[{shape[0]}, {shape[1]}] |{op} a |{op} b", aten.view.default, x, list(shape))
    b.output("output", "y", b.call("y", after, getattr(OPS, name).default, own, op, *args))
    value = torch.randn(4, *shape, dtype=torch.float64)
    (y,) = simulate(b.graph(), {"x": value}).values()
    want = {"sum": value.sum(0), "max": value.amax(0), "min": value.amin(0)}[op]
    torch.testing.assert_close(y, want, rtol=1e-14, atol=1e-14)


def test_reduce_scatter_uneven_within_one_axis() -> None:
    """Over b alone, a still sharding another dim; 5 in chunks of 3, the last padded with 0."""
    b = Builder(AB)
    x = b.input("x", "f64[2@b, 4@a, 5]", "input")
    own = b.call("own", "f64[4@a, 5] |sum b", aten.view.default, x, [2, 5])
    args = ("sum", ["b"], [2, 5], 1, [2, 3])
    b.output("output", "y", b.call("y", "f64[4@a, 5@b]", OPS.reduce_scatter.default, own, *args))
    value = torch.randn(2, 4, 5, dtype=torch.float64)
    seen: list[torch.Tensor] = []
    (y,) = simulate(b.graph(), {"x": value}, observe=lambda _, values: seen.extend(values)).values()
    torch.testing.assert_close(y, value.sum(0), rtol=1e-14, atol=1e-14)
    assert seen[-1][:, 2].tolist() == [0.0, 0.0]


class Alone:
    """The communicator of a group of one; what it returns is fresh, as any communicator's."""

    def all_reduce(self, x, op, axes):
        return x.clone()

    def all_gather(self, x, axes):
        return x[None].clone()

    def reduce_scatter(self, x, op, axes):
        return x[0].clone()

    def all_to_all(self, x, axes):
        return x.clone()

    def all_to_all_uneven(self, x, axes, sizes):
        return x.clone()

    def permute(self, x, axes, source):
        return x.clone()


def context(mesh: Mesh, rank: int) -> RankContext:
    return rank_context(mesh, rank, Alone())


CALLS = {
    "reshard": (),
    "all_reduce": ("sum", ["tp"]),
    "all_gather": (["tp"], [4, 6], 1, 6, [4, 6]),
    "reduce_scatter": ("sum", ["tp"], [4, 6], 1, [4, 6]),
    "all_to_all": (["tp"], [4, 6], 0, 1, 6, [4, 6]),
    "permute_ranks": (["tp"], [0]),
    "shard_slice": (["tp"], [4, 6], 0, [4, 6]),
    "mask_pad": ([4, 6], 1, 6, ["tp"], 0.0),
    "slice_blocks": (["tp"], [4, 6], 1, [2, -2], [2, 1], [4, 6]),
    "gather_blocks": (["tp"], [4, 6], 1, [2, -2], [2, 1], [4, 6]),
    "mask_blocks": ([4, 6], 1, [2, -2], [2, 1], ["tp"], 0.0, True),
    "neighbour_rows": (["tp"], 1, 0, 6, 1),
    "halo": (None, None, 1, ["tp"]),
    "halo_sum": (None, None, 0, 0, 1, ["tp"]),
    "mean_anew": (1, 6, 1, 1, 0, True, ["tp"]),
}


@pytest.mark.parametrize("op", CALLS)
def test_results_are_fresh_and_fakes_agree(op: str) -> None:
    """Even where there is nothing to do, a result shares no memory with its operand: torch's rule for such a schema."""
    x = torch.randn(6, 4).t()
    call = getattr(OPS, op).default
    with running(context(Mesh(tp=1), 0)):
        y = call(x, *CALLS[op])
    assert torch.equal(y, x)
    assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    with FakeTensorMode() as mode:
        fake = call(mode.from_tensor(x), *CALLS[op])
    assert (fake.shape, fake.stride(), fake.dtype) == (y.shape, y.stride(), y.dtype)


def test_padding_is_filled_where_a_rank_has_it() -> None:
    mesh = Mesh(a=2, b=2)
    masked: list[list[float]] = []
    for rank in range(4):
        with running(context(mesh, rank)):
            masked.append(OPS.mask_pad.default(torch.ones(2), [2], 0, 5, ["a", "b"], -math.inf).tolist())
    assert masked == [[1, 1], [1, -math.inf], [1, 1], [-math.inf, -math.inf]]


def test_axis_offset_adds_up_its_axes() -> None:
    mesh = Mesh(a=2, b=3)
    found: list[int] = []
    for rank in range(6):
        with running(context(mesh, rank)):
            found.append(int(OPS.axis_offset.default(["b", "a"], [10, 100])))
    assert found == [0, 10, 20, 100, 110, 120]


def test_a_split_axis_keeps_its_coordinate() -> None:
    found = rank_context(Mesh(dp=2, tp=4).split("tp", (2, 2)), 6, Alone())
    assert found.coordinate == {"dp": 1, "tp:0": 1, "tp:1": 0, "tp": 2}


def test_span_of_ten_over_two_axes() -> None:
    mesh = Mesh(a=2, b=3)
    spans = [span(10, ("a", "b"), mesh, mesh.coordinate(rank)) for rank in range(6)]
    assert spans == [Span(0, 2, 2), Span(2, 2, 2), Span(4, 1, 2), Span(5, 2, 2), Span(7, 2, 2), Span(9, 1, 2)]
    assert span(5, ("b",), mesh, {"a": 0, "b": 2}) == Span(4, 1, 2)
    assert span(3, ("b", "a"), mesh, {"a": 1, "b": 2}) == Span(3, 0, 1)


def test_every_collective_is_known_to_the_simulator() -> None:
    names = {str(op).removeprefix("shardc.").removesuffix(".default") for op in collectives.COLLECTIVES}
    rows = {"exchange_counts", "dispatch_rows", "combine_rows"}
    assert names == {
        "all_reduce",
        "gather_linear",
        "linear_scatter",
        "all_gather",
        "gather_blocks",
        "reduce_scatter",
        "all_to_all",
        "permute_ranks",
        "neighbour_rows",
        "next_keys",
        "merge_lse",
        "merge_parts",
        "mirror_rows",
        *rows,
    }
    reading = ("shard_slice", "mask_pad", "axis_offset", "slice_blocks", "mask_blocks", "halo", "halo_sum")
    reading += ("mean_anew", "shift_positions", "shift_rows", "shift_join", "sdpa_rows", "sdpa_rows_bwd")
    reading += ("sdpa_part", "sdpa_part_bwd", "scan_part", "scan_part_backward", "scan_summary")
    reading += ("scan_summary_backward", "scan_turn", "scan_turn_backward")
    reading += ("reach_rows", "reach_sum", "pick_rows", "place_rows")
    reading += ("chunk_totals", "states_behind", "take_rows", "add_rows", "run_extremes", "extreme_of_runs")
    reading += ("cumulative_part", "cumulative_totals", "cumulative_extreme_part", "extreme_totals")
    reading += ("extreme_gradient_part", "extreme_spills")
    reading += tuple(f"scan_{what}{way}" for what in ("part", "summary", "turn") for way in ("", "_backward"))
    assert set(local.AXES_READ) == {getattr(OPS, name).default for name in reading}
