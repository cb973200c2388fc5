"""Curves over tasks, a panel for every task, samples and components on one sheet, and the small pictures of a record.

Whatever the dataset, only what a decoder has made is kept in a record: never a real image, nor a pseudo-input, which
may start at one and stay near it.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from boovae.bench.paper_tables import Grid, beside, rows_of, title_of
from boovae.bench.published import comparable, dataset_title
from boovae.bench.results import Measured, Spread
from boovae.files import write_file
from boovae.report.pictures import png
from boovae.report.series import COLOURS, Series
from boovae.report.svg import chart
from boovae.runs.folder import RunFolder

if TYPE_CHECKING:
    from markupsafe import Markup
    from PIL.Image import Image

#: A metric's numbers per task: what they are called in the CSV files and on a chart.
PER_TASK = {"nll": ("nll", "NLL, nats"), "diversity": ("diversity_term", "diversity term")}
WIDTH, HEIGHT, LEGEND = 360, 210, 20  # of a chart on a sheet, and of a line of its legend
PER_ROW = 5  # entries of a legend in a row
LABEL_WIDTH, LABEL_HEIGHT, GAP = 120, 24, 6  # pixels; a longer label has more
#: Rows and columns of a run's grid of samples that are kept, and how many it has.
SAMPLES, GRID = 4, 8
#: Pixels from which a picture is halved.
LARGE = 200
#: Components of a task that are kept, the heaviest: those that stand for many images.
LEARNED = 10


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
    name, counts = dataset_title(measured.dataset), rows_of(measured, metric)
    printed = beside(measured, metric) if paper else {}
    ours, theirs = [], []
    for colour, label in enumerate(measured.labels):
        ours.append(_over_tasks(measured, label, counts, metric, colour))
        numbers = [(seen, printed[label, seen]) for seen in counts if (label, seen) in printed]
        theirs.append(line([(seen, Spread(number.mean, number.std, 0)) for seen, number in numbers], colour))
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
        counts = range(task + 1, measured.tasks + 1)
        lines = [
            _over_tasks(measured, label, counts, column, colour, task) for colour, label in enumerate(measured.labels)
        ]
        plain = name.replace("$", r"\$")  # no formula
        charts.append(
            chart(lines, f"{title}: task “{plain}”", "tasks seen", salt=measured.dataset, wide=metric == "nll")
        )
    return [drawn for drawn in charts if drawn]


def _over_tasks(
    measured: Measured, label: str, counts: range, metric: str, colour: int, task: int | None = None
) -> Series:
    found = [(seen, measured.spread(label, seen, metric, task)) for seen in counts]
    return line([(seen, spread) for seen, spread in found if spread], colour)


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


def write_sheet(path: Path, charts: Sequence[str], legend: Sequence[str], columns: int) -> None:
    """Write charts, if there are any, as one SVG file."""
    if charts:
        write_file(path, sheet(charts, legend, min(columns, len(charts))))


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


# --- pictures -------------------------------------------------------------------------------------------------------


def samples(measured: Measured) -> Grid | None:
    """Return the samples, a row per method, a column per number of tasks seen; None if there are none."""
    found: dict[str, dict[int, str]] = {}
    for cell, summary in measured.cells:
        for task, picture in enumerate(summary.get("samples", ())):
            found.setdefault(cell.label, {})[(task + 1) * cell.together] = picture
    counts = sorted({seen for pictures in found.values() for seen in pictures})
    rows = [[label, *(pictures.get(seen, "") for seen in counts)] for label, pictures in found.items()]
    return Grid(["tasks seen", *map(str, counts)], rows) if rows else None


def learned(measured: Measured) -> Grid | None:
    """Return what the decoders make of learned components: a row per method and task; None without any."""
    rows = [
        [f"{cell.label}, {name}", *pictures]
        for cell, summary in measured.cells
        for name, pictures in summary.get("components", {}).items()
    ]
    return Grid([], rows) if rows else None


def laid_out(sheet: Grid) -> bytes:
    """Lay pictures out as PNG; they stand apart where their columns have a head."""
    from PIL import Image, ImageDraw
    from PIL.ImageFont import load_default

    font = load_default(13)
    labels = [row[0] for row in sheet.rows]
    rows = [[opened(text) if text else None for text in row[1:]] for row in sheet.rows]
    drawn = [picture for row in rows for picture in row if picture]
    apart, top = (GAP, LABEL_HEIGHT) if sheet.head else (0, 0)
    wide, high = (max(getattr(picture, side) for picture in drawn) for side in ("width", "height"))
    wide, high = wide + apart, high + GAP
    left = max(LABEL_WIDTH, *(math.ceil(font.getlength(label)) + 2 * GAP for label in labels))
    grey = bool(sheet.head) and all(picture.mode == "L" for picture in drawn)
    size = left + wide * (len(sheet.head[1:]) or LEARNED), top + high * len(rows)
    whole = Image.new("L" if grey else "RGB", size, "white")
    pen = ImageDraw.Draw(whole)
    for column, text in enumerate(sheet.head):
        pen.text((left + (column - 1) * wide if column else GAP, 4), text, fill="black", font=font)
    for place, (label, row) in enumerate(zip(labels, rows, strict=True)):
        down = top + place * high
        pen.text((GAP, down + (high - GAP + apart) // 2 - 8), label, fill="black", font=font)
        for column, picture in enumerate(row):
            if picture:
                whole.paste(picture, (left + column * wide, down))
    return png(whole)


def sample_pictures(run: Path, tasks: int) -> list[str]:
    """Return some samples after each task, as PNG in base64."""
    from PIL import Image

    paths = [RunFolder(run).sample_grid(task) for task in range(tasks)]
    return [_text(png(_few(Image.open(path)))) for path in paths if path.is_file()]


def component_pictures(run: Path) -> dict[str, list[str]]:
    """Return what the decoder makes of each task's heaviest components, as PNG in base64, by the name of the task."""
    path = RunFolder(run).components
    found: dict[str, list[dict[str, Any]]] = {}
    for component in json.loads(path.read_text(encoding="utf-8"))["components"] if path.is_file() else ():
        found.setdefault(component["name"] or str(component["task"]), []).append(component)
    for components in found.values():
        components.sort(key=lambda component: component["weight"] or 0.0, reverse=True)
    return {name: [one["decoded"] for one in components[:LEARNED]] for name, components in found.items()}


def opened(picture: str) -> Image:
    """Return a picture of a record."""
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(picture)))


def _few(picture: Image) -> Image:
    """Return the upper left of a grid of samples, smaller if it is large."""
    box = (0, 0, picture.width * SAMPLES // GRID, picture.height * SAMPLES // GRID)
    few = (picture if picture.mode == "L" else picture.convert("RGB")).crop(box)
    return few.reduce(2) if few.width > LARGE else few


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")
