"""Timelines: links and collectives take their time; text, SVG and trace show what there is."""

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from shardc import ShardcError
from shardc.schedule.build import build
from shardc.schedule.costs import Costs, InstructionCosts, StageCost
from shardc.schedule.instructions import COMPUTE, Forward, Recv, Send
from shardc.schedule.pipeline import chain_pipeline
from shardc.schedule.replay import _ReplayState, _Transfer, replay  # pyright: ignore[reportPrivateUsage]
from shardc.schedule.timeline import Timeline, TimelineEvent


def test_transfers_take_latency_and_bytes_over_bandwidth() -> None:
    """One microbatch down two stages and back: nothing hides its two transfers."""
    costs = Costs((StageCost(),) * 2, latency=0.5, bandwidth=4.0)
    assert replay(build(chain_pipeline(2, crossing=6), "1f1b", 1, costs=costs), costs).makespan == 6 + 2 * (0.5 + 6 / 4)


def test_a_link_carries_one_value_at_a_time() -> None:
    costs = Costs((StageCost(), StageCost(0.1, 0.1, 0.1)), bandwidth=1.0)
    drawn = replay(build(chain_pipeline(2, crossing=5), "gpipe", 3, costs=costs), costs)
    down = sorted((e for e in drawn.events if isinstance(e.instruction, Send) and e.rank == 0), key=lambda e: e.start)
    assert [(e.start, e.end) for e in down] == [(1, 6), (6, 11), (11, 16)]


def test_transfers_hide_behind_work() -> None:
    """A slow link costs the six trips of one microbatch that nothing hides, not those of all sixteen."""
    lists = build(chain_pipeline(4), "bfs", 16, 2)
    free, slow = (replay(lists, replace(Costs.unit(4), latency=latency)).makespan for latency in (0.0, 0.25))
    assert 0 < slow - free <= 6 * 0.25


def test_transfers_that_take_cores_make_the_work_beside_them_longer() -> None:
    """Of both ranks, by the share of the transfer that runs beside work; nothing of a rank that waits."""
    plain = Costs(2 * (StageCost(),), latency=0.5)
    lists = build(chain_pipeline(2), "gpipe", 2, costs=plain)
    costs = InstructionCosts.given(plain, plain.seconds, lambda rank, _: 0.25 if rank == 0 else 0.0)
    first, last = (
        [(e.start, e.end) for e in replay(lists, costs).events if e.rank == rank and isinstance(e.instruction, COMPUTE)]
        for rank in (0, 1)
    )
    # Rank 0 sends from 1 to 1.5, beside its second forward, and from 2.25 to 2.75, beside nothing of its own.
    assert first[:2] == [(0, 1), (1, 2.25)]
    # Rank 1 waits for the first, and is at work until 2.5 while the second comes: half of 0.25. It is there at 2.75.
    assert last[:2] == [(1.5, 2.5), (2.75, 3.75)]


def test_work_beside_what_a_rank_receives_takes_longer() -> None:
    """The last stage is slow: what is sent meanwhile takes of its work, which ends later by all of it."""
    plain = Costs((StageCost(), StageCost(forward=4.0)), latency=0.5)
    lists = build(chain_pipeline(2), "gpipe", 3, costs=plain)

    def forwards(taken: float) -> list[tuple[float, float]]:
        events = replay(lists, InstructionCosts.given(plain, plain.seconds, lambda *_: taken)).events
        return [(e.start, e.end) for e in events if e.rank == 1 and isinstance(e.instruction, Forward)]

    assert forwards(0.0) == [(1.5, 5.5), (5.5, 9.5), (9.5, 13.5)]
    # The second comes beside the first forward, and so does the third.
    assert forwards(0.25) == [(1.5, 5.5), (5.75, 9.75), (10.0, 14.0)]


def test_work_that_is_shorter_than_a_transfer_stands_still_for_its_share() -> None:
    """A transfer takes half of both ranks' time: work of 0.25 beside it takes 0.5, and so does the one after it."""
    plain = Costs((StageCost(forward=0.25), StageCost()), latency=1.0)
    lists = build(chain_pipeline(2), "gpipe", 3, costs=plain)
    costs = InstructionCosts.given(plain, plain.seconds, lambda *_: 0.5)
    events = replay(lists, costs).events
    found = [(e.start, e.end) for e in events if e.rank == 0 and isinstance(e.instruction, Forward)]
    # The link is busy with the first from 0.25 to 1.25, and then with the second.
    assert found == [(0.0, 0.25), (0.25, pytest.approx(0.75)), (pytest.approx(0.75), pytest.approx(1.25))]


def test_a_rank_that_waits_makes_up_for_what_a_transfer_took() -> None:
    """Received beside the first work, and read after an idle time: nothing of it is left."""
    transfer = _Transfer(1.0, 2.0, 0.5)
    lists = build(chain_pipeline(2), "gpipe", 2)
    state = _ReplayState(lists, InstructionCosts.given(Costs.unit(2), Costs.unit(2).seconds))
    for spans, late in (([(0.0, 4.0)], 0.5), ([(0.0, 4.0), (4.2, 5.0)], 0.3), ([(0.0, 4.0), (10.0, 11.0)], 0.0)):
        state.worked[1], state.work_end[1] = list(spans), spans[-1][1]
        state.received[1]["x", 0] = transfer
        state._receive(1, [("x", 0)])  # pyright: ignore[reportPrivateUsage]
        assert state.work_end[1] == pytest.approx(spans[-1][1] + late)
        assert not state.received[1]


def test_collectives_and_the_optimizer() -> None:
    costs = replace(Costs.unit(2), reduce=0.5, optimizer=0.25)
    lists = build(chain_pipeline(2, tied=True, clips=True), "1f1b", 4, costs=costs)
    # Rank 0 ends last; its own sum, the shared one, then the optimizer of both.
    assert replay(lists, costs).makespan == pytest.approx(12 + 3 + 2 * 0.5 + 0.25)
    gathered = build(chain_pipeline(2, gathers=True), "1f1b", 4)
    assert replay(gathered, replace(Costs.unit(2), gather=2.0)).makespan == 2 + 15


def test_bytes() -> None:
    """GPipe keeps all, 1F1B as many as there are ranks ahead."""
    peak = {
        name: replay(build(chain_pipeline(4, crossing=1, kept=1000), name, 12)).peak_bytes for name in ("gpipe", "1f1b")
    }
    assert [round(size / 1000) for size in peak["gpipe"]] == [12] * 4
    assert [round(size / 1000) for size in peak["1f1b"]] == [4, 3, 2, 1]


def test_measured_timelines_are_the_same_thing() -> None:
    events = (TimelineEvent(0, Forward(0, 0), 10.0, 11.0), TimelineEvent(1, Forward(1, 0), 11.5, 12.5))
    drawn = Timeline(2, events)
    assert (drawn.makespan, drawn.bubble, drawn.peak_live) == (2.5, 2 * 2.5 / 2 - 1, (1, 1))


def test_unproved_lists_that_get_stuck() -> None:
    lists = build(chain_pipeline(2), "1f1b", 2)
    lost = replace(lists, ranks=(tuple(i for i in lists.ranks[0] if not isinstance(i, Send)), lists.ranks[1]))
    with pytest.raises(ShardcError, match="rank 0 waits for ever") as caught:
        replay(lost)
    assert caught.value.code == "SC523"
    assert any(isinstance(i, Recv) for i in lists.ranks[0])


def test_text(golden: Callable[[str, str], None]) -> None:
    shown = [
        replay(build(chain_pipeline(4), "1f1b", 6)).text(),
        replay(build(chain_pipeline(8), "zb-v", 8, 2)).text(160),
    ]
    golden("timeline.txt", "\n\n".join(shown))
    wide = replay(build(chain_pipeline(16), "1f1b", 64)).text(80)
    assert max(map(len, wide.splitlines())) < 80 + 40


def test_svg(tmp_path: Path) -> None:
    drawn = replay(build(chain_pipeline(8), "zb-v", 8, 2))
    drawn.to_svg(tmp_path / "zb.svg")
    root = ET.parse(tmp_path / "zb.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    boxes = root.findall(f"{space}g")
    assert len(boxes) == 4 * 2 * 3 * 8  # a box for each piece of work
    assert "makespan 51" in "".join(root.itertext())
    widths = {box.find(f"{space}rect").get("width") for box in boxes}  # type: ignore[union-attr]
    assert len(widths) == 1


def test_trace(tmp_path: Path) -> None:
    costs = replace(Costs.unit(4), latency=0.5)
    drawn = replay(build(chain_pipeline(4), "1f1b", 4, costs=costs), costs)
    drawn.to_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    work = [e for e in events if e["ph"] == "X" and e["tid"] == 0]
    assert len(work) == 4 * 4 * 2
    assert sum(e.get("cat") == "Send" for e in events) == 2 * 3 * 4
    assert max(e["ts"] + e["dur"] for e in work) == pytest.approx(drawn.makespan * 1e6)
    for rank in range(4):  # a rank does one thing at a time
        times = sorted((e["ts"], e["ts"] + e["dur"]) for e in work if e["pid"] == rank)
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(times))
