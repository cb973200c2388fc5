"""The page of a bench: tables beside the paper's, curves, panels and samples in one self-contained HTML file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from boovae.report.frame import environment, own_file
from boovae.report.series import COLOURS


def swatches(labels: Sequence[str]) -> list[tuple[str, int, bool]]:
    """Return the entries of a legend: label, colour, and whether its line is dashed."""
    return [(label, index % COLOURS, index >= COLOURS) for index, label in enumerate(labels)]


@dataclass(frozen=True)
class Section:
    """A part of a chapter. Links to it end with `name` and read `short`.

    `how` explains how to read it; without, the page explains it by its name.

    The content is a `Table` of the paper, a `Grid` of texts or pictures, or charts; a `folded` section starts closed.
    """

    kind: Literal["table", "grid", "charts", "pictures"]
    name: str
    short: str
    title: str
    content: Any
    folded: bool = False
    how: str = ""


@dataclass(frozen=True)
class Chapter:
    """The part of the page about one dataset; its links begin with `name`."""

    name: str
    title: str
    legend: Sequence[str]
    sections: Sequence[Section]
    made_with: Mapping[str, str]


def render(
    title: str, chapters: Sequence[Chapter], findings: Mapping[str, str], last: Section | None, missing: Sequence[str]
) -> bytes:
    """Return the page; sections without content are left out."""
    shown = {"chapters": chapters, "findings": findings, "closing": last, "missing": missing, "swatches": swatches}
    page = environment().get_template("bench/webpage.html").render(title=title, style=own_file("style.css"), **shown)
    return page.encode("utf-8", errors="replace")
