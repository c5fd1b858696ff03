"""benchmarks/train_step: all contestants are rehearsed over gloo, peers get no mask, and sums of lines are right."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")

from transformers import masking_utils

from benchmarks.train_step import ours, parent, peers, summary
from benchmarks.train_step.__main__ import main, options
from benchmarks.train_step.models import TINY_MODELS
from benchmarks.train_step.rows import CONTESTANTS, ROWS, Row, rehearsal
from benchmarks.train_step.setting import Run, Setting
from benchmarks.train_step.switches import OFF, SWITCHES
from shardc.ir import microbatch
from shardc.ir.ops.collectives import sent_at

NEED_MORE = {  # than a CPU, or than what is installed
    *("ours-fused-graphs", "ours-tp-graphs", "ours-dp-graphs"),
    *("dtensor-tp-sp-async", "torch-cp-allgather", "torch-cp-alltoall"),
    *("jax", "jax-tp", "jax-tp-sp"),
}


@pytest.fixture(autouse=True)
def library_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """`skip_masks` replaces these for as long as a benchmark's process lives."""
    for name in ("find_packed_sequence_indices", "is_torchdynamo_exporting"):
        monkeypatch.setattr(masking_utils, name, getattr(masking_utils, name))


@pytest.mark.slow
def test_all_contestants_are_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    out = tmp_path / "lines.jsonl"
    asked = ["--device", "cpu", "--tiny", "--rounds", "1", "--steps", "1", "--seconds", "900", "--out", str(out)]
    code = main(asked)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    failed = {line.get("contestant", "a job"): line["failed"] for line in lines if "failed" in line}
    assert not failed, failed
    assert code == 0
    measured = {line["contestant"] for line in lines if line.get("correct")}
    told = {line["contestant"]: line["left_out"] for line in lines if "left_out" in line}
    assert told.keys() <= NEED_MORE, told
    assert measured | told.keys() == {name for row in rehearsal() for name in row.contestants}


def test_every_contestant_is_in_a_row_and_rehearsed() -> None:
    in_rows = {name for row in ROWS.values() for name in row.contestants}
    assert in_rows <= CONTESTANTS.keys()
    assert in_rows == {name for row in rehearsal() for name in row.contestants}


def test_a_compiled_peer_of_hugging_face_gets_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def capturing(*_: Any) -> Any:
        def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            graphs.append(graph)
            return graph

        return backend

    monkeypatch.setattr(peers, "compiler", capturing)
    model, device = TINY_MODELS["gpt2"], torch.device("cpu")
    (batch,) = model.batches(1, 2, device)
    state = model.build(torch.float32).state_dict()
    peers.compiled(Setting(model, state, batch, device, torch.float32, 1)).step(batch)
    calls = [node for graph in graphs for node in graph.graph.nodes if "scaled_dot_product" in str(node.target)]
    assert len(calls) == model.layers
    for call in calls:
        assert call.kwargs["is_causal"] is True
        assert call.kwargs["attn_mask"] is None


def line(contestant: str, turns: int, ms: float, **more: Any) -> dict[str, Any]:
    row = {"row": "tp4-gpt-1.3b", "contestant": contestant, "turns": turns, "median_ms": ms, "rounds_ms": [ms, ms + 1]}
    return {**row, "free_ms": ms, "bar": 1.3, "device": "H200", "torch": "2.11", "commit": "abc", **more}


def test_ratios_are_of_turns_that_ran_together() -> None:
    """The late peer's 90 ms were taken when ours took 60, so it is 1.5 of ours, and the early one's 52 are 1.3."""
    lines = [line("ours-tp", 1, 40.0), line("dtensor-tp", 1, 52.0)]
    lines += [line("ours-tp", 2, 60.0, again=True), line("jax-tp", 2, 72.0)]
    said = summary.table(lines)
    assert any("jax-tp / ours-tp = 1.200 (1.197 to 1.200)" in text and "missed by 7.7%" in text for text in said), said
    lines[-1] = line("jax-tp", 2, 90.0)
    said = summary.table(lines)
    assert any("dtensor-tp / ours-tp = 1.300" in text and "met" in text for text in said), said


def test_memory_is_held_against_the_leanest_peer_and_the_report() -> None:
    """Of its mode: sequence parallelism needs less than tensor parallelism without it."""
    lines = [line("ours-tp", 1, 40.0, peak_gib=11.0, reported_peak_gib=10.0)]
    lines += [line("dtensor-tp", 1, 52.0, peak_gib=12.0), line("megatron-tp", 1, 53.0, peak_gib=10.0)]
    lines += [line("ours-tp-sp", 1, 41.0, peak_gib=5.0, reported_peak_gib=5.1)]
    lines += [line("megatron-tp-sp", 1, 54.0, peak_gib=5.0)]
    said = summary.table(lines)
    assert "  memory: ours-tp / megatron-tp = 1.10, bar 1.05: missed" in said
    assert "  program.memory() of ours-tp: -9.1% of the peak, bar 3%: missed" in said
    assert "  memory: ours-tp-sp / megatron-tp-sp = 1.00, bar 1.05" in said
    assert "  program.memory() of ours-tp-sp: +2.0% of the peak, bar 3%" in said


def test_a_prediction_stands_beside_what_was_measured() -> None:
    said = summary.table([line("ours-tp", 1, 40.0, predicted_ms=38.0), line("dtensor-tp", 1, 52.0)])
    assert any("predicted -5.0%" in text for text in said), said


def test_a_contestant_that_kills_its_job_leaves_the_others_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs: list[list[str]] = []

    def job(
        asked: argparse.Namespace, rows: list[Row], ranks: int, wanted: list[str], end: float, lines: list[Any]
    ) -> tuple[int, tuple[str, str]]:
        jobs.append(wanted)
        bad = ("tp4-gpt-1.3b", "ours-tp")
        if "/".join(bad) in wanted:
            return -9, bad
        lines += [line(each.split("/")[1], 1, 50.0) for each in wanted]
        return 0, bad

    monkeypatch.setattr(parent, "_job", job)
    asked = ["--device", "cpu", "--rows", "tp4-gpt-1.3b", "--contestants", "ours-tp", "dtensor-tp"]
    assert parent.measure(options(asked)) == 1
    assert jobs == [["tp4-gpt-1.3b/dtensor-tp", "tp4-gpt-1.3b/ours-tp"], ["tp4-gpt-1.3b/dtensor-tp"]]
    said = capsys.readouterr().out
    assert "failed: the job died (-9)" in said
    assert "dtensor-tp                     50.00 ms" in said


def made(row: Row, contestant: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """What tells a contestant's program apart in a rehearsal of two ranks, and its calls before microbatches."""
    model, device = TINY_MODELS[row.model], torch.device("cpu")
    row = row.tiny(2)
    (batch,) = model.batches(1, row.sequences, device)
    dtype = torch.bfloat16 if row.master else torch.float32
    found: list[tuple[str, int]] = []

    def launched(setting: Setting, mesh: str, plan: Any, graphs: bool = False) -> Run:
        program = ours.compiled(setting, mesh, plan)
        with setting.switch.active():
            found.append((ours.form_of(program, setting.switch), len(microbatch.before_microbatches(program.body))))
        return Run(lambda batch: torch.zeros(()), dict)

    monkeypatch.setattr(ours, "ours", launched)
    CONTESTANTS[contestant](Setting(model, {}, batch, device, dtype, 2, row.microbatches, master=row.master))
    return found[0]


SHARES_REHEARSED = [(row.name, name) for row in rehearsal() if row.of_shares for name in row.contestants if name in OFF]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("row", "contestant"), SHARES_REHEARSED)
def test_a_pass_that_is_switched_off_leaves_another_program(
    row: str, contestant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, switch = OFF[contestant]
    whole, early = made(ROWS[row], form, monkeypatch)
    without, none_early = made(ROWS[row], contestant, monkeypatch)
    assert whole != without
    if "casts" in switch.off:
        assert early > 0
        assert none_early == 0


def test_a_switch_is_back_when_its_contestant_has_run() -> None:
    chunk, pieces = (4, 512, 4096), SWITCHES["no-pieces"]
    narrowed = microbatch.narrowed_weights
    with pieces.active(), SWITCHES["no-early-casts"].active():
        assert sent_at(chunk, 1, 2) == 0
        assert microbatch.narrowed_weights is not narrowed
    assert sent_at(chunk, 1, 2) == 1
    assert microbatch.narrowed_weights is narrowed


def test_rows_of_shares_are_asked_for() -> None:
    part_b = parent.chosen(options(["--gpus", "4"]))
    shares = parent.chosen(options(["--gpus", "4", "--shares"]))
    assert part_b
    assert shares
    assert not any(row.of_shares for row in part_b)
    assert all(name.startswith("ours") for row in shares for name in row.contestants)
    assert parent.chosen(options(["--rows", shares[0].name])) == [shares[0]]


def test_a_pass_s_share_is_of_the_same_turns() -> None:
    """The first turns' 30 ms are of another time than the 40 that ran beside 44."""
    lines = [line("ours-tp", 1, 30.0, program="a", peak_gib=3.0, reported_peak_gib=3.0)]
    lines += [line("ours-tp", 2, 40.0, again=True, program="a", peak_gib=3.0, reported_peak_gib=3.0)]
    lines += [line("ours-tp-no-late", 2, 44.0, program="b", peak_gib=2.5, reported_peak_gib=2.5)]
    said = summary.table(lines)
    text = "  without late weight gradients: 1.100 of ours-tp's step (1.098 to 1.100), free 1.100, peak -0.50 GiB"
    assert text in said, said
    lines[-1]["program"] = "a"
    assert "  without late weight gradients: the same program" in summary.table(lines)
