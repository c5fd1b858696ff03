"""Schedules against the formulas of their papers, in units; and all of them, however odd the shape, proved."""

import math
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardc import ShardcError, schedules
from shardc.schedule.build import build
from shardc.schedule.clock import Orders
from shardc.schedule.costs import Costs, StageCost
from shardc.schedule.emit import emit
from shardc.schedule.instructions import Backward, Compute, Dgrad, Forward, Recv, Send, Wgrad
from shardc.schedule.pipeline import chain_pipeline
from shardc.schedule.prove import prove
from shardc.schedule.replay import replay
from shardc.schedule.schedules.judge import peak_activations
from shardc.schedule.timeline import Timeline
from tests.schedule.oracle import broken, homes_of
from tests.schedule.pipelines import PIPELINES

SHAPES = [(1, 1), (2, 2), (2, 8), (4, 4), (4, 12), (5, 10), (8, 32), (16, 64)]
ANY = schedules.names()  # the built-in ones: tests register theirs later
VIRTUAL = {name: schedules.default_virtual(name) for name in ANY if name not in ("greedy", "auto")}


def timeline(name: str, ranks: int, microbatches: int, virtual: int = 1, costs: Costs | None = None) -> Timeline:
    """Each stage's forward takes 1, its dgrad 1 and its wgrad 1, unless told otherwise."""
    return replay(build(chain_pipeline(ranks * virtual), name, microbatches, virtual, costs), costs)


# ---------------------------------------------------------------------- published figures
@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_gpipe(p: int, m: int) -> None:
    drawn = timeline("gpipe", p, m)
    assert drawn.bubble == pytest.approx((p - 1) / m)
    assert drawn.peak_live == (m,) * p


@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_1f1b_has_the_bubble_of_gpipe_and_holds_p(p: int, m: int) -> None:
    drawn = timeline("1f1b", p, m)
    assert drawn.bubble == pytest.approx((p - 1) / m)
    assert drawn.peak_live == tuple(min(p - rank, m) for rank in range(p))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize(("p", "m"), SHAPES[:-1])
def test_interleaved(p: int, m: int, v: int) -> None:
    """Megatron holds 2 (p - 1) + (v - 1) p + 1 microbatches of a stage on rank 0, p (1 + (p - 1) / (p v)) of a rank."""
    drawn = timeline("interleaved", p, m, v)
    assert drawn.bubble == pytest.approx((p - 1) / (v * m))
    assert drawn.peak_live[0] == pytest.approx(min(p + (p - 1) / v, m))


@pytest.mark.parametrize("v", [1, 2, 4])
@pytest.mark.parametrize(("p", "m"), SHAPES[:-1])
def test_breadth_first(p: int, m: int, v: int) -> None:
    drawn = timeline("bfs", p, m, v)
    assert drawn.bubble == pytest.approx((p - 1) / (v * m))
    assert drawn.peak_live == (m,) * p


@pytest.mark.parametrize(("f", "b", "w"), [(1, 1, 1), (2, 3, 1), (3, 3, 2), (4, 4, 3)])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 4), (4, 8), (4, 20), (8, 16), (16, 64)])
def test_zb_h1(p: int, m: int, f: int, b: int, w: int) -> None:
    """Bubble (p - 1)(F + B - W), memory p: table 2 of the paper."""
    drawn = timeline("zb-h1", p, m, costs=Costs((StageCost(f, b, w),) * p))
    assert drawn.makespan == pytest.approx(m * (f + b + w) + (p - 1) * (f + b - w))
    assert drawn.idle(0) == pytest.approx((p - 1) * (f + b - w))
    assert max(drawn.peak_live) == p


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 3), (2, 8), (4, 7), (4, 8), (8, 15), (8, 32), (16, 64)])
def test_zb_v(p: int, m: int) -> None:
    """No bubble between a rank's first work and its last; memory p, the same on every rank."""
    drawn = timeline("zb-v", p, m, 2)
    assert [drawn.idle(rank) for rank in range(p)] == [0.0] * p
    assert drawn.makespan == 6 * m + p - 1  # the ranks start one after another
    assert drawn.peak_live == (p,) * p


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (2, 9), (4, 8), (4, 20), (8, 16), (8, 20)])
@pytest.mark.parametrize(("f", "d", "w"), [(1, 1, 1), (2, 2, 1)])
def test_dualpipe_v(p: int, m: int, f: int, d: int, w: int) -> None:
    """Bubble (PP/2 - 1)(F&B + B - 3W) of DeepSeek's table, with PP = 2p stages, B = d + w, and F&B = F + B."""
    orders = schedules.order("dualpipe-v", 2 * p, 2, m)
    costs = Costs((StageCost(f, d, w),) * 2 * p)
    work = 2 * m * (f + d + w)
    assert makespan_of_pairs(orders, costs) - work == (p - 1) * ((f + d + w) + (d + w) - 3 * w)
    # In the lists a pair's forward hands on its result before its backward begins, which shortens it to ZB-H1's.
    drawn = timeline("dualpipe-v", p, m, 2, costs)
    assert drawn.makespan - work == pytest.approx((p - 1) * (f + d - w))
    assert drawn.peak_live == ((2 * p + 1) / 2 if m > p > 1 else drawn.peak_live[0],) * p
    assert max(drawn.peak_live) <= (2 * p + 1) / 2


def makespan_of_pairs(orders: Orders, costs: Costs) -> float:
    """When all is done, if a forward and the backward after it run as one: both begin together and end together."""
    last, made, spans = len(costs.stages) - 1, dict[tuple[str, int, int], float](), [0.0] * len(orders)
    left = [list(pairs(order, rank == len(orders) - 1)) for rank, order in enumerate(orders)]

    def ready(work: Compute) -> float:
        s, j = work.stage, work.microbatch
        if isinstance(work, Forward):
            return made.get(("F", s - 1, j), math.inf) if s else 0.0
        if isinstance(work, Wgrad):
            return 0.0
        return made.get(("F", s, j) if s == last else ("B", s + 1, j), math.inf)

    while any(left):
        rank = min((r for r, units in enumerate(left) if units), key=lambda r: max(map(ready, left[r][0])))
        unit = left[rank].pop(0)
        start = max([spans[rank], *map(ready, unit)])
        spans[rank] = start + sum(map(costs.work_seconds, unit))
        for work in unit:
            if not isinstance(work, Wgrad):
                made["F" if isinstance(work, Forward) else "B", work.stage, work.microbatch] = spans[rank]
    return max(spans)


def pairs(order: Sequence[Compute], turn: bool) -> Iterator[list[Compute]]:
    """A forward before a whole backward is a pair; but for the first one at the turn of the V, as DeepSeek has it."""
    at = 0
    while at < len(order):
        paired = isinstance(order[at], Forward) and isinstance(order[at + 1], Backward)
        size = 2 if paired and not turn else 1
        turn = turn and not paired
        yield list(order[at : at + size])
        at += size


# ---------------------------------------------------------------------- all of them
@pytest.mark.parametrize("name", ANY)
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 1), (3, 2), (4, 1), (4, 5), (3, 7), (5, 8)])
def test_few_or_odd_microbatches(name: str, p: int, m: int) -> None:
    """Every schedule takes any number, and none does worse than one microbatch after another."""
    v = VIRTUAL.get(name, 2)
    drawn = timeline(name, p, m, v)
    assert drawn.makespan <= 3 * p * v * m
    assert max(drawn.peak_live) <= m


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", ANY)
def test_proved_at_full_size(name: str) -> None:
    """p = 16, m = 64; four stages a rank where a schedule takes them. The bar is a second; `-s` shows what it took."""
    v = 4 if name in ("interleaved", "bfs") else VIRTUAL.get(name, 2)
    lists = emit(schedules.order(name, 16 * v, v, 64), PIPELINES["tied"](16 * v), 64)
    begin = time.process_time()
    proof = prove(lists)
    took = time.process_time() - begin
    assert proof.ok, str(proof)
    print(f"{name}: {took:.2f} s for {sum(map(len, lists.ranks))} instructions")


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, int, int, int, Costs, str]:
    name = draw(st.sampled_from(ANY))
    p, m = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    v = VIRTUAL.get(name) or draw(st.integers(1, 3))
    if name in ("interleaved", "bfs"):
        v = draw(st.integers(2, 3))
    seconds = st.sampled_from([0.0, 0.3, 1.0, 1.7, 4.0])
    stages = draw(st.lists(st.builds(StageCost, seconds, seconds, seconds), min_size=p * v, max_size=p * v))
    costs = Costs(tuple(stages), latency=draw(seconds), bandwidth=draw(st.sampled_from([math.inf, 16.0])))
    return name, p, m, v, costs, draw(st.sampled_from(sorted(PIPELINES)))


@given(cases(), st.booleans())
def test_proved_and_right(case: tuple[str, int, int, int, Costs, str], regather: bool) -> None:
    """On any costs and any shape of model, lists pass the proof, and run to the right end in any interleaving."""
    name, p, m, v, costs, model = case
    lists = build(PIPELINES[model](p * v), name, m, v, costs, regather)
    assert broken(lists, homes_of(lists), seed=m) is None
    drawn = replay(lists, costs)
    busy = [sum(e.end - e.start for e in drawn.work(rank)) for rank in range(p)]
    assert drawn.makespan >= max(busy)


@pytest.mark.parametrize("name", [name for name, v in VIRTUAL.items() if v == 2])
def test_stages_in_a_loop_or_in_a_v(name: str) -> None:
    orders = schedules.order(name, 8, 2, 4)
    homes = {work.stage: rank for rank, order in enumerate(orders) for work in order}
    fold = name in ("zb-v", "dualpipe-v")
    assert homes == {s: min(s, 7 - s) if fold else s % 4 for s in range(8)}


def test_breadth_first_gathers_a_stage_twice_a_step() -> None:
    def gathers(name: str) -> int:
        lists = build(PIPELINES["sharded"](8), name, 8, 2)
        return sum(type(i).__name__ == "Gather" for i in lists.ranks[1])

    assert gathers("bfs") == 4 - 1  # the last stage of a rank goes from forward to backward at once
    assert gathers("interleaved") > 4


def test_opposite_transfers_are_one_batch() -> None:
    """1F1B's steady state: an activation goes down while a gradient comes up, side by side on both ranks."""
    ranks = build(chain_pipeline(2), "1f1b", 4).ranks
    for rank, listed in enumerate(ranks):
        sides = [(type(a), type(b)) for a, b in pairwise(listed)]
        assert (Send, Recv) in sides or (Recv, Send) in sides, f"rank {rank}"


# ---------------------------------------------------------------------- auto
def test_auto_takes_memory_into_account() -> None:
    limits = {}
    for memory in (math.inf, 8.0, 6.0, 4.0, 2.0):
        orders = schedules.order("auto", 8, 2, 8, Costs.unit(8, memory))
        assert max(peak_activations(order, Costs.unit(8)) for order in orders) <= memory
        limits[memory] = timeline("auto", 4, 8, 2, Costs.unit(8, memory)).makespan
    assert list(limits.values()) == sorted(limits.values())
    assert limits[8.0] == 6 * 8 + 3  # ZB-V's
    assert limits[2.0] > limits[4.0]


@pytest.mark.parametrize("split", [0.0, 0.5])
def test_auto_is_at_least_as_fast_as_each(split: float) -> None:
    """Where splitting backward costs more than its bubble saves (torch's does), it is not split."""
    stage = StageCost(1.0, 1.0 + split, 1.0 + split, 2.0)
    costs = Costs((stage,) * 8, latency=0.1)
    found = timeline("auto", 4, 16, 2, costs)
    for name in (name for name, v in VIRTUAL.items() if v == 2):
        assert found.makespan <= timeline(name, 4, 16, 2, costs).makespan + 1e-6
    works = {type(e.instruction) for e in found.events}
    assert (Backward in works) == (split > 0)


def test_greedy_balances_what_fixed_schedules_do_not() -> None:
    """A heavy last stage (the vocabulary's): the list schedule is as fast as that allows, but for the ends."""
    stages = (StageCost(),) * 3 + (StageCost(2.0, 2.0, 2.0),)
    costs = Costs(stages)
    assert timeline("greedy", 4, 16, costs=costs).makespan <= timeline("1f1b", 4, 16, costs=costs).makespan
    assert timeline("greedy", 4, 16, costs=costs).makespan <= 16 * 6 + 3 + 3 + 3


# ---------------------------------------------------------------------- one's own
def reversed_gpipe(stages: int, virtual: int, microbatches: int, costs: Costs) -> list[list[Compute]]:
    """GPipe as its paper draws it: the microbatch that came last goes back first."""
    forwards, backwards = range(microbatches), range(microbatches - 1, -1, -1)
    return [[*(Forward(rank, j) for j in forwards), *(Backward(rank, j) for j in backwards)] for rank in range(stages)]


def test_register() -> None:
    schedules.register("reversed-gpipe", reversed_gpipe)
    schedules.register("reversed-gpipe", reversed_gpipe)  # as when a notebook's cell is run twice
    assert timeline("reversed-gpipe", 4, 8).bubble == pytest.approx(3 / 8)
    with pytest.raises(ShardcError, match="already"):
        schedules.register("1f1b", reversed_gpipe)


def test_a_broken_schedule_is_refused_with_its_cycle() -> None:
    def eager_backward(stages: int, virtual: int, microbatches: int, costs: Costs) -> list[list[Compute]]:
        orders: list[list[Compute]] = reversed_gpipe(stages, virtual, microbatches, costs)
        orders[0].insert(1, orders[0].pop())  # rank 0 wants microbatch 0's gradient before it sends microbatch 1
        return orders

    schedules.register("eager-backward", eager_backward)
    with pytest.raises(ShardcError) as caught:
        build(chain_pipeline(2), "eager-backward", 2)
    assert [d.code for d in caught.value.diagnostics] == ["SC523"]
    assert "2 ranks wait for each other" in str(caught.value)


WRONG: list[tuple[Any, str]] = [
    (lambda s, v, m, c: None, "does not list its work: TypeError"),
    (lambda s, v, m, c: [[Forward(0, list(range(0))[m])]], "does not list its work: IndexError"),
    (lambda s, v, m, c: [1, 2], "does not list its work: TypeError"),
    (lambda s, v, m, c: [["F0"], []], "lists 'F0' for rank 0"),
    (lambda s, v, m, c: [[Forward(0, cast(Any, "a"))], []], "lists Forward"),
]


@pytest.mark.parametrize(("function", "said"), WRONG)
def test_a_function_that_is_no_schedule_is_refused(function: Any, said: str) -> None:
    name = f"wrong-{id(function)}"
    schedules.register(name, function)
    with pytest.raises(ShardcError, match=said) as caught:
        build(chain_pipeline(2), name, 2)
    assert [d.code for d in caught.value.diagnostics] == ["SC220"]


@pytest.mark.parametrize(("function", "virtual"), [("1f1b", 1), (reversed_gpipe, 0)])
def test_what_is_no_schedule_is_not_registered(function: Any, virtual: int) -> None:
    with pytest.raises(ShardcError):
        schedules.register("none", function, virtual=virtual)
    assert "none" not in schedules.names()


def test_a_schedule_may_yield() -> None:
    schedules.register("yields", lambda s, v, m, c: (iter(one) for one in reversed_gpipe(s, v, m, c)))  # pyright: ignore[reportArgumentType]
    assert timeline("yields", 4, 8).bubble == pytest.approx(3 / 8)


@pytest.mark.parametrize("stages", [1, 3])
def test_costs_of_other_stages_are_refused(stages: int) -> None:
    with pytest.raises(ShardcError, match=f"of {stages} stages, the pipeline has 2"):
        replay(build(chain_pipeline(2), "gpipe", 2), Costs.unit(stages))


@pytest.mark.parametrize("work", [Forward(0, 0), Dgrad(0, 0), Wgrad(1, 1)])
def test_a_schedule_that_forgets_or_repeats_is_refused(work: Compute) -> None:
    for times in (0, 2):
        orders = [list(order) for order in schedules.order("zb-h1", 2, 1, 2)]
        rank = orders[work.stage]
        rank[rank.index(work) : rank.index(work) + 1] = [work] * times
        assert "SC525" in {d.code for d in prove(emit(orders, chain_pipeline(2), 2)).errors}
