"""The page of diagnostics is executed: each code has a section, and each section says what is really printed.

The block `model.py` of the page is what every example begins with. The code before the first `###` of a chapter is run
after it, once. In a section, files (blocks with a title) are written, and the rest is run, in a copy of that namespace
and an empty folder:

    code, up to the first text block     must print the code of the section; the text is its message, place and hint
    code behind it, the mended form      continues the example, and must not print the code

`--update-golden` writes the text blocks. A section that names a test or a golden file instead (what needs several
processes) is compared with that file, or the test must exist.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from typer.testing import CliRunner

import shardc
from kernels_triton.launch import tables
from shardc.cli import main
from shardc.ir.diagnostic import CODES, ShardcError
from shardc.rules import registry as rules
from shardc.schedule.schedules import registry as schedules

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs/reference/diagnostics.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCK = re.compile(r'^```(\w+)(?: title="(.+?)")?\n(.*?)^```$', re.M | re.S)
HEADING = re.compile(r"^### (SC\d+) ([\w-]+) \{#(sc\d+)\}$", re.M)
# What differs from run to run.
VARYING = (
    (r"process \d+ on \S+", "process 4711 on node1"),
    (r"after \d+ characters", "after 4711 characters"),
    (r"the \d+ that were written", "the 4711 that were written"),
    (r"by \d\.\de[+-]\d+, on", "by 5.8e-01, on"),
)


class Block(NamedTuple):
    language: str
    title: str
    body: str


class Section(NamedTuple):
    code: str
    text: str
    chapter: str

    @property
    def blocks(self) -> list[Block]:
        return [Block(*match) for match in BLOCK.findall(self.text)]

    @property
    def example(self) -> list[Block]:
        return self.blocks[: self._shown]

    @property
    def shown(self) -> str:
        return self.blocks[self._shown].body

    @property
    def mended(self) -> list[Block]:
        return self.blocks[self._shown + 1 :]

    @property
    def made_by(self) -> str | None:
        """The test, or the golden file, that a section without an example names."""
        match = re.search(r"^Made by `(tests/\S+)`", self.text, re.M)
        return match[1] if match else None

    @property
    def _shown(self) -> int:
        return [block.language for block in self.blocks].index("text")


def parsed() -> dict[str, Section]:
    sections: dict[str, Section] = {}
    for chapter in re.split(r"^(?=## )", TEXT, flags=re.M)[1:]:
        preamble, *rest = re.split(r"^(?=### )", chapter, flags=re.M)
        for text in rest:
            match = HEADING.match(text)
            assert match, text[:80]
            assert match[1] not in sections, f"{match[1]} has two sections"
            sections[match[1]] = Section(match[1], text, preamble)
    return sections


SECTIONS = parsed()
EXECUTED = [code for code, section in SECTIONS.items() if section.made_by is None]


# ---------------------------------------------------------------------- running an example
@cache
def preamble(chapter: str, folder: Path) -> dict[str, Any]:
    """The names that the examples of a chapter begin with."""
    scope: dict[str, Any] = {"__name__": "example"}
    blocks = [Block(*match) for match in BLOCK.findall(TEXT.partition("\n## ")[0] + chapter)]
    for block in (block for block in blocks if block.language == "python"):
        file = folder / block.title
        file.write_text(block.body)
        torch.manual_seed(0)
        exec(compile(block.body, str(file), "exec", dont_inherit=True), scope)
    return scope


@contextlib.contextmanager
def as_registered() -> Iterator[None]:
    """The rules and schedules that an example adds are there for that example alone."""
    registries: list[dict[Any, Any]] = [rules._RULES, rules._FITTED, schedules._SCHEDULES]
    before = [dict(table) for table in registries]
    try:
        yield
    finally:
        for table, entries in zip(registries, before, strict=True):
            table.clear()
            table.update(entries)


def printed_by(blocks: list[Block], scope: dict[str, Any], name: str) -> str:
    """What blocks print, and what they raise, warn of and leave in the diagnostics of programs."""
    out = io.StringIO()
    before = {id(value) for value in scope.values()}
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(out):
        warnings.simplefilter("always")
        for block in blocks:
            if block.title:
                Path(block.title).write_text(block.body)
            elif block.language == "python":
                Path(f"{name}.py").write_text(block.body)
                try:
                    exec(compile(block.body, str(Path(f"{name}.py").absolute()), "exec", dont_inherit=True), scope)
                except ShardcError as error:
                    print(error)
            elif block.language == "console":
                for command in re.findall(r"^\$ shardc (.*)$", block.body, re.M):
                    print(CliRunner().invoke(main.app, command.split(), prog_name="shardc").output)
    for value in scope.values():
        if isinstance(value, shardc.Program) and id(value) not in before:
            print(*value.diagnostics, sep="\n", file=out)
    printed = "\n".join([out.getvalue(), *(str(warning.message) for warning in caught)])
    for pattern, plain in ((re.escape(f"{Path.cwd()}/"), ""), (re.escape(f"{ROOT}/"), ""), *VARYING):
        printed = re.sub(pattern, plain, printed)
    return printed


def shortened(code: str, printed: str) -> str:
    """Of the first diagnostic of a code: message, place, hint, and the quoted lines where a caret points into them."""
    head = rf"^(?:error|warning|note)\[{code} {CODES[code].name}\]: .*\n"
    match = re.search(rf"({head})((?:  .*\n)*)", printed + "\n", re.M)
    assert match, f"{code} is not printed, but\n{printed}"
    lines, kept = match[2].splitlines(), False
    caret = any(re.match(r"   \| +\^", line) for line in lines)
    short = match[1].rstrip() + "\n"
    for line in lines:
        if not line.startswith(" " * 10):  # a continuation goes with its line
            kept = line.startswith(("  -->", "  hint:")) or (caret and line.startswith("   |"))
        short += line.rstrip() + "\n" if kept else ""
    return short


def compare(section: Section, short: str, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden") and short != section.shown:
        updated = section.text.replace(f"```text\n{section.shown}```", f"```text\n{short}```", 1)
        PAGE.write_text(PAGE.read_text(encoding="utf-8").replace(section.text, updated), encoding="utf-8")
    else:
        assert short == section.shown


# ---------------------------------------------------------------------- tests
def test_every_code_has_its_section() -> None:
    assert set(SECTIONS) == set(CODES)
    assert list(SECTIONS) == sorted(SECTIONS)
    for code, name, anchor in HEADING.findall(TEXT):
        assert (name, anchor) == (CODES[code].name, code.lower())


@pytest.mark.parametrize("code", SECTIONS)
def test_a_section_says_what_its_code_means(code: str) -> None:
    assert f"\n*{CODES[code].meaning[:1].upper()}{CODES[code].meaning[1:]}.*\n" in SECTIONS[code].text


@pytest.mark.parametrize("code", EXECUTED)
def test_examples(
    code: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    section, shared = SECTIONS[code], tmp_path_factory.getbasetemp()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tables.schedules.cache_clear()
    monkeypatch.setenv(tables.VARIABLE, "")  # so that it is put back after an example that sets it
    monkeypatch.delenv(tables.VARIABLE)
    scope = dict(preamble(section.chapter, shared))
    (tmp_path / "model.py").write_text((shared / "model.py").read_text())
    torch.manual_seed(0)
    assert section.example
    with as_registered():
        printed = printed_by(section.example, scope, "example").replace(f"{shared}/", "")
    short = shortened(code, printed)
    compare(section, short, request)
    with as_registered():
        mended = printed_by(section.mended, scope, "mended")
    assert f"[{code} " not in mended
    assert "error[" not in mended


def test_most_sections_are_executed_and_have_a_mended_form() -> None:
    assert len(EXECUTED) > 70
    assert sum(bool(SECTIONS[code].mended) for code in EXECUTED) > 60


@pytest.mark.parametrize("code", sorted(set(SECTIONS) - set(EXECUTED)))
def test_what_other_tests_make(code: str, request: pytest.FixtureRequest) -> None:
    """A golden file has what the page shows, word for word; of a test, what is shown is of the right code."""
    section = SECTIONS[code]
    source = (ROOT / str(section.made_by).partition("::")[0]).read_text(encoding="utf-8")
    if str(section.made_by).endswith(".txt"):
        compare(section, shortened(code, source), request)
    else:
        assert code in source
        assert shortened(code, section.shown) == section.shown


def test_tests_that_are_named_exist() -> None:
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT):
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name


def test_what_is_linked_exists() -> None:
    anchors = set(re.findall(r"\{#([\w-]+)\}", TEXT))
    assert set(re.findall(r"\]\(#([\w-]+)\)", TEXT)) <= anchors
