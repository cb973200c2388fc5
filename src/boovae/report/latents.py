"""The map of a run's latent space for plotly: test images by task, and the prior's components."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from boovae.metrics.schema import Floats
from boovae.report.charts import AXIS, Chart, Numbers, colour, to_plotly
from boovae.report.numbers import deviation, mean, number
from boovae.report.run_record import LatentMap, Place, RunRecord
from boovae.report.series import COLOURS

#: Markers of tasks on a map, the next one after every round of colours: plotly's name and the legend's character.
SYMBOLS = {"circle": "●", "triangle-up": "▲", "square": "■", "cross": "✚"}
#: Marker of the prior's components.
COMPONENT = "diamond"


def latent_map(run: RunRecord) -> Chart | None:
    """Draw test images and the prior's components in the plane in which the images are spread most."""
    if run.latents is None:
        return None
    owners = {place.task for place in run.latents.components if place.task is not None}
    names = {task: run.task_name(task) for task in owners | {codes.task for codes in run.latents.codes}}
    return _map(run.latents, names, "Codes and components")


@dataclass(frozen=True)
class TaskLabel:
    """A task in the legend of charts with one colour per task."""

    label: str
    colour: int
    again: bool  # the colours are used a second time
    mark: str  # on a map


def task_legend(run: RunRecord) -> list[TaskLabel]:
    """Return the tasks of a run with their colours in charts."""
    shown = set(run.gains) | ({codes.task for codes in run.latents.codes} if run.latents else set())
    marks = list(SYMBOLS.values())
    return [
        TaskLabel(run.task_name(task), task % COLOURS, task >= COLOURS, marks[_round_of(task)])
        for task in sorted(shown)
    ]


def _map(latents: LatentMap, names: dict[int, str], title: str) -> Chart | None:
    """Draw test images as points, coloured by task, and the prior's components as diamonds sized by mass."""
    if not latents.codes:
        return None
    places = [p for p in latents.components if np.isfinite([*p.at, *p.deviation]).all() and (p.mass or 0) > 0]
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
    """Return centre and spread of the codes of every task, and its number of components."""
    rows = []
    for codes in latents.codes:
        places = [*mean(codes.points, axis=0).tolist(), *deviation(codes.points, axis=0).tolist()]
        components = sum(place.task == codes.task for place in latents.components)
        cells = [str(len(codes.points)), *map(number, places), str(components)]
        rows.append((names[codes.task], cells))
    return Numbers(["task", "images", "centre 1", "centre 2", "deviation 1", "deviation 2", "components"], rows)


def _round_of(task: int) -> int:
    """Return the index of a task's marker in `SYMBOLS`: how often the colours were used up before it."""
    return task // COLOURS % len(SYMBOLS)


def _points(points: Floats, name: str, task: int) -> dict[str, Any]:
    symbol = list(SYMBOLS)[_round_of(task)]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": escape(name),
        "x": to_plotly(points[:, 0]),
        "y": to_plotly(points[:, 1]),
        "marker": {"color": colour(task), "symbol": symbol, "size": 5, "opacity": 0.6},
        "hovertemplate": "task “%{fullData.name}”<extra></extra>",
    }


def _components(places: Sequence[Place], names: dict[int, str]) -> list[dict[str, Any]]:
    """Return a single trace of all components, each in the colour of its task."""
    if not places:
        return []
    masses = [place.mass or 0.0 for place in places]
    largest = max(masses)
    owners = ["the prior" if place.task is None else f"task “{names.get(place.task, '?')}”" for place in places]
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "components",
            "x": to_plotly(np.array([place.at[0] for place in places])),
            "y": to_plotly(np.array([place.at[1] for place in places])),
            "text": [escape(owner) for owner in owners],
            "customdata": [round(100 * mass, 2) for mass in masses],
            "marker": {
                "symbol": COMPONENT,
                "size": [round(6 + 8 * math.sqrt(mass / largest), 1) for mass in masses],
                "color": ["var(--card)" if place.task is None else colour(place.task) for place in places],
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
