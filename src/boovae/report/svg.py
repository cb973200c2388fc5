"""Line charts as SVG by matplotlib: for files, and for pages without scripts."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from boovae.report.numbers import number
from boovae.report.series import COLOURS, Series, settled_range

if TYPE_CHECKING:
    from markupsafe import Markup

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

    full, others = ([line for line in lines if line.drawn] for lines in (series, beside))
    if not full:
        return Markup("")
    ends = ", ".join(f"from {number(first)} to {number(last)}" for first, last in (line.ends for line in full))
    describe = f"{label} over {x_label}: {ends}"
    return Markup(line_chart(full, describe, x_label, label, clip, salt, wide, others))  # text in it is ours alone


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
