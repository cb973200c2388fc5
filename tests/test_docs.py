"""The documentation does what it says: its Python runs, its commands parse, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from boovae.cli import VERBS, parsed
from boovae.methods import METHODS

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for language, text in BLOCK.findall(page.read_text(encoding="utf-8")) if language in languages]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands() -> Iterator[tuple[str, list[str]]]:
    for page in PAGES:
        for line in "\n".join(blocks(page, "sh", "console")).replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words[:1] == ["boovae"]:
                yield named(page), words[1:]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=named)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in METHODS:  # a method that the page registers is gone afterwards
        monkeypatch.setitem(METHODS, name, METHODS[name])
    before = set(METHODS)
    try:
        exec("\n".join(blocks(page, "python")), {"__name__": page.stem})
    finally:
        for name in set(METHODS) - before:
            del METHODS[name]


@pytest.mark.parametrize(
    ("page", "words"), [pytest.param(*case, id=f"{case[0]}: {shlex.join(case[1])}") for case in commands()]
)
def test_a_command_of_a_page_is_understood(page: str, words: list[str]) -> None:
    assert words[0] in VERBS
    parsed(words[0], words[1:])


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(BLOCK, "", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.M)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, target


def test_every_method_has_its_page() -> None:
    assert {page.stem for page in (ROOT / "docs" / "methods").glob("*.md")} == set(METHODS)
