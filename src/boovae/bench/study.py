"""A study: how the metrics after the last task depend on one number, as lines in a figure, a CSV and a table."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from boovae.bench.cells import file_name
from boovae.bench.figures import line, sheet
from boovae.bench.page import Chapter, Panels, Plain, render
from boovae.bench.published import dataset_title
from boovae.bench.request import Request
from boovae.bench.results import Measured
from boovae.bench.statistics import Spread
from boovae.bench.tables import as_csv
from boovae.files import write_file
from boovae.report.figures import chart

HEAD = ("dataset", "metric", "line", "at", "mean", "std", "seeds")


@dataclass(frozen=True)
class Line:
    """A line of a figure: label and numbers; a line `flat` is one number that does not depend on `at`."""

    label: str
    points: Sequence[tuple[float, Spread]]
    flat: bool = False


def final(measured: Measured, label: str, metric: str) -> Spread | None:
    """Return a metric after the last task."""
    return measured.spread(label, measured.tasks, metric)


def write_study(
    request: Request,
    measured: Sequence[Measured],
    missing: Sequence[str],
    *,
    title: str,
    at: str,
    titles: dict[str, str],
    lines: Callable[[Measured, str], Sequence[Line]],
    findings: dict[str, str],
) -> dict[str, str]:
    """Write numbers, figure and page: for each dataset a chart of every metric in `titles` over `at`."""
    folder = request.results
    records: list[tuple[object, ...]] = []
    chapters = []
    for each in measured:
        each.write_csv(folder / f"{file_name(each.dataset)}.csv", request.command)
        name = dataset_title(each.dataset)
        charts, legend, by_metric = [], [], []
        for metric, metric_title in titles.items():
            found = lines(each, metric)
            legend = [one.label for one in found]
            series = [line(one.points, colour, dashed=one.flat) for colour, one in enumerate(found)]
            charts.append(chart(series, f"{metric_title} on {name}", at))
            by_metric.append(found)
            records += [(each.dataset, metric, *record) for one in found for record in _records(one)]
        charts = [drawn for drawn in charts if drawn]
        if charts:
            write_file(folder / f"{file_name(each.dataset)}.svg", sheet(charts, legend, len(charts)))
        how = (
            f"After {each.tasks} tasks; the band is one standard deviation over the seeds. Dashed: independent of {at}."
        )
        figures = [Panels("charts", "charts", "Charts", how, charts)]
        made_with, numbers = each.made_with(request.command), _numbers(at, each.tasks, list(titles.values()), by_metric)
        chapters.append(Chapter(file_name(each.dataset), name, legend, [], figures, {}, made_with, numbers))
    write_file(folder / f"{request.study}.csv", as_csv(HEAD, iter(records)))
    write_file(folder / f"{request.study}.md", _markdown(title, at, records).encode())
    names = {each.dataset: dataset_title(each.dataset) for each in measured}
    write_file(folder / "report.html", render(title, chapters, _titled(findings, names), None, missing))
    write_file(folder / "findings.json", (json.dumps(findings, indent=1) + "\n").encode())
    return findings


def _records(one: Line) -> list[tuple[object, ...]]:
    points = one.points[:1] if one.flat else one.points
    return [(one.label, "" if one.flat else f"{at:g}", *spread.record) for at, spread in points]


def _numbers(at: str, tasks: int, titles: Sequence[str], by_metric: Sequence[Sequence[Line]]) -> Plain | None:
    """Return the numbers of all lines, a column per metric; None without any."""
    texts: dict[tuple[str, str], list[str]] = {}
    for column, lines in enumerate(by_metric):
        for one in lines:
            for x, spread in one.points[:1] if one.flat else one.points:
                row = texts.setdefault((one.label, "" if one.flat else f"{x:g}"), [""] * len(titles))
                row[column] = _text(spread)
    how = f"After {tasks} tasks: mean (standard deviation) over seeds."
    rows = [(label, x, *row) for (label, x), row in texts.items()]
    return Plain("Numbers", how, ("", at, *titles), rows) if rows else None


def _text(spread: Spread) -> str:
    """Write mean and deviation with one decimal, small ones with three.

    >>> _text(Spread(247.0, 2.36776, 5)), _text(Spread(0.00235377, 0.000687216, 5)), _text(Spread(12345.6, math.nan, 1))
    ('247.0 (2.4)', '0.002 (0.001)', '12345.6')
    """
    decimals = 1 if abs(spread.mean) >= 10 else 3
    deviation = f" ({spread.std:.{decimals}f})" if math.isfinite(spread.std) else ""
    return f"{spread.mean:.{decimals}f}{deviation}"


def _titled(findings: dict[str, str], names: dict[str, str]) -> dict[str, str]:
    """Return findings that begin with a dataset under the name a person knows it by."""
    parts = {key: key.partition(": ") for key in findings}
    return {names.get(head, head) + colon + rest: findings[key] for key, (head, colon, rest) in parts.items()}


def _markdown(title: str, at: str, records: Sequence[tuple[object, ...]]) -> str:
    lines = [f"# {title}", "", f"| dataset | metric | | {at} | mean | std | seeds |", "|---|---|---|---|---|---|---|"]
    lines += ["| " + " | ".join(map(str, record)) + " |" for record in records]
    return "\n".join(lines) + "\n"
