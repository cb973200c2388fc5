"""The documentation does what it says: its Python runs, its commands parse, its links lead somewhere.

That the commands run, too, is in test_docs_commands.py.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

import boovae.config.choose
from boovae.cli.main import VERBS, main, parsed
from boovae.methods import METHODS
from boovae.metrics import METRICS

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for language, text in BLOCK.findall(page.read_text(encoding="utf-8")) if language in languages]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_every_block_is_of_a_kind_that_the_tests_run() -> None:
    for page in PAGES:
        opened = re.findall(r"^ *```(.*)$", page.read_text(encoding="utf-8"), re.M)[::2]
        assert set(opened) <= {"python", "sh", "console"}, named(page)


def commands(page: Path) -> Iterator[list[str]]:
    for line in "\n".join(blocks(page, "sh", "console")).replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if words[:1] == ["boovae"]:
            yield words[1:]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=named)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(boovae.config.choose, "MOST_EPOCHS", 2)  # what is chosen
    code = "\n".join(blocks(page, "python"))
    if "onnxruntime" in code:
        pytest.importorskip("onnxruntime", reason="boovae[onnx] is not installed")
    if "RUN/" in code:  # what the page's own commands make of a run folder
        main(["train", "--tasks", "1", "--epochs", "1", "--samples", "2", "--metric", "nll", "--out", "RUN", "--quiet"])
        for words in commands(page):
            main(words)
    with executed(code, tmp_path / f"{page.stem}.py"):
        pass


@contextlib.contextmanager
def executed(code: str, path: Path) -> Iterator[None]:
    """Run code from a file; the methods and metrics that it registers are gone afterwards."""
    path.write_text(code, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    before = [(known, dict(known)) for known in (METHODS, METRICS)]
    with pytest.MonkeyPatch.context() as patch:
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, path.stem, module)  # a dataclass looks up where it was made
        try:
            spec.loader.exec_module(module)
            yield
        finally:
            for known, old in before:
                known.clear()
                known.update(old)  # type: ignore[arg-type]


@pytest.mark.parametrize("page", [page for page in PAGES if [*commands(page)]], ids=named)
def test_the_commands_of_a_page_are_understood(page: Path, tmp_path: Path) -> None:
    methods = "\n".join(text for text in blocks(page, "python") if "@register" in text)
    with executed(methods, tmp_path / f"{page.stem}.py"):
        for words in commands(page):
            assert words[0] in VERBS, words
            try:
                parsed(words[0], words[1:])
            except SystemExit as stop:
                if stop.code != 0:  # --help ends with 0
                    pytest.fail(shlex.join(words))


@pytest.mark.slow
def test_the_commands_of_the_first_page_do_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in commands(ROOT / "docs" / "index.md"):
        main(words)
    assert {path.name for path in tmp_path.glob("*.png")} == {"all.png", "threes.png", "components.png"}
    assert (tmp_path / "runs/first/report.html").stat().st_size > 10_000


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


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=named)
def test_files_of_the_repository_that_a_page_names_are_there(page: Path) -> None:
    text = re.sub(BLOCK, "", page.read_text(encoding="utf-8"))
    for path in re.findall(r"`((?:src|tests|docs|benchmarks)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), path


def test_what_moved_is_where_the_changelog_says() -> None:
    rows = re.findall(r"^\| `boovae\..* \| (`boovae\..*`) \|$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    names = [name for row in rows for name in re.findall(r"`(boovae[\w.]+)`", row)]
    assert len(names) >= 18
    for name in names:
        module, _, item = name.rpartition(".")
        assert hasattr(importlib.import_module(module), item), name


def test_links_of_the_site_lead_somewhere(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="boovae[docs] is not installed")
    site = tmp_path / "site"
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True, timeout=120)
    shutil.copytree(ROOT / "results", site / "results")  # as `make docs` does
    for page in set(site.rglob("*.html")) - {site / "404.html"}:
        for target in re.findall(r'(?:href|src)="([^"#?]+)', page.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:", target):
                assert (page.parent / unquote(target)).exists(), (page, target)


def test_every_method_has_its_page() -> None:
    assert {page.stem for page in (ROOT / "docs" / "methods").glob("*.md")} == set(METHODS)


def test_every_page_is_in_the_site() -> None:
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert set(re.findall(r"^ +- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)) == pages
