"""Passes, the cut and schedules have no figures of a machine: they ask `ir.hardware.Hardware` what takes how long."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent / "shardc"
ROOMS = ("passes", "partition", "schedule")
OF_A_MACHINE = re.compile(r"BYTES|SECONDS|FLOPS|BANDWIDTH|LATENCY|RATE|DELAY|START|LAUNCH")
# What is no figure of a machine although it is called so.
OTHER = {
    "partition/checkpoint_bytes.py:RELAUNCH_SECONDS": "a default of an argument",
    "passes/fusion/clustering/clustering.py:NEGLIGIBLE_BYTES": "what a merge may hold more, whatever it runs on",
    "passes/gemm_padding.py:LAUNCHES": "a count of launches, each of the hardware's seconds",
    "passes/type_check.py:MOST_BYTES": "a bound of what is believed of a file",
    "schedule/schedules/registry.py:SECONDS": "a limit for a user's schedule",
}


def figures(source: str) -> Iterator[tuple[str, float]]:
    """Constants of a module that are called like a machine's quantity, and floats that only a machine's rates are."""
    tree = ast.parse(source)
    for statement in tree.body:
        value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        numbers = [n.value for n in ast.walk(value) if isinstance(n, ast.Constant)] if value is not None else []
        for target in targets:
            if isinstance(target, ast.Name) and OF_A_MACHINE.search(target.id):
                yield from ((target.id, n) for n in numbers if isinstance(n, int | float) and not isinstance(n, bool))
    floats = (n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, float))
    for node in floats:
        if 1e10 <= node.value < float("inf") or 1e-7 < node.value < 1e-4:  # smaller ones guard against 0
            yield f"line {node.lineno}", node.value


def test_passes_have_no_figures_of_a_machine() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{name}": value
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*.py"))
        for name, value in figures(path.read_text(encoding="utf-8"))
    }
    assert found.keys() - OTHER.keys() == set(), {k: v for k, v in found.items() if k not in OTHER}
    assert OTHER.keys() - found.keys() == set(), "these are gone"


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("START_BYTES = 64", 1),
        ("LINK_RATE: float = 3.2", 1),
        ("def f(x):\n    return x / 4.5e11", 1),
        ("def f(x):\n    return x + 20e-6", 1),
        ("MAX_TENSORS = 40\nx = 0.5\ny = float('inf')", 0),
    ],
)
def test_figures_are_seen(source: str, count: int) -> None:
    assert len(list(figures(source))) == count
