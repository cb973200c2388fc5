"""The page as a person uses it, in a real browser."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import uvicorn

from boovae.data import Stream
from conftest import watched
from served_run import Served, picture

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

expect = pytest.importorskip("playwright.sync_api", reason="playwright is missing: pip install 'boovae[test]'").expect


@pytest.fixture(scope="module")
def address(served: Callable[[str], Served]) -> Iterator[Callable[[str], str]]:
    """Return where a method's model is served, by a real server."""
    servers: dict[str, tuple[uvicorn.Server, threading.Thread]] = {}

    def of(method: str) -> str:
        if method not in servers:
            app: Any = served(method).client.app
            server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off", ws="none"))
            thread = threading.Thread(target=server.run)
            thread.start()
            servers[method] = server, thread
            while not server.started:
                time.sleep(0.01)
        return f"http://127.0.0.1:{servers[method][0].servers[0].sockets[0].getsockname()[1]}/"

    yield of
    for server, thread in servers.values():
        server.should_exit = True
        thread.join()


@pytest.fixture
def open_page(browser: Browser, address: Callable[[str], str]) -> Iterator[Callable[..., Page]]:
    """Open the page; at the end nothing may have been complained about or asked of others."""
    contexts, seen = [], []

    def opened(method: str = "boo+distill", **options: Any) -> Page:
        contexts.append(browser.new_context(**options))
        page, where = contexts[-1].new_page(), address(method)
        seen.append((where, *watched(page)))
        page.goto(where)
        page.wait_for_selector("#film img")
        return page

    yield opened
    for context in contexts:
        context.close()
    for where, troubles, requests in seen:
        assert not troubles
        assert [url for url in requests if not url.startswith((where, "data:"))] == []


def tiles(page: Page) -> list[str]:
    return list(page.eval_on_selector_all("#grid img", "all => all.map(image => image.src)"))


def redrawn(page: Page, before: list[str]) -> list[str]:
    """Wait until the samples are others; return them."""
    end = time.monotonic() + 10
    while tiles(page) == before and time.monotonic() < end:
        page.wait_for_timeout(20)
    assert tiles(page) != before
    return tiles(page)


def changed(page: Page, selector: str, before: str | None) -> str:
    """Wait until a picture is another one; return it."""
    expect(page.locator(selector)).not_to_have_attribute("src", before or "")
    return str(page.locator(selector).get_attribute("src"))


def test_the_page_shows_the_model_at_once(open_page: Callable[..., Page]) -> None:
    page = open_page()
    assert page.locator("h1").inner_text() == "boo+distill on digits"
    assert len(set(tiles(page))) > 30
    assert page.locator("#tasks label").all_inner_texts() == ["all", "0", "1"]
    assert page.locator(".tile.a").count() == page.locator(".tile.b").count() == 1
    assert page.evaluate("[...document.images].filter(i => i.src && i.offsetParent).every(i => i.naturalWidth >= 8)")


def test_picking_a_task_and_a_component_changes_the_samples(open_page: Callable[..., Page]) -> None:
    page = open_page()
    everything = tiles(page)
    page.get_by_role("radio", name="1", exact=True).check(force=True)
    of_task = redrawn(page, everything)
    assert len(of_task) == len(everything)
    page.locator("#components label").nth(1).click()
    of_component = redrawn(page, of_task)
    page.get_by_role("button", name="More").click()
    longer = redrawn(page, of_component)
    assert len(longer) == 2 * len(of_component)
    assert longer[: len(of_component)] == of_component
    page.get_by_role("button", name="New seed").click()
    others = redrawn(page, longer)
    page.get_by_label("seed").fill("0")
    page.keyboard.press("Tab")
    assert redrawn(page, others) == of_component  # the seed is back, and so are they


def test_the_slider_morphs_one_image_into_the_other(open_page: Callable[..., Page]) -> None:
    page = open_page()
    page.locator(".tile").nth(3).click()
    page.locator(".tile").nth(8).press("b")
    ends = [tiles(page)[3], tiles(page)[8]]
    expect(page.locator("#start")).to_have_attribute("src", ends[0])
    expect(page.locator("#end")).to_have_attribute("src", ends[1])
    slider = page.get_by_role("slider")
    slider.press("Home")
    expect(page.locator("#here")).to_have_attribute("src", ends[0])
    box = slider.bounding_box()
    assert box is not None
    seen = set()
    page.mouse.move(box["x"] + 8, box["y"] + box["height"] / 2)
    page.mouse.down()
    for step in range(1, 9):
        page.mouse.move(box["x"] + box["width"] * step / 8 - 8, box["y"] + box["height"] / 2)
        seen.add(page.locator("#here").get_attribute("src"))
    page.mouse.up()
    assert len(seen) > 5
    slider.press("End")
    expect(page.locator("#here")).to_have_attribute("src", ends[1])
    assert page.locator("#where").inner_text().startswith("100 %")
    page.get_by_role("button", name="Play").click()
    changed(page, "#here", ends[1])
    page.get_by_role("button", name="Stop").click()


def test_an_own_image_is_reconstructed_and_its_task_named(open_page: Callable[..., Page], digits: Stream) -> None:
    page = open_page()
    grey = (digits[1].test.images[0].reshape(8, 8).numpy() * 255).astype(np.uint8)
    file: Any = {"name": "own.png", "mimeType": "image/png", "buffer": picture(grey)}
    page.set_input_files("#file", file)
    page.wait_for_selector("#verdict:not([hidden])")
    assert page.locator("#judgement").inner_text().startswith("It is most like ")
    assert page.locator("#bars li").count() == 2
    assert "log p(x) = −" in page.locator("#score").inner_text()
    seen, rebuilt = (str(page.locator(name).get_attribute("src")) for name in ("#seen", "#reconstruction"))
    assert seen != rebuilt
    page.get_by_label("invert").check()
    changed(page, "#seen", seen)
    page.get_by_label("invert").uncheck()
    expect(page.locator("#reconstruction")).to_have_attribute("src", rebuilt)
    page.get_by_role("button", name="Use as A").click()
    expect(page.locator("#start")).to_have_attribute("src", rebuilt)


DROP = """(bytes) => {
  const transfer = new DataTransfer();
  transfer.items.add(new File([new Uint8Array(bytes)], "own", { type: "image/png" }));
  document.getElementById("zone").dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, bubbles: true }));
}"""


def test_images_can_be_dropped_and_drawn(open_page: Callable[..., Page]) -> None:
    page = open_page()
    page.evaluate(DROP, list(picture(np.full((8, 8), 90, np.uint8))))
    page.wait_for_selector("#verdict:not([hidden])")
    dropped = page.locator("#seen").get_attribute("src")
    page.locator("#pad").scroll_into_view_if_needed()
    box = page.locator("#pad").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 10)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] - 10, steps=5)
    page.mouse.up()
    changed(page, "#seen", dropped)
    page.get_by_role("button", name="Clear").click()
    assert page.locator("#verdict").is_hidden()


@pytest.mark.parametrize("method", ["standard", "multihead"])
def test_methods_without_components_have_no_picker_for_them(open_page: Callable[..., Page], method: str) -> None:
    page = open_page(method)
    assert page.locator("#tasks").is_visible() == (method == "multihead")
    if method == "multihead":
        before = tiles(page)
        page.get_by_role("radio", name="1", exact=True).check(force=True)
        redrawn(page, before)
    assert page.locator("#components").is_hidden()
    grey: Any = {"name": "own.png", "mimeType": "image/png", "buffer": picture(np.full((8, 8), 90, np.uint8))}
    page.set_input_files("#file", grey)
    page.wait_for_selector("#verdict:not([hidden])")
    assert page.locator("#bars li").count() == (2 if method == "multihead" else 0)


def test_a_file_that_is_no_picture_is_refused_in_words(browser: Browser, address: Callable[[str], str]) -> None:
    page = browser.new_page()
    page.goto(address("boo+distill"))
    page.wait_for_selector("#film img")
    nonsense: Any = {"name": "own.png", "mimeType": "image/png", "buffer": b"nonsense"}
    page.set_input_files("#file", nonsense)
    expect(page.locator("#status")).to_contain_text("cannot be read as a picture")
    assert page.locator("#verdict").is_hidden()
    page.close()


def test_it_fits_a_phone_and_is_dark_at_night(open_page: Callable[..., Page]) -> None:
    page = open_page(viewport={"width": 360, "height": 740}, color_scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 26)"
