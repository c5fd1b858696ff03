"""The rehearsal of benchmarks/long_context.py on two processes: every contestant finds what one device finds."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", minversion="5.0")

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.long_context import main, ratios, table, wrong
from benchmarks.long_context_runs import OPTIONAL, RUNS, Setting, Slice, backend_of_its_own, shifted, slice_of

ROOT = Path(__file__).parents[2]
ASKED = ("ours-ring", "hand-ring", "hand-gather", "torch-allgather-eager")
TOLERANCE = 1e-5  # of float32


def test_contestants_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "lines.jsonl"
    command = [sys.executable, "-m", "benchmarks.long_context", "--device", "cpu", "--tiny", "--gpus", "2"]
    command += ["--steps", "1", "--rounds", "1", "--out", str(out), "--runs", *ASKED]
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    done = subprocess.run(command, env=env, cwd=ROOT, timeout=300, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    measured = {row["run"]: row for row in rows if "median_ms" in row}
    assert list(measured) == [name for name in ASKED if not name.startswith("torch")]
    for row in measured.values():
        for gaps in (row["gaps"], row["last_gaps"]):
            assert len(gaps) == 6
            assert max(gaps.values()) < TOLERANCE, row
    assert measured["ours-ring"]["auto"] in ("ring", "all_gather", "all_to_all")
    (failed,) = (row for row in rows if "failed" in row)  # no kernel of the CPU is known to it
    assert failed["run"] == "torch-allgather-eager"
    assert "NotImplementedError" in failed["failed"]
    (found,) = (row["ratios"] for row in rows if "ratios" in row)
    assert {*found} == {"hand-ring / ours-ring", "hand-gather / ours-ring"}
    assert main(["--table", str(out)]) == 0
    assert "| 64 | hand-gather |" in capsys.readouterr().out


def test_runs_that_are_wrong_do_not_count() -> None:
    rows: dict[str, dict[str, object]] = {
        "ours-ring": {"gaps": {"loss": 0.2}},
        "ours-all_gather": {"gaps": {"loss": 0.01}},
        "hand-ring": {"gaps": {"loss": 0.01}},
        "torch-alltoall": {"gaps": {"loss": float("nan")}},
        "hand-gather": {"gaps": {"loss": 0.01}, "last_gaps": {"loss": 0.2}},
    }
    assert [name for name, row in rows.items() if wrong(row)] == ["ours-ring", "torch-alltoall", "hand-gather"]
    found = ratios(
        rows, {"ours-ring": 1.0, "ours-all_gather": 2.0, "hand-ring": 3.0, "torch-alltoall": 1.0, "hand-gather": 1.0}
    )
    assert found == {"hand-ring / ours-all_gather": 1.5}
    spent = {"median_ms": 1.0, "min_ms": 1.0, "max_ms": 1.0, "tokens_per_s": 64}
    lines = table([{"tokens": 64, "run": name, **row, **spent} for name, row in rows.items()])
    assert [("WRONG" in line) for line in lines[2:]] == [True, False, False, True, True]


@pytest.mark.parametrize("order", [("twice", "thrice"), ("thrice", "twice")])
def test_compiled_runs_keep_their_attention(order: tuple[str, ...]) -> None:
    """Of two compiled runs that take turns, each calls its own attention, and compiles it."""
    torch.compiler.reset()
    setting = Setting.of(slice_of(2, True), 16, torch.device("cpu"))
    factors = {"twice": 2.0, "thrice": 3.0}

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: object, **_: object) -> tuple[Tensor, None]:
        factor = factors[module.config._attn_implementation]  # type: ignore[index,union-attr]
        return (factor * q + k.repeat_interleave(2, 1)).transpose(1, 2), None

    runs: dict[str, Slice] = {}
    expected: dict[str, Tensor] = {}
    operands = (*shifted(setting.batch), 15)
    for name in order:
        ALL_ATTENTION_FUNCTIONS.register(name, attend)
        model = setting.model()
        model.config._attn_implementation = name
        expected[name] = Slice(model, "")(*operands)
        runs[name] = Slice(model, "aot_eager")
    assert not torch.allclose(*expected.values())
    for name in (*order, *reversed(order), *order):
        torch.testing.assert_close(runs[name](*operands), expected[name])


def test_compiled_runs_share_no_entries() -> None:
    """What one backend has compiled, another one of the same compiler does not take."""
    graphs: list[str] = []
    calls: list[Callable[[Tensor], Tensor]] = []

    def layer(x: Tensor) -> Tensor:
        return x.sin() + 1

    def counted(name: str) -> Callable[..., object]:
        own = backend_of_its_own("eager")

        def backend(graph: torch.fx.GraphModule, inputs: list[object]) -> object:
            graphs.append(name)
            return own(graph, inputs)

        return backend

    assert backend_of_its_own("eager") is not backend_of_its_own("eager")
    for name in ("first", "second"):
        calls.append(torch.compile(layer, backend=counted(name)))
    for call in (*calls, *reversed(calls)):
        torch.testing.assert_close(call(torch.ones(3)), torch.ones(3).sin() + 1)
    assert graphs == ["first", "second"]


def test_what_is_tried_instead_exists() -> None:
    from benchmarks.long_context_runs import INSTEAD

    assert {*INSTEAD, *INSTEAD.values()} <= {*RUNS, *OPTIONAL}
