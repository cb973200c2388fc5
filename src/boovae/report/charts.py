"""Series over tasks, components and epochs; and line charts as SVG, for files and for pages without scripts."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from boovae.report.components import Gain
from boovae.report.findings import forgetting
from boovae.report.log import Floats
from boovae.report.numbers import deviation, mean, number
from boovae.report.read import Epoch, Run

if TYPE_CHECKING:
    from markupsafe import Markup

COLOURS = 8  # --s0 … --s7 of style.css; later series repeat them dashed
POINTS = 240  # of a training curve: more is finer than a pixel
WIDE = 3  # from this ratio of the largest to the smallest number on an axis is logarithmic, where that is wanted
# Stand-ins that matplotlib draws with; in the SVG the page's own colours take their place.
INK, RULE = "#010203", "#010204"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: it scales, can be read aloud, and takes the page's font
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": RULE,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
}


@dataclass(frozen=True)
class Series:
    """One line with a band around it; `colour` counts from 0 as in the legend."""

    x: Floats
    y: Floats
    band: Floats
    colour: int
    dashed: bool = False
    marks: bool = False


def chart(
    series: Sequence[Series],
    label: str,
    x_label: str,
    clip: bool = False,
    salt: str = "",
    wide: bool = False,
    beside: Sequence[Series] = (),
) -> Markup:
    """Draw the series that have any number; an empty text where none has."""
    from markupsafe import Markup

    full, others = ([line for line in lines if np.isfinite(line.y).any()] for lines in (series, beside))
    if not full:
        return Markup("")
    ends = ", ".join(f"from {number(first)} to {number(last)}" for first, last in map(_ends, full))
    describe = f"{label} over {x_label}: {ends}"
    return Markup(line_chart(full, describe, x_label, label, clip, salt, wide, others))  # text in it is ours alone


def _ends(line: Series) -> tuple[float, float]:
    finite = line.y[np.isfinite(line.y)]
    return float(finite[0]), float(finite[-1])


def line_chart(
    series: Sequence[Series],
    describe: str,
    x_label: str,
    y_label: str,
    clip: bool = False,
    salt: str = "",
    wide: bool = False,
    beside: Sequence[Series] = (),
) -> str:
    """Return an SVG element; `describe` is its text alternative.

    With `clip` the steep first epochs of every task may leave the frame, so that the rest can be seen; with `wide` the
    axis is logarithmic where the largest number is more than WIDE times the smallest, so that one bad series does not
    press the others together. Charts with the same labels on one page need different `salt`. The axes have room for
    the series `beside`, too, which are not drawn: charts that stand side by side can have the same axes.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, ScalarFormatter

    # Ids are hashes: salted by the chart's own text they are the same every time, yet never twice on a page.
    with rc_context(STYLE | {"svg.hashsalt": y_label + salt}):
        figure = Figure(figsize=(5.0, 2.9))
        # Fixed margins: charts in a row line up, and an automatic layout would draw everything twice.
        axes = figure.add_axes((0.11, 0.17, 0.87, 0.73))
        for line in series:
            colour = f"#0a0b{line.colour % COLOURS:02x}"
            style = (0, (4, 2)) if line.dashed or line.colour >= COLOURS else "-"
            axes.fill_between(line.x, line.y - line.band, line.y + line.band, color=colour, alpha=0.18, linewidth=0)
            axes.plot(
                line.x,
                line.y,
                color=colour,
                linestyle=style,
                linewidth=1.6,
                marker="o" if line.marks else "",
                markersize=3.5,
            )
        for line in beside:
            for edge in (line.y - line.band, line.y + line.band):
                axes.update_datalim(np.column_stack((line.x, edge)))
        axes.autoscale_view()
        if clip and (span := settled_range(series)):
            axes.set_ylim(*span)
        axes.set_xlabel(x_label)
        axes.set_title(y_label, loc="left", fontsize=9)  # above, not sideways: read without turning the head
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12, min_n_ticks=1))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        if wide and _is_wide([*series, *beside]):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
            axes.yaxis.set_major_formatter(ScalarFormatter())
            axes.yaxis.set_minor_locator(NullLocator())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _inline(buffer.getvalue(), describe)


def _is_wide(series: Sequence[Series]) -> bool:
    values = np.concatenate([line.y for line in series])
    return bool(np.nanmin(values) > 0 and np.nanmax(values) > WIDE * np.nanmin(values))


def settled_range(series: Sequence[Series]) -> tuple[float, float] | None:
    """Return the range without the first quarter of every task, where the curves are steep; None if it has no width."""
    settled = np.concatenate([line.y[line.x % 1 > 0.25] for line in series])  # a task is one unit of x
    settled = settled[np.isfinite(settled)]
    if not len(settled) or settled.min() == settled.max():
        return None
    low, high = float(settled.min()), float(settled.max())
    margin = 0.25 * (high - low)
    return low - margin, high + margin


def _inline(svg: str, describe: str) -> str:
    """Cut matplotlib's file down to an element for a page: no prologue, no metadata, no id twice."""
    box = re.search(r'viewBox="([^"]+)"', svg)
    body = svg[svg.index(">", svg.index("<svg")) + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'(<g) id="[^"]*"', r"\1", body)
    body = body.replace("xlink:href", "href").replace(INK, "currentColor").replace(RULE, "var(--rule)")
    body = re.sub(r"#0a0b0(\d)", r"var(--s\1)", body)
    body = re.sub(r"\s*\n\s*", "\n", body)
    assert box is not None  # matplotlib always writes it
    return f'<svg class="chart" viewBox="{box[1]}" role="img" aria-label="{escape(describe)}">{body}'


def over_tasks(run: Run, key: str, colour: int) -> Series:
    """Return a number of the evaluations (`nll`, `diversity`) against the number of tasks seen."""
    values = np.array([getattr(evaluation, key) for evaluation in run.evaluations], dtype=np.float64)
    seen = np.array([evaluation.task + 1.0 for evaluation in run.evaluations])
    return Series(seen, mean(values), np.nan_to_num(deviation(values)), colour, marks=True)


def forgetting_over_tasks(run: Run, colour: int) -> Series:
    """Return what the earlier tasks have lost on average, against the number of tasks seen."""
    later = [evaluation for evaluation in run.evaluations if evaluation.task > 0]
    lost = [mean(forgetting(evaluation), axis=0) for evaluation in later]
    values = np.array(lost, dtype=np.float64).reshape(len(later), len(run.seeds))
    seen = np.array([evaluation.task + 1.0 for evaluation in later])
    return Series(seen, mean(values), np.nan_to_num(deviation(values)), colour, marks=True)


def distance_over_tasks(features: str, run: Run, colour: int) -> Series:
    """Return the Fréchet distance on some features against the number of tasks seen."""
    found = [e for e in run.evaluations if features in e.fidelity]
    values = np.array([e.fidelity[features].frechet for e in found], dtype=np.float64).reshape(-1, len(run.seeds))
    seen = np.array([e.task + 1.0 for e in found])
    return Series(seen, mean(values), np.nan_to_num(deviation(values)), colour, marks=True)


def over_components(gain: Gain, colour: int) -> Series:
    """Return by how much a task's divergence has fallen with so many components, from the smallest mixture on."""
    gained = gain.divergence[:1] - gain.divergence
    return Series(gain.sizes, mean(gained), np.nan_to_num(deviation(gained)), colour, marks=True)


def over_epochs(run: Run, key: str, colour: int, dashed: bool = False) -> Series:
    """Return a training curve; every task takes the same width, so that runs can be laid over each other."""
    parts: list[tuple[Floats, Floats, Floats]] = []
    for task in sorted({epoch.task for epoch in run.epochs}):
        values = _held([epoch for epoch in run.epochs if epoch.task == task], key)
        x = task + np.arange(1, len(values) + 1) / len(values)
        keep = np.unique(np.linspace(0, len(values) - 1, max(POINTS // max(run.planned, 1), 8)).round().astype(int))
        spread = np.nan_to_num(deviation(values))
        parts.append((x[keep], mean(values)[keep], spread[keep]))
        parts.append((x[-1:], np.array([np.nan]), np.zeros(1)))  # a gap where the next task begins
    if not parts:
        return Series(np.zeros(0), np.zeros(0), np.zeros(0), colour, dashed)
    x, y, band = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Series(x, y, band, colour, dashed)


def _held(epochs: Sequence[Epoch], key: str) -> Floats:
    """Return epochs x [R]; a replica that has stopped keeps its last value, or the mean would jump."""
    values = np.array([getattr(epoch, key) for epoch in epochs], dtype=np.float64)
    for row in range(1, len(values)):
        values[row] = np.where(np.isnan(values[row]), values[row - 1], values[row])
    return values
