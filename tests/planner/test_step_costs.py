"""The closed form of a step against the schedules' own clock, and what of it grows with what."""

import dataclasses
import itertools

import pytest

from shardc.ir.hardware import Hardware
from shardc.plan.hardware import hardware
from shardc.planner.candidate import Candidate
from shardc.planner.layer_costs import LayerCosts, Part
from shardc.planner.numbers import Numbers
from shardc.planner.stages import split
from shardc.planner.step_costs import TERMS, estimate, in_flight
from shardc.schedule import schedules
from shardc.schedule.clock import work_spans
from shardc.schedule.costs import Costs, StageCost
from shardc.schedule.pipeline import chain_pipeline
from shardc.schedule.schedules.judge import peak_activations

HARDWARE = Hardware()
NUMBERS = Numbers()
LAYER = Part(forward=1.0, backward=2.0, kept=100.0, weights=10.0, largest=5.0, tensors=2)


def layers(count: int, entry: Part | None = None, exit: Part | None = None, layer: Part = LAYER) -> LayerCosts:
    return LayerCosts(entry or Part(), exit or Part(), ((layer, count),))


def clock(schedule: str, stages: int, virtual: int, microbatches: int, forward: float, backward: float) -> float:
    """The makespan of a schedule whose stages all take as long."""
    costs = Costs((StageCost(forward, backward / 2, backward / 2),) * stages)
    orders = schedules.order(schedule, stages, virtual, microbatches, costs)
    pipeline = chain_pipeline(stages)
    return max(span.end for spans in work_spans(orders, pipeline, costs) for span in spans)


@pytest.mark.parametrize(("pp", "microbatches"), list(itertools.product((2, 4, 8), (1, 4, 16))))
def test_1f1b_takes_as_long_as_its_clock_says(pp: int, microbatches: int) -> None:
    candidate = Candidate(pp=pp, microbatches=microbatches, schedule="1f1b")
    costs = layers(pp * 2)
    assert estimate(candidate, costs, HARDWARE, NUMBERS).seconds == pytest.approx(
        clock("1f1b", pp, 1, microbatches, 2.0, 4.0), rel=1e-3
    )


@pytest.mark.parametrize("pp", [1, 2])
def test_products_are_as_fast_as_their_share_of_the_step_lets_them_be(pp: int) -> None:
    """By the same rule as a predicted step's: what a rank does and waits beside its products makes them faster."""
    power = HARDWARE.tables.model_validate({"power": {"sustained": 0.8, "relief": 0.2, "most": 1.25}})
    hot = dataclasses.replace(HARDWARE, tables=power)
    costs = layers(pp, layer=dataclasses.replace(LAYER, products=2.0))
    candidate = Candidate(pp=pp, microbatches=4, schedule="1f1b" if pp > 1 else "")
    alone, found = (estimate(candidate, costs, machine, NUMBERS) for machine in (HARDWARE, hot))
    factor = 1 / 0.8 - 0.2 * (alone.seconds - 8.0) / 8.0
    assert factor > 1
    assert found.work == pytest.approx(4.0 + 8.0 * factor)
    assert found.bubble == pytest.approx(alone.bubble * found.work / 12.0)
    assert sum(getattr(found, name) for name in TERMS) == pytest.approx(found.seconds)


def test_a_microbatch_takes_no_less_than_its_host() -> None:
    candidate = Candidate(microbatches=4)
    for host, seconds in ((2.0, 24.0), (5.0, 40.0)):
        costs = layers(2, layer=dataclasses.replace(LAYER, host=host))
        assert estimate(candidate, costs, HARDWARE, NUMBERS).seconds == pytest.approx(seconds)


@pytest.mark.parametrize(("pp", "virtual", "rounds"), list(itertools.product((2, 4), (2, 4), (1, 4))))
def test_interleaved_takes_as_long_as_its_clock_says(pp: int, virtual: int, rounds: int) -> None:
    candidate = Candidate(pp=pp, microbatches=pp * rounds, schedule="interleaved", virtual=virtual)
    costs = layers(pp * virtual)
    assert estimate(candidate, costs, HARDWARE, NUMBERS).seconds == pytest.approx(
        clock("interleaved", pp * virtual, virtual, pp * rounds, 1.0, 2.0), rel=1e-3
    )


@pytest.mark.parametrize(("schedule", "virtual"), [("zb-h1", 1), ("zb-v", 2)])
@pytest.mark.parametrize(("pp", "late"), list(itertools.product((2, 4, 8), (0.7, 1.0))))
def test_zero_bubble_schedules_take_as_long_as_their_clock_says(
    schedule: str, virtual: int, pp: int, late: float
) -> None:
    candidate = Candidate(pp=pp, microbatches=4 * pp, schedule=schedule, virtual=virtual)
    layer = dataclasses.replace(LAYER, late=late)
    dgrad = layer.backward - late
    costs = Costs((StageCost(1.0, dgrad, late),) * (pp * virtual))
    orders = schedules.order(schedule, pp * virtual, virtual, 4 * pp, costs)
    clocked = max(span.end for spans in work_spans(orders, chain_pipeline(pp * virtual), costs) for span in spans)
    found = estimate(candidate, layers(pp * virtual, layer=layer), HARDWARE, NUMBERS)
    assert found.seconds == pytest.approx(clocked, rel=1e-3)
    assert (
        found.bubble
        < estimate(
            dataclasses.replace(candidate, schedule="1f1b", virtual=1),
            layers(pp * virtual, layer=layer),
            HARDWARE,
            NUMBERS,
        ).bubble
    )
    most = max(peak_activations(order, costs) for order in orders)  # in chunks of activations
    assert in_flight(candidate, 0) >= most


def test_a_v_has_its_first_and_last_stage_on_one_rank() -> None:
    candidate = Candidate(pp=4, microbatches=8, schedule="zb-v", virtual=2)
    assert [[candidate.stage(rank, v) for v in range(2)] for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]


WEIGHTY = dataclasses.replace(LAYER, weights=1e9, largest=1e8, boundary=1e6, sent=0.1, recomputed=0.2)


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(dp=4, tp=2, zero=2),
        Candidate(dp=8, zero=3, microbatches=4),
        Candidate(dp=4, dp_replicate=4, zero=3, microbatches=4),
        Candidate(pp=4, dp=2, microbatches=8, schedule="1f1b", zero=1),
        Candidate(pp=2, microbatches=8, schedule="interleaved", virtual=2),
        Candidate(pp=2, dp=2, microbatches=8, schedule="zb-h1", zero=3),
    ],
    ids=str,
)
def test_a_step_is_the_sum_of_its_terms(candidate: Candidate) -> None:
    found = estimate(candidate, layers(9, entry=LAYER, layer=WEIGHTY), hardware("h200-nvlink"), NUMBERS)
    assert found.seconds == pytest.approx(sum(getattr(found, term) for term in TERMS))
    assert found.sent + found.recomputed < found.work


def test_storage_over_part_of_dp_gathers_from_fewer_and_holds_more() -> None:
    """Nodes of 8: over all 32 ranks weights come from other nodes; over 8 only sums go there."""
    machine, mixed = hardware("h200-nvlink"), Numbers(stored=4, computed=2, gradient=4, state=8)
    layer = dataclasses.replace(WEIGHTY, forward=1e-3, backward=2e-3, sent=0.0, recomputed=0.0)
    whole = Candidate(dp=32, zero=3, microbatches=8)
    part = Candidate(dp=8, dp_replicate=4, zero=3, microbatches=8)
    all_ranks, node = (estimate(c, layers(8, layer=layer), machine, mixed) for c in (whole, part))
    assert node.gathered < 0.8 * all_ranks.gathered
    assert node.memory.state == 4 * all_ranks.memory.state
    assert part.batch == whole.batch
    assert part.mesh.size("dp_replicate") == 4
    sums = estimate(Candidate(dp=8, zero=3, microbatches=8), layers(8, layer=layer), machine, mixed).data
    assert node.data > sums  # shards are summed over replicas, too


def test_larger_buckets_take_less_time_and_more_memory() -> None:
    small, large = (
        estimate(Candidate(dp=16, zero=1, microbatches=2, bucket=b), layers(8, layer=WEIGHTY), HARDWARE, NUMBERS)
        for b in (25 * 2**20, 400 * 2**20)
    )
    assert large.data < small.data
    assert large.memory.transient == small.memory.transient + 2 * 375 * 2**20


def test_without_buckets_each_parameter_travels_alone() -> None:
    def data(bucket: bool, tensors: int) -> float:
        layer = dataclasses.replace(WEIGHTY, weights=1e5, tensors=tensors)
        candidate = Candidate(dp=16, zero=1, microbatches=2, bucket=bucket)
        return estimate(candidate, layers(8, layer=layer), HARDWARE, NUMBERS).data

    assert data(True, 12) == data(True, 120)
    assert data(True, 12) < data(False, 12) < data(False, 120)


def test_what_computes_beside_a_gather_takes_longer() -> None:
    """By the hardware's contention, hidden as the gather is."""
    layer = dataclasses.replace(LAYER, weights=1e6, largest=1e6)
    slow = Hardware.of({"contention": {"product": 1.5}})
    candidate = Candidate(dp=8, zero=3, microbatches=4)
    alone, beside = (estimate(candidate, layers(8, layer=layer), h, NUMBERS) for h in (HARDWARE, slow))
    assert beside.gathered > 3 * alone.gathered > 0


@pytest.mark.parametrize(("weights", "ratio"), [(1e6, 0.75 * 8), (1e13, 1.0)], ids=["hidden", "longer than work"])
def test_gathers_on_the_computes_cores_hide_what_is_left(weights: float, ratio: float) -> None:
    """Of hidden ones an eighth is shown, and with cores taken 0.75; of longer ones what the work does not cover."""
    layer = dataclasses.replace(LAYER, weights=weights, largest=weights)
    taking = Hardware.of({"contention": {"cores": 0.75}})
    candidate = Candidate(dp=8, zero=3, microbatches=4)
    alone, taken = (estimate(candidate, layers(8, layer=layer), h, NUMBERS) for h in (HARDWARE, taking))
    assert taken.gathered == pytest.approx(ratio * alone.gathered)


def test_stages_are_balanced_with_embedding_and_head() -> None:
    head = Part(forward=2.0, backward=4.0)
    stages = split(layers(10, exit=head), 4)
    assert [s.layers for s in stages] == [3, 3, 3, 1]
    assert sum(s.part.forward for s in stages) == 12.0
    assert all(s.layers for s in split(layers(4, exit=Part(forward=50.0)), 4))


def test_every_layer_is_in_some_stage_whatever_their_costs() -> None:
    for count, stages, extra in itertools.product((5, 9, 16), (2, 3, 5), (0.0, 3.0, 40.0)):
        found = split(layers(count, entry=Part(forward=extra), exit=Part(backward=extra / 2)), stages)
        assert sum(s.layers for s in found) == count
        assert len(found) == stages
        assert all(s.layers > 0 for s in found)


def test_a_microbatch_in_flight_holds_its_activations() -> None:
    deep = Candidate(pp=4, microbatches=16, schedule="1f1b")
    assert [in_flight(deep, r) for r in range(4)] == [4, 3, 2, 1]
    held = estimate(deep, layers(8), HARDWARE, NUMBERS).memory
    assert (held.activations, held.in_flight) == (4 * 2 * 100.0, 4)
    assert estimate(dataclasses.replace(deep, microbatches=2), layers(8), HARDWARE, NUMBERS).memory.activations == 400.0


def test_stages_with_the_same_layers_are_one_and_the_first_and_last_their_own() -> None:
    costs = layers(8, entry=Part(weights=7.0), exit=Part(weights=3.0))
    first, second, third, last = split(costs, 4)
    assert second is third
    assert [stage.part.weights for stage in (first, second, last)] == [27.0, 20.0, 23.0]
    assert [stage.layers for stage in (first, second, last)] == [2, 2, 2]


def test_a_rank_holds_as_many_microbatches_as_its_place_says() -> None:
    """The last of 1F1B one, however many ranks before it have the same layers."""
    candidate = Candidate(pp=4, microbatches=8, schedule="1f1b")
    memory = estimate(candidate, layers(4, exit=Part(kept=1000.0)), HARDWARE, NUMBERS).memory
    assert (memory.activations, memory.in_flight) == (1100.0, 1)
    memory = estimate(candidate, layers(4, entry=Part(kept=1000.0)), HARDWARE, NUMBERS).memory
    assert (memory.activations, memory.in_flight) == (4400.0, 4)


def test_zero_divides_what_it_says() -> None:
    mixed = Numbers(stored=4, computed=2, gradient=4, state=8)
    held = {z: estimate(Candidate(dp=4, microbatches=2, zero=z), layers(8), HARDWARE, mixed).memory for z in (0, 1, 3)}
    weights = 80.0
    assert (held[0].weights, held[0].state) == (6 * weights, 8 * weights)
    assert (held[1].weights, held[1].state) == (4 * weights / 4 + 2 * weights, 8 * weights / 4)
    assert held[3].weights == 4 * weights / 4 + 2 * 2 * 10.0  # two layers gathered
    assert {memory.gradients for memory in held.values()} == {4 * weights}  # of two microbatches, whole


def test_experts_are_summed_over_fewer_ranks() -> None:
    part = dataclasses.replace(LAYER, weights=1e9, own=1e9)
    own = estimate(Candidate(ep=8, zero=1), layers(4, layer=part), HARDWARE, NUMBERS)
    common = estimate(Candidate(ep=8, zero=1), layers(4, layer=dataclasses.replace(part, own=0.0)), HARDWARE, NUMBERS)
    assert own.data < common.data == estimate(Candidate(dp=8, zero=1), layers(4, layer=part), HARDWARE, NUMBERS).data
    assert own.memory.state == 8 * common.memory.state


def test_transfers_slow_a_pipeline_down() -> None:
    wide = dataclasses.replace(LAYER, boundary=5e10)
    for schedule, virtual in (("1f1b", 1), ("interleaved", 2)):
        candidate = Candidate(pp=4, microbatches=8, schedule=schedule, virtual=virtual)
        near, far = (estimate(candidate, layers(8, layer=layer), HARDWARE, NUMBERS) for layer in (LAYER, wide))
        assert far.seconds > near.seconds
