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
from shardc.schedule.costs import Costs, StageCost
from shardc.schedule.instructions import Forward, Recv, Send
from shardc.schedule.pipeline import chain_pipeline
from shardc.schedule.replay import replay
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
