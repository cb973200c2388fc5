"""Curves over tasks, a panel for every task, and all samples on one sheet."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from typing import TYPE_CHECKING

import numpy as np

from boovae.bench.published import comparable, dataset_title
from boovae.bench.results import Measured
from boovae.bench.statistics import Spread
from boovae.bench.tables import beside, rows_of, title_of
from boovae.bench.thumbnails import LEARNED, Sheet, opened
from boovae.report.figures import chart
from boovae.report.pictures import png
from boovae.report.series import COLOURS, Series

if TYPE_CHECKING:
    from markupsafe import Markup
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont, ImageFont

#: A metric's numbers per task: what they are called in the CSV files and on a chart.
PER_TASK = {"nll": ("nll", "NLL, nats"), "diversity": ("diversity_term", "diversity term")}
WIDTH, HEIGHT, LEGEND = 360, 210, 20  # of a chart on a sheet, and of a line of its legend
PER_ROW = 5  # entries of a legend in a row
LABEL_WIDTH, LABEL_HEIGHT, GAP = 120, 24, 6  # pixels; a longer label has more


def line(points: Sequence[tuple[float, Spread]], colour: int, dashed: bool = False) -> Series:
    """Return a line through means with a band of one deviation; a single seed has no band."""
    x = np.array([at for at, _ in points], dtype=np.float64)
    y = np.array([spread.mean for _, spread in points], dtype=np.float64)
    band = np.nan_to_num(np.array([spread.std for _, spread in points], dtype=np.float64))
    return Series(x, y, band, colour, dashed, marks=True)


def curves(measured: Measured, metric: str, *, paper: bool = True) -> list[Markup]:
    """Draw a metric over the tasks seen, as we measured it and, if wanted, as the paper prints it.

    Where the two can be compared they have the same axes.
    """
    name = dataset_title(measured.dataset)
    ours, theirs = [], []
    printed = beside(measured, metric)
    for colour, label in enumerate(measured.labels):
        counts = rows_of(measured, metric)
        found = [(seen, measured.spread(label, seen, metric)) for seen in counts]
        ours.append(line([(seen, spread) for seen, spread in found if spread], colour))
        theirs_too = [(seen, printed.get((label, seen))) for seen in counts] if paper else []
        theirs.append(line([(seen, Spread(p.mean, p.std, 0)) for seen, p in theirs_too if p], colour))
    printed_title = title_of(metric) if comparable(metric) else "FID"
    whose = ((ours, title_of(metric), "measured"), (theirs, printed_title, "in the paper"))
    both = [*ours, *theirs] if comparable(metric) else []
    charts = [
        chart(lines, f"{title} on {name}, {how}", "tasks seen", wide=metric == "nll", beside=both)
        for lines, title, how in whose
    ]
    return [drawn for drawn in charts if drawn]


def panels(measured: Measured, metric: str) -> list[Markup]:
    """Draw a panel for every task: how its number goes on while later tasks are learned."""
    if metric not in PER_TASK:
        return []
    column, title = PER_TASK[metric]
    charts = []
    for task, name in enumerate(measured.task_names):
        lines = []
        for colour, label in enumerate(measured.labels):
            found = [(seen, measured.spread(label, seen, column, task)) for seen in range(task + 1, measured.tasks + 1)]
            lines.append(line([(seen, spread) for seen, spread in found if spread], colour))
        plain = name.replace("$", r"\$")  # no formula
        charts.append(
            chart(lines, f"{title}: task “{plain}”", "tasks seen", salt=measured.dataset, wide=metric == "nll")
        )
    return [drawn for drawn in charts if drawn]


def sheet(charts: Sequence[str], legend: Sequence[str], columns: int = 2) -> bytes:
    """Lay charts out in one SVG file that stands alone, with a legend above and the page's light colours."""
    rows = -(-len(charts) // columns)
    top = LEGEND * (-(-len(legend) // PER_ROW)) + 10
    width, height = WIDTH * columns, top + HEIGHT * rows
    parts = [*_legend(legend, width)]
    for index, drawn in enumerate(charts):
        x, y = WIDTH * (index % columns), top + HEIGHT * (index // columns)
        place = f'<svg x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}"'
        parts.append(str(drawn).replace('<svg class="chart"', place, 1))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"<style>{_colours()}</style>"
        f'<rect width="100%" height="100%" fill="var(--card)"/>{body}</svg>\n'
    ).encode()


def _legend(labels: Sequence[str], width: int) -> Iterator[str]:
    for index, label in enumerate(labels):
        x, y = width / PER_ROW * (index % PER_ROW) + 10, LEGEND * (index // PER_ROW) + 14
        dash = ' stroke-dasharray="4 2"' if index >= COLOURS else ""
        colour = f"var(--s{index % COLOURS})"
        yield f'<line x1="{x}" x2="{x + 22}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="3"{dash}/>'
        yield f'<text x="{x + 28}" y="{y + 4}" font-size="12">{escape(label)}</text>'


def _colours() -> str:
    """Return the report's light colours, for a file that has no page around it."""
    style = resources.files("boovae.report").joinpath("style.css").read_text(encoding="utf-8")
    light = style[: style.index("@media")]
    names = " ".join(re.findall(r"--(?:s\d|rule|card|ink): #[0-9a-f]+;", light))
    return f"svg {{ {names} color: var(--ink); font-family: sans-serif; }} text {{ fill: currentColor; }}"


def samples(measured: Measured) -> Sheet | None:
    """Return the samples, a row per method, a column per number of tasks seen; None if there are none."""
    found: dict[tuple[str, int], str] = {}
    for cell, summary in measured.cells:
        for task, picture in enumerate(summary.get("samples", ())):
            found[cell.label, (task + 1) * cell.together] = picture
    drawn = {label for label, _ in found}
    counts = sorted({seen for _, seen in found})
    rows = [(label, [found.get((label, seen), "") for seen in counts]) for label in measured.labels if label in drawn]
    return Sheet([str(seen) for seen in counts], rows) if rows else None


def learned(measured: Measured) -> Sheet | None:
    """Return what the decoders make of learned components: a row per method and task; None without any."""
    rows = [
        (f"{cell.label}, {name}", pictures)
        for cell, summary in measured.cells
        for name, pictures in summary.get("components", {}).items()
    ]
    return Sheet([], rows) if rows else None


def laid_out(sheet: Sheet) -> bytes:
    """Lay a sheet out as PNG; pictures stand apart where their columns have a head."""
    from PIL import Image

    rows = [(label, [opened(text) if text else None for text in row]) for label, row in sheet.rows]
    drawn = [picture for _, row in rows for picture in row if picture]
    apart, top = (GAP, LABEL_HEIGHT) if sheet.head else (0, 0)
    wide, high = (max(getattr(picture, side) for picture in drawn) for side in ("width", "height"))
    wide, high = wide + apart, high + GAP
    left = _label_width([label for label, _ in rows])
    grey = bool(sheet.head) and all(picture.mode == "L" for picture in drawn)
    size = left + wide * (len(sheet.head) or LEARNED), top + high * len(rows)
    whole = Image.new("L" if grey else "RGB", size, "white")
    if sheet.head:
        _write(whole, (GAP, 4), "tasks seen")
    for column, text in enumerate(sheet.head):
        _write(whole, (left + column * wide, 4), text)
    for place, (label, row) in enumerate(rows):
        down = top + place * high
        _write(whole, (GAP, down + (high - GAP + apart) // 2 - 8), label)
        for column, picture in enumerate(row):
            if picture:
                whole.paste(picture, (left + column * wide, down))
    return png(whole)


def _write(picture: Image, place: tuple[int, int], text: str) -> None:
    from PIL import ImageDraw

    ImageDraw.Draw(picture).text(place, text, fill="black", font=_font())


def _label_width(labels: Sequence[str]) -> int:
    """Return the room that the longest label needs, with a gap on both sides."""
    return max(LABEL_WIDTH, *(math.ceil(_font().getlength(label)) + 2 * GAP for label in labels))


def _font() -> FreeTypeFont | ImageFont:
    from PIL.ImageFont import load_default

    return load_default(13)
