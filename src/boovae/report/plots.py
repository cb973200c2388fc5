"""Charts that answer to the pointer and the keys: lines and points as plotly draws them, each with its table.

A figure is written as plotly's JSON. Colours are names of the page's own (`var(--s0)`), which its script looks up, so
that charts follow light and dark. Everything that comes from a run folder is escaped: plotly reads tags in texts.
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

from boovae.report.charts import COLOURS, Series, settled_range
from boovae.report.latents import LatentMap, Place
from boovae.report.log import Floats
from boovae.report.numbers import deviation, mean, number, with_spread

if TYPE_CHECKING:
    from markupsafe import Markup

Kind = Literal["run", "joint", "paper"]

#: Whose line it is: plotly's dash and marker.
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
#: Marks of tasks on a map, another one once the colours are used up: plotly's name and how a legend writes it.
SYMBOLS = {"circle": "●", "triangle-up": "▲", "square": "■", "cross": "✚"}
#: What a component of the prior looks like on a map.
COMPONENT = "diamond"


@dataclass(frozen=True)
class Line:
    """A series with a name; lines of one run are shown and hidden together."""

    name: str
    series: Series
    run: int | None = None
    kind: Kind = "run"
    texts: Sequence[str] = ()  # what to call the points, where x alone does not say


@dataclass(frozen=True)
class Numbers:
    """The table behind a chart."""

    columns: list[str]
    rows: list[tuple[str, list[str]]]


@dataclass(frozen=True)
class Chart:
    """A chart of the page; `figure` is plotly's."""

    title: str
    describe: str
    figure: dict[str, Any]
    table: Numbers
    square: bool = False

    @property
    def json(self) -> Markup:
        """The figure as JSON that cannot end the element it stands in."""
        from markupsafe import Markup

        text = json.dumps(self.figure, separators=(",", ":"), allow_nan=False)
        return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def line_plot(
    lines: Sequence[Line], title: str, x_title: str, *, at: str = "", ends: bool = False, clip: bool = False
) -> Chart | None:
    """Draw the lines that have any number; None if there is none.

    `at` says what the pointer is at ("tasks seen: %{x}"). With `ends` the table has the last point of every task alone,
    and with `clip` the steep first epochs of every task may leave the frame.
    """
    full = [line for line in lines if np.isfinite(line.series.y).any()]
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
    texts = ", ".join(f"{line.name} from {number(first)} to {number(last)}" for line, first, last in map(_ends, full))
    table = _ends_table(full, x_title) if ends else _table(full, x_title)
    return Chart(title, f"{title} over {x_title}: {texts}", {"data": data, "layout": layout}, table)


def _step(lines: Sequence[Line]) -> int | None:
    """Return the distance of the marks on the axis: a whole number, a dozen marks at most; None leaves it to plotly."""
    longest = max(float(np.nanmax(line.series.x)) for line in lines)
    return next((step for step in (1, 2, 5, 10, 20, 50, 100, 1000) if longest <= 12 * step), None)


def _colour(index: int) -> str:
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
        "x": _listed(series.x),
        "y": _listed(series.y),
        "customdata": _listed(series.band),
        "text": [escape(text) for text in line.texts] or None,
        "line": {"color": _colour(series.colour), "dash": dash, "width": 2},
        "marker": {"color": _colour(series.colour), "symbol": symbol, "size": 6},
        "hovertemplate": f"{where}%{{fullData.name}}: {value}<extra></extra>",
        "meta": line.run,
    }


def _band(line: Line) -> list[dict[str, Any]]:
    """Return one standard deviation around a line as an area, in pieces where the line has gaps."""
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
            x += [*_listed(series.x[piece]), *_listed(series.x[piece][::-1]), None]
            y += [*_listed(high), *_listed(low[::-1]), None]
    area = {"type": "scatter", "mode": "lines", "x": x, "y": y, "fill": "toself", "hoverinfo": "skip", "meta": line.run}
    return [area | {"line": {"width": 0}, "fillcolor": _colour(series.colour), "opacity": 0.2}] if x else []


def _listed(values: Floats) -> list[float | None]:
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def _ends(line: Line) -> tuple[Line, float, float]:
    finite = line.series.y[np.isfinite(line.series.y)]
    return line, float(finite[0]), float(finite[-1])


def _table(lines: Sequence[Line], x_title: str) -> Numbers:
    """Return a row for every x, a column for every line."""
    places = sorted({x for line in lines for x in line.series.x.tolist()})
    columns = [dict(zip(line.series.x.tolist(), _cells(line), strict=True)) for line in lines]
    rows = [(f"{x:g}", [column.get(x, "") for column in columns]) for x in places]
    return Numbers([x_title, *(line.name for line in lines)], rows)


def _ends_table(lines: Sequence[Line], x_title: str) -> Numbers:
    """Return what every line was at the end of each task: x there is a whole number."""
    rows: dict[int, list[str]] = {}
    for column, line in enumerate(lines):
        cells = _cells(line)
        for x, cell in zip(line.series.x.tolist(), cells, strict=True):
            if x == round(x) and cell:
                rows.setdefault(int(x), [""] * len(lines))[column] = cell
    return Numbers([x_title, *(line.name for line in lines)], [(str(x), rows[x]) for x in sorted(rows)])


def _cells(line: Line) -> list[str]:
    """Return what a table says of every point of a line; the paper's numbers have the decimals it prints."""
    pairs = zip(line.series.y.tolist(), line.series.band.tolist(), strict=True)
    if line.kind == "paper":
        return [f"{y:g} ± {band:g}" if math.isfinite(y) else "" for y, band in pairs]
    return [with_spread(y, band or math.nan) if math.isfinite(y) else "" for y, band in pairs]


# --- the map of the latent space ------------------------------------------------------------------------------------


def map_plot(latents: LatentMap, names: dict[int, str], title: str) -> Chart | None:
    """Draw test images as points, coloured by task, and the prior's components as diamonds as large as their mass."""
    if not latents.codes:
        return None
    places = [p for p in latents.components if np.isfinite([*p.at, *p.deviation]).all() and p.mass > 0]
    axes = [_direction(name, share) for name, share in zip(("first", "second"), latents.explained, strict=True)]
    layout: dict[str, Any] = {
        "xaxis": axes[0],
        "yaxis": axes[1] | {"scaleanchor": "x"},
        "hovermode": "closest",
        "shapes": [_outline(places[0])] if len(places) == 1 else [],
    }
    data = [_points(codes.points, names[codes.task], codes.task) for codes in latents.codes]
    data += _components(places, names)
    describe = f"{title}: test images of {len(latents.codes)} tasks and {len(places)} components of the prior"
    return Chart(title, describe, {"data": data, "layout": layout}, _map_table(latents, names), square=True)


def _direction(name: str, share: float) -> dict[str, Any]:
    of_variance = f" ({100 * share:.0f} % of the variance)" if math.isfinite(share) else ""
    return AXIS | {"title": {"text": f"{name} direction{of_variance}"}, "zeroline": False, "constrain": "domain"}


def _map_table(latents: LatentMap, names: dict[int, str]) -> Numbers:
    """Return where the codes of every task lie and how wide, and how many components it has."""
    rows = []
    for codes in latents.codes:
        places = [*mean(codes.points, axis=0).tolist(), *deviation(codes.points, axis=0).tolist()]
        components = sum(place.task == codes.task for place in latents.components)
        cells = [str(len(codes.points)), *map(number, places), str(components)]
        rows.append((names[codes.task], cells))
    return Numbers(["task", "images", "centre 1", "centre 2", "deviation 1", "deviation 2", "components"], rows)


def round_of(task: int) -> int:
    """Return how often the colours were used up before a task: which of `SYMBOLS` it has."""
    return task // COLOURS % len(SYMBOLS)


def _points(points: Floats, name: str, task: int) -> dict[str, Any]:
    symbol = list(SYMBOLS)[round_of(task)]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": escape(name),
        "x": _listed(points[:, 0]),
        "y": _listed(points[:, 1]),
        "marker": {"color": _colour(task), "symbol": symbol, "size": 5, "opacity": 0.6},
        "hovertemplate": "task “%{fullData.name}”<extra></extra>",
    }


def _components(places: Sequence[Place], names: dict[int, str]) -> list[dict[str, Any]]:
    """Return one trace of all components, each in the colour of its task."""
    if not places:
        return []
    largest = max(place.mass for place in places)
    owners = ["the prior" if place.task is None else f"task “{names.get(place.task, '?')}”" for place in places]
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "components",
            "x": _listed(np.array([place.at[0] for place in places])),
            "y": _listed(np.array([place.at[1] for place in places])),
            "text": [escape(owner) for owner in owners],
            "customdata": [round(100 * place.mass, 2) for place in places],
            "marker": {
                "symbol": COMPONENT,
                "size": [round(6 + 8 * math.sqrt(place.mass / largest), 1) for place in places],
                "color": ["var(--card)" if place.task is None else _colour(place.task) for place in places],
                "line": {"color": "var(--ink)", "width": 1.2},
            },
            "hovertemplate": "component of %{text}: %{customdata} % of the prior<extra></extra>",
        }
    ]


def _outline(place: Place) -> dict[str, Any]:
    """Return an ellipse of two standard deviations."""
    (x, y), (wide, high) = place.at.tolist(), (2 * place.deviation).tolist()
    corners = {"x0": x - wide, "x1": x + wide, "y0": y - high, "y1": y + high}
    return {"type": "circle", **corners, "line": {"color": "var(--ink)", "width": 1.2, "dash": "dot"}}


# --- plotly itself --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Script:
    """A script that the page carries: packed, and the digest by which a browser may know it."""

    packed: str
    digest: str


@functools.cache
def plotly_script() -> Script:
    """Return plotly.js as the installed package has it, gzipped and in base64: 2 MB instead of 5."""
    from plotly.offline import get_plotlyjs

    source = get_plotlyjs().encode("utf-8")
    return Script(base64.b64encode(gzip.compress(source, 9, mtime=0)).decode("ascii"), digest(source))


def digest(source: bytes) -> str:
    """Return how a content security policy names a script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source).digest()).decode("ascii")
