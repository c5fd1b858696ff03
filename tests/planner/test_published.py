"""Choices that others published, as candidates: ours is slower by no more than 5 %, and says what they lose."""

import pytest

from shardc.planner.layer_costs import LayerCosts
from shardc.planner.reasons import reason
from shardc.planner.search import Priced, search
from shardc.planner.small_program import Subject
from shardc.planner.space import Limits, candidates
from shardc.planner.step_costs import estimate
from tests.planner.published import MEGATRON, Published, is_published, llama_405b, megatron

pytestmark = pytest.mark.long


def fastest(subject: Subject, limits: Limits, tp: int, pp: int, cp: int, recompute: tuple[str, ...]) -> Priced:
    """The fastest that fits, of those with such a mesh."""
    found: list[Priced] = []
    for c in candidates(subject, limits, varied=False):
        if (c.tp, c.pp, c.cp) == (tp, pp, cp) and c.recompute in recompute:
            costs = subject.costs(c.inner)
            if isinstance(costs, LayerCosts):
                found.append(Priced(c, estimate(c, costs, subject.hardware, subject.numbers)))
    return min((p for p in found if p.estimate.memory.total <= limits.memory), key=lambda p: p.seconds)


@pytest.mark.parametrize("published", MEGATRON, ids=lambda p: p.name)
def test_megatron(published: Published) -> None:
    subject, limits = megatron(published)
    best = search(subject, limits).fitting(limits.memory)[0]
    theirs = fastest(subject, limits, published.tp, published.pp, 1, ("full",))
    assert is_published(theirs.candidate, published)
    assert best.seconds <= 1.05 * theirs.seconds
    assert reason(theirs, best, limits.memory, subject.hardware)
    assert best.candidate.tp <= subject.hardware.accelerators_per_node
    assert best.candidate.sequence == (best.candidate.tp > 1)
    assert best.candidate.pp == 1 or best.candidate.zero == 1


@pytest.mark.parametrize(("length", "gpus", "batch", "cp"), [(8192, 16384, 2048, 1), (131072, 16384, 128, 16)])
def test_llama_405b(length: int, gpus: int, batch: int, cp: int) -> None:
    subject, limits = llama_405b(length, gpus, batch)
    best = search(subject, limits).fitting(limits.memory)[0]
    theirs = fastest(subject, limits, 8, 16, cp, ("none", "selective", "full"))
    assert best.seconds <= 1.05 * theirs.seconds
    assert best.candidate.tp <= subject.hardware.accelerators_per_node
