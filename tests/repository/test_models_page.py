"""The page of models is what `python -m benchmarks.zoo --table` writes: a row a model, and totals of these rows."""

from __future__ import annotations

import re

import pytest

from tests.repository.pages import ROOT

zoo_table = pytest.importorskip("benchmarks.zoo_table")
TEXT = (ROOT / "docs/reference/models.md").read_text()
STATUSES = ("verified", "alone", "differs", "refused", "crashed", "timeout", "not trained", "not built")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\\\)\|", line)[1:-1]]


def rows(title: str) -> list[list[str]]:
    section = TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return [cells(line) for line in section.splitlines() if line.startswith(("| `", "| type"))]


def test_it_says_which_versions_it_is_of() -> None:
    assert re.search(r"`transformers` \d[\w.]* .*\btorch\n?\s?\d", TEXT, re.S)


@pytest.mark.parametrize("kind", zoo_table.KINDS)
def test_every_row_is_whole_and_the_totals_are_theirs(kind: str) -> None:
    head, *models = rows(zoo_table.KINDS[kind])
    assert len(models) > 5
    totals = [cells(line) for line in TEXT.splitlines() if line.startswith(f"| {kind} |")]
    for column, mesh in ((1, zoo_table.TENSOR), (4, zoo_table.EXPERT)):
        (total,) = [row for row in totals if row[1] == mesh] or [None]
        status = [row[column] for row in models if row[column]]
        verified = [row for row in models if row[column] == "verified"]
        assert [len(status), len(verified)] == ([0, 0] if total is None else [int(total[4]), int(total[6])])
        for row in models:
            assert len(row) == len(head) == 7
            assert not row[column] or row[column].startswith(STATUSES)
        for row in verified:
            assert re.fullmatch(r"\d+\.\d", row[column + 1])
            assert re.fullmatch(r"\d+( / \d+)?", row[column + 2])


def test_a_page_of_lines_has_a_row_for_each_model_that_trained() -> None:
    line = {"name": "causal/llama", "mesh": zoo_table.TENSOR, "transformers": "5.0", "torch": "2.9"}
    done = {"status": "verified", "compile_s": 1.0, "verify_s": 0.5, "collectives": {"all_reduce tp": 3}, "ideal": 2}
    text = zoo_table.page([
        line | {"status": "timeout"},
        line | done,
        line | {"mesh": zoo_table.EXPERT, "status": "refused", "code": "SC101", "error": "a | b\nmore"},
        line | {"name": "masked/none", "status": "not trained"},
    ])  # fmt: skip
    assert "| `llama` | verified | 1.5 | 3 / 2 | refused SC101 a \\| b | | |\n" in text
    assert "`transformers` 5.0 " in text
    assert "package that was not there: `none`." in text
    assert "## Masked" not in text
