"""`boovae bench paper`: the paper's NLL and diversity tables, its curves and its samples, measured with our code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from boovae.bench import cells as grid
from boovae.bench.figures import PER_TASK, curves, laid_out, learned, panels, samples, sheet
from boovae.bench.findings import DIFFERENCES, differences, differences_markdown, findings
from boovae.bench.page import Chapter, Panels, Plain, render
from boovae.bench.published import DATASETS, FACES, FACES_METHODS, FACES_TASKS, METHODS, comparable, dataset_title
from boovae.bench.request import Request
from boovae.bench.results import Measured
from boovae.bench.tables import HEAD, as_csv, table, title_of
from boovae.files import write_file

if TYPE_CHECKING:
    from markupsafe import Markup

__all__ = ["DATASETS", "plan", "write"]

HOW = "The band is one standard deviation over the seeds; lower is better."
HOW_DIFFERENCES = (
    "Mean of the differences after the last task and the interval that holds 95 % of its bootstrap over seeds; "
    "negative: the first method is better."
)
HOW_PANELS = {
    "nll": "One panel per task, from the moment it was learned: a line that rises is forgetting.",
    "diversity": "One panel per class: above 0 it is drawn too seldom, below 0 too often.",
}


def plan(request: Request) -> list[grid.Cell]:
    """Return the cells of datasets x methods; those of the paper's table for a dataset if none are named."""
    cells = []
    for dataset in request.datasets:
        faces = dataset in FACES
        methods = request.methods or (FACES_METHODS if faces else METHODS)
        tasks = min(request.tasks, FACES_TASKS) if faces else request.tasks
        wanted = grid.plan([dataset], methods, request.given, tasks, request.joint_tasks)
        known = {cell.name for cell in wanted}
        cells += wanted + [cell for cell in _joint_there(request, dataset, methods, tasks) if cell.name not in known]
    return cells


def _joint_there(request: Request, dataset: str, methods: Sequence[str], tasks: int) -> list[grid.Cell]:
    """Return what is finished of `joint`, if nobody said after how many tasks: more than the usual is welcome."""
    joints = [text for text in methods if grid.Variant.parse(text).method == "joint"]
    if request.joint_tasks is not None or not joints:
        return []
    every = grid.plan([dataset], joints, request.given, tasks, range(1, tasks + 1))
    return [cell for cell in every if grid.read_summary(request.cells, cell) is not None]


def write(request: Request, measured: Sequence[Measured], missing: Sequence[str]) -> dict[str, str]:
    """Write every number, the tables beside the paper's, the figures and the page; return what they say in short."""
    folder = request.results
    for each in measured:
        each.write_csv(folder / f"{grid.file_name(each.dataset)}.csv", request.command)
    for metric in request.metrics:
        tables = [table(each, metric) for each in measured]
        write_file(folder / f"{metric}.csv", as_csv(HEAD, (record for each in tables for record in each.records())))
        beside = any(each.compared for each in tables)
        note = ("Ours / the paper's: mean" if beside else "Mean") + " (standard deviation) over seeds"
        note += "; the better one is bold.\n\n" if beside and comparable(metric) else ".\n\n"
        write_file(folder / f"{metric}.md", (note + "\n".join(each.markdown() for each in tables)).encode())
    compared = list(differences(measured, request.metrics))
    write_file(folder / "differences.csv", as_csv(DIFFERENCES, iter(compared)))
    write_file(folder / "differences.md", differences_markdown(compared).encode())
    found = findings(measured, request.metrics)
    chapters = [_chapter(request, each) for each in measured]
    page = render("The paper's tables, measured", chapters, found, _compared(compared), missing)
    write_file(folder / "report.html", page)
    write_file(folder / "findings.json", (json.dumps(found, indent=1) + "\n").encode())
    return found


def _compared(records: Sequence[tuple[object, ...]]) -> Plain | None:
    """Return the differences as the page shows them; None without any."""
    if not records:
        return None
    rows = [
        (dataset_title(str(dataset)), title_of(str(metric)), *map(str, (method, other, difference)), f"{low} to {high}")
        for dataset, metric, _, method, other, difference, low, high, _ in records
    ]
    head = ("dataset", "metric", "method", "other", "difference", "interval")
    return Plain("Method against method, seed by seed", HOW_DIFFERENCES, head, rows, strong="difference")


def _chapter(request: Request, measured: Measured) -> Chapter:
    """Write the figures of one dataset and return what the page says of it."""
    stem = grid.file_name(measured.dataset)
    # The paper has one table of distances, whatever features ours are on.
    distance = next((metric for metric in request.metrics if not comparable(metric)), None)
    over_tasks = [
        drawn
        for metric in request.metrics
        for drawn in curves(measured, metric, paper=comparable(metric) or metric == distance)
    ]
    figures = [Panels("charts", "charts", "As tasks arrive", HOW, over_tasks)]
    _save(request, f"{stem}_curves.svg", over_tasks, measured.labels, 2)
    for metric in filter(PER_TASK.__contains__, request.metrics):
        drawn = panels(measured, metric)
        panel_title, short = f"Task by task: {PER_TASK[metric][1]}", f"{title_of(metric)} task by task"
        figures.append(Panels(f"{metric}-per-task", short, panel_title, HOW_PANELS[metric], drawn, folded=True))
        _save(request, f"{stem}_{metric}_per_task.svg", drawn, measured.labels, 5)
    pictures = {"samples": samples(measured), "components": learned(measured)}
    shown = {name: pictured for name, pictured in pictures.items() if pictured is not None}
    for name, pictured in shown.items():
        write_file(request.results / f"{stem}_{name}.png", laid_out(pictured))
    title = dataset_title(measured.dataset)
    tables = [table(measured, metric) for metric in request.metrics]
    return Chapter(stem, title, measured.labels, tables, figures, shown, measured.made_with(request.command))


def _save(request: Request, name: str, charts: Sequence[Markup], legend: Sequence[str], columns: int) -> None:
    if charts:
        write_file(request.results / name, sheet(charts, legend, min(columns, len(charts))))
