"""docs/architecture.md is true: every room is in it, passes are in their order, commands print the lines shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardc.cli import main
from shardc.compiler.pass_pipeline import Options, body_passes, call_passes, kernel_passes
from tests.repository.test_layering import FLOORS

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```console\n(.*?)^```$", TEXT, re.M | re.S)
COMMANDS = [part.partition("\n")[::2] for block in BLOCKS for part in block.split("$ shardc ")[1:]]


def test_every_room_is_on_its_floor() -> None:
    shown = [(int(floor), room) for floor, room in re.findall(r"^\| (\d+) \| `([\w.]+)` \|", TEXT, re.M)]
    assert sorted(shown) == sorted((floor, room) for floor, rooms in enumerate(FLOORS) for room in rooms)
    assert [floor for floor, _ in shown] == sorted(floor for floor, _ in shown)


def test_passes_are_in_their_order() -> None:
    listed = re.findall(r"^\| `(\w+)` \| `[\w.]+` \|", TEXT, re.M)
    after = (*body_passes((), (), (), Options()), *call_passes(Options()), *kernel_passes(Options()))
    assert listed == [
        "normalize",
        "imply_masks",
        "group_experts",
        "limit_experts",
        "quantize",
        "sum_parts",
        *(each.name for each in after),
    ]


@pytest.mark.parametrize(("command", "shown"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_commands_print_the_lines_shown(command: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(main.app, command.split(), prog_name="shardc")
    assert result.exit_code == 0, result.output
    printed = [line.rstrip() for line in result.stdout.splitlines()]
    position, elided = 0, True  # a first line may stand anywhere: summaries begin with blank lines
    for line in shown.rstrip("\n").splitlines():
        if line == "...":
            elided = True
            continue
        where = printed.index(line, position) if line in printed[position:] else None
        assert where is not None, f"not printed: {line}\n{result.stdout}"
        assert elided or where == position, f"printed, but not there: {line}"
        position, elided = where + 1, False


def test_what_it_names_exists() -> None:
    for path in re.findall(r"`(?:\S+ )*((?:docs|tests|configs|examples|shardc|kernels_triton)/[\w/.]+)", TEXT):
        assert (ROOT / path).exists(), path
    for room, start in re.findall(r"^\| \d+ \| `([\w.]+)` \|.*\| `([\w/.]+)` \|$", TEXT, re.M):
        folder = ROOT / room.replace(".", "/")
        assert (folder / start).exists() or (folder.parent / start).exists(), f"{room}: {start}"
    for package in re.findall(r"^\| `\w+` \| `([\w.]+)` \|", TEXT, re.M):
        assert (ROOT / "shardc/passes" / package).exists(), package
