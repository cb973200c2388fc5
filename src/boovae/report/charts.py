"""Interactive charts for plotly, each with a table of its numbers.

A figure is written as plotly's JSON. Colours are CSS variables of the page (`var(--s0)`), which its script looks up, so
that charts follow the light and dark theme. Everything from a run folder is escaped, because plotly interprets tags.
"""

import base64
import functools
import gzip
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

import numpy as np

from boovae.metrics.schema import Floats
from boovae.report.findings import Published, published_for
from boovae.report.matrices import Table
from boovae.report.numbers import number, with_spread
from boovae.report.run_record import RunRecord
from boovae.report.series import COLOURS, Series, over_epochs, over_tasks, settled_range, with_band

Kind = Literal["run", "joint", "paper", "training"]

#: Plotly's dash and marker for each kind of line.
STYLE: dict[Kind, tuple[str, str]] = {
    "run": ("solid", "circle"),
    "joint": ("dot", "circle"),
    "paper": ("dash", "circle-open"),
    "training": ("dash", "circle"),
}


@dataclass(frozen=True)
class Line:
    """A series with a name; lines of one run are shown and hidden together."""

    name: str
    series: Series
    run: int | None = None
    kind: Kind = "run"
    texts: Sequence[str] = ()  # names of the points, if x alone is not enough


@dataclass(frozen=True)
class Chart:
    """A chart of the page; `figure` is in plotly's format."""

    title: str
    describe: str
    figure: dict[str, Any]
    table: Table
    lines: Sequence[Line] = ()
    square: bool = False


def line_plot(lines: Sequence[Line], title: str, x_title: str, ends: bool = False, clip: bool = False) -> Chart | None:
    """Draw the lines that have any numbers; None if no line has.

    With `ends` the table has just the end of every task; with `clip` the steep first epochs of every task may leave the
    frame.
    """
    full = [line for line in lines if line.series.drawn]
    if not full:
        return None
    x_axis = {"title": {"text": x_title}, "showgrid": False, "tickformat": "d", "dtick": _step(full)}
    if not ends:
        x_axis["unifiedhovertitle"] = {"text": f"{x_title}: %{{x}}"}
    span = settled_range([line.series for line in full]) if clip else None
    y_axis = {"range": list(span)} if span else {}
    layout = {"xaxis": x_axis, "yaxis": y_axis, "hovermode": "closest" if ends else "x unified"}
    data = [trace for line in full for trace in (*_band(line), _line(line))]
    ends_of = [(line.name, *map(number, line.series.ends)) for line in full]
    texts = ", ".join(f"{name} from {first} to {last}" for name, first, last in ends_of)
    table = _table(title, full, x_title, ends=ends)
    return Chart(title, f"{title} over {x_title}: {texts}", {"data": data, "layout": layout}, table, full)


def _step(lines: Sequence[Line]) -> int | None:
    """Return the distance of axis ticks, an integer that gives at most a dozen of them; None leaves it to plotly."""
    longest = max(float(np.nanmax(line.series.x)) for line in lines)
    return next((step for step in (1, 2, 5, 10, 20, 50, 100, 1000) if longest <= 12 * step), None)


def colour(index: int) -> str:
    """Return the page's colour with this number."""
    return f"var(--s{index % COLOURS})"


def _line(line: Line) -> dict[str, Any]:
    series = line.series
    dash, symbol = STYLE[line.kind]
    if line.kind == "run" and series.colour >= COLOURS:
        dash = "dash"
    value = "%{y:.4~g} ± %{customdata:.2~g}" if series.band.any() else "%{y:.4~g}"
    where = "%{text}<br>" if line.texts else ""
    paint = {"color": colour(series.colour)}
    return points(line.name, series.x, series.y) | {
        "mode": "lines+markers" if series.marks else "lines",
        "customdata": to_plotly(series.band),
        "text": [escape(text) for text in line.texts] or None,
        "line": {**paint, "dash": dash, "width": 2},
        "marker": {**paint, "symbol": symbol, "size": 6},
        "hovertemplate": f"{where}%{{fullData.name}}: {value}<extra></extra>",
        "meta": line.run,
    }


def points(name: str, x: Floats, y: Floats) -> dict[str, Any]:
    """Return a trace of points in plotly's format."""
    return {"type": "scatter", "mode": "markers", "name": escape(name), "x": to_plotly(x), "y": to_plotly(y)}


def _band(line: Line) -> list[dict[str, Any]]:
    """Return the area of one standard deviation around a line, in pieces if the line has gaps."""
    series = line.series
    if not series.band.any():
        return []
    x: list[float | None] = []
    y: list[float | None] = []
    low, high = series.y - series.band, series.y + series.band
    finite = np.isfinite(series.y)
    for piece in np.split(np.arange(len(finite)), np.flatnonzero(~finite)):
        piece = piece[finite[piece]]
        if len(piece) > 1:
            x += [*to_plotly(series.x[piece]), *to_plotly(series.x[piece][::-1]), None]
            y += [*to_plotly(high[piece]), *to_plotly(low[piece][::-1]), None]
    area = {"type": "scatter", "mode": "lines", "x": x, "y": y, "fill": "toself", "hoverinfo": "skip", "meta": line.run}
    return [area | {"line": {"width": 0}, "fillcolor": colour(series.colour), "opacity": 0.2}] if x else []


def to_plotly(values: Floats) -> list[float | None]:
    """Return numbers for plotly: six digits, None if not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def _table(title: str, lines: Sequence[Line], x_title: str, *, ends: bool) -> Table:
    """Return a table with a column for every line; a row for every x, or only for those at the end of a task."""
    columns = [_cells(line) for line in lines]
    if ends:  # where x is a whole number
        places = {x for column in columns for x in column if x == round(x)}
    else:
        places = {x for line in lines for x in line.series.x.tolist()}
    rows = [(f"{x:g}", [column.get(x, "") for column in columns]) for x in sorted(places)]
    return Table(title, [x_title, *(line.name for line in lines)], rows)


def _cells(line: Line) -> dict[float, str]:
    """Return the table cell of every point of a line, by x; numbers of the paper keep their printed decimals."""
    points = zip(line.series.x.tolist(), line.series.y.tolist(), line.series.band.tolist(), strict=True)
    write = "{:g} ± {:g}".format if line.kind == "paper" else lambda y, band: with_spread(y, band or math.nan)
    return {x: write(y, band) for x, y, band in points if math.isfinite(y)}


# --- the charts of a run ---------------------------------------------------------------------------------------------


def kind_of(run: RunRecord) -> Kind:
    """Return "joint" for a run that was trained on all tasks at once, which bounds the other methods."""
    return "joint" if "joint" in run.head.method.split("+") else "run"


def curves(runs: Sequence[RunRecord], labels: Sequence[str], published: Published) -> list[Chart]:
    """Draw all numbers with a curve over the tasks seen, and published numbers for the same data and method."""
    drawn: dict[str, list[Line]] = {}
    beside: dict[str, list[Line]] = {}
    for index, (run, label) in enumerate(zip(runs, labels, strict=True)):
        for title, (metric, series) in over_tasks(run, index).items():
            drawn.setdefault(title, []).append(Line(label, series, index, kind_of(run)))
            beside.setdefault(title, []).extend(_published(run, metric, index, published))
    found = [line_plot(drawn[title] + beside[title], title, "tasks seen") for title in drawn]
    return [chart for chart in found if chart]


def _published(run: RunRecord, metric: str, index: int, published: Published) -> list[Line]:
    """Return the published line for a run, if there is one."""
    found = {seen: published_for(run, metric, seen, published) for seen in range(1, run.planned + 1)}
    numbers = [(seen, number) for seen, number in found.items() if number]
    if not numbers:
        return []
    x, y, band = np.array([(seen, number.mean, number.std) for seen, number in numbers], dtype=np.float64).T
    return [Line(f"{numbers[0][1].method} in the paper", Series(x, y, band, index, marks=True), index, "paper")]


def training(runs: Sequence[RunRecord], labels: Sequence[str]) -> list[Chart]:
    """Draw validation loss and KL over the epochs; for a single run also the training loss."""

    def line(index: int, name: str, split: str, term: str, kind: Kind) -> Line:
        series = over_epochs(runs[index], split, term, index if kind != "training" else 1)
        return Line(name, series, index, kind, _points(runs[index], series))

    alone = len(runs) == 1
    kinds = [kind_of(run) for run in runs]
    loss = [line(i, "validation" if alone else labels[i], "valid", "loss", kind) for i, kind in enumerate(kinds)]
    if alone:
        loss.append(line(0, "training", "train", "loss", "training"))
    kl = [line(i, labels[i], "valid", "kl", kind) for i, kind in enumerate(kinds)]
    drawn = [
        line_plot(loss, "Loss" if alone else "Validation loss", "tasks done", ends=True, clip=True),
        line_plot(kl, "Validation KL", "tasks done", ends=True),
    ]
    return [chart for chart in drawn if chart]


def _points(run: RunRecord, series: Series) -> list[str]:
    """Return a label for every point of a training curve: the task and how far it was trained."""
    tasks = np.ceil(series.x).astype(int) - 1
    shares = series.x - tasks
    return [f"{run.task_name(task)}, {share:.0%} through" for task, share in zip(tasks.tolist(), shares, strict=True)]


def gains(run: RunRecord) -> Chart | None:
    """Draw the gain from each further component, one line per task.

    It is how much a task's divergence falls with the number of components, relative to the smallest mixture.
    """
    found = [
        Line(run.task_name(task), with_band(gain.sizes, gain.divergence[:1] - gain.divergence, task))
        for task, gain in run.gains.items()
    ]
    return line_plot(found, "Gained over the smallest mixture, nats", "components")


# --- plotly itself --------------------------------------------------------------------------------------------------


@functools.cache
def plotly_script() -> tuple[str, str]:
    """Return plotly.js of the installed package, gzipped and in base64 (2 MB instead of 5), and its digest."""
    from plotly.offline import get_plotlyjs

    source = get_plotlyjs().encode("utf-8")
    return base64.b64encode(gzip.compress(source, 9, mtime=0)).decode("ascii"), digest(source)


def digest(source: bytes) -> str:
    """Return the digest of a script for a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source).digest()).decode("ascii")
