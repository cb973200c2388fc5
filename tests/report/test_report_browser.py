"""The report in a real browser: charts are drawn, answer to keys and buttons, and fit a phone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from test_report_charts import LATENTS
from test_report_components import add_components

from conftest import watched
from made_up_run import make_run
from run_folders import write_report

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

expect = pytest.importorskip("playwright.sync_api", reason="playwright is missing: pip install 'boovae[test]'").expect

PHONE = 360  # pixels
DRAWN = "html[data-charts=drawn]"
LINE = '.plot path.js-line[style*="stroke-width: 2px"]'  # not the edge of a band
SECONDS = 60_000  # milliseconds to wait for the charts, also on a busy machine


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report about one run, and one about two."""
    folder = tmp_path_factory.mktemp("runs")
    one, two = make_run(folder / "boo", tasks=3), make_run(folder / "joint", tasks=3, method="joint", forget=2.0)
    add_components(one)
    (one / "latents.json").write_text(json.dumps(LATENTS))
    return {"one": write_report([one]), "two": write_report([one, two], folder / "both.html")}


class Visit:
    """A page that is open, and everything that went wrong on it."""

    def __init__(self, browser: Browser, file: Path, width: int = 1280, colours: Any = "light") -> None:
        context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=colours)
        self.page: Page = context.new_page()
        self.troubles, self.requests = watched(self.page)
        self.page.goto(file.as_uri())
        self.page.wait_for_selector(DRAWN, timeout=SECONDS)

    def colour(self, selector: str, attribute: str) -> str:
        found: str = self.page.eval_on_selector(selector, f"node => getComputedStyle(node).{attribute}")
        return found

    def close(self) -> None:
        assert self.troubles == []
        self.page.context.close()


@pytest.fixture(scope="module")
def visit(browser: Browser, pages: dict[str, Path]) -> Iterator[Callable[..., Visit]]:
    """Open a page, each kind once: plotly takes a moment. At the end all must have been silent."""
    opened: dict[Any, Visit] = {}

    def open_page(name: str, **options: Any) -> Visit:
        key = (name, *options.items())
        if key not in opened:
            opened[key] = Visit(browser, pages[name], **options)
        return opened[key]

    yield open_page
    for one in opened.values():
        one.close()


def test_all_charts_are_drawn_and_nothing_is_fetched(visit: Callable[..., Visit]) -> None:
    seen = visit("one")
    plots = seen.page.locator(".plot")
    assert plots.count() == 5 + 1 + 1 + 2  # curves, gains, map, training
    for index in range(plots.count()):
        assert plots.nth(index).locator(".scatterlayer .trace").count() > 0
    assert plots.first.locator(".points path").count() == 3 + 2  # our points, and the paper's from the second task on
    assert [url.split(":")[0] for url in seen.requests if not url.startswith("data:")] == ["file"]


def test_the_pointer_and_the_keys_show_values(visit: Callable[..., Visit]) -> None:
    page = visit("one").page
    first = page.locator(".plot").first
    first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    label = first.locator(".hoverlayer")
    expect(label).to_contain_text("tasks seen: 2")
    expect(label).to_contain_text("boo: ")
    expect(label).to_contain_text("Boo in the paper: 96.1 ± 0.9")
    page.keyboard.press("ArrowLeft")
    expect(label).to_contain_text("tasks seen: 1")
    page.keyboard.press("Tab")  # to the table; the values go
    expect(label).not_to_contain_text("tasks seen")
    second = page.locator(".plot").nth(1)
    second.hover()
    expect(second.locator(".hoverlayer")).to_contain_text("tasks seen: 2")
    training = page.locator(".plot").last
    training.focus()
    page.keyboard.press("ArrowLeft")
    expect(training.locator(".hoverlayer")).to_contain_text("digit 2, 100% through")


def test_tables_open_by_key(visit: Callable[..., Visit]) -> None:
    page = visit("one").page
    page.locator(".plot").first.focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    table = page.locator(".numbers table").first
    assert table.is_visible()
    assert table.locator("tbody tr").count() == 3
    assert "96.1 ± 0.9\n" in table.inner_text()


def test_two_runs_share_a_legend_that_hides_them(visit: Callable[..., Visit]) -> None:
    page = visit("two", width=PHONE).page
    lines = page.locator(".plot").first.locator("path.js-line")
    before = lines.count()
    button = page.get_by_role("button", name="joint")
    assert button.get_attribute("aria-pressed") == "true"
    button.focus()
    page.keyboard.press("Space")
    assert button.get_attribute("aria-pressed") == "false"
    assert 0 < lines.count() < before
    page.keyboard.press("Space")
    assert lines.count() == before
    heads = page.locator(".headlines thead th").all_inner_texts()
    assert [head.strip() for head in heads] == ["boo", "joint"]


def test_dark_is_the_systems_choice_and_the_buttons(visit: Callable[..., Visit]) -> None:
    light, dark = visit("one"), visit("one", width=PHONE, colours="dark")
    papers = [seen.colour("body", "backgroundColor") for seen in (light, dark)]
    lines = [seen.colour(LINE, "stroke") for seen in (light, dark)]
    assert papers[0] != papers[1]
    assert lines[0] != lines[1]
    dark.page.get_by_role("button", name="Light").click()
    assert dark.colour("body", "backgroundColor") == papers[0]
    assert dark.colour(LINE, "stroke") == lines[0]
    dark.page.get_by_role("button", name="Dark").click()
    assert dark.colour("body", "backgroundColor") == papers[1]


@pytest.mark.parametrize(("name", "options"), [("one", {"colours": "dark"}), ("two", {})])
def test_a_phone_need_not_scroll_sideways(visit: Callable[..., Visit], name: str, options: dict[str, str]) -> None:
    page = visit(name, width=PHONE, **options).page
    for details in page.locator("details").all():
        details.evaluate("node => { node.open = true; }")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE
    for plot in page.locator(".plot").all():
        box = plot.locator(".main-svg").first.bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= PHONE


def test_without_scripts_the_tables_are_there(browser: Browser, pages: dict[str, Path]) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(pages["two"].as_uri())
    assert page.locator(".numbers").count() == page.locator(".plot").count()
    page.locator(".numbers summary").first.click()
    assert page.locator(".numbers table").first.is_visible()
    assert page.get_by_role("button", name="joint").is_disabled()
    context.close()
