"""Lines of charts: numbers over tasks, components and epochs, with a band around each.

Two libraries draw them. Plotly makes charts that answer to the pointer, for pages (`charts.py`); matplotlib makes files
and pictures for pages without scripts, which plotly could only make with a browser (`svg.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from boovae.metrics.metric import numbers
from boovae.metrics.typed import Floats
from boovae.report.numbers import deviation, mean
from boovae.report.record import Epoch, Gain, RunRecord

#: --s0 … --s7 of style.css; later series repeat them dashed.
COLOURS = 8
#: Of a training curve: more are finer than a pixel.
POINTS = 240


@dataclass(frozen=True)
class Series:
    """One line with a band around it; `colour` counts from 0 as in the legend."""

    x: Floats
    y: Floats
    band: Floats
    colour: int
    dashed: bool = False
    marks: bool = False

    @property
    def drawn(self) -> bool:
        """Whether it has any number."""
        return bool(np.isfinite(self.y).any())

    @property
    def ends(self) -> tuple[float, float]:
        """The first and the last number."""
        finite = self.y[np.isfinite(self.y)]
        return float(finite[0]), float(finite[-1])


def with_band(x: Floats, values: Floats, colour: int) -> Series:
    """Return the means of `values` (n, R) at x, in a band of one standard deviation."""
    return Series(x, mean(values), np.nan_to_num(deviation(values)), colour, marks=True)


def settled_range(series: Sequence[Series]) -> tuple[float, float] | None:
    """Return the range without the first quarter of every task, where the curves are steep; None if it has no width."""
    settled = np.concatenate([line.y[line.x % 1 > 0.25] for line in series])  # a task is one unit of x
    settled = settled[np.isfinite(settled)]
    if not len(settled) or settled.min() == settled.max():
        return None
    low, high = float(settled.min()), float(settled.max())
    margin = 0.25 * (high - low)
    return low - margin, high + margin


def over_tasks(run: RunRecord, colour: int) -> dict[str, tuple[str, Series]]:
    """Return every number that its metric wants drawn against the tasks seen: its name and line, by title."""
    found: dict[str, tuple[str, list[tuple[float, Floats]]]] = {}
    for evaluation in reversed(run.evaluations):  # the last one has all titles, in the order of the metrics
        for number in numbers(evaluation):
            if number.curve:
                points = found.setdefault(number.curve, (number.name, []))[1]
                points.insert(0, (float(evaluation.learned), np.atleast_1d(number.values)))
    return {
        title: (name, with_band(np.array([x for x, _ in points]), np.array([row for _, row in points]), colour))
        for title, (name, points) in found.items()
    }


def over_components(gain: Gain, colour: int) -> Series:
    """Return by how much a task's divergence falls with the number of components, from the smallest mixture on."""
    return with_band(gain.sizes, gain.divergence[:1] - gain.divergence, colour)


def over_epochs(run: RunRecord, split: str, term: str, colour: int, dashed: bool = False) -> Series:
    """Return a training curve; every task takes the same width, so that runs can be laid over each other."""
    parts: list[tuple[Floats, Floats, Floats]] = []
    for task in sorted({epoch.task for epoch in run.epochs}):
        values = _held([epoch for epoch in run.epochs if epoch.task == task], split, term)
        x = task + np.arange(1, len(values) + 1) / len(values)
        keep = np.unique(np.linspace(0, len(values) - 1, max(POINTS // max(run.planned, 1), 8)).round().astype(int))
        spread = np.nan_to_num(deviation(values))
        parts.append((x[keep], mean(values)[keep], spread[keep]))
        parts.append((x[-1:], np.array([np.nan]), np.zeros(1)))  # a gap where the next task begins
    if not parts:
        return Series(np.zeros(0), np.zeros(0), np.zeros(0), colour, dashed)
    x, y, band = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Series(x, y, band, colour, dashed)


def _held(epochs: Sequence[Epoch], split: str, term: str) -> Floats:
    """Return epochs x [R]; a replica that has stopped keeps its last value, or the mean would jump."""
    values = np.array([epoch.term(split, term) for epoch in epochs], dtype=np.float64)
    for row in range(1, len(values)):
        values[row] = np.where(np.isnan(values[row]), values[row - 1], values[row])
    return values
