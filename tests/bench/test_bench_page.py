"""The page of a bench in a real browser: its tables fit, its links lead somewhere, on a phone too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bench_parts import made_up, request
from boovae.bench.cells import plan
from boovae.bench.figures import sample_pictures
from boovae.bench.published import METHODS
from boovae.bench.results import Measured
from boovae.bench.studies import write
from boovae.report.pictures import save_grid
from conftest import watched

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytest.importorskip("playwright.sync_api", reason="playwright is missing: pip install 'boovae[test]'")

PHONE, WINDOW = 360, 1400  # pixels


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of all methods on Fashion-MNIST, whose numbers take most room."""
    folder = tmp_path_factory.mktemp("bench")
    found = Measured("fashion_mnist")
    for cell in plan(["fashion_mnist"], METHODS, {"replicas": 2}, 10):
        summary = made_up(cell, lambda seen, seed: 300.0 + 2 * seed, lambda seen: [1 / seen] * seen)
        save_grid(folder / cell.name / "samples" / "task_00.png", np.zeros((64, 784)), (28, 28))
        summary["samples"] = sample_pictures(folder / cell.name, 1)
        summary["components"] = {"Bag": summary["samples"]} if cell.label == "boo" else {}
        found.add(cell, summary)
    asked = request(folder, out=folder, datasets=("fashion_mnist",), methods=METHODS, given={"replicas": 2})
    write(asked, [found], [])
    return asked.results / "report.html"


@pytest.fixture(params=[WINDOW, PHONE])
def page(browser: Browser, file: Path, request: pytest.FixtureRequest) -> Iterator[Page]:
    """The page in a window and on a phone; it must be silent and ask for nothing."""
    context = browser.new_context(viewport={"width": request.param, "height": 844})
    page = context.new_page()
    troubles, _ = watched(page)
    page.goto(file.as_uri())
    yield page
    assert troubles == []
    context.close()


def test_the_page_and_what_it_says_in_short_fit_and_so_do_all_tables_in_a_window(page: Page) -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    cut = page.evaluate(
        "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).map(e => e.ariaLabel)"
    )
    assert "Findings" not in cut
    if page.evaluate("innerWidth") == WINDOW:
        assert cut == []


def test_every_link_leads_to_what_can_then_be_seen(page: Page) -> None:
    links = page.locator("nav a")
    assert links.count() > 8
    for link in links.all():
        page.evaluate("document.querySelectorAll('details').forEach(e => { e.open = false })")
        link.click()
        place = page.locator(str(link.get_attribute("href")))
        assert place.is_visible()
        box = place.bounding_box()
        assert box is not None
        assert 0 <= box["y"] < 844


def test_the_legend_stays_with_the_charts_and_leaves_with_them(page: Page) -> None:
    page.click("nav a[href='#fashion_mnist-diversity-per-task']")
    legend = "document.querySelector('.legend').getBoundingClientRect()"
    if page.evaluate("innerWidth") == WINDOW:
        assert page.evaluate(f"{legend}.top") == 0
    page.click("nav a[href='#fashion_mnist-samples']")
    assert page.evaluate(f"{legend}.bottom") <= page.locator("#fashion_mnist-samples").bounding_box()["y"]  # type: ignore[index]
