"""Interactive charts for plotly, each with a table of its numbers.

A figure is written as plotly's JSON. Colours are CSS variables of the page (`var(--s0)`), which its script looks up, so
that charts follow the light and dark theme. Everything from a run folder is escaped, because plotly interprets tags.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from boovae.metrics.schema import Floats
from boovae.report.findings import Published, published_for
from boovae.report.numbers import number, with_spread
from boovae.report.run_record import RunRecord
from boovae.report.series import COLOURS, Series, over_components, over_epochs, over_tasks, settled_range

if TYPE_CHECKING:
    from markupsafe import Markup

Kind = Literal["run", "joint", "paper"]

#: Plotly's dash and marker for each kind of line.
STYLE: dict[Kind, tuple[str, str]] = {
    "run": ("solid", "circle"),
    "joint": ("dot", "circle"),
    "paper": ("dash", "circle-open"),
}
AXIS = {
    "gridcolor": "var(--rule)",
    "zerolinecolor": "var(--rule)",
    "linecolor": "var(--rule)",
    "spikecolor": "var(--quiet)",
    "spikethickness": 1,
    "fixedrange": True,
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
class Numbers:
    """The table behind a chart."""

    columns: list[str]
    rows: list[tuple[str, list[str]]]


@dataclass(frozen=True)
class Chart:
    """A chart of the page; `figure` is in plotly's format."""

    title: str
    describe: str
    figure: dict[str, Any]
    table: Numbers
    lines: Sequence[Line] = ()
    square: bool = False

    @property
    def json(self) -> Markup:
        """The figure as JSON that cannot close the HTML element around it."""
        from markupsafe import Markup

        text = json.dumps(self.figure, separators=(",", ":"), allow_nan=False)
        return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def line_plot(
    lines: Sequence[Line], title: str, x_title: str, *, at: str = "", ends: bool = False, clip: bool = False
) -> Chart | None:
    """Draw the lines that have any numbers; None if no line has.

    `at` labels the pointer's position ("tasks seen: %{x}"). With `ends` the table has just the end of every task;
    with `clip` the steep first epochs of every task may leave the frame.
    """
    full = [line for line in lines if line.series.drawn]
    if not full:
        return None
    x_axis: dict[str, Any] = AXIS | {
        "title": {"text": x_title},
        "showgrid": False,
        "tickformat": "d",
        "dtick": _step(full),
    }
    if at:
        x_axis["unifiedhovertitle"] = {"text": at}
    layout: dict[str, Any] = {"xaxis": x_axis, "yaxis": dict(AXIS), "hovermode": "closest" if ends else "x unified"}
    if clip:
        span = settled_range([line.series for line in full])
        layout["yaxis"] |= {"range": list(span)} if span else {}
    data = [trace for line in full for trace in (*_band(line), _line(line))]
    ends_of = [(line.name, *map(number, line.series.ends)) for line in full]
    texts = ", ".join(f"{name} from {first} to {last}" for name, first, last in ends_of)
    table = _ends_table(full, x_title) if ends else _table(full, x_title)
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
    if line.kind == "run" and (series.dashed or series.colour >= COLOURS):
        dash = "dash"
    value = "%{y:.4~g} ± %{customdata:.2~g}" if series.band.any() else "%{y:.4~g}"
    where = "%{text}<br>" if line.texts else ""
    return {
        "type": "scatter",
        "mode": "lines+markers" if series.marks else "lines",
        "name": escape(line.name),
        "x": to_plotly(series.x),
        "y": to_plotly(series.y),
        "customdata": to_plotly(series.band),
        "text": [escape(text) for text in line.texts] or None,
        "line": {"color": colour(series.colour), "dash": dash, "width": 2},
        "marker": {"color": colour(series.colour), "symbol": symbol, "size": 6},
        "hovertemplate": f"{where}%{{fullData.name}}: {value}<extra></extra>",
        "meta": line.run,
    }


def _band(line: Line) -> list[dict[str, Any]]:
    """Return the area of one standard deviation around a line, in pieces if the line has gaps."""
    series = line.series
    if not series.band.any():
        return []
    x: list[float | None] = []
    y: list[float | None] = []
    finite = np.isfinite(series.y)
    for piece in np.split(np.arange(len(finite)), np.flatnonzero(~finite)):
        piece = piece[finite[piece]]
        if len(piece) > 1:
            low, high = series.y[piece] - series.band[piece], series.y[piece] + series.band[piece]
            x += [*to_plotly(series.x[piece]), *to_plotly(series.x[piece][::-1]), None]
            y += [*to_plotly(high), *to_plotly(low[::-1]), None]
    area = {"type": "scatter", "mode": "lines", "x": x, "y": y, "fill": "toself", "hoverinfo": "skip", "meta": line.run}
    return [area | {"line": {"width": 0}, "fillcolor": colour(series.colour), "opacity": 0.2}] if x else []


def to_plotly(values: Floats) -> list[float | None]:
    """Return numbers for plotly: six digits, None if not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def _table(lines: Sequence[Line], x_title: str) -> Numbers:
    """Return a table with a row for every x and a column for every line."""
    places = sorted({x for line in lines for x in line.series.x.tolist()})
    columns = [dict(zip(line.series.x.tolist(), _cells(line), strict=True)) for line in lines]
    rows = [(f"{x:g}", [column.get(x, "") for column in columns]) for x in places]
    return Numbers([x_title, *(line.name for line in lines)], rows)


def _ends_table(lines: Sequence[Line], x_title: str) -> Numbers:
    """Return a table with the values of every line at the end of each task, where x is an integer."""
    rows: dict[int, list[str]] = {}
    for column, line in enumerate(lines):
        cells = _cells(line)
        for x, cell in zip(line.series.x.tolist(), cells, strict=True):
            if x == round(x) and cell:
                rows.setdefault(int(x), [""] * len(lines))[column] = cell
    return Numbers([x_title, *(line.name for line in lines)], [(str(x), rows[x]) for x in sorted(rows)])


def _cells(line: Line) -> list[str]:
    """Return the table cell of every point of a line; numbers of the paper keep their printed decimals."""
    pairs = zip(line.series.y.tolist(), line.series.band.tolist(), strict=True)
    if line.kind == "paper":
        return [f"{y:g} ± {band:g}" if math.isfinite(y) else "" for y, band in pairs]
    return [with_spread(y, band or math.nan) if math.isfinite(y) else "" for y, band in pairs]


# --- the charts of a run ---------------------------------------------------------------------------------------------


def is_joint(run: RunRecord) -> bool:
    """Whether a run was trained on all tasks at once, which bounds the other methods."""
    return "joint" in run.method.split("+")


def curves(runs: Sequence[RunRecord], labels: Sequence[str], published: Published) -> list[Chart]:
    """Draw all numbers with a curve over the tasks seen, and published numbers for the same data and method."""
    drawn: dict[str, list[Line]] = {}
    beside: dict[str, list[Line]] = {}
    for index, (run, label) in enumerate(zip(runs, labels, strict=True)):
        for title, (metric, series) in over_tasks(run, index).items():
            drawn.setdefault(title, []).append(Line(label, series, index, "joint" if is_joint(run) else "run"))
            beside.setdefault(title, []).extend(_published(run, metric, index, published))
    found = [line_plot(drawn[title] + beside[title], title, "tasks seen", at="tasks seen: %{x}") for title in drawn]
    return [chart for chart in found if chart]


def _published(run: RunRecord, metric: str, index: int, published: Published) -> list[Line]:
    """Return the published line for a run, if there is one."""
    found = [(seen, published_for(run, metric, seen, published)) for seen in range(1, run.planned + 1)]
    numbers = [(float(seen), number.mean, number.std) for seen, number in found if number]
    if not numbers:
        return []
    name = next(number.method for _, number in found if number)
    x, y, band = np.array(numbers, dtype=np.float64).T
    return [Line(f"{name} in the paper", Series(x, y, band, index, marks=True), index, "paper")]


def training(runs: Sequence[RunRecord], labels: Sequence[str]) -> list[Chart]:
    """Draw validation loss and KL over the epochs; for a single run also the training loss."""

    def lines(term: str, names: Sequence[str]) -> list[Line]:
        found = []
        for index, (run, name) in enumerate(zip(runs, names, strict=True)):
            series = over_epochs(run, "valid", term, index)
            found.append(Line(name, series, index, "joint" if is_joint(run) else "run", _points(run, series)))
        return found

    loss = lines("loss", labels if len(runs) > 1 else ["validation"])
    if len(runs) == 1:
        series = over_epochs(runs[0], "train", "loss", 1, dashed=True)
        loss.append(Line("training", series, 0, "run", _points(runs[0], series)))
    drawn = [
        line_plot(loss, "Validation loss" if len(runs) > 1 else "Loss", "tasks done", ends=True, clip=True),
        line_plot(lines("kl", labels), "Validation KL", "tasks done", ends=True),
    ]
    return [chart for chart in drawn if chart]


def _points(run: RunRecord, series: Series) -> list[str]:
    """Return a label for every point of a training curve: the task and how far it was trained."""
    tasks = np.ceil(series.x).astype(int) - 1
    shares = series.x - tasks
    return [f"{run.task_name(task)}, {share:.0%} through" for task, share in zip(tasks.tolist(), shares, strict=True)]


def gains(run: RunRecord) -> Chart | None:
    """Draw the gain from each further component, one line per task."""
    found = [Line(run.task_name(task), over_components(gain, task)) for task, gain in run.gains.items()]
    return line_plot(found, "Gained over the smallest mixture, nats", "components", at="components: %{x}")


# --- plotly itself --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Script:
    """A script inside the page: packed, and its digest for the content security policy."""

    packed: str
    digest: str


@functools.cache
def plotly_script() -> Script:
    """Return plotly.js of the installed package, gzipped and in base64: 2 MB instead of 5."""
    from plotly.offline import get_plotlyjs

    source = get_plotlyjs().encode("utf-8")
    return Script(base64.b64encode(gzip.compress(source, 9, mtime=0)).decode("ascii"), digest(source))


def digest(source: bytes) -> str:
    """Return the digest of a script for a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source).digest()).decode("ascii")
