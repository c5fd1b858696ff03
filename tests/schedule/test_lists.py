"""Instruction lists as text and as JSON."""

import json
from collections.abc import Callable

import pytest

from shardc.schedule.build import build
from shardc.schedule.instructions import COMPUTE
from shardc.schedule.lists import RankLists
from shardc.schedule.pipeline import chain_pipeline
from shardc.schedule.prove import prove
from tests.schedule.pipelines import PIPELINES


def test_text(golden: Callable[[str, str], None]) -> None:
    golden("zb_h1.txt", str(build(PIPELINES["tied"](2), "zb-h1", 2)))
    golden("interleaved_sharded.txt", build(PIPELINES["sharded"](4), "interleaved", 2, 2).text(1))


@pytest.mark.parametrize("model", sorted(PIPELINES))
def test_json_round_trip(model: str) -> None:
    lists = build(PIPELINES[model](4), "zb-v", 3, 2)
    read = RankLists.from_plain(json.loads(json.dumps(lists.to_plain())))
    assert read == lists
    assert prove(read).ok
    assert str(read) == str(lists)


def test_values_are_freed_after_their_last_use() -> None:
    """At no time does a rank hold more than the microbatches under way need."""
    lists = build(chain_pipeline(4), "1f1b", 16)
    for rank, listed in enumerate(lists.ranks):
        held = most = 0
        for i in listed:
            reads_and_makes = lists.pipeline.effects(i)
            held += len(reads_and_makes[1])
            held -= len(getattr(i, "values", ()))
            most = max(most, held)
        # What 4 - rank microbatches keep, and what comes in and goes out.
        assert most <= (4 - rank) * 2 + 3


def test_unsplit_backward_hides_what_passes_between_its_parts() -> None:
    lists = build(chain_pipeline(2), "1f1b", 2)
    assert "dkept" not in str(lists)
    assert "dkept" in str(build(chain_pipeline(2), "zb-h1", 2))


def test_stages_of() -> None:
    lists = build(chain_pipeline(8), "zb-v", 2, 2)
    assert [lists.stages_of(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert sum(isinstance(i, COMPUTE) for i in lists.ranks[0]) == 2 * 3 * 2
