"""The documentation is executed: a reader who pastes what a page shows gets what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import shardc
from shardc import P
from shardc.cli.targets import load
from shardc.compiler.pass_pipeline import Options, body_passes, call_passes, kernel_passes
from shardc.ir.placement import Placement
from shardc.runtime.train.trainer import Trainer
from tests.repository.loggers import stand_in
from tests.repository.pages import PAGES, ROOT, Page, missing_names, shardc_cli

pytest.importorskip("transformers")

OWN_TESTS = ("architecture.md", "diagnostics.md")
EXECUTED = [page for page in PAGES if page.path.name not in OWN_TESTS]
# What the synopsis of the command line leaves to the reader.
STANDS_FOR = {
    "shardc timeline TARGET --plan FILE": "shardc timeline examples/mlp.py:mlp --plan tests/cli/mlp_pp.yaml",
    "shardc calibrate": "shardc calibrate --seconds 1",
    "--from FILE": "--from benchmarks/measurements/h200.jsonl",
    "FILE --symbolic": "symbols.yaml --symbolic",
    "TARGET": "examples/mlp.py:mlp",
    "FILE": "configs/plans/mlp.yaml",
    "PASS ...": "propagate",
    "GLOB": "*",
    "VALUE": "0",
    " R": " 0",
    " N": " 1",
    " X": " 0.1",
}
GENERATES = {"TARGET": "hf:gpt2?n_layer=1", "FILE": "shardc:gpt2"}  # an MLP does not
IDS = [str(page.path.relative_to(ROOT)) for page in EXECUTED]


def _runs(page: Page) -> bool:
    return any(block.language in ("python", "console") and not block.is_excerpt for block in page.blocks)


def _enter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are those of a reader in the repository, and what they write stays in the folder."""
    monkeypatch.chdir(folder)
    for name in ("examples", "configs", "docs", "tests", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)


def _run(page: Page, folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    _enter(folder, monkeypatch)
    page.run(folder, request)


def test_the_readme_runs(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    _run(page("README.md"), tmp_path, request, monkeypatch)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.long] if page.path.stem == "training" else [], id=page.path.stem)
        for page in EXECUTED[1:]
        if _runs(page)
    ],
)
def test_a_page_runs(
    page: Page, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = stand_in(monkeypatch)
    _run(page, tmp_path, request, monkeypatch)
    assert all(logs) == ("SummaryWriter" in page.text), "what the page logs reaches the loggers"


@pytest.mark.parametrize("page", EXECUTED, ids=IDS)
def test_what_a_page_shows_and_names_exists(page: Page) -> None:
    for block in page.blocks:
        if block.is_excerpt:
            file = (ROOT / str(block.named)).read_text(encoding="utf-8")
            assert "\n".join(line for line in block.body.splitlines() if not line.startswith("#")) in file
        if block.language == "py":
            assert not missing_names(block.body)
    for path in re.findall(r"`(?:\S+ )*((?:tests|configs|examples|shardc|benchmarks|docs)/[\w/.]+)", page.text):
        assert (ROOT / path).exists(), path
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    for target in re.findall(r"`make (\w+)`|^make (\w+)$", page.text, re.M):
        assert "".join(target) in targets
    kinds = {"trainer": Trainer, "program": shardc.Program, "shardc": shardc, "Plan": shardc.Plan}
    for kind, name in re.findall(r"\b(trainer|program|shardc|Plan)\.(\w+)\(", page.text):
        assert hasattr(kinds[kind], name), f"{kind}.{name}"
    for target in set(re.findall(r"`(hf:\w+(?:\?\S+)?)`", page.text)):
        assert load(target).model is not None


def page(name: str) -> Page:
    return Page(ROOT / name)


def synopsis() -> list[str]:
    """The commands of the synopsis, one for each option: what `[...]` and continued lines say may be added."""
    section = re.search(r"^# Command line\n\n((?:    .*\n)+)", page("docs/reference/commands.md").text, re.M)
    assert section
    commands: list[str] = []
    continued = ""
    for line in section[1].splitlines():
        said = re.split(r"\s{3,}", line.strip())[0]
        if said.startswith("shardc"):
            continued = re.sub(r"\s*\[.*?\]", "", said)
        else:
            said = f"{continued} {said}"
        said = re.sub(r"\s*\[(-o FILE|--nproc N|--weights FOLDER)\]", "", said)
        ways = [said.replace(one, "") for one in re.findall(r"\[.*?\]", said)]
        commands += [re.sub(r"[\[\]]", "", way) for way in {said, *ways}]
    return sorted(commands)


# Measuring a machine takes most of a minute; tests/distributed/test_calibrate.py does it too.
@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=[pytest.mark.long] if c.strip() == "shardc calibrate" else []) for c in synopsis()],
)
def test_the_synopsis_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _enter(tmp_path, monkeypatch)
    (tmp_path / "symbols.yaml").write_text(Path("configs/plans/mlp.yaml").read_text() + "symbols: {B: x.0}\n")
    for word, meant in (STANDS_FOR | (GENERATES if command.startswith("shardc generate") else {})).items():
        command = re.sub(rf"{re.escape(word)}(?!\w)", meant, command)
    if command.startswith("shardc lock") and "--check" in command:
        shardc_cli(command.removeprefix("shardc ").partition("--check")[0])  # what it compares with
    forms = re.search(r"\w+(?:\|\w+)+", command)
    for form in forms[0].split("|") if forms else [""]:
        out, _ = shardc_cli(command.replace(forms[0], form).removeprefix("shardc ") if forms else command[7:])
        assert out


def test_the_finding_of_the_readme_is_what_is_printed() -> None:
    """It is the one of the guide, which is printed there."""
    shown = next(block.body for block in page("README.md").blocks if block.body.startswith("warning["))
    assert shown in page("docs/guides/debugging.md").text


def test_placements_mean_the_same_in_text_and_in_python() -> None:
    rows = re.findall(r"^\| `(.+?)` \| `(.+?)` \|", page("docs/guides/placements.md").text, re.M)
    assert len(rows) == 5
    for text, python in rows:
        assert Placement.parse(text) == P(eval(python, {"shardc": shardc}))


def test_passes_are_listed_in_their_order() -> None:
    blocks = page("docs/guides/debugging.md").blocks
    listed = next(block.body for block in blocks if block.body.startswith("trace"))
    names = [
        one.name for one in (*body_passes((), (), (), Options()), *call_passes(Options()), *kernel_passes(Options()))
    ]
    assert re.findall("|".join(rf"\b{name}\b" for name in names), listed) == names


def test_the_site_has_every_page() -> None:
    listed = set(re.findall(r"^\s+- ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M))
    there = {str(one.path.relative_to(ROOT / "docs")) for one in PAGES if one.path.name != "README.md"}
    assert listed == there


def test_the_readme_is_short() -> None:
    assert len(page("README.md").text.splitlines()) <= 200
