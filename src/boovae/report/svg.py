"""Line charts as SVG, drawn by matplotlib, for files and pages without scripts."""

import io
import re
from collections.abc import Sequence
from html import escape
from importlib import resources

import numpy as np
from markupsafe import Markup

from boovae.report.numbers import number
from boovae.report.series import COLOURS, Series

WIDE = 3  # ratio of the largest to the smallest number above which a `wide` axis is logarithmic
# Placeholder colours of svg.mplstyle, replaced by the page's colours in the SVG.
INK, RULE = "#010203", "#010204"


def chart(
    lines: Sequence[Series], label: str, x_label: str, salt: str = "", wide: bool = False, beside: Sequence[Series] = ()
) -> Markup:
    """Draw the lines that have any numbers as an SVG element; empty if none has.

    With `wide` the axis is logarithmic if the largest number is more than WIDE times the smallest, so that one bad
    line does not squash the others. Charts with the same labels on one page need different `salt`. The axes also
    cover the lines `beside`, which are not drawn, so that neighbouring charts can have the same axes.
    """
    from matplotlib import style

    drawn, others = ([line for line in each if line.drawn] for each in (lines, beside))
    if not drawn:
        return Markup("")
    ends = ", ".join(f"from {number(first)} to {number(last)}" for first, last in (line.ends for line in drawn))
    # Ids are hashes: salted with the chart's text they are reproducible and unique on a page.
    look = str(resources.files("boovae.report").joinpath("svg.mplstyle"))
    with style.context([look, {"svg.hashsalt": label + salt}]):
        svg = _svg(drawn, label, x_label, wide, others)
    return Markup(_inline(svg, f"{label} over {x_label}: {ends}"))  # every text in it is escaped


def _svg(series: Sequence[Series], label: str, x_label: str, wide: bool, beside: Sequence[Series]) -> str:
    """Return matplotlib's SVG file of a chart."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, ScalarFormatter

    figure = Figure(figsize=(5.0, 2.9))
    # Fixed margins align charts in a row; an automatic layout would draw everything twice.
    axes = figure.add_axes((0.11, 0.17, 0.87, 0.73))
    for line in series:
        colour = f"#0a0b{line.colour % COLOURS:02x}"
        style = (0, (4, 2)) if line.dashed or line.colour >= COLOURS else "-"
        marker = "o" if line.marks else ""
        axes.fill_between(line.x, line.y - line.band, line.y + line.band, color=colour, alpha=0.18, linewidth=0)
        axes.plot(line.x, line.y, color=colour, linestyle=style, marker=marker)
    for line in beside:
        for edge in (line.y - line.band, line.y + line.band):
            axes.update_datalim(np.column_stack((line.x, edge)))
    axes.autoscale_view()
    axes.set_xlabel(x_label)
    axes.set_title(label, loc="left")  # horizontal, easier to read
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    values = np.concatenate([line.y for line in (*series, *beside)])
    if wide and np.nanmin(values) > 0 and np.nanmax(values) > WIDE * np.nanmin(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_locator(NullLocator())
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return buffer.getvalue()


def _inline(svg: str, describe: str) -> str:
    """Reduce matplotlib's file to an element for a page, without prologue, metadata and ids of groups."""
    box = re.search(r'viewBox="([^"]+)"', svg)
    body = svg[svg.index(">", svg.index("<svg")) + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'(<g) id="[^"]*"', r"\1", body)
    body = body.replace("xlink:href", "href").replace(INK, "currentColor").replace(RULE, "var(--rule)")
    body = re.sub(r"#0a0b0(\d)", r"var(--s\1)", body)
    body = re.sub(r"\s*\n\s*", "\n", body)
    assert box is not None  # matplotlib always writes it
    return f'<svg class="chart" viewBox="{box[1]}" role="img" aria-label="{escape(describe)}">{body}'
