"""`boovae bench paper`: the paper's NLL and diversity tables, its curves and its samples, measured with our code."""

from collections.abc import Sequence

from boovae.bench import cells as grid
from boovae.bench import paper_tables as tables
from boovae.bench.figures import PER_TASK, as_png, curves, learned, panels, samples, write_sheet
from boovae.bench.paper_tables import Grid, title_of
from boovae.bench.published import DATASETS, FACES, FACES_METHODS, FACES_TASKS, METHODS, dataset_title, is_distance
from boovae.bench.request import Request, file_name
from boovae.bench.results import Measured, finished
from boovae.bench.webpage import Chapter, Section
from boovae.files import write_file
from boovae.report.outputs import write_rows

#: Titles of pictures.
SAMPLES, COMPONENTS = "Samples of each method", "Learned components"


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
            cells += wanted
            cells += [cell for cell in _finished_joint(request, dataset, methods, tasks) if cell.name not in known]
        return cells

    def findings(self, request: Request, measured: Sequence[Measured]) -> dict[str, str]:
        """Compare our numbers with the paper's."""
        return tables.findings(measured, request.shown)

    def write_tables(self, request: Request, measured: Sequence[Measured]) -> Section | None:
        """Write our tables beside the paper's, and the differences by seed; return the differences for the page."""
        folder = request.results
        for metric in request.shown:
            found = [tables.table(each, metric) for each in measured]
            records = (record for each in found for record in each.records())
            write_rows(folder / f"{metric}.csv", tables.HEAD, records)
            beside = any(each.compared for each in found)
            note = ("Ours / the paper's: mean" if beside else "Mean") + " (standard deviation) over seeds"
            note += "; the better one is bold.\n\n" if beside and not is_distance(metric) else ".\n\n"
            write_file(folder / f"{metric}.md", (note + "\n".join(each.markdown() for each in found)).encode())
        compared = list(tables.differences(measured, request.shown))
        write_rows(folder / "differences.csv", tables.Comparison._fields, compared)
        write_file(folder / "differences.md", tables.differences_markdown(compared).encode())
        if not compared:
            return None
        rows = [
            (dataset_title(one.dataset), title_of(one.metric), one.method, one.other, one.difference, one.interval)
            for one in compared
        ]
        shown = Grid(("dataset", "metric", "method", "other", "difference", "interval"), rows, strong="difference")
        return Section("grid", "differences", "", "Method against method, seed by seed", shown)

    def chapter(self, request: Request, measured: Measured) -> Chapter:
        """Write the figures of a dataset; return its chapter of the page."""
        folder, stem, metrics = request.results, file_name(measured.dataset), request.shown
        found = list[Section]()
        for one in (tables.table(measured, metric) for metric in metrics):
            found.append(Section("table", one.metric, f"{title_of(one.metric)} table", one.title, one))
        # The paper has one table of distances, whatever features ours are on.
        others = list(filter(is_distance, metrics))[1:]
        over_tasks = [each for metric in metrics for each in curves(measured, metric, paper=metric not in others)]
        write_sheet(folder / f"{stem}_curves.svg", over_tasks, measured.labels, 2)
        found.append(Section("charts", "charts", "charts", "As tasks arrive", over_tasks))
        for metric in (each for each in metrics if each in PER_TASK):
            by_task, name = panels(measured, metric), f"{metric}-per-task"
            write_sheet(folder / f"{stem}_{metric}_per_task.svg", by_task, measured.labels, 5)
            title, short = f"Task by task: {PER_TASK[metric][1]}", f"{title_of(metric)} task by task"
            found.append(Section("charts", name, short, title, by_task, folded=True))
        pictures = ("samples", SAMPLES, samples(measured)), ("components", COMPONENTS, learned(measured))
        for name, title, sheet in pictures:
            if sheet:
                write_file(folder / f"{stem}_{name}.png", as_png(sheet))
                found.append(Section("pictures", name, name, title, sheet, folded=name == "components"))
        made_with = measured.made_with(request.command)
        return Chapter(stem, dataset_title(measured.dataset), measured.labels, found, made_with)


def _finished_joint(request: Request, dataset: str, methods: Sequence[str], tasks: int) -> list[grid.Cell]:
    """Return the finished cells of `joint` on any number of tasks; none if `--joint-tasks` chooses them."""
    joints = [text for text in methods if grid.Variant.parse(text).method == "joint"]
    if request.joint_tasks is not None or not joints:
        return []
    every = grid.plan([dataset], joints, request.given, tasks, range(1, tasks + 1))
    return [cell for cell, _ in finished(request.out, every)]
