"""The page of a bench: tables beside the paper's, curves, panels and samples in one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from boovae.bench.tables import Table, title_of
from boovae.bench.thumbnails import Sheet
from boovae.report.frame import environment, own_file
from boovae.report.series import COLOURS

if TYPE_CHECKING:
    from markupsafe import Markup


#: Titles of pictures, and how to read them.
SHEETS = {
    "samples": (
        "What each method draws",
        "Samples of the first seed, a row per method, a column per number of tasks seen; the same random numbers "
        "everywhere in a row.",
    ),
    "components": (
        "What components stand for",
        "What the decoder of the first seed makes, after the last task, of the heaviest components of each task.",
    ),
}


@dataclass(frozen=True)
class Panels:
    """Charts with a title and a word on how to read them; `folded`, a reader opens them.

    `name` is what a link to them ends with, `short` what it says.
    """

    name: str
    short: str
    title: str
    how: str
    charts: Sequence[Markup]
    folded: bool = False


@dataclass(frozen=True)
class Plain:
    """A table of texts with a title and a word on how to read it; the column `strong` stands out."""

    title: str
    how: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong: str = ""


@dataclass(frozen=True)
class Chapter:
    """What the page says of a dataset; its links begin with `name`."""

    name: str
    title: str
    legend: Sequence[str]
    tables: Sequence[Table]
    figures: Sequence[Panels]
    pictures: Mapping[str, Sheet]
    made_with: Mapping[str, str]
    numbers: Plain | None = None

    @property
    def swatches(self) -> list[tuple[str, int, bool]]:
        """Label, colour, and whether its line is dashed."""
        return [(label, index % COLOURS, index >= COLOURS) for index, label in enumerate(self.legend)]

    @property
    def sheets(self) -> list[tuple[str, str, str, Sheet]]:
        """Name, title, a word on how to read it, and the pictures."""
        return [(name, *SHEETS[name], sheet) for name, sheet in self.pictures.items()]

    @property
    def drawn(self) -> list[Panels]:
        """The figures that have charts."""
        return [figure for figure in self.figures if figure.charts]

    @property
    def contents(self) -> list[tuple[str, str]]:
        """What the list of contents names: where it leads and what it says."""
        found = [(table.metric, f"{title_of(table.metric)} table") for table in self.tables]
        found += [("numbers", "numbers")] if self.numbers else []
        found += [(figure.name, figure.short) for figure in self.drawn]
        found += [(name, name) for name in self.pictures]
        return [(f"{self.name}-{name}", text) for name, text in found]


def render(
    title: str,
    chapters: Sequence[Chapter],
    findings: Mapping[str, str],
    differences: Plain | None,
    missing: Sequence[str],
) -> bytes:
    """Return the page."""
    page = (
        environment()
        .get_template("bench/page.html")
        .render(
            title=title,
            style=own_file("style.css"),
            chapters=chapters,
            findings=findings,
            differences=differences,
            missing=missing,
        )
    )
    return page.encode("utf-8", errors="replace")
