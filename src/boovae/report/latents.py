"""The map of a run's latent space for plotly: test images by task, and the prior's components."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np

from boovae.report.charts import Chart, colour, points
from boovae.report.matrices import Table
from boovae.report.numbers import deviation, mean, number
from boovae.report.run_record import Codes, LatentMap, Place, RunRecord
from boovae.report.series import COLOURS

#: Markers of tasks on a map, the next one after every round of colours: plotly's name and the legend's character.
SYMBOLS = {"circle": "●", "triangle-up": "▲", "square": "■", "cross": "✚"}


class TaskLabel(NamedTuple):
    """A task in the legend of charts with one colour per task."""

    label: str
    colour: int
    again: bool  # the colours are used a second time
    mark: str  # on a map


def task_legend(run: RunRecord) -> list[TaskLabel]:
    """Return the tasks of a run with their colours in charts."""
    shown = {*run.gains, *(codes.task for codes in (run.latents.codes if run.latents else ()))}
    marks = list(SYMBOLS.values())
    names = {task: run.task_name(task) for task in sorted(shown)}
    return [TaskLabel(name, task % COLOURS, task >= COLOURS, marks[_round_of(task)]) for task, name in names.items()]


def _round_of(task: int) -> int:
    """Return the index of a task's marker in `SYMBOLS`: how often the colours were used up before it."""
    return task // COLOURS % len(SYMBOLS)


def latent_map(run: RunRecord) -> Chart | None:
    """Draw test images and the prior's components in the plane in which the images are spread most.

    Images are points in the colours of their tasks, components diamonds sized by mass.
    """
    found = run.latents
    if found is None or not found.codes:
        return None
    places = [p for p in found.components if np.isfinite([*p.at, *p.deviation]).all() and (p.mass or 0) > 0]
    axes = [_direction(name, share) for name, share in zip(("first", "second"), found.explained, strict=True)]
    layout: dict[str, Any] = {
        "xaxis": axes[0],
        "yaxis": axes[1] | {"scaleanchor": "x"},
        "hovermode": "closest",
        "shapes": [_outline(places[0])] if len(places) == 1 else [],
    }
    data = [_codes(codes, run.task_name(codes.task)) for codes in found.codes]
    if places:
        data.append(_components(places, run))
    describe = f"test images of {len(found.codes)} tasks and {len(places)} components of the prior"
    title = "Codes and components"
    figure = {"data": data, "layout": layout}
    return Chart(title, f"{title}: {describe}", figure, _table(title, found, run), square=True)


def _direction(name: str, share: float) -> dict[str, Any]:
    of_variance = f" ({100 * share:.0f} % of the variance)" if math.isfinite(share) else ""
    return {"title": {"text": f"{name} direction{of_variance}"}, "zeroline": False, "constrain": "domain"}


def _table(title: str, latents: LatentMap, run: RunRecord) -> Table:
    """Return centre and spread of the codes of every task, and its number of components."""
    rows = []
    for codes in latents.codes:
        places = [*mean(codes.points, axis=0).tolist(), *deviation(codes.points, axis=0).tolist()]
        components = sum(place.task == codes.task for place in latents.components)
        rows.append((run.task_name(codes.task), [str(len(codes.points)), *map(number, places), str(components)]))
    columns = ["task", "images", "centre 1", "centre 2", "deviation 1", "deviation 2", "components"]
    return Table(title, columns, rows)


def _codes(found: Codes, name: str) -> dict[str, Any]:
    symbol = list(SYMBOLS)[_round_of(found.task)]
    marker = {"color": colour(found.task), "symbol": symbol, "size": 5, "opacity": 0.6}
    template = "task “%{fullData.name}”<extra></extra>"
    return points(name, *found.points.T) | {"marker": marker, "hovertemplate": template}


def _components(places: Sequence[Place], run: RunRecord) -> dict[str, Any]:
    """Return a single trace of all components, each in the colour of its task."""
    masses = np.array([place.mass for place in places])
    owners = ["the prior" if place.task is None else f"task “{run.task_name(place.task)}”" for place in places]
    marker = {
        "symbol": "diamond",
        "size": (6 + 8 * np.sqrt(masses / masses.max())).round(1).tolist(),
        "color": ["var(--card)" if place.task is None else colour(place.task) for place in places],
        "line": {"color": "var(--ink)", "width": 1.2},
    }
    return points("components", *np.array([place.at for place in places]).T) | {
        "text": [escape(owner) for owner in owners],
        "customdata": (100 * masses).round(2).tolist(),
        "marker": marker,
        "hovertemplate": "component of %{text}: %{customdata} % of the prior<extra></extra>",
    }


def _outline(place: Place) -> dict[str, Any]:
    """Return an ellipse of two standard deviations."""
    (x0, y0), (x1, y1) = (place.at - 2 * place.deviation).tolist(), (place.at + 2 * place.deviation).tolist()
    line = {"color": "var(--ink)", "width": 1.2, "dash": "dot"}
    return {"type": "circle", "x0": x0, "x1": x1, "y0": y0, "y1": y1, "line": line}
