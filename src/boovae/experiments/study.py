"""A study: how the metrics after the last task depend on one number, as lines in a figure, a CSV and a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from boovae.experiments.figures import line, sheet
from boovae.experiments.grid import file_name
from boovae.experiments.measured import Measured
from boovae.experiments.page import Chapter, Panels, render
from boovae.experiments.paper import DATASET_NAMES
from boovae.experiments.request import Request
from boovae.experiments.statistics import Spread
from boovae.experiments.tables import as_csv
from boovae.files import write_file
from boovae.report.charts import chart

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
        name = DATASET_NAMES.get(each.dataset, each.dataset)
        charts, legend = [], []
        for metric, metric_title in titles.items():
            found = lines(each, metric)
            legend = [one.label for one in found]
            series = [line(one.points, colour, dashed=one.flat) for colour, one in enumerate(found)]
            charts.append(chart(series, f"{metric_title} on {name}", at))
            records += [(each.dataset, metric, *record) for one in found for record in _records(one)]
        charts = [drawn for drawn in charts if drawn]
        if charts:
            write_file(folder / f"{file_name(each.dataset)}.svg", sheet(charts, legend, len(charts)))
        how = (
            f"After {each.tasks} tasks; the band is one standard deviation over the seeds. Dashed: independent of {at}."
        )
        chapters.append(Chapter(name, legend, [], [Panels(title, how, charts)], {}, each.made_with(request.command)))
    write_file(folder / f"{request.study}.csv", as_csv(HEAD, iter(records)))
    write_file(folder / f"{request.study}.md", _markdown(title, at, records).encode())
    write_file(folder / "report.html", render(title, chapters, findings, [], missing))
    write_file(folder / "findings.json", (json.dumps(findings, indent=1) + "\n").encode())
    return findings


def _records(one: Line) -> list[tuple[object, ...]]:
    points = one.points[:1] if one.flat else one.points
    return [(one.label, "" if one.flat else f"{at:g}", *spread.record) for at, spread in points]


def _markdown(title: str, at: str, records: Sequence[tuple[object, ...]]) -> str:
    lines = [f"# {title}", "", f"| dataset | metric | | {at} | mean | std | seeds |", "|---|---|---|---|---|---|---|"]
    lines += ["| " + " | ".join(map(str, record)) + " |" for record in records]
    return "\n".join(lines) + "\n"
