"""The page of a bench: tables beside the paper's, curves, panels and samples in one self-contained HTML file."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from boovae.experiments.tables import Table
from boovae.report.charts import COLOURS
from boovae.report.frame import environment, own_file

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
    """Charts with a title and a word on how to read them."""

    title: str
    how: str
    charts: Sequence[Markup]


@dataclass(frozen=True)
class Chapter:
    """What the page says of a dataset."""

    title: str
    legend: Sequence[str]
    tables: Sequence[Table]
    figures: Sequence[Panels]
    pictures: Mapping[str, bytes]
    made_with: Mapping[str, str]

    @property
    def swatches(self) -> list[tuple[str, int, bool]]:
        """Label, colour, and whether its line is dashed."""
        return [(label, index % COLOURS, index >= COLOURS) for index, label in enumerate(self.legend)]

    @property
    def sheets(self) -> list[tuple[str, str, str]]:
        """Title, a word on how to read it, and the picture as a page holds it."""
        return [
            (*SHEETS[name], "data:image/png;base64," + base64.b64encode(picture).decode("ascii"))
            for name, picture in self.pictures.items()
        ]


def render(
    title: str,
    chapters: Sequence[Chapter],
    findings: Mapping[str, str],
    differences: Sequence[tuple[object, ...]],
    missing: Sequence[str],
) -> bytes:
    """Return the page."""
    page = (
        environment()
        .get_template("experiments/page.html")
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
