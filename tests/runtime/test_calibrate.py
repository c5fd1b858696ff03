"""Fits give back what measurements were made of; the repository's file of H200s is what its measurements come to."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks import fit_hardware, fit_power
from shardc import ShardcError
from shardc.cli import main
from shardc.ir.device_rates import AttentionRate, ProductRate
from shardc.ir.hardware import DEFAULT, Group, Hardware
from shardc.ir.slowdowns import Contention, Meetings, Power
from shardc.plan import hardware as files
from shardc.runtime.calibrate.calibrate import Machine, hardware_text
from shardc.runtime.calibrate.device import CPU_ATTENTION, _from_memory
from shardc.runtime.calibrate.fit import (
    BACKWARD,
    attention_rates,
    contention,
    cores,
    jitter,
    kind_of,
    memory_points,
    product_rate,
    tables,
)
from shardc.runtime.calibrate.peers import SHAPES
from shardc.runtime.calibrate.rows import NEEDED, Row, read_rows
from shardc.runtime.calibrate.timing import Together, coarse_first, timed
from shardc.runtime.calibrate.write import hardware_yaml

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "benchmarks/measurements/h200.jsonl"
FILE = ROOT / "configs/hardware/h200-nvlink.yaml"
ROWS = read_rows(MEASURED)
OTHERS = [read_rows(MEASURED.with_name(name)) for name in fit_hardware.OTHERS]
H200 = files.read_file(FILE)
ERRORS = list(fit_hardware.errors(ROWS, H200))


# ---------------------------------------------------------------------- the H200's file
def test_the_file_is_what_the_measurements_come_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    fitted = fit_hardware.with_power(fit_hardware.fitted(ROWS, *OTHERS), H200.tables.power)
    text = fit_hardware.text(fitted, "benchmarks/measurements/h200.jsonl")
    assert text == FILE.read_text(), "python -m benchmarks.fit_hardware writes it"


@pytest.mark.slow
@pytest.mark.long
def test_the_limit_of_power_is_what_steps_of_one_gpu_come_to() -> None:
    steps = list(fit_power.steps(H200))
    assert len(steps) == 8
    assert fit_power.fitted(steps, H200.tables.power.most) == H200.tables.power
    assert max(abs(one.predicted(H200.tables.power) / one.measured - 1) for one in steps) < 0.06


def test_a_known_limit_of_power_comes_back() -> None:
    known = Power(sustained=0.91, relief=0.4, most=1.15)
    steps = [
        fit_power.OneGpuStep("", 0.0, products, others) for products in (0.02, 0.1, 0.3) for others in (0.01, 0.05)
    ]
    steps = [step._replace(measured=step.predicted(known)) for step in steps]
    assert fit_power.fitted(steps, known.most) == known


def test_no_step_of_several_gpus_is_fitted() -> None:
    assert {row["gpus"] for row in ROWS if row["kind"] == "step"} == {1}
    assert not {row["kind"] for row in ROWS} - {*NEEDED, "step", "copy"}
    held = [json.loads(line) for line in (MEASURED.parent / "h200_steps.jsonl").read_text().splitlines()]
    assert {row["gpus"] for row in held} == {4}


def out_of_order(row: Row) -> bool:
    """Whether a larger message of the same series took less, or a smaller one longer: no rising table has both."""
    series = [
        other
        for other in ROWS
        if other["kind"] == "collective" and all(other[key] == row[key] for key in ("op", "group", "graph"))
    ]
    return any((other["bytes"] - row["bytes"]) * (other["us"] - row["us"]) < 0 for other in series)


def test_collectives_are_reproduced() -> None:
    errors = [(row, abs(error)) for what, row, error in ERRORS if what == "collective"]
    assert len(errors) == 165
    assert median(error for _, error in errors) < 0.001
    assert max(error for row, error in errors if not out_of_order(row)) < 0.01
    assert max(error for row, error in errors if row["graph"]) < 0.01
    assert max(error for row, error in errors if row["bytes"] >= 2**24) < 0.01
    large = [row for row, error in errors if error > 0.1]
    assert len(large) <= 20
    assert max(error for _, error in errors) < 0.28


def test_attention_is_reproduced() -> None:
    """But for times that the CPU bounded: of the same shape, others took less."""
    shortest: dict[tuple[Any, ...], float] = {}
    pairs = [(what, row, error) for what, row, error in ERRORS if what.startswith("attention")]

    def key(what: str, row: Row) -> tuple[Any, ...]:
        return what, row["backend"], row["mb"] * row["heads"], row["sequence"]

    def taken(what: str, row: Row) -> float:
        return row["fwd_ms"] if what == "attention forward" else row["fwd_bwd_ms"]

    for what, row, _ in pairs:
        shortest[key(what, row)] = min(shortest.get(key(what, row), math.inf), taken(what, row))
    assert max(abs(error) for _, _, error in pairs if error > 0) < 0.035
    kept = [error for what, row, error in pairs if taken(what, row) < 1.1 * shortest[key(what, row)]]
    assert max(map(abs, kept)) < 0.09
    assert median(map(abs, kept)) < 0.015
    assert len(kept) >= 75, "of 88"


def test_memory_and_steps_of_one_gpu_are_reproduced() -> None:
    assert max(abs(error) for what, _, error in ERRORS if what == "memory") < 0.01
    errors = [abs(error) for what, _, error in ERRORS if what == "step"]
    assert len(errors) == 7
    assert (max(errors) < 0.07, median(errors) < 0.02) == (True, True)


# ---------------------------------------------------------------------- fits
def test_known_tables_come_back() -> None:
    rows: list[Row] = [
        {
            "kind": "collective",
            "op": op,
            "group": group,
            "bytes": size,
            "graph": graph,
            "us": us(op, group, size, graph),
        }
        for op in ("all_reduce", "p2p", "ring_shift")
        for group in (2, 4)
        for graph in (False, True)
        for size in (4096, 2**20, 2**26)
        if not graph or size < 2**26
    ]
    hardware = Hardware.of(tables(rows))
    for row in rows:
        seconds = hardware.collective_seconds(kind_of(row), row["bytes"], Group((row["group"],)), graph=row["graph"])
        assert seconds == pytest.approx(row["us"] * 1e-6)
    # Beyond what was captured, a graph takes what the others do.
    for graph in (False, True):
        seconds = hardware.collective_seconds("all_reduce", 2**26, Group((4,)), graph=graph)
        assert seconds == pytest.approx(us("all_reduce", 4, 2**26, False) * 1e-6)


def us(op: str, group: int, size: int, graph: bool) -> float:
    return {"all_reduce": 10, "p2p": 20, "ring_shift": 30}[op] * group * (0.5 if graph else 1) + size / 1e5


def test_known_attention_comes_back() -> None:
    known = {"flops_per_second": 5e14, "start_seconds": 2e-5, "key_seconds": 1e-8, "tile": 200}
    truth = Hardware.of(
        {
            "attention": [
                {"dtypes": ["bfloat16"], **known},
                {"dtypes": ["bfloat16"], **known, "flops_per_second": 3e14, "backward": True},
            ]
        }
    )
    rows: list[dict[str, Any]] = []
    for mb, heads, sequence in ((1, 8, 1024), (4, 16, 1024), (2, 16, 2048), (4, 32, 2048), (2, 32, 4096), (1, 8, 8192)):
        flops = 2 * mb * heads * sequence**2 * 128
        times = [
            truth.attention_seconds(n, fit_hardware.BF16, backward=backward, sequence=sequence) * 1e3
            for n, backward in ((flops, False), (flops * 5 // 2, True))
        ]
        shape = {"backend": "flash", "mb": mb, "heads": heads, "sequence": sequence, "width": 128}
        rows.append({"kind": "attention", **shape, "fwd_ms": times[0], "fwd_bwd_ms": sum(times)})
        rows.append(
            {"kind": "attention", **shape, "fwd_ms": 2 * times[0], "fwd_bwd_ms": 2 * sum(times)}
        )  # of a busy CPU
    for entry, rate in zip(tables(rows)["attention"], (5e14, 3e14), strict=True):
        assert entry["flops_per_second"] == pytest.approx(rate, rel=0.01)
        assert entry["start_seconds"] == pytest.approx(2e-5, rel=0.05)
        assert entry["key_seconds"] == pytest.approx(1e-8, rel=0.05)
        assert entry["tile"] == pytest.approx(200, abs=4)


def test_a_known_rate_of_products_comes_back() -> None:
    tiles = (((128, 128), 1.0), ((64, 64), 0.5))
    truth = ProductRate(
        dtypes=("float32",), flops_per_second=1e13, units=16, tiles=tiles, start_seconds=4e-6, depth_start=64
    )
    shapes = [(1, n, n, n) for n in (128, 256, 512, 1024, 4096)] + [(1, 4096, 512, 4096), (8, 512, 512, 64)]
    rows = [
        {"kind": "product", "dtype": "float32", "batch": b, "rows": m, "columns": n, "depth": k,
         "us": truth.seconds(b, m, n, k, 1e12) * 1e6}
        for b, m, n, k in shapes
    ]  # fmt: skip
    fitted = product_rate(rows, truth.changed(flops_per_second=1e12), 1e12)
    assert fitted.flops_per_second == pytest.approx(1e13, rel=0.03)
    for shape in shapes:
        assert fitted.seconds(*shape, 1e12) == pytest.approx(truth.seconds(*shape, 1e12))
    for shape in ((1, 2048, 2048, 2048), (1, 1024, 4096, 512), (4, 256, 256, 256)):  # not measured
        assert fitted.seconds(*shape, 1e12) == pytest.approx(truth.seconds(*shape, 1e12), rel=0.1)


def test_what_ranks_of_a_cpu_do_to_each_other(tmp_path: Path) -> None:
    """Rows made from figures come to these figures."""
    cores = [
        {"kind": "cores", "what": "all_reduce", "times": 3, "work_us": 20e3, "collective_us": 3 * t}
        | {"both_us": 20e3 + 3 * (0.7 * t + 500)}
        for t in (1e3, 4e3, 16e3)
    ]
    meetings = [
        {"kind": "meeting", "computed_us": t, "alone_us": t + 300, "together_us": t + 300 + (j * t) ** 0.5}
        for t, j in ((4e3, 100), (16e3, 120), (64e3, 900))
    ]
    ceiling = [{"kind": "ceiling", "how": "neg", "mib": 2**n, "ms": 2**n / 10} for n in range(4)]
    elements = [{"kind": "element", "op": op, "elements": 2**18, "us": us} for op, us in (("gelu", 900), ("neg", 190))]
    machine = {"kind": "machine", "device": "cpu", "world": 2, "units": 1}
    path = tmp_path / "mine.yaml"
    beside = [{"kind": "neighbours", "alone_us": 100.0, "beside_us": us} for us in (90.0, 130.0, 400.0)]
    path.write_text(hardware_text([machine, *cores, *beside, *meetings, *ceiling, *elements], []))
    fitted = files.read_file(path).tables
    assert fitted.contention == Contention(cores=0.7, switch_seconds=5e-4, neighbours=1.3)
    assert fitted.meetings.jitter_seconds == pytest.approx(120e-6, rel=1e-3)
    assert dict(fitted.elements) == {"gelu": pytest.approx(900e-6 / 2**18, rel=1e-3)}, (
        "neg takes as long as memory does"
    )


def test_one_time_that_is_wrong_by_far_changes_no_share() -> None:
    """A scheduler that lets a thread wait makes some times several times as long."""
    law = {size: 0.7 * size + 200 for size in (300, 600, 1200, 2400, 7000, 9000)}
    rows = [
        {"kind": "cores", "times": 1, "work_us": 5e3, "collective_us": t, "both_us": 5e3 + m} for t, m in law.items()
    ]
    found = cores(rows)
    assert found == {"cores": 0.7, "switch_seconds": pytest.approx(2e-4)}
    for wrong in rows:
        others = [row for row in rows if row is not wrong]
        assert cores([*others, {**wrong, "both_us": 5e3 + 3 * law[wrong["collective_us"]]}]) == found


def test_collectives_that_take_more_than_all_their_time() -> None:
    """Two bounds are met: the whole of the time, and nothing besides."""
    times = {5: 6, 4: 5, 6: 7.2, 0.2: 0.1}
    rows = [
        {"kind": "cores", "times": 1, "work_us": 9e3, "collective_us": 1e3 * t, "both_us": 9e3 + 1e3 * more}
        for t, more in times.items()
    ]
    assert cores(rows) == {"cores": 1.0}


def test_turns_are_put_together_by_their_medians() -> None:
    """Of kernels the quickest one's median; of a GPU's attention the least, since what is longer waited for the CPU."""
    kernels = [{"kind": "ceiling", "how": "neg", "mib": 1, "ms": ms} for ms in (0.1, 0.3, 0.9)]
    copies = [{"kind": "ceiling", "how": "copy", "mib": 1, "ms": ms} for ms in (0.4, 0.5)]
    assert dict(memory_points([*kernels, *copies])) == {2**20: 0.3e-3}
    shape = {"kind": "attention", "mb": 1, "heads": 8, "sequence": 512, "width": 64}
    turns = [{**shape, "fwd_ms": ms, "fwd_bwd_ms": 3 * ms} for ms in (1.0, 2.0, 6.0)]
    rate = {
        backend: attention_rates([{**row, "backend": backend} for row in turns], ["float32"])[0]["flops_per_second"]
        for backend in ("", "flash")
    }
    assert rate["flash"] == pytest.approx(2 * rate[""])


def test_calls_on_a_cpu_have_operands_of_their_own() -> None:
    seen: list[torch.Tensor] = []
    made: list[int] = []

    def operands() -> tuple[torch.Tensor, None]:
        made.append(1)
        return torch.ones(4, 3).t(), None

    call = _from_memory(lambda x, _: seen.append(x), operands, 2**20, most=5)
    for _ in range(10):
        call()
    assert len({x.data_ptr() for x in seen}) == 5
    assert seen[0] is seen[5]
    assert {x.stride() for x in seen} == {(1, 3)}, "as a weight lies"
    assert len(made) == 1


def test_ranks_that_do_not_wait_have_no_jitter() -> None:
    row = {"kind": "meeting", "computed_us": 9e3, "alone_us": 9e3, "together_us": 8e3}
    assert jitter([row]) == {"jitter_seconds": 0}
    of_both = {"kind": "cores", "times": 1, "work_us": 9.0, "collective_us": 1.0}
    assert cores([{**of_both, "both_us": 12.0}]) == {"cores": 1, "switch_seconds": 2e-6}
    assert cores([{**of_both, "both_us": 8.0}]) == {"cores": 0}


def test_ranks_that_keep_their_speed() -> None:
    """Pieces of work from 1 to 100 ms tell for how long; without the longest only the root of the time is fitted."""
    truth = Meetings(jitter_seconds=1.5e-5, steady_seconds=1e-2)
    rows = [
        {"kind": "meeting", "computed_us": us, "alone_us": us, "together_us": us + truth.wait(us * 1e-6) * 1e6}
        for us in (1e3, 4e3, 20e3, 100e3)
    ]
    assert jitter(rows) == {"jitter_seconds": pytest.approx(1.5e-5, rel=1e-3), "steady_seconds": 1e-2}
    assert set(jitter(rows[:3])) == {"jitter_seconds"}


def test_units_that_collectives_take_from_products() -> None:
    tiles = (((128, 256), 1.0), ((128, 128), 0.85))
    rate = ProductRate(dtypes=("bfloat16",), flops_per_second=7e14, units=132, tiles=tiles)
    rows = [
        {"kind": "contention", "what": "product", "rows": m, "columns": n, "depth": k,
         "alone_us": 100.0, "beside_us": 100 * rate.slowdown(1, m, n, k, 1e18, 32)}
        for m, n, k in SHAPES
    ]  # fmt: skip
    found = contention(rows, rate)
    again = [rate.slowdown(1, *shape, 1e18, int(found["units"])) for shape in SHAPES]
    assert again == pytest.approx([row["beside_us"] / 100 for row in rows])
    assert abs(found["units"] - 32) <= 3
    assert "units" not in contention(rows), "no tiles are known"
    assert "units" not in contention([{"what": "product", "alone_us": 1, "beside_us": 2}], rate), "nor shapes"


def test_an_attention_that_writes_its_scores() -> None:
    truth = AttentionRate(dtypes=("float32",), flops_per_second=5e10, start_seconds=2e-5, score_width=60)
    rows = []
    for batch, heads, n, width in CPU_ATTENTION:
        flops = 2.0 * batch * heads * n**2 * width
        forward, backward = (truth.seconds(of, n, width) for of in (flops, BACKWARD * flops))
        about = {"kind": "attention", "backend": "", "mb": batch, "heads": heads, "sequence": n, "width": width}
        rows.append({**about, "fwd_ms": forward * 1e3, "fwd_bwd_ms": (forward + backward) * 1e3})
    for figures in attention_rates(rows, ["float32"]):
        assert figures["flops_per_second"] == pytest.approx(5e10, rel=1e-2)
        assert figures["score_width"] == 60


def test_attention_is_measured_with_the_kernel_that_steps_run() -> None:
    """In a process that has compiled nothing, as a rank of `shardc calibrate` is one."""
    script = """
from shardc import torch_compat
from shardc.runtime.calibrate.device import CPU_ATTENTION, attention
calls = []
for name in ("flash_attention_on_cpu", "flash_attention_on_cpu_backward"):
    def counted(*of, kernel=getattr(torch_compat, name)):
        calls.append(kernel)
        return kernel(*of)
    setattr(torch_compat, name, counted)
rows = list(attention("cpu", 0.1))
assert 1 <= len(rows) <= len(CPU_ATTENTION) and len(set(calls)) == 2, (rows, calls)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_file_of_everything_that_was_measured(tmp_path: Path) -> None:
    launch = [{"kind": "launch", "what": what, "us": us} for what, us in (("launch", 4.0), ("gap", 1.5))]
    beside = [{"kind": "contention", "what": "product", "alone_us": 10.0, "beside_us": us} for us in (9.0, 12.0, 30.0)]
    ceiling = [{"kind": "ceiling", "how": "neg", "mib": 2**n, "ms": 0.001 + 2**n / 1e4} for n in range(4)]
    product = {
        "kind": "product",
        "dtype": "float32",
        "batch": 1,
        "rows": 512,
        "columns": 512,
        "depth": 512,
        "us": 100.0,
    }
    sent = {"kind": "collective", "op": "all_gather", "group": 4, "graph": False}
    collective = [{**sent, "bytes": 2**n, "us": 50 + 2**n / 1e3} for n in (10, 20, 26)]
    path = tmp_path / "mine.yaml"
    machine = {"kind": "machine", "device": "cpu", "world": 4, "units": 1}
    rows = [machine, *launch, *beside, *ceiling, product, *collective]
    path.write_text(hardware_text(rows, ["a title"]))
    hardware = files.read_file(path)
    assert (hardware.kernel_launch_seconds, hardware.kernel_gap_seconds) == (4e-6, 1.5e-6)
    assert hardware.tables.contention.product == 1.2
    assert hardware.accelerators_per_node == 4
    assert hardware.fp32_flops_per_second == pytest.approx(2 * 512**3 / 1e-4, rel=1e-3)
    assert hardware.product_seconds(1, 512, 512, 512, fit_hardware.torch.float32) == pytest.approx(1e-4, rel=1e-3)
    assert hardware.memory_seconds(2**20) == pytest.approx(1e-6 + 1e-7, rel=1e-3)
    assert hardware.link_bytes_per_second == pytest.approx(0.75e9, rel=0.01)
    assert hardware.collective_start_seconds == pytest.approx(51e-6, rel=0.01)
    assert hardware.collective_seconds("all_gather", 2**20, Group((4,))) == pytest.approx(50e-6 + 2**20 / 1e9, rel=1e-3)
    assert path.read_text().startswith("# a title\n")
    assert not hardware.tables.products[0].tiles[1:]
    assert (hardware.device, hardware.unaligned_slowdown) == ("cpu", 1)
    path.write_text(hardware_text([{**machine, "device": "cuda", "units": 132}, *rows[1:]], []))
    assert files.read_file(path).tables.products[0].units == 132
    assert files.read_file(path).unaligned_slowdown == DEFAULT.unaligned_slowdown
    assert files.read_file(path).device == "gpu"


# ---------------------------------------------------------------------- files
knots = st.dictionaries(st.integers(0, 2**36), st.floats(1e-7, 9).map(lambda v: float(f"{v:.4g}")), min_size=1).map(
    lambda points: [list(pair) for pair in zip(sorted(points), sorted(points.values()), strict=True)]
)
series = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["all_reduce", "send"]),
        "group": st.integers(2, 99),
        "graph": st.booleans(),
        "seconds": knots,
    }
)


@given(
    st.fixed_dictionaries(
        {"bucket_bytes": st.integers(1, 2**40)},
        optional={
            "memory_bytes_per_second": st.floats(1e6, 1e18).map(lambda v: float(f"{v:.4g}")),
            "kernel_gap_seconds": st.floats(1e-9, 1).map(lambda v: float(f"{v:.4g}")),
            "memory": knots,
            "calls": st.fixed_dictionaries({"first": knots}, optional={"later": knots}),
            "links": st.lists(st.fixed_dictionaries({"name": st.just("node"), "series": st.lists(series, max_size=3)})),
            "contention": st.fixed_dictionaries({"memory": st.floats(1, 99).map(lambda v: float(f"{v:.4g}"))}),
            "attention": st.lists(
                st.fixed_dictionaries(
                    {
                        "dtypes": st.just(["float32"]),
                        "flops_per_second": st.floats(1e6, 1e18).map(lambda v: float(f"{v:.4g}")),
                        "backward": st.booleans(),
                    }
                )
            ),
        },
    )
)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, quantities: dict[str, Any]) -> None:
    path = tmp_path_factory.mktemp("hardware") / "mine.yaml"
    path.write_text(hardware_yaml(quantities, dict.fromkeys(quantities, "measured: it is"), ["a", "", "b"]))
    assert files.read_file(path) == Hardware.of({**DEFAULT.quantities(), **quantities})


GOOD = '{"kind": "launch", "what": "gap", "us": 1}'


@pytest.mark.parametrize(
    ("line", "said", "hint"),
    [
        ("{", "not JSON", "a line is a JSON object"),
        ("[]", "a measurement without a kind", "a line is a JSON object"),
        ('{"us": 1}', "a measurement without a kind", "a line is a JSON object"),
        ('{"kind": "launch", "what": "gap"}', "'us' of a launch should be a number above 0, not None", "what, us"),
        ('{"kind": "launch", "what": "gap", "us": 0}', "a number above 0, not 0", "what, us"),
        ('{"kind": "launch", "what": "gap", "us": true}', "a number above 0, not True", "what, us"),
        ('{"kind": "launch", "what": 7, "us": 1}', "should be text, not 7", "what, us"),
        (
            '{"kind": "machine", "device": "cuda", "world": 4, "units": 2.5}',
            "'units' of a machine should be a whole",
            "units",
        ),
        (
            '{"kind": "collective", "op": "all_reduce", "group": 2, "bytes": 1, "us": 1, "graph": 0}',
            "true or false",
            "op",
        ),
    ],
)
def test_what_is_no_measurement_is_cited(tmp_path: Path, line: str, said: str, hint: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n")
    with pytest.raises(ShardcError) as caught:
        read_rows(path)
    (diagnostic,) = caught.value.diagnostics
    assert (diagnostic.code, diagnostic.location) == ("SC208", f"{path}:3")
    assert said in diagnostic.message
    assert hint in (diagnostic.hint or "")


def test_a_file_without_measurements_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for text in ("", '{"kind": "step"}\n'):
        path.write_text(text)
        with pytest.raises(ShardcError, match="no measurement of a kind that is read"):
            read_rows(path)
    with pytest.raises(ShardcError, match="no measurements can be read"):
        read_rows(tmp_path / "none.jsonl")


# ---------------------------------------------------------------------- measuring
def test_samples_are_of_calls_and_the_slowest_rank_counts() -> None:
    calls: list[int] = []

    class Slow(Together):
        def slowest(self, seconds: list[float]) -> list[float]:
            return [t + 1 for t in seconds]

    times = timed(lambda: calls.append(1), 100.0, "cpu", Slow())
    assert len(times.samples) == 99  # of a bit more than a second each, as it were
    assert min(times.samples) > 1
    assert len(calls) == 1 + 2 + 1 + 99
    row = times.row()
    assert row["us_min"] <= row["us"] <= row["us_max"]
    assert row["n"] == 99


def test_what_runs_before_a_call_is_not_in_its_time() -> None:
    order: list[str] = []

    def before() -> None:
        order.append("before")
        time.sleep(5e-3)

    times = timed(lambda: order.append("call"), 0.1, "cpu", before=before)
    assert times.median < 1e-3
    assert len(times.samples) < 20, "the budget is for both"
    called = [n for n, what in enumerate(order) if what == "call"]
    assert all(order[n - 1] == "before" for n in called[1:]), "but of the first, which is not timed"


def test_what_calls_take_beside_their_work() -> None:
    """After kernels of several sizes, medians of turns; an op's elements and the least kernel are beside it."""
    calls = [
        {"kind": "call", "moved": moved, "first_us": first * turn, "later_us": first * turn / 2}
        for moved, first in ((4096, 2.0), (2**22, 40.0))
        for turn in (1.0, 0.9, 7.0)
    ]
    ceiling = [{"kind": "ceiling", "how": "neg", "mib": 2**n, "ms": 0.04 + 2**n / 10} for n in range(4)]
    elements = [{"kind": "element", "op": "gelu", "elements": 2**18, "us": 940}]
    fitted = tables([*calls, *ceiling, *elements])
    assert dict(fitted["calls"]["first"]) == pytest.approx({4096: 2e-6, 2**22: 40e-6})
    assert dict(fitted["calls"]["later"]) == pytest.approx({4096: 1e-6, 2**22: 20e-6})
    assert fitted["memory"][0] == (0, pytest.approx(40e-6)), "as much as a call takes, where it was 2.5 us at most"
    assert fitted["elements"] == {"gelu": pytest.approx(900e-6 / 2**18)}
    late = tables([calls[-1], *ceiling, *elements])  # no time was left to measure a call that follows little
    assert "calls" not in late
    assert late["elements"] == {"gelu": pytest.approx(940e-6 / 2**18)}


def test_the_whole_range_comes_first() -> None:
    assert coarse_first([1, 2, 3, 4, 5, 6, 7, 8]) == [1, 4, 7, 2, 5, 8, 3, 6]


def test_more_gpus_than_there_are_are_refused() -> None:
    with pytest.raises(ShardcError, match="SC506"):
        Machine.at_hand("cuda", 4096, 1)
    assert Machine.at_hand("cpu", None, 1) == Machine("cpu", 2, 1)


def test_the_command_fits_a_file(tmp_path: Path) -> None:
    output = tmp_path / "h200.yaml"
    done = CliRunner().invoke(main.app, ["calibrate", "--from", str(MEASURED), "-o", str(output)])
    assert done.exit_code == 0, done.output
    hardware = files.read_file(output)
    assert hardware.tables.links[0].series == H200.tables.links[0].series
    assert hardware.tables.attention == H200.tables.attention
    assert hardware.tables.memory == H200.tables.memory
    assert not hardware.tables.products, "the file has no measurement of products alone"
    assert "no measurement of products: their rates are the default's" in done.stderr
    assert "kernels" not in done.stderr
    assert "# Not measured, and as in default.yaml, which is no machine: products.\n" in output.read_text()
    (tmp_path / "none.jsonl").write_text("{")
    beside = CliRunner().invoke(
        main.app, ["calibrate", "--from", str(MEASURED), "--world", "4", "--rows", "rows.jsonl"]
    )
    assert beside.exit_code == 2
    assert "SC105" in beside.stderr
    assert "--rows and --world" in beside.stderr
    wrong = CliRunner().invoke(main.app, ["calibrate", "--from", str(tmp_path / "none.jsonl")])
    assert wrong.exit_code == 2
    assert "none.jsonl:1" in wrong.output


def test_the_command_prints_json() -> None:
    done = CliRunner().invoke(main.app, ["calibrate", "--from", str(MEASURED), "--json"])
    hardware = Hardware.of({**DEFAULT.quantities(), **json.loads(done.stdout)["hardware"]})
    assert hardware.tables.attention == H200.tables.attention


def test_the_cpu_s_file_is_what_its_measurements_come_to(tmp_path: Path) -> None:
    rows = read_rows(ROOT / "benchmarks/measurements/cpu.jsonl")
    path = tmp_path / "cpu.yaml"
    path.write_text(hardware_text(rows, []))
    assert files.read_file(path) == files.named("cpu-gloo")


def test_a_backward_that_took_less_than_forward_has_a_rate() -> None:
    shape = {"kind": "attention", "backend": "", "mb": 1, "heads": 8, "sequence": 512, "width": 64}
    for entry in tables([{**shape, "fwd_ms": 2.0, "fwd_bwd_ms": 1.5}])["attention"]:
        assert entry["flops_per_second"] > 0
