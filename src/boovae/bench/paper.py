"""`boovae bench paper`: the paper's NLL and diversity tables, its curves and its samples, measured with our code."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from boovae.bench import cells as grid
from boovae.bench.figures import PER_TASK, as_png, curves, learned, panels, samples, write_sheet
from boovae.bench.paper_tables import (
    HEAD,
    Comparison,
    Grid,
    differences,
    differences_markdown,
    findings,
    table,
    title_of,
)
from boovae.bench.published import DATASETS, FACES, FACES_METHODS, FACES_TASKS, METHODS, comparable, dataset_title
from boovae.bench.request import Request, file_name
from boovae.bench.results import Measured, finished
from boovae.bench.webpage import Chapter, Section
from boovae.files import write_file
from boovae.report.outputs import write_rows

HOW = "The band is one standard deviation over the seeds; lower is better."
HOW_DIFFERENCES = (
    "Mean of the differences after the last task and its 95 % bootstrap interval over seeds; negative: the first "
    "method is better."
)
HOW_PANELS = {
    "nll": "One panel per task, from the moment it was learned: a line that rises is forgetting.",
    "diversity": "One panel per class: above 0 it is drawn too seldom, below 0 too often.",
}
#: Name and title of pictures, and how to read them.
SAMPLES = (
    "samples",
    "Samples of each method",
    "Samples of the first seed: a row per method, a column per number of tasks seen. All samples in a row use the "
    "same random numbers.",
)
COMPONENTS = (
    "components",
    "Learned components",
    "The heaviest components of each task after the last task, decoded; first seed.",
)


class Paper:
    """The methods of the paper's table for each dataset, unless others are named."""

    title = "The paper's tables, measured"
    datasets = DATASETS
    methods: tuple[str, ...] = ()

    def plan(self, request: Request) -> list[grid.Cell]:
        """Return the cells of datasets x methods."""
        cells = []
        for dataset in request.datasets:
            faces = dataset in FACES
            methods = request.methods or (FACES_METHODS if faces else METHODS)
            tasks = min(request.tasks, FACES_TASKS) if faces else request.tasks
            wanted = grid.plan([dataset], methods, request.given, tasks, request.joint_tasks)
            known = {cell.name for cell in wanted}
            cells += wanted + [
                cell for cell in _finished_joint(request, dataset, methods, tasks) if cell.name not in known
            ]
        return cells

    def findings(self, request: Request, measured: Sequence[Measured]) -> dict[str, str]:
        """Compare our numbers with the paper's."""
        return findings(measured, request.shown)

    def write_tables(self, request: Request, measured: Sequence[Measured]) -> Section | None:
        """Write our tables beside the paper's, and the differences by seed; return the differences for the page."""
        folder = request.results
        for metric in request.shown:
            tables = [table(each, metric) for each in measured]
            write_rows(folder / f"{metric}.csv", HEAD, (record for each in tables for record in each.records()))
            beside = any(each.compared for each in tables)
            note = ("Ours / the paper's: mean" if beside else "Mean") + " (standard deviation) over seeds"
            note += "; the better one is bold.\n\n" if beside and comparable(metric) else ".\n\n"
            write_file(folder / f"{metric}.md", (note + "\n".join(each.markdown() for each in tables)).encode())
        compared = list(differences(measured, request.shown))
        write_rows(folder / "differences.csv", Comparison._fields, compared)
        write_file(folder / "differences.md", differences_markdown(compared).encode())
        if not compared:
            return None
        rows = [
            (dataset_title(one.dataset), title_of(one.metric), one.method, one.other, one.difference, one.interval)
            for one in compared
        ]
        shown = Grid(("dataset", "metric", "method", "other", "difference", "interval"), rows, strong="difference")
        return Section("grid", "differences", "", "Method against method, seed by seed", HOW_DIFFERENCES, shown)

    def chapter(self, request: Request, measured: Measured) -> Chapter:
        """Write the figures of a dataset; return its chapter of the page."""
        folder, stem, metrics = request.results, file_name(measured.dataset), request.shown
        tables = [(metric, table(measured, metric)) for metric in metrics]
        found = [Section("table", metric, f"{title_of(metric)} table", one.title, "", one) for metric, one in tables]
        # The paper has one table of distances, whatever features ours are on.
        distance = next((metric for metric in metrics if not comparable(metric)), None)
        drawn = [curves(measured, metric, paper=comparable(metric) or metric == distance) for metric in metrics]
        over_tasks = list(chain(*drawn))
        write_sheet(folder / f"{stem}_curves.svg", over_tasks, measured.labels, 2)
        found.append(Section("charts", "charts", "charts", "As tasks arrive", HOW, over_tasks))
        for metric in filter(PER_TASK.__contains__, metrics):
            by_task, name = panels(measured, metric), f"{metric}-per-task"
            write_sheet(folder / f"{stem}_{metric}_per_task.svg", by_task, measured.labels, 5)
            title, short = f"Task by task: {PER_TASK[metric][1]}", f"{title_of(metric)} task by task"
            found.append(Section("charts", name, short, title, HOW_PANELS[metric], by_task, folded=True))
        for section in (_pictures(samples(measured), *SAMPLES), _pictures(learned(measured), *COMPONENTS, folded=True)):
            if section.content:
                write_file(folder / f"{stem}_{section.name}.png", as_png(section.content))
                found.append(section)
        made_with = measured.made_with(request.command)
        return Chapter(stem, dataset_title(measured.dataset), measured.labels, found, made_with)


def _pictures(shown: Grid | None, name: str, title: str, how: str, *, folded: bool = False) -> Section:
    return Section("pictures", name, name, title, how, shown, folded)


def _finished_joint(request: Request, dataset: str, methods: Sequence[str], tasks: int) -> list[grid.Cell]:
    """Return the finished cells of `joint` on any number of tasks; none if `--joint-tasks` chooses them."""
    joints = [text for text in methods if grid.Variant.parse(text).method == "joint"]
    if request.joint_tasks is not None or not joints:
        return []
    every = grid.plan([dataset], joints, request.given, tasks, range(1, tasks + 1))
    return [cell for cell, _ in finished(request.out, every)]
