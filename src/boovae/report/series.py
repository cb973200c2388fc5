"""Lines of charts: numbers over tasks, components and epochs, each with a band.

Two libraries draw them. Plotly draws interactive charts for pages (`charts.py`); matplotlib draws SVG for files and
pages without scripts (`svg.py`), for which plotly would need a browser.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from boovae.metrics.metric import numbers
from boovae.metrics.schema import Floats
from boovae.report.numbers import deviation, mean
from boovae.report.run_record import Epoch, RunRecord

#: --s0 … --s7 of style.css; later series repeat them dashed.
COLOURS = 8
#: Points of a training curve; more would be finer than a pixel.
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
        """Whether it has any finite number."""
        return bool(np.isfinite(self.y).any())

    @property
    def ends(self) -> tuple[float, float]:
        """The first and the last finite number."""
        finite = self.y[np.isfinite(self.y)]
        return float(finite[0]), float(finite[-1])


def with_band(x: Floats, values: Floats, colour: int) -> Series:
    """Return the means of `values` (n, R) at x with a band of one standard deviation."""
    return Series(x, mean(values), np.nan_to_num(deviation(values)), colour, marks=True)


def settled_range(series: Sequence[Series]) -> tuple[float, float] | None:
    """Return the range of values after the steep first quarter of every task; None if it is empty."""
    settled = np.concatenate([line.y[line.x % 1 > 0.25] for line in series])  # a task is one unit of x
    settled = settled[np.isfinite(settled)]
    if not len(settled) or settled.min() == settled.max():
        return None
    low, high = float(settled.min()), float(settled.max())
    margin = 0.25 * (high - low)
    return low - margin, high + margin


def over_tasks(run: RunRecord, colour: int) -> dict[str, tuple[str, Series]]:
    """Return name and line of every number with a curve over the tasks seen, by title."""
    found: dict[str, tuple[str, list[tuple[float, Floats]]]] = {}
    for evaluation in reversed(run.evaluations):  # reversed: the last one has all titles in the order of the metrics
        for number in numbers(evaluation):
            if number.curve:
                points = found.setdefault(number.curve, (number.name, []))[1]
                points.insert(0, (float(evaluation.learned), np.atleast_1d(number.values)))
    return {
        title: (name, with_band(np.array([x for x, _ in points]), np.array([row for _, row in points]), colour))
        for title, (name, points) in found.items()
    }


def over_epochs(run: RunRecord, split: str, term: str, colour: int) -> Series:
    """Return a training curve; all tasks get the same width, so that runs can share a chart."""
    parts: list[tuple[Floats, Floats, Floats]] = []
    for task in sorted({epoch.task for epoch in run.epochs}):
        values = _held([epoch for epoch in run.epochs if epoch.task == task], split, term)
        x = task + np.arange(1, len(values) + 1) / len(values)
        keep = np.unique(np.linspace(0, len(values) - 1, max(POINTS // max(run.planned, 1), 8)).round().astype(int))
        parts.append((x[keep], mean(values)[keep], np.nan_to_num(deviation(values))[keep]))
        parts.append((x[-1:], np.array([np.nan]), np.zeros(1)))  # a gap before the next task
    if not parts:
        return Series(np.zeros(0), np.zeros(0), np.zeros(0), colour)
    x, y, band = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Series(x, y, band, colour)


def _held(epochs: Sequence[Epoch], split: str, term: str) -> Floats:
    """Return epochs x [R]; a stopped replica keeps its last value so that the mean does not jump."""
    values = np.array([epoch.term(split, term) for epoch in epochs], dtype=np.float64)
    for row in range(1, len(values)):
        values[row] = np.where(np.isnan(values[row]), values[row - 1], values[row])
    return values
