"""docs/glossary.md: at least 80 terms, in alphabetical order, each with a place that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")


class Term(NamedTuple):
    word: str
    meaning: str
    anchor: str
    place: str


TERMS = [
    Term(*(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]))
    for line in TEXT.splitlines()
    if line.startswith("| ") and not line.startswith("| term ")
]


def test_terms_are_in_alphabetical_order_and_distinct() -> None:
    words = [term.word.lower() for term in TERMS]
    assert len(words) >= 80
    assert words == sorted(set(words))


@pytest.mark.parametrize("term", TERMS, ids=[term.word for term in TERMS])
def test_a_term_is_one_sentence_with_an_anchor_and_a_place(term: Term) -> None:
    assert re.fullmatch(r"[^.]+\.", re.sub(r"`.*?`", "", term.meaning)), "one sentence"
    assert term.anchor
    name = re.fullmatch(r"`([\w.]+)`", term.place)
    assert name is not None
    file, rest = find(name[1])
    assert not rest or rest in defined(file), f"{file.relative_to(ROOT)} defines no {rest}"


def find(name: str) -> tuple[Path, str]:
    """The file of a dotted name's module, and what is left: a class or a function."""
    parts = name.split(".")
    for end in (len(parts), len(parts) - 1):
        base = ROOT.joinpath(*parts[:end])
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.exists():
                return file, ".".join(parts[end:])
    raise AssertionError(f"there is no module {name}")


def defined(file: Path) -> set[str]:
    """The names that a module defines."""
    names: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names
