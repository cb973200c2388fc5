"""Curves over tasks, a panel for every task, samples and components on one sheet, and the small pictures of a record.

A record keeps only pictures that a decoder made: never a real image, nor a pseudo-input, which may be initialised with
one and stay close to it.
"""

import base64
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from PIL import Image, ImageDraw, ImageFont

from boovae.bench.paper_tables import Grid, beside, rows_of, title_of
from boovae.bench.published import dataset_title, is_distance
from boovae.bench.results import Measured, Spread
from boovae.bench.webpage import swatches
from boovae.files import write_file
from boovae.report.frame import environment, own_file
from boovae.report.pictures import png
from boovae.report.series import Series
from boovae.report.svg import chart
from boovae.runs.folder import RunFolder

#: Metrics with a number per task: its name in the CSV files and on a chart.
PER_TASK = {"nll": ("nll", "NLL, nats"), "diversity": ("diversity_term", "diversity term")}
LABEL_WIDTH, LABEL_HEIGHT, GAP = 120, 24, 6  # pixels; longer labels get more
#: Rows and columns that are kept of a run's grid of samples, and how many the grid has.
SAMPLES, GRID = 4, 8
#: Width in pixels above which a picture is halved.
LARGE = 200
#: Components kept per task: the heaviest, which stand for the most images.
LEARNED = 10


def line(points: Sequence[tuple[float, Spread]], colour: int, dashed: bool = False) -> Series:
    """Return a line through the means with a band of one standard deviation; a single seed has no band."""
    x, y, band = np.array([(at, spread.mean, spread.std) for at, spread in points], dtype=np.float64).reshape(-1, 3).T
    return Series(x, y, np.nan_to_num(band), colour, dashed, marks=True)


def curves(measured: Measured, metric: str, *, paper: bool = True) -> list[Markup]:
    """Draw a metric over the tasks seen, as we measured it and, if `paper`, as the paper prints it.

    The two charts share their axes if they are comparable.
    """
    name, counts = dataset_title(measured.dataset), rows_of(measured, metric)
    printed = beside(measured, metric) if paper else {}
    ours, theirs = [], []
    for colour, label in enumerate(measured.labels):
        ours.append(_over_tasks(measured, label, counts, metric, colour))
        numbers = [(seen, printed[label, seen]) for seen in counts if (label, seen) in printed]
        theirs.append(line([(seen, Spread(number.mean, number.std, 0)) for seen, number in numbers], colour))
    fid = is_distance(metric)
    options: dict[str, Any] = {"wide": metric == "nll", "beside": [] if fid else [*ours, *theirs]}
    whose = ((ours, title_of(metric), "measured"), (theirs, "FID" if fid else title_of(metric), "in the paper"))
    charts = (chart(lines, f"{title} on {name}, {how}", "tasks seen", **options) for lines, title, how in whose)
    return list(filter(None, charts))


def panels(measured: Measured, metric: str) -> list[Markup]:
    """Draw a panel for every task: its number while later tasks are learned."""
    if metric not in PER_TASK:
        return []
    column, title = PER_TASK[metric]
    charts = []
    for task, name in enumerate(measured.task_names):
        counts = range(task + 1, measured.tasks + 1)
        lines = [_over_tasks(measured, one, counts, column, colour, task) for colour, one in enumerate(measured.labels)]
        text = f"{title}: task “{name}”".replace("$", r"\$")  # not a formula
        charts.append(chart(lines, text, "tasks seen", salt=measured.dataset, wide=metric == "nll"))
    return list(filter(None, charts))


def _over_tasks(
    measured: Measured, label: str, counts: range, metric: str, colour: int, task: int | None = None
) -> Series:
    found = [(seen, measured.spread(label, seen, metric, task)) for seen in counts]
    return line([(seen, spread) for seen, spread in found if spread], colour)


def write_sheet(path: Path, charts: Sequence[Markup], labels: Sequence[str], columns: int) -> None:
    """Write charts, if there are any, as one SVG file with a legend on top and the light colours of the page."""
    if not charts:
        return
    colours = own_file("style.css").partition("}")[0] + "}"
    shape = {"columns": min(columns, len(charts)), "legend": swatches(labels), "colours": colours}
    text = environment().get_template("bench/sheet.svg").render(charts=charts, **shape)
    write_file(path, text.encode())


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
    """Return the decoded components, a row per method and task; None if there are none."""
    rows = [
        [f"{cell.label}, {name}", *pictures]
        for cell, summary in measured.cells
        for name, pictures in summary.get("components", {}).items()
    ]
    return Grid([], rows) if rows else None


def as_png(shown: Grid) -> bytes:
    """Lay out the pictures of a grid as PNG; leave gaps between columns if the grid has a header."""
    font = ImageFont.load_default(13)
    left = max(LABEL_WIDTH, *(math.ceil(font.getlength(row[0])) + 2 * GAP for row in shown.rows))
    gap, top = (GAP, LABEL_HEIGHT) if shown.head else (0, 0)
    pictures = {
        (row, column): Image.open(io.BytesIO(base64.b64decode(text)))
        for row, (_, *texts) in enumerate(shown.rows)
        for column, text in enumerate(texts)
        if text
    }
    width = max(picture.width for picture in pictures.values()) + gap
    height = max(picture.height for picture in pictures.values()) + GAP
    grey = bool(shown.head) and all(picture.mode == "L" for picture in pictures.values())
    size = left + width * (len(shown.head[1:]) or LEARNED), top + height * len(shown.rows)
    whole = Image.new("L" if grey else "RGB", size, "white")
    for (row, column), picture in pictures.items():
        whole.paste(picture, (left + column * width, top + row * height))
    pen = ImageDraw.Draw(whole)
    for column, text in enumerate(shown.head):
        pen.text((left + (column - 1) * width if column else GAP, 4), text, fill="black", font=font)
    middle = top + (height - GAP + gap) // 2 - 8
    for row, (label, *_) in enumerate(shown.rows):
        pen.text((GAP, middle + row * height), label, fill="black", font=font)
    return png(whole)


def sample_pictures(run: Path, tasks: int) -> list[str]:
    """Return some samples after each task, as PNG in base64."""
    paths = [RunFolder(run).sample_grid(task) for task in range(tasks)]
    return [base64.b64encode(png(_few(Image.open(path)))).decode() for path in paths if path.is_file()]


def component_pictures(run: Path) -> dict[str, list[str]]:
    """Return the heaviest components of each task, decoded, as PNG in base64, by the name of the task."""
    path = RunFolder(run).components
    found: dict[str, list[dict[str, Any]]] = {}
    for component in json.loads(path.read_text(encoding="utf-8"))["components"] if path.is_file() else ():
        found.setdefault(component["name"] or str(component["task"]), []).append(component)
    for components in found.values():
        components.sort(key=lambda component: component["weight"] or 0.0, reverse=True)
    return {name: [one["decoded"] for one in components[:LEARNED]] for name, components in found.items()}


def _few(picture: Image.Image) -> Image.Image:
    """Return the top left part of a grid of samples, at half size if it is large."""
    box = (0, 0, picture.width * SAMPLES // GRID, picture.height * SAMPLES // GRID)
    few = (picture if picture.mode == "L" else picture.convert("RGB")).crop(box)
    return few.reduce(2) if few.width > LARGE else few
