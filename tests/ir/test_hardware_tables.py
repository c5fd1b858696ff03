"""Tables of hardware: they go through what was measured, never fall, hold in groups that span a network, round trip."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardc import Plan, ShardcError
from shardc.ir.curve import latency_and_rate, rising, seconds_at
from shardc.ir.device_rates import AttentionRate, ProductRate
from shardc.ir.hardware import DEFAULT, Group, Hardware, Tables
from shardc.ir.links import extents_of, sent_share
from shardc.ir.mesh import Mesh
from shardc.plan import hardware as files

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "send")
NAMED = ("a100-nvlink+ib", "h100-nvlink+ib", "h200-nvlink")
GROUPS = [Group(extents) for extents in [(2,), (3,), (8,), (1, 2), (4, 2), (8, 4), (1, 64), (8, 32, 4)]]
BF16 = torch.bfloat16

sizes = st.floats(0, 2**40)
seconds = st.floats(1e-7, 10)
curves = st.dictionaries(st.integers(0, 2**36), seconds, min_size=1, max_size=8).map(
    lambda points: tuple(zip(sorted(points), sorted(points.values()), strict=False))
)


# ---------------------------------------------------------------------- curves
@given(curves, sizes, sizes)
def test_a_curve_never_falls_and_is_positive(points: Any, a: float, b: float) -> None:
    less, more = sorted((a, b))
    assert 0 < seconds_at(points, less) <= seconds_at(points, more) * (1 + 1e-12)


@given(curves)
def test_a_curve_goes_through_its_knots_without_a_step(points: Any) -> None:
    for size, t in points:
        assert seconds_at(points, size) == pytest.approx(t, rel=1e-12)
    for (x0, y0), (x1, y1) in pairwise(points):
        for share in (1e-9, 0.25, 1 - 1e-9):
            assert seconds_at(points, x0 + share * (x1 - x0)) == pytest.approx(y0 + share * (y1 - y0), rel=1e-6)


@given(st.floats(1e-6, 1e-3), st.floats(1e8, 1e13), sizes)
def test_latency_and_bandwidth_are_a_curve(latency: float, rate: float, size: float) -> None:
    assert seconds_at(latency_and_rate(latency, rate, 0.75), size) == pytest.approx(
        latency + 0.75 * size / rate, rel=1e-9
    )


@given(st.lists(st.tuples(st.integers(0, 20), seconds), min_size=1, max_size=12))
def test_measurements_are_made_to_rise(pairs: list[tuple[int, float]]) -> None:
    points = rising(pairs)
    assert [size for size, _ in points] == sorted({size for size, _ in pairs})
    assert all(t <= later * (1 + 1e-12) for (_, t), (_, later) in pairwise(points))
    # The mean of all in the logarithm stays, counted by measurement.
    by_size = dict(points)
    assert sum(math.log(by_size[size]) for size, _ in pairs) == pytest.approx(
        sum(math.log(t) for _, t in pairs), abs=1e-9
    )


def test_what_rises_stays_and_what_falls_is_averaged() -> None:
    assert rising([(1, 2.0), (2, 3.0), (4, 5.0)]) == ((1, 2.0), (2, 3.0), (4, 5.0))
    falls = rising([(1, 1.0), (2, 8.0), (4, 2.0), (8, 9.0)])
    assert [t for _, t in falls] == pytest.approx([1, 4, 4, 9])


@pytest.mark.parametrize(
    ("points", "at", "expected"),
    [
        (((4, 2.0), (8, 4.0)), 16, 8.0),  # the last segment's slope
        (((4, 2.0), (8, 4.0), (12, 4.0)), 20, 6.0),  # that of all, where the last knots are level
        (((4, 2.0), (8, 2.0)), 24, 6.0),  # the last knot's bytes a second
        (((4, 2.0),), 16, 8.0),
        (((0, 2.0),), 16, 2.0),
        (((4, 2.0), (8, 4.0)), 1, 2.0),
    ],
)
def test_beyond_the_knots(points: Any, at: float, expected: float) -> None:
    assert seconds_at(points, at) == pytest.approx(expected)


# ---------------------------------------------------------------------- groups in a network
meshes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(
    lambda extents: Mesh(tuple((f"a{i}", n) for i, n in enumerate(extents)))
)


@given(meshes, st.data())
def test_extents_are_those_of_the_group_that_spans_most(mesh: Mesh, data: Any) -> None:
    axes = tuple(data.draw(st.sets(st.sampled_from(mesh.names), min_size=1)))
    node = data.draw(st.integers(1, 9))
    units = (node, node * data.draw(st.integers(1, 5)))
    extents = extents_of(mesh, axes, units)
    nodes, racks = (max(len({rank // unit for rank in group}) for group in mesh.groups(axes)) for unit in units)
    whole = (*extents, 1, 1)[:3]
    assert whole == (-(-mesh.size(axes) // nodes), -(-nodes // racks), racks)


def test_a_large_mesh_is_quick() -> None:
    mesh = Mesh(dp=64, pp=16, cp=16, ep=8, tp=8)
    hardware = files.named("h200").on(mesh)
    assert hardware.group_of(mesh, ("tp",)) == Group((8,))
    assert hardware.group_of(mesh, ("ep",)) == Group((1, 8))
    assert hardware.group_of(mesh, ("cp",)) == Group((1, 4, 4))
    assert hardware.group_of(mesh, ("dp", "tp")) == Group((8, 1, 64))


# ---------------------------------------------------------------------- collectives
@pytest.mark.parametrize("name", NAMED)
@given(
    kind=st.sampled_from(KINDS), group=st.sampled_from(GROUPS), a=st.floats(0, 2**34), b=st.floats(0, 2**34),
    graph=st.booleans(),
)  # fmt: skip
def test_a_collective_never_takes_less_for_more(
    name: str, kind: str, group: Group, a: float, b: float, graph: bool
) -> None:
    hardware = files.named(name)
    less, more = (hardware.collective_seconds(kind, size, group, graph=graph) for size in sorted((a, b)))
    assert 0 < less <= more * (1 + 1e-9)
    assert more < 1e3


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("kind", KINDS)
def test_links_are_no_faster_than_their_rate(name: str, kind: str) -> None:
    hardware = files.named(name)
    for group in GROUPS:
        rate = 2**34 * sent_share(kind, group.extents[0]) / hardware.collective_seconds(kind, 2**34, group)
        assert rate < 1.1 * hardware.link_bytes_per_second
        if len(group.extents) > 1 and group.extents[0] == 1:
            rate = 2**34 * sent_share(kind, group.size) / hardware.collective_seconds(kind, 2**34, group)
            assert 0.5 < rate / hardware.network_bytes_per_second < 1.1, group


def test_nodes_share_what_goes_over_the_network() -> None:
    """Of a group of 8 in each of 4 nodes, a rank sends an eighth of what one of 4 ranks sends that are alone."""
    flat = Hardware(link_bytes_per_second=1e12, network_bytes_per_second=1e10, collective_start_seconds=1e-9)
    levels = [{"name": "node"}, {"name": "network"}]
    hardware = Hardware.of({**flat.quantities(), "links": levels})
    for kind, part in {"all_reduce": 8, "all_gather": 8, "reduce_scatter": 8, "all_to_all": 1, "permute": 1}.items():
        alone = hardware.collective_seconds(kind, 2**30, Group((1, 4)))
        assert hardware.collective_seconds(kind, 2**30, Group((8, 4))) == pytest.approx(alone / part, rel=1e-3)
        assert hardware.collective_seconds(kind, 2**30, Group((8,))) == pytest.approx(
            flat.collective_seconds(kind, 2**30, Group((8,))), rel=1e-6
        )


def of_series(*series: dict[str, Any], **level: Any) -> Hardware:
    return Hardware.of({"links": [{"name": "node", **level, "series": series}]})


def test_groups_between_and_beyond() -> None:
    hardware = of_series(
        {"kind": "all_gather", "group": 2, "latency_seconds": 1e-5, "bytes_per_second": 1e11},
        {"kind": "all_gather", "group": 8, "latency_seconds": 3e-5, "bytes_per_second": 1e11},
        doubling_seconds=4e-6,
    )
    for group, latency in ((2, 1e-5), (4, 2e-5), (8, 3e-5), (32, 3.8e-5)):
        for size in (0, 2**20, 2**30):
            expected = latency + size * (group - 1) / group / 1e11
            assert hardware.collective_seconds("all_gather", size, Group((group,))) == pytest.approx(expected)
    # Relatives: as much is sent by a reduce-scatter, twice as much by an all-reduce, whose start is two.
    gather = hardware.collective_seconds("all_gather", 2**20, Group((4,)))
    assert hardware.collective_seconds("reduce_scatter", 2**20, Group((4,))) == gather
    assert hardware.collective_seconds("all_reduce", 2**20, Group((4,))) == pytest.approx(2 * gather)
    assert hardware.collective_seconds("all_gather", 2**20, Group((4,)), graph=True) == gather
    assert hardware.collective_seconds("all_gather", 2**20, Group((1,))) == 0
    flat = DEFAULT.collective_seconds("permute", 2**20, Group((4,)))  # no relative has a table
    assert hardware.collective_seconds("permute", 2**20, Group((4,))) == flat


def test_a_graph_has_tables_of_its_own() -> None:
    series = {"kind": "permute", "group": 2, "bytes_per_second": 1e11}
    hardware = of_series({**series, "latency_seconds": 4e-5}, {**series, "latency_seconds": 2e-5, "graph": True})
    times = [hardware.collective_seconds("send", 0, Group((2,)), graph=graph) for graph in (False, True)]
    assert times == pytest.approx([4e-5, 2e-5])


def test_contention_slows_both() -> None:
    hardware = Hardware.of({"contention": {"product": 1.5, "attention": 2, "memory": 3, "collective": 4}})
    for slowdown, alone, beside in (
        (1.5, *(hardware.product_seconds(1, 64, 64, 64, BF16, contended=c) for c in (False, True))),
        (2.0, *(hardware.attention_seconds(2**20, BF16, contended=c) for c in (False, True))),
        (3.0, *(hardware.memory_seconds(2**20, contended=c) for c in (False, True))),
        (4.0, *(hardware.collective_seconds("send", 9, Group((2,)), contended=c) for c in (False, True))),
    ):
        assert beside == pytest.approx(slowdown * alone)


def test_meetings_grow_as_the_root_of_the_time() -> None:
    meetings = Hardware.of({"meetings": {"jitter_seconds": 1e-4}}).tables.meetings
    assert [meetings.wait(t) for t in (0.0, 1e-2, 4e-2)] == pytest.approx([0, 1e-3, 2e-3])
    assert Hardware().tables.meetings.wait(1.0) == 0


def test_ranks_that_keep_their_speed_first_wait_as_long_as_the_time_itself() -> None:
    steady = Hardware.of({"meetings": {"jitter_seconds": 2e-4, "steady_seconds": 1e-2}}).tables.meetings
    assert [steady.wait(t) for t in (0.0, 1e-5, 2e-5)] == pytest.approx([0, 1e-6, 2e-6], rel=1e-3)
    assert steady.wait(10.0) == pytest.approx((2e-4 * 9.99) ** 0.5, rel=1e-6)
    times = [steady.wait(10**n) for n in range(-12, 3)]
    assert times == sorted(times)


def test_a_product_beside_a_collective_loses_rounds_of_its_tiles() -> None:
    """Of 4 units one is taken: 4 tiles take two rounds for one, 8 three for two, and 3 lose nothing."""
    table = {"dtypes": ["bfloat16"], "flops_per_second": 1e12, "units": 4, "tiles": [[[128, 128], 1.0]]}
    hardware = Hardware.of(
        {"products": [table], "contention": {"product": 9, "units": 1}, "memory_bytes_per_second": 1e18}
    )
    for rows, slower in ((4, 2), (8, 1.5), (3, 1), (400, 134 / 100)):
        times = [hardware.product_seconds(1, 128 * rows, 128, 128, BF16, contended=c) for c in (False, True)]
        assert times[1] == pytest.approx(slower * times[0])
    assert hardware.product_seconds(1, 8, 8, 8, torch.float32, contended=True) == pytest.approx(
        9 * hardware.product_seconds(1, 8, 8, 8, torch.float32)
    ), "no tiles are known of it"


def test_a_product_that_memory_bounds_is_slowed_as_memory_is() -> None:
    table = {"dtypes": ["bfloat16"], "flops_per_second": 1e18, "units": 4, "tiles": [[[128, 128], 1.0]]}
    contention = {"units": 1, "memory": 1.25}
    hardware = Hardware.of({"products": [table], "contention": contention, "memory_bytes_per_second": 1e9})
    times = [hardware.product_seconds(1, 512, 128, 128, BF16, contended=c) for c in (False, True)]
    assert times[1] == pytest.approx(1.25 * times[0])


def test_scores_in_memory_take_longer_where_heads_are_narrow() -> None:
    figures = {"dtypes": ["bfloat16"], "flops_per_second": 1e12}
    plain, scores = (Hardware.of({"attention": [{**figures, **more}]}) for more in ({}, {"score_width": 96}))
    for width, ratio in ((32, 4), (96, 2), (0, 1)):
        times = [hardware.attention_seconds(2**30, BF16, width=width) for hardware in (plain, scores)]
        assert times[1] == pytest.approx(ratio * times[0])


# ---------------------------------------------------------------------- products and attention
def rate(**other: Any) -> ProductRate:
    return ProductRate.model_validate({"dtypes": ("bfloat16",), "flops_per_second": 1e12, **other})


def test_a_half_empty_wave_takes_as_long_as_a_full_one() -> None:
    tiles = (((128, 128), 1.0),)
    surface = rate(units=4, tiles=tiles)
    full = surface.seconds(1, 256, 256, 64, 1e12)
    assert full == pytest.approx(2 * 256 * 256 * 64 / 1e12)
    assert surface.seconds(1, 256, 257, 64, 1e12) == pytest.approx(2 * full)
    assert surface.seconds(1, 256, 512, 64, 1e12) == pytest.approx(2 * full)
    assert surface.seconds(1, 1, 1, 64, 1e12) == pytest.approx(full)
    smaller = rate(units=4, tiles=(*tiles, ((64, 64), 0.5)))
    assert smaller.seconds(1, 64, 64, 64, 1e12) == pytest.approx(full / 2)  # a quarter of the tile, at half the rate


def test_few_tiles_split_their_depth() -> None:
    surface = rate(units=16, tiles=(((128, 128), 1.0),))
    whole, sums = 16 * 2 * 128 * 128 * 4096 / 1e12, 8 * 16 * 128 * 128
    assert surface.seconds(1, 128, 128, 4096, 1e18) == pytest.approx(whole / 16, rel=1e-6)
    assert surface.seconds(1, 128, 128, 4096, 1e12) == pytest.approx(whole / 16 + sums / 1e12)
    assert surface.seconds(1, 128, 128, 255, 1e18) == pytest.approx(16 * 2 * 128 * 128 * 255 / 1e12)  # too short


def test_a_tile_and_a_product_have_starts() -> None:
    surface = rate(start_seconds=1e-3, depth_start=100)
    assert surface.seconds(2, 3, 5, 7, 1e12) == pytest.approx(1e-3 + 2 * 2 * 3 * 5 * 107 / 1e12)


def test_samples_correct_what_the_figures_leave() -> None:
    shape, near, far = (1, 512, 512, 512), (1, 512, 520, 512), (1, 8, 8, 8)
    plain, corrected = rate(), rate(samples=((*shape, 1e-3), (1, 8192, 8192, 8192, 1.1)))
    assert corrected.seconds(*shape, 1e12) == pytest.approx(1e-3)
    ratio = 1e-3 / plain.seconds(*shape, 1e12)
    assert corrected.seconds(*near, 1e12) / plain.seconds(*near, 1e12) == pytest.approx(ratio, rel=0.01)
    assert 1 < corrected.seconds(*far, 1e12) / plain.seconds(*far, 1e12) < ratio


@pytest.mark.parametrize("name", NAMED)
@given(shape=st.tuples(*(st.integers(1, n) for n in (64, 20000, 20000, 20000))))
def test_a_product_is_no_faster_than_the_device(name: str, shape: tuple[int, int, int, int]) -> None:
    hardware = files.named(name)
    taken = hardware.product_seconds(*shape, BF16)
    batch, rows, columns, depth = shape
    assert taken >= 2 * math.prod(shape) / (1.2 * hardware.bf16_flops_per_second)
    assert taken >= hardware.memory_seconds(2 * batch * (rows * depth + depth * columns + rows * columns)) * (1 - 1e-12)
    assert taken < 1e3


def test_8_bit_products_have_bfloat16s_tiles_at_a_rate_of_their_own() -> None:
    figures = {"bf16_flops_per_second": 1e12, "fp8_flops_per_second": 2e12, "memory_bytes_per_second": 1e18}
    table = {"dtypes": ["bfloat16"], "flops_per_second": 1e12, "units": 4, "tiles": [[[128, 128], 0.5]]}
    for tables in ({}, {"products": [table]}):
        hardware = Hardware.of({**figures, **tables})
        for shape in ((1, 256, 256, 64), (1, 264, 264, 64), (2, 512, 8, 4096)):
            wide, narrow, other = (
                hardware.product_seconds(*shape, dtype) for dtype in (BF16, torch.float8_e4m3fn, torch.float8_e5m2)
            )
            assert narrow == other == pytest.approx(wide / 2)
    slow = Hardware.of({**figures, "products": [table], "memory_bytes_per_second": 1e9})
    assert slow.product_seconds(1, 256, 64, 128, torch.float8_e4m3fn) == pytest.approx(
        (256 * 128 + 64 * 128 + 2 * 256 * 64) / 1e9
    ), "operands of a byte, and a result of two"


def test_odd_rows_are_slow_and_one_row_is_not() -> None:
    hardware = files.named("h200")
    aligned, odd = (hardware.product_seconds(1, 8192, n, 4096, BF16) for n in (50264, 50257))
    assert odd == pytest.approx(4 * aligned, rel=0.01)
    one, eight = (hardware.product_seconds(1, n, 4096, 4096, BF16) for n in (1, 8))
    assert one == pytest.approx(eight, rel=0.01)
    assert hardware.product_seconds(1, 64, 0, 64, BF16) == 0


def test_dtypes_without_a_table_take_the_flat_rate() -> None:
    hardware = files.named("h200")
    assert hardware.product_seconds(1, 64, 64, 64, torch.float32) == pytest.approx(2 * 64**3 / 6.7e13, rel=1e-3)
    assert hardware.attention_seconds(10**9, torch.float32) == pytest.approx(10**9 / 6.7e13, rel=1e-3)


def test_attention_by_direction_backend_sequence_and_width() -> None:
    entry = AttentionRate(
        dtypes=("bfloat16",), flops_per_second=1e14, start_seconds=1e-5, key_seconds=1e-9, tile=128, backend="a",
        widths=((64, 0.5),),
    )  # fmt: skip
    backward = {"dtypes": ["bfloat16"], "flops_per_second": 5e13, "backward": True, "backend": "b"}
    hardware = Hardware.of({"attention": [entry.model_dump(), backward]})
    flops = 10**11
    assert hardware.attention_seconds(flops, BF16, sequence=1024, width=128) == pytest.approx(
        1e-5 + 1024e-9 + flops * 1.125 / 1e14
    )
    assert hardware.attention_seconds(flops, BF16, sequence=1024, width=64) == pytest.approx(
        1e-5 + 1024e-9 + flops * 1.125 / 5e13
    )
    assert hardware.attention_seconds(flops, BF16, backward=True) == pytest.approx(flops / 5e13)
    assert hardware.attention_seconds(flops, BF16, backend="b") == DEFAULT.attention_seconds(flops, BF16)


# ---------------------------------------------------------------------- changes, records, errors
def test_the_default_has_no_tables() -> None:
    assert DEFAULT.tables == Tables()
    assert files.read_file(files.packaged("hardware")["default"]).tables == Tables()


@pytest.mark.parametrize("name", [*NAMED, "default"])
def test_tables_survive_files_and_plans(name: str) -> None:
    hardware = files.named(name)
    assert Hardware.of(json.loads(json.dumps(hardware.quantities()))) == hardware
    assert hash(hardware) == hash(Hardware.of(hardware.quantities()))
    changed = Plan.from_dict({"hardware": {"like": name, "bucket_bytes": 4096}})
    assert changed.hardware.value.tables == hardware.tables
    for plan in (changed, changed.self_contained()):
        assert Plan.parse(plan.dump()).hardware.value == changed.hardware.value


def test_what_was_asked_before_makes_no_difference() -> None:
    samples = {"products": [{**rate().model_dump(), "samples": [[1, 8, 8, 8, 1e-6]]}]}
    first, second = (Hardware.of({**files.named("h200").quantities(), **samples}) for _ in range(2))
    first.collective_seconds("all_reduce", 2**20, Group((4,)))
    first.product_seconds(1, 8, 8, 16, BF16)
    assert first == second
    assert hash(first) == hash(second)
    assert first.quantities() == second.quantities()
    assert first.tables.links[0].changed(series=()).seconds("all_reduce", 2**20, 4, graph=False) is None
    product = first.tables.products[0]
    assert product.changed(samples=()).seconds(1, 8, 8, 8, 1e12) == product.model_seconds(1, 8, 8, 8, 1e12)


def test_a_changed_quantity_leaves_out_what_it_contradicts() -> None:
    h200 = files.named("h200")
    slower = h200.changed({"link_bytes_per_second": 1e10})
    assert slower.collective_seconds("permute", 2**30, Group((4,))) == pytest.approx(20e-6 + 2**30 / 1e10)
    network = h200.collective_seconds("permute", 2**30, Group((1, 4)))
    assert slower.collective_seconds("permute", 2**30, Group((1, 4))) == network
    assert slower.tables.memory == h200.tables.memory
    network = h200.changed({"network_bytes_per_second": 1e10})
    assert network.tables.links[0] == h200.tables.links[0]
    assert network.collective_seconds("permute", 2**30, Group((1, 4))) == pytest.approx(20e-6 + 2**30 / 1e10)
    assert h200.changed({"memory_bytes_per_second": 1e12}).memory_seconds(2**30) == 2**30 / 1e12
    products = h200.changed({"bf16_flops_per_second": 1e12, "bucket_bytes": 4096})
    assert products.product_seconds(1, 64, 64, 64, BF16) == 2 * 64**3 / 1e12
    assert products.attention_seconds(10**9, BF16) == 1e-3
    assert h200.changed({"fp32_flops_per_second": 1e12}).tables == h200.tables
    assert h200.changed({"contention": {"product": 2}}).tables.contention.product == 2


WRONG = [
    ("memory: {16: 1.0e-6, 4: 1.0e-6}", "memory", "sizes have to grow"),
    ("memory: {4: 2.0e-6, 16: 1.0e-6}", "memory", "takes less than"),
    ("memory: {4: -1}", "memory", "greater than 0"),
    ("memory: fast", "memory", "valid tuple"),
    ("products:\n- {dtypes: [bfloat16], flops_per_second: 7}", "products.0.flops_per_second", "greater than"),
    ("attention:\n- {dtypes: [bf16], flops_per_second: 1.0e+12}", "attention.0.dtypes.0", "should be 'bfloat16'"),
    ("products:\n- {dtypes: [bfloat16], flops_per_second: 1.0e+12, tile: 7}", "products.0.tile", "extra"),
    ("links:\n- name: node\n  series:\n  - {kind: all_reduce, group: 1, seconds: {1: 1}}", "group", "greater"),
    ("links:\n- name: node\n  series:\n  - {kind: gossip, group: 2, seconds: {1: 1}}", "kind", "'all_reduce'"),
    ("links:\n- name: node\n  series:\n  - {kind: send, group: 2}", "series.0", "a series has seconds, or"),
    ("contention: {product: 0.5}", "contention.product", "greater than"),
    ("contention: {cores: 1.5}", "contention.cores", "less than"),
    ("meetings: {jitter_seconds: -1}", "meetings.jitter_seconds", "greater than or"),
    ("elements: {gelu: 0}", "elements.0.1", "be greater than 0"),
]


@pytest.mark.parametrize(("text", "place", "said"), WRONG, ids=[said for _, _, said in WRONG])
def test_what_is_wrong_in_a_table_is_cited(tmp_path: Any, text: str, place: str, said: str) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(f"accelerators_per_node: 4\n{text}\n")
    with pytest.raises(ShardcError) as caught:
        files.read_file(path)
    first = caught.value.diagnostics[0]
    assert (first.code, first.location) == ("SC208", f"{path}:{1 + len(text.splitlines())}")
    assert place in first.message
    assert said in first.message
    assert "docs/reference/hardware.md" in (first.hint or "")
    indented = "\n".join(f"  {line}" for line in text.splitlines())
    with pytest.raises(ShardcError) as caught:
        Plan.parse(f"hardware:\n{indented}\n", "plan.yaml")
    assert caught.value.diagnostics[0].location == "plan.yaml:2"
    with pytest.raises(ShardcError, match="SC208"):
        Hardware.of({"links": 3})


def test_a_file_is_like_another(tmp_path: Any) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text("like: h200\nnetwork_bytes_per_second: 1e10\n")
    assert files.hardware(path) == files.named("h200").changed({"network_bytes_per_second": 1e10})
    assert files.hardware("h200") == files.hardware(files.named("h200-nvlink"))
    for wrong in ("like: h20", "like: [h200]"):
        path.write_text(wrong)
        with pytest.raises(ShardcError) as caught:
            files.read_file(path)
        assert caught.value.diagnostics[0].location == f"{path}:1"
    with pytest.raises(ShardcError, match="there is no hardware named 'h20'"):
        files.hardware("h20")
