"""The page in a real Chromium: it draws, clicks explain, 32 layers take as few rows as 3, and nothing is fetched."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.page.test_content import program

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as engine:
        opened = engine.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Opens a program's page; at the end nothing went wrong in it, and nothing was asked of a network."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    problems: list[str] = []
    page.on("pageerror", lambda problem: problems.append(str(problem)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: problems.append(request.url) if not request.url.startswith("file:") else None)

    def go(layers: int, pipeline: bool = False, tab: str = "") -> Any:
        page.goto(program(layers, pipeline).show(tmp_path / "program.html").as_uri() + (f"#{tab}" if tab else ""))
        page.wait_for_selector("body[data-ready]")
        return page

    yield go
    page.close()
    assert problems == []


@pytest.mark.long  # `test_content.py` folds equal layers, and the test of a folded layer's name shows it in a browser
def test_32_layers_take_as_few_rows_as_three(opened: Any) -> None:
    page = opened(32)
    assert (
        page.locator(
            "details.segment[data-count='30'], details.segment[data-count='31'], details.segment[data-count='32']"
        ).count()
        > 1
    )
    assert page.locator(".row").count() < 500
    head, view = page.locator("header").bounding_box(), page.locator("#view").bounding_box()
    assert head["y"] + head["height"] <= view["y"]
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_a_click_on_a_collective_says_why(opened: Any) -> None:
    page = opened(2)
    edge = page.locator(".row.edge").first
    edge.scroll_into_view_if_needed()
    edge.click(position={"x": 3, "y": 5})
    details = page.locator("#details")
    assert "all_reduce" in details.inner_text()
    assert 'h.0.up.weight = "tp"' in details.inner_text() or 'x = "dp"' in details.inner_text()
    assert "needed" in details.inner_text()
    assert page.locator(".row.chosen").count() == 1


def test_a_name_leads_to_its_line(opened: Any) -> None:
    page = opened(2)
    page.fill("#search", "relu")
    assert 0 < page.locator(".row").count() < 20
    page.fill("#search", "")
    page.locator(".row .name", has_text="%x").first.click()
    assert "input" in page.locator(".row.chosen").inner_text()
    page.check("#only-edges")
    assert page.locator(".row").count() == page.locator(".row.edge").count() > 0


def test_a_name_of_a_folded_layer_leads_to_the_one_that_is_shown(opened: Any) -> None:
    page = opened(12)
    page.locator(".row .name", has_text="%h.11.add").first.click()
    assert page.locator(".row.chosen").inner_text().strip().startswith("%h.0.add")
    assert page.locator("#details h2").first.inner_text() == "%h.0.add"


def test_passes_memory_and_ranks(opened: Any) -> None:
    page = opened(2)
    page.get_by_role("tab", name="Passes").click()
    page.select_option(
        "#pass", label=next(o for o in page.locator("#pass option").all_inner_texts() if "lower_resh" in o).strip()
    )
    assert (
        "all_reduce" in page.locator("#difference .added").first.inner_text()
        or page.locator("#difference .added").count() > 0
    )
    page.get_by_role("tab", name="Memory").click()
    box = page.locator("svg#memory").bounding_box()
    assert box["width"] > 300
    page.get_by_role("tab", name="Communication").click()
    assert "all_reduce (sum)" in page.locator("#view").inner_text()
    page.get_by_role("tab", name="Ranks").click()
    page.select_option("#rank", "3")
    assert "dp=1, tp=1" in page.locator("#view").inner_text()


def test_a_pipeline_has_a_timeline(opened: Any) -> None:
    page = opened(4, True, "Timeline")
    assert page.locator("svg#timeline rect.work").count() == 4 * 2 * 2
    assert "no seconds" in page.locator("#view").inner_text()
    page.get_by_role("tab", name="Graph").click()
    page.select_option("#graph", index=2)
    assert page.locator(".row").count() > 3


def test_a_narrow_window_keeps_everything_in_reach(opened: Any) -> None:
    page = opened(2)
    page.set_viewport_size({"width": 420, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.locator(".row.edge").first.click(position={"x": 3, "y": 5})
    box = page.locator("#details").bounding_box()
    assert box["width"] <= 420
    assert box["y"] < 800
