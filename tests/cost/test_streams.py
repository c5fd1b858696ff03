"""Graphs written by hand on the streams of a rank: times that follow by arithmetic, and what holds of every graph.

Longer than 400 lines: all cases are graphs of few lines, on the same streams.
"""

import dataclasses
import operator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from shardc.cost.call_seconds import CallCost, call_costs
from shardc.cost.streams import ADDITION, COMPUTE, Timed, run
from shardc.ir.graph import Graph, info, operands
from shardc.ir.hardware import Hardware
from shardc.ir.mesh import Mesh
from shardc.ir.ops.local import axis_offset
from shardc.ir.small_sums import SMALL
from shardc.torch_compat import ADDED_AT_ONCE
from tests.handmade import Builder, aten

SIZE = 64
PRODUCT = 2 * SIZE**3 / 1e12  # seconds
MESH = Mesh(a=2, b=2)
TYPE = f"f32[{SIZE}, {SIZE}]"
REDUCED = SIZE * SIZE * 4 / 1e9  # of 2 ranks: 2 (k - 1) / k of the bytes
NOTHING = 1e-9  # the least that a delay of hardware may be
FLAT = Hardware(
    bf16_flops_per_second=1e12,
    fp32_flops_per_second=1e12,
    memory_bytes_per_second=1e18,
    link_bytes_per_second=1e9,
    network_bytes_per_second=1e9,
    collective_start_seconds=NOTHING,
    kernel_launch_seconds=NOTHING,
    kernel_gap_seconds=NOTHING,
)


RATES = ("link_bytes_per_second", "fp32_flops_per_second")


class Drawn:
    """Products and all-reduces of square matrices, in order; each reads values that are there."""

    def __init__(self) -> None:
        self.builder = Builder(MESH)
        self.weight = self.builder.input("w", TYPE)
        self.values = [self.builder.input("x", TYPE, "input")]

    def product(self, of: int = -1) -> None:
        name = f"mm{len(self.values)}"
        self.values.append(self.builder.call(name, TYPE, aten.mm.default, self.values[of], self.weight))

    def reduce(self, axis: str = "a", of: int = -1) -> None:
        partial = self.builder.call(
            f"part{len(self.values)}", f"{TYPE} |sum {axis}", aten.mm.default, self.values[of], self.weight
        )
        self.values += [partial, self.builder.all_reduce(f"sum{len(self.values)}", partial, TYPE, axis)]

    def graph(self) -> Graph:
        for index, value in enumerate(self.values):
            if not value.users:
                self.builder.output("output", f"y{index}", value)
        return self.builder.graph()


def beside_a_collective(products: int) -> Graph:
    """A product, a collective beside so many products, and a product of both."""
    drawn = Drawn()
    drawn.reduce()
    reduced = len(drawn.values) - 1
    drawn.product(0)
    for _ in range(products - 1):
        drawn.product()
    beside = drawn.values[-1]
    drawn.values.append(drawn.builder.call("both", TYPE, aten.mm.default, drawn.values[reduced], beside))
    return drawn.graph()


def timed(graph: Graph, hardware: Hardware = FLAT) -> tuple[Timed, dict[fx.Node, CallCost]]:
    costs = call_costs(graph, hardware)
    return run(graph, costs, hardware), costs


def test_a_chain_adds_up() -> None:
    drawn = Drawn()
    drawn.product()
    drawn.reduce()
    drawn.product()
    found, _ = timed(drawn.graph())
    assert found.seconds == pytest.approx(3 * PRODUCT + REDUCED, rel=1e-2)
    assert sum(seconds for _, seconds in found.exposed) == pytest.approx(REDUCED, rel=1e-2)
    assert found.kinds["product"] == pytest.approx(3 * PRODUCT)


@pytest.mark.parametrize("products", [1, 10, 100])
def test_a_collective_hides_behind_as_many_products_as_it_is_long(products: int) -> None:
    found, _ = timed(beside_a_collective(products))
    hidden = products * PRODUCT
    assert found.seconds == pytest.approx(2 * PRODUCT + max(hidden, REDUCED), rel=1e-2)
    assert sum(seconds for _, seconds in found.exposed) == pytest.approx(max(0.0, REDUCED - hidden), abs=1e-7)


def test_groups_have_streams_of_their_own() -> None:
    """Along one axis two collectives take turns; along two they run at once."""
    seconds: dict[str, float] = {}
    for axes in ("aa", "ab"):
        drawn = Drawn()
        drawn.reduce(axes[0], 0)
        drawn.reduce(axes[1], 0)
        seconds[axes] = timed(drawn.graph())[0].seconds
    assert seconds["aa"] == pytest.approx(PRODUCT + 2 * REDUCED, rel=1e-2)
    assert seconds["ab"] == pytest.approx(2 * PRODUCT + REDUCED, rel=1e-2)


def test_kernels_shorter_than_their_launches_wait_for_the_host() -> None:
    drawn = Drawn()
    for _ in range(10):
        drawn.product()
    slow = dataclasses.replace(FLAT, kernel_launch_seconds=10 * PRODUCT)
    found, _ = timed(drawn.graph(), slow)
    assert found.seconds == pytest.approx(10 * 10 * PRODUCT + PRODUCT, rel=1e-2)
    assert found.idle == pytest.approx(found.seconds - 10 * PRODUCT, rel=1e-2)
    assert (found.launches, found.host) == (10, pytest.approx(100 * PRODUCT))


def test_what_a_collective_waits_for_the_host_is_the_hosts() -> None:
    """A product, a copy of its result and the all-reduce are launched one after another, each as long as it takes."""
    drawn = Drawn()
    drawn.reduce()
    found, _ = timed(drawn.graph(), dataclasses.replace(FLAT, kernel_launch_seconds=REDUCED))
    assert found.seconds == pytest.approx(4 * REDUCED, rel=1e-2)
    assert sum(seconds for _, seconds in found.exposed) == pytest.approx(REDUCED, rel=1e-2)
    assert found.idle == pytest.approx(3 * REDUCED - PRODUCT, rel=1e-2)


def test_work_beside_a_collective_takes_longer() -> None:
    """By the tables' factor, for as long as both are under way."""
    drawn = Drawn()
    drawn.reduce()
    reduced = len(drawn.values) - 1
    drawn.product(0)
    for _ in range(7):
        drawn.product()
    beside = drawn.values[-1]
    drawn.values.append(drawn.builder.call("both", TYPE, aten.mm.default, drawn.values[reduced], beside))
    graph = drawn.graph()
    tables = FLAT.tables.model_validate({"contention": {"product": 1.5}})
    found, _ = timed(graph, dataclasses.replace(FLAT, tables=tables))
    assert REDUCED > 8 * 1.5 * PRODUCT  # all eight run beside it
    assert found.kinds["product"] == pytest.approx((2 + 8 * 1.5) * PRODUCT, rel=1e-2)
    assert found.seconds == pytest.approx(2 * PRODUCT + REDUCED, rel=1e-2)


@pytest.mark.parametrize(("units", "slower"), [(2, 1), (1, 2)])
def test_products_beside_a_collective_lose_rounds_of_tiles(units: int, slower: int) -> None:
    """Of two tiles: none with two units left, one with one left. `product` is for those whose tiles are not known."""
    table = {"dtypes": ["float32"], "flops_per_second": 1e12, "units": 3, "tiles": [[[SIZE, SIZE // 2], 1.0]]}
    alone = with_tables(products=[table])
    beside = with_tables(products=[table], contention={"product": 9, "units": 3 - units})
    one, both = (timed(beside_a_collective(8), hardware)[0].kinds["product"] for hardware in (alone, beside))
    assert both == pytest.approx(one * (2 + 8 * slower) / 10, rel=1e-2)


def test_a_kernel_is_slowed_by_every_collective_under_way() -> None:
    """Four in a row on one stream, behind them a chain of products: all of it but the end runs beside one of them."""
    drawn = Drawn()
    for _ in range(4):
        drawn.reduce("a", 0)
    for _ in range(50):
        drawn.product(0)
    alone, _ = timed(drawn.graph())
    slowed, _ = timed(drawn.graph(), with_tables(contention={"product": 2}))
    beside = 2 * (alone.kinds["product"] - 4 * PRODUCT)
    assert beside < 4 * REDUCED, "the collectives outlast it"
    assert slowed.kinds["product"] == pytest.approx(beside + 4 * PRODUCT, rel=0.03)


@pytest.mark.parametrize("products", [1, 10, 100])
def test_collectives_beside_work_push_back_those_behind_them(products: int) -> None:
    """Two in a row take twice as long beside products, and no longer than alone where nothing runs beside them."""
    drawn = Drawn()
    drawn.reduce("a", 0)
    first = drawn.values[-1]
    drawn.reduce("a", 0)
    second = drawn.values[-1]
    drawn.product(0)
    for _ in range(products - 1):
        drawn.product()
    for name, reduced in (("both", second), ("all", first)):
        drawn.values.append(drawn.builder.call(name, TYPE, aten.mm.default, reduced, drawn.values[-1]))
    found, _ = timed(drawn.graph(), with_tables(contention={"collective": 2}))
    work = (products + 1) * PRODUCT  # with the second one's operand
    sent = 2 * REDUCED + min(2 * REDUCED, work / 2)  # of what is beside them, half is lost
    assert found.seconds == pytest.approx(PRODUCT + max(sent, work) + 2 * PRODUCT, rel=1e-2)


def with_tables(**tables: object) -> Hardware:
    return dataclasses.replace(FLAT, tables=FLAT.tables.model_validate(tables))


@pytest.mark.parametrize("products", [1, 100])
def test_a_collective_on_the_computes_cores_hides_what_is_left(products: int) -> None:
    """Compute stands still for 0.75 of it, wherever it is waited for; the rest passes behind products."""
    found, _ = timed(beside_a_collective(products), with_tables(contention={"cores": 0.75}))
    taken, hidden = 0.75 * REDUCED, products * PRODUCT
    assert found.taken == pytest.approx(taken, rel=1e-3)
    assert found.seconds == pytest.approx(2 * PRODUCT + taken + max(hidden, REDUCED - taken), rel=1e-2)
    exposed = taken + max(0.0, REDUCED - taken - hidden)
    assert sum(seconds for _, seconds in found.exposed) == pytest.approx(exposed, rel=1e-2)
    assert found.compute == pytest.approx(sum(found.by_call.values()), rel=1e-2)


@pytest.mark.parametrize("products", [1, 100])
def test_a_collective_takes_of_the_work_beside_it_besides(products: int) -> None:
    """As much of each, but not more than there is, and nothing where nothing runs beside it."""
    switch = 2 * PRODUCT
    plain, beside = (
        timed(beside_a_collective(products), with_tables(contention={"cores": 0.75, "switch_seconds": seconds}))[0]
        for seconds in (0.0, switch)
    )
    more = min(switch, products * PRODUCT)
    assert beside.taken == pytest.approx(plain.taken + more, rel=1e-3)
    waited = Drawn()
    waited.reduce()
    waited.product()
    alone, _ = timed(waited.graph(), with_tables(contention={"cores": 0.75, "switch_seconds": switch}))
    assert alone.taken == pytest.approx(0.75 * REDUCED, rel=1e-3)
    assert beside.compute == pytest.approx(sum(beside.by_call.values()), rel=1e-2)


def test_a_collective_that_has_passed_takes_nothing_more() -> None:
    """The first, in front of one that is waited for, takes of the product between their beginnings alone."""
    drawn = Drawn()
    drawn.reduce()
    first = len(drawn.values) - 1
    drawn.reduce(of=0)
    drawn.product()
    last = drawn.values[-1]
    drawn.values.append(drawn.builder.call("both", TYPE, aten.mm.default, drawn.values[first], last))
    hardware = with_tables(contention={"cores": 0.75, "switch_seconds": 2 * PRODUCT})
    found, _ = timed(drawn.graph(), hardware)
    assert found.taken == pytest.approx(2 * 0.75 * REDUCED + PRODUCT, rel=1e-3)


@pytest.mark.parametrize("size", [SMALL // 4, SMALL // 4 + 1])
def test_terms_of_small_sums_are_added_by_one_call(size: int) -> None:
    """As long as if each had a call of its own, as large ones have: their bytes are read twice and written."""
    builder = Builder(MESH)
    x = builder.input("x", f"f32[2, {size}]", "input")
    made = builder.call("both", None, aten.var_mean.correction, x, [0])
    for name, index in (("variance", 0), ("mean", 1)):
        value = builder.call(name, f"f32[{size}]", operator.getitem, made, index)
        builder.output("sum", name, value)
    hardware = dataclasses.replace(FLAT, memory_bytes_per_second=1e9)
    spans = timed(builder.graph(), hardware)[0].spans
    seconds = [span.end - span.start for span in spans if span.name.endswith(ADDITION)]
    one = 3 * 4 * size / 1e9
    assert seconds == pytest.approx([2 * one] if 4 * size <= SMALL else [one, one], rel=1e-3)


def test_many_small_sums_are_several_launches() -> None:
    def launches(count: int) -> int:
        builder = Builder(MESH)
        x = builder.input("x", TYPE, "input")
        for k in range(count):
            value = builder.call(f"y{k}", TYPE, aten.mul.Tensor, x, float(k))
            builder.output("sum", f"y{k}", value)
        return timed(builder.graph(), FLAT)[0].launches - count

    assert [launches(count) for count in (1, 2, ADDED_AT_ONCE, ADDED_AT_ONCE + 1)] == [1, 1, 1, 2]


def test_ranks_meet_later_the_longer_they_have_computed() -> None:
    """After n products: root of (jitter * n products). What follows a collective at once meets nobody who is late."""
    jitter = 10 * PRODUCT
    drawn = Drawn()
    drawn.product()
    drawn.product()
    drawn.reduce()  # after three products
    reduced = drawn.values[-1]
    for name in ("next", "last"):
        again = drawn.builder.call(f"{name}.part", f"{TYPE} |sum b", aten.view.default, reduced, [SIZE, SIZE])
        reduced = drawn.builder.all_reduce(name, again, TYPE, "b")
        drawn.values.append(reduced)
    found, _ = timed(drawn.graph(), with_tables(meetings={"jitter_seconds": jitter}))
    late = (jitter * 3 * PRODUCT) ** 0.5
    assert found.met == pytest.approx(late, rel=1e-2)
    assert found.seconds == pytest.approx(3 * PRODUCT + late + 3 * REDUCED, rel=1e-2)


CALLS = {"first": {4096: 2e-6, 2**15: 40e-6}, "later": {4096: 2e-6, 2**15: 20e-6}}


def test_calls_after_kernels_that_fill_the_caches() -> None:
    """A kernel takes what its table says after one that fills them, less by what a call does after one that does not;
    a view what a call does; and a view of a parameter nothing."""
    builder = Builder(MESH)
    x, w = builder.input("x", TYPE, "input"), builder.input("w", TYPE)
    table = builder.input("table", TYPE, "buffer")
    y = builder.call("y", TYPE, aten.neg.default, x)  # moves 32 KiB, as much as fills the caches
    row = builder.call("row", f"f32[1, {SIZE * SIZE}]", aten.view.default, y, [1, SIZE * SIZE])
    back = builder.call("back", TYPE, aten.view.default, row, [SIZE, SIZE])
    z = builder.call("z", TYPE, aten.neg.default, back)
    turned = builder.call("turned", TYPE, aten.t.default, w)
    flipped = builder.call("flipped", TYPE, aten.t.default, table)  # of a buffer that stays
    builder.call("offset", "i64[]", axis_offset, ["a"], [1])
    product = builder.call("product", TYPE, aten.mm.default, z, turned)
    small = builder.call("small", "f32[64]", aten.sum.dim_IntList, product, [0])
    for name in ("tiny", "again"):
        small = builder.call(name, "f32[64]", aten.neg.default, small)
    both = builder.call("both", TYPE, aten.mm.default, flipped, turned)
    builder.output("output", "out", small)
    builder.output("output", "both", both)
    products = [{"dtypes": ["float32"], "flops_per_second": 1e12}]
    hardware = with_tables(memory={0: 50e-6, 2**16: 50e-6, 2**30: 1.0}, products=products, calls=CALLS)
    found, costs = timed(builder.graph(), hardware)
    seconds = {info(node).name: cost.seconds for node, cost in costs.items()}
    after_small = 2e-6 + (40e-6 - 2e-6) * (2**14 + 256 - 4096) / (2**15 - 4096)
    assert seconds == pytest.approx(
        {
            "y": 50e-6, "row": 40e-6, "back": 20e-6, "z": 30e-6, "turned": 0.0, "flipped": 0.0, "offset": 0.0,
            "product": 50e-6, "small": 50e-6, "tiny": 50e-6 - (40e-6 - after_small), "again": 12e-6, "both": 12e-6,
        },
        rel=1e-2,
    )  # fmt: skip
    assert found.seconds == pytest.approx(sum(seconds.values()), rel=1e-3)
    assert found.launches == 7


def test_no_kernel_takes_less_than_nothing() -> None:
    """A product of which no table says that calling is in its time takes that time, whatever came before it."""
    builder = Builder(MESH)
    x, row = builder.input("x", TYPE, "input"), builder.input("row", "f32[64]", "input")
    builder.output("output", "small", builder.call("small", "f32[64]", aten.neg.default, row))
    builder.output("output", "y", builder.call("y", TYPE, aten.mm.default, x, x))
    (_, small), (_, product) = timed(builder.graph(), with_tables(calls=CALLS))[1].items()
    assert product.seconds == pytest.approx(PRODUCT)
    assert 0 < small.seconds < 2e-6
    assert with_tables(calls=CALLS).changed({"memory_bytes_per_second": 1e9}).tables.calls.first is None


def test_what_an_op_computes_comes_beside_its_call() -> None:
    builder = Builder(MESH)
    x = builder.input("x", TYPE, "input")
    builder.output("output", "y", builder.call("y", TYPE, aten.gelu.default, x))
    hardware = with_tables(memory={0: 40e-6, 2**30: 1.0}, elements={"gelu": 1e-8}, calls=CALLS)
    (cost,) = timed(builder.graph(), hardware)[1].values()
    assert cost.seconds == pytest.approx(40e-6 + 1e-8 * SIZE * SIZE)


def test_a_hidden_collective_is_no_meeting() -> None:
    """Compute never waits for it, so its ranks need not come at the same time."""
    found, _ = timed(beside_a_collective(100), with_tables(meetings={"jitter_seconds": PRODUCT}))
    assert found.met == 0
    assert found.seconds == pytest.approx(102 * PRODUCT, rel=1e-2)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    drawn = Drawn()
    for _ in range(draw(st.integers(1, 30))):
        of = draw(st.integers(0, len(drawn.values) - 1))
        if draw(st.booleans()):
            drawn.product(of)
        else:
            drawn.reduce(draw(st.sampled_from("ab")), of)
    return drawn.graph()


def longest_path(graph: Graph, costs: dict[fx.Node, CallCost]) -> float:
    ends: dict[fx.Node, float] = {}
    for node in graph.calls():
        ends[node] = costs[node].total + max((ends.get(v, 0.0) for v in operands(node)), default=0.0)
    return max(ends.values())


@settings(max_examples=60, deadline=None)
@given(graph=graphs())
def test_a_step_is_no_shorter_than_any_stream_and_path_and_no_longer_than_all_in_turn(graph: Graph) -> None:
    found, costs = timed(graph)
    busy: dict[str, float] = {}
    for span in found.spans:
        busy[span.stream] = busy.get(span.stream, 0.0) + span.end - span.start
    in_turn = sum(cost.total for cost in costs.values())
    slack = 3 * NOTHING * (found.launches + 1)
    assert found.seconds >= max(busy.values()) - slack
    assert found.seconds >= longest_path(graph, costs) - slack
    assert found.seconds <= in_turn + slack
    assert busy[COMPUTE] + sum(s for _, s in found.exposed) + found.idle + found.gaps == pytest.approx(
        found.compute, abs=slack
    )
    # Each stream runs one span at a time, and none before its operands are there.
    for stream in busy:
        spans = sorted((span.start, span.end) for span in found.spans if span.stream == stream)
        assert all(first[1] <= second[0] + NOTHING for first, second in pairwise(spans))
    ends = {span.name: span.end for span in found.spans}
    starts = {span.name: span.start for span in found.spans}
    for node in graph.calls():
        for value in operands(node):
            if info(value).name in ends:
                assert starts[info(node).name] >= ends[info(value).name] - NOTHING


@settings(max_examples=30, deadline=None)
@given(
    graph=graphs(), times=st.floats(1.01, 100), rate=st.sampled_from(["link_bytes_per_second", "fp32_flops_per_second"])
)
def test_faster_hardware_is_never_slower(graph: Graph, times: float, rate: str) -> None:
    faster = dataclasses.replace(FLAT, **{rate: getattr(FLAT, rate) * times})
    assert timed(graph, faster)[0].seconds <= timed(graph)[0].seconds + 1e-12
