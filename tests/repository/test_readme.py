"""The README is executed: a reader who pastes what it shows gets what it says.

Python blocks run in order, in one namespace, in an empty folder. A block whose first line is a comment with a path is
an excerpt, and is in that file word for word. Commands in console blocks run as they stand, and print what stands below
them (`--update-golden` writes it there, and the diagnostic); the lines of the synopsis run with every option they name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from typer.testing import CliRunner

import shardc
from shardc import P
from shardc.cli import main
from shardc.cli.targets import load
from shardc.compiler.pass_pipeline import Options, body_passes, part_passes
from shardc.ir.placement import Placement
from shardc.runtime.train.trainer import Trainer

pytest.importorskip("transformers")

ROOT = Path(__file__).parent.parent.parent
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")

# The model and the plan that the diagnostic in the README is the first of.
MODEL = """\
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.d, self.c_attn, self.c_proj = d, nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.c_attn(x).split(self.d, dim=2)
        q, k, v = (t.unflatten(2, (4, -1)).transpose(1, 2) for t in (q, k, v))
        return self.c_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([nn.ModuleDict({"attn": Attention(32)})])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.h[0]["attn"](x)).square().mean()


def model() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Model(), (torch.randn(4, 8, 32),)
"""
PLAN = """\
mesh: dp=2, tp=2
inputs:
  x: "dp, tp, -"
"""
# What a synopsis leaves to the reader.
STANDS_FOR = {
    "shardc timeline TARGET --plan FILE": "shardc timeline examples/mlp.py:mlp --plan tests/cli/mlp_pp.yaml",
    "TARGET": "examples/mlp.py:mlp",
    "FILE": "configs/plans/mlp.yaml",
    "PASS ...": "propagate",
    "GLOB": "*",
    "VALUE": "0",
    " R": " 0",
    " N": " 1",
    " X": " 0.1",
}


class Block(NamedTuple):
    language: str
    body: str

    @property
    def excerpt_of(self) -> str | None:
        """The file that a block says it is taken from."""
        found = re.match(r"# ([\w/]+\.\w+)\b", self.body)
        return found[1] if found else None


BLOCKS = [Block(*found) for found in re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.M | re.S)]


def shardc_cli(command: str) -> tuple[str, str]:
    """What a command prints on stdout and on stderr, paths as seen from here."""
    result = CliRunner().invoke(main.app, command.split(), prog_name="shardc")
    assert result.exit_code == 0, f"shardc {command}\n{result.output}\n{result.exception!r}"
    return _plain(result.stdout), _plain(result.stderr)


def _plain(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines()).strip()


def _rounded(text: str) -> str:
    """Rounding errors, and where they are largest, differ between processors."""
    return re.sub(r"at worst \(.*\)", "at worst", re.sub(r"\d\.\de-\d\d", "1e-..", text))


def compare(shown: str, printed: str, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden") and _rounded(shown.strip()) != _rounded(printed):
        README.write_text(README.read_text(encoding="utf-8").replace(shown, printed + "\n"), encoding="utf-8")
    else:
        assert _rounded(printed) == _rounded(shown.strip())


@pytest.mark.slow
def test_the_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    scope: dict[str, object] = {"__name__": "readme"}
    run = [block for block in BLOCKS if block.language == "python" and block.excerpt_of is None]
    for block in run:
        exec(compile(block.body, str(README), "exec"), scope)
    assert len(run) == 3
    assert (tmp_path / "timeline.svg").exists()
    assert scope["loss"] == pytest.approx(scope["metrics"].loss, abs=1.0)  # type: ignore[attr-defined]
    assert (tmp_path / "step.json").exists()
    assert scope["metrics"].step == scope["scheduler"].last_epoch + 1 == 3  # type: ignore[attr-defined]
    assert (tmp_path / "out/run").is_dir()


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.excerpt_of], ids=lambda block: block.excerpt_of)
def test_excerpts_are_in_their_files(block: Block) -> None:
    file = (ROOT / str(block.excerpt_of)).read_text(encoding="utf-8")
    shown = "\n".join(line for line in block.body.splitlines() if not line.startswith("#"))
    assert shown in file


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "console"], ids=lambda block: block.body.splitlines()[0]
)
def test_commands_print_what_is_shown(
    block: Block, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    command, _, shown = block.body.partition("\n")
    printed, _ = shardc_cli(command.removeprefix("$ shardc "))
    compare(shown, printed, request)


def synopsis() -> list[str]:
    """The commands of the synopsis, one for each option: what `[...]` and continued lines say may be added."""
    section = re.search(r"^## Command line\n\n((?:    .*\n)+)", TEXT, re.M)
    assert section
    commands: list[str] = []
    for line in section[1].splitlines():
        said = re.split(r"\s{3,}", line.strip())[0]
        if not said.startswith("shardc"):
            said = f"shardc compile TARGET --plan FILE {said}"
        said = re.sub(r"\s*\[(-o FILE|--nproc N)\]", "", said)
        ways = [said.replace(one, "") for one in re.findall(r"\[.*?\]", said)]
        commands += [re.sub(r"[\[\]]", "", way) for way in {said, *ways}]
    return sorted(commands)


@pytest.mark.parametrize("command", synopsis())
def test_the_synopsis_runs(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for word, meant in STANDS_FOR.items():
        command = re.sub(rf"{re.escape(word)}(?!\w)", meant, command)
    forms = re.search(r"\w+(?:\|\w+)+", command)
    for form in forms[0].split("|") if forms else [""]:
        out, _ = shardc_cli(command.replace(forms[0], form).removeprefix("shardc ") if forms else command[7:])
        assert out


def test_the_diagnostic_is_what_is_printed(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    Path("plan.yaml").write_text(PLAN)
    _, printed = shardc_cli("compile model.py:model --plan plan.yaml")
    shown = next(block.body for block in BLOCKS if block.body.startswith(("warning[", "error[")))
    first, *_ = re.split(r"\n(?=\w+\[SC)", printed.replace(f"{tmp_path}/", ""))
    compare(shown, first, request)


def test_placements_mean_the_same_in_text_and_in_python() -> None:
    rows = re.findall(r"^\| `(.+?)` \| `(.+?)` \|", TEXT, re.M)
    assert len(rows) == 5
    for text, python in rows:
        assert Placement.parse(text) == P(eval(python, {"shardc": shardc}))


def test_passes_are_listed_in_their_order() -> None:
    listed = next(block.body for block in BLOCKS if block.body.startswith("trace"))
    names = [one.name for one in (*body_passes((), (), Options()), *part_passes(Options()))]
    assert re.findall("|".join(rf"\b{name}\b" for name in names), listed) == names


def test_what_is_named_exists() -> None:
    for path in re.findall(r"`(?:\S+ )*((?:tests|configs|examples|shardc|benchmarks)/[\w/.]+)", TEXT):
        assert (ROOT / path).exists(), path
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    for target in re.findall(r"`make (\w+)`|^make (\w+)$", TEXT, re.M):
        assert "".join(target) in targets


def test_what_it_calls_exists() -> None:
    kinds = {"trainer": Trainer, "program": shardc.Program, "shardc": shardc, "Plan": shardc.Plan}
    called = {(kind, name) for kind, name in re.findall(r"\b(trainer|program|shardc|Plan)\.(\w+)\(", TEXT)}
    assert len(called) > 10
    assert all(hasattr(kinds[kind], name) for kind, name in called)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`(hf:\w+(?:\?\S+)?)`", TEXT))))
def test_targets_load(target: str) -> None:
    assert load(target).model is not None
