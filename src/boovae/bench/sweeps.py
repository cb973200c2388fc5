"""Studies of one number: how the metrics after the last task depend on it.

`boovae bench coreset-size` shows how many real images per task do as well as a few learned ones, and `boovae bench
components` how many learned images per task are best, with and without dropping the light ones.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

from markupsafe import Markup

from boovae.bench import cells as grid
from boovae.bench.figures import line, write_sheet
from boovae.bench.paper_tables import Grid, as_markdown, title_of
from boovae.bench.published import dataset_title
from boovae.bench.request import Request, file_name
from boovae.bench.results import Measured, Spread, spread
from boovae.bench.webpage import Chapter, Section
from boovae.errors import InputError
from boovae.files import write_file
from boovae.report.outputs import write_rows
from boovae.report.svg import chart

DATASETS = ("mnist", "fashion_mnist")
HEAD = ("dataset", "metric", "line", "at", "mean", "std", "seeds")


class Line(NamedTuple):
    """A line of a figure: label and numbers; a `flat` line is one number that does not depend on `at`."""

    label: str
    points: Sequence[tuple[float, Spread]]
    flat: bool = False

    @property
    def texts(self) -> list[tuple[str, Spread]]:
        """The numbers of the line with the value of `at`, as text for a table."""
        return [("", self.points[0][1])] if self.flat else [(f"{at:g}", number) for at, number in self.points]


@dataclass(frozen=True)
class Sweep:
    """A study that tries `values` of one number, shown to users as `at`."""

    title: str
    at: str
    values: Sequence[int]
    methods: tuple[str, ...]
    vary: Callable[[str, int], dict[str, str]]
    """Returns the variants of a method with a value, by the labels of their lines."""
    say: Callable[[Measured, str, Sequence[Line]], dict[str, str]]
    """Returns the findings from the lines of a dataset and metric."""
    varied: tuple[str, ...] = ()
    """Methods to vary instead of those of the request, which then become flat lines to compare with."""
    datasets: tuple[str, ...] = DATASETS
    other: Mapping[str, tuple[str, Callable[[Any], Spread | None]]] = field(default_factory=dict)
    """Numbers beside the evaluations: title, and a function that reads them from a cell's record."""

    def plan(self, request: Request) -> list[grid.Cell]:
        """Return a cell for every line and value, and for the methods to compare with."""
        methods = [variant for _, _, variant in self.variants(request)] + list(request.methods if self.varied else ())
        return grid.plan(request.datasets, methods, request.given, request.tasks, request.joint_tasks)

    def variants(self, request: Request) -> Iterator[tuple[str, int, str]]:
        """Yield label, value and variant for every point of the lines."""
        for text, value in product(self.varied or request.methods, self.values):
            yield from ((label, value, variant) for label, variant in self.vary(text, value).items())

    def lines(self, request: Request, measured: Measured, metric: str) -> list[Line]:
        """Return the lines of a metric: those over the values, then the flat ones."""
        swept, points = set[str](), dict[str, list[tuple[float, Spread]]]()
        for label, value, variant in self.variants(request):
            cell = variant.partition("=")[0]
            number = self._number(measured, cell, metric)
            points.setdefault(label, []).extend([(float(value), number)] if number else [])
            swept.add(cell)
        flat = {label: self._number(measured, label, metric) for label in measured.labels if label not in swept}
        ends = float(self.values[0]), float(self.values[-1])
        return [Line(label, found) for label, found in points.items()] + [
            Line(label, [(end, number) for end in ends], flat=True) for label, number in flat.items() if number
        ]

    def _number(self, measured: Measured, label: str, metric: str) -> Spread | None:
        """Return a number of a cell after the last task."""
        if metric not in self.other:
            return measured.spread(label, measured.tasks, metric)
        summary = next((summary for cell, summary in measured.cells if cell.label == label), None)
        return self.other[metric][1](summary) if summary else None

    def titles(self, request: Request) -> dict[str, str]:
        """Return the metrics to draw, with their titles."""
        other = {name: title for name, (title, _) in self.other.items()}
        return {name: title_of(name) for name in request.shown} | other

    def findings(self, request: Request, measured: Sequence[Measured]) -> dict[str, str]:
        """Return the findings from all lines."""
        found: dict[str, str] = {}
        for each, metric in product(measured, request.shown):
            found |= self.say(each, metric, self.lines(request, each, metric))
        return found

    def write_tables(self, request: Request, measured: Sequence[Measured]) -> None:
        """Write the numbers of all lines."""
        found = [
            (each.dataset, metric, one.label, at, *number.record)
            for each, metric in product(measured, self.titles(request))
            for one in self.lines(request, each, metric)
            for at, number in one.texts
        ]
        write_rows(request.results / f"{request.study}.csv", HEAD, found)
        text = as_markdown(f"dataset | metric | | {self.at} | mean | std | seeds", found)
        write_file(request.results / f"{request.study}.md", f"# {self.title}\n\n{text}".encode())

    def chapter(self, request: Request, measured: Measured) -> Chapter:
        """Write the figure of a dataset, a chart for every metric; return its chapter of the page."""
        stem, name, titles = file_name(measured.dataset), dataset_title(measured.dataset), self.titles(request)
        lines = {title: self.lines(request, measured, metric) for metric, title in titles.items()}
        charts = list[Markup]()
        for title, found in lines.items():
            series = [line(one.points, colour, one.flat) for colour, one in enumerate(found)]
            charts += filter(None, [chart(series, f"{title} on {name}", self.at)])
        legend = [one.label for one in found]
        write_sheet(request.results / f"{stem}.svg", charts, legend, len(charts))
        seen = f"After {measured.tasks} tasks"
        how = f"{seen}; the band is one standard deviation over the seeds. Dashed: independent of {self.at}."
        how_numbers = f"{seen}: mean (standard deviation) over seeds."
        sections = [
            Section("grid", "numbers", "numbers", "Numbers", _numbers(self.at, lines), how=how_numbers),
            Section("charts", "charts", "charts", "Charts", charts, how=how),
        ]
        return Chapter(stem, name, legend, sections, measured.made_with(request.command))


def _numbers(at: str, lines: Mapping[str, Sequence[Line]]) -> Grid | None:
    """Return the numbers of all lines, a column per metric; None without any."""
    texts: dict[tuple[str, str], dict[str, str]] = {}
    for title, found in lines.items():
        for one in found:
            for place, number in one.texts:
                texts.setdefault((one.label, place), {})[title] = number.text(1 if abs(number.mean) >= 10 else 3)
    rows = [(*key, *(row.get(title, "") for title in lines)) for key, row in texts.items()]
    return Grid(("", at, *lines), rows) if rows else None


# --- real images ----------------------------------------------------------------------------------------------------

#: Images kept per task.
SIZES = (15, 50, 100, 200, 500)


def _needed(measured: Measured, metric: str, lines: Sequence[Line]) -> dict[str, str]:
    """Say from which size on a coreset is better than each method it is compared with."""
    coreset, *others = lines
    found = {}
    for other in others:
        tried = {int(size): ours.mean < other.points[0][1].mean for size, ours in coreset.points}
        if tried:
            of = "" if len(tried) == len(SIZES) else f" (of {', '.join(map(str, tried))}, the finished ones)"
            found[f"{measured.dataset}: coreset below {other.label} in {title_of(metric)}"] = _enough(tried) + of
    return found


def _enough(better: dict[int, bool]) -> str:
    """Say at which sizes a coreset is better; with few seeds, more images are not always better.

    >>> _enough({15: False, 50: True, 100: True}), _enough({15: True, 50: False})
    ('from 50 images per task', 'only with 15 images per task')
    """
    sizes = [size for size, good in better.items() if good]
    if not sizes:
        return "at no size tried"
    if all(good for size, good in better.items() if size >= sizes[0]):
        return f"from {sizes[0]} images per task"
    return f"only with {', '.join(map(str, sizes))} images per task"


CORESET_SIZE = Sweep(
    title="Size of the coreset",
    at="images kept per task",
    values=SIZES,
    methods=("boo", "boo+distill"),
    varied=("coreset",),
    vary=lambda method, size: {method: f"{method} of {size}={method}:coreset_images={size}"},
    say=_needed,
)


# --- learned images -------------------------------------------------------------------------------------------------

#: With and without pruning, the step that drops components that have become light.
PRUNING = {"": "boo_prune=0.001", " without pruning": "boo_prune=0.0"}


def _components(text: str, count: int) -> dict[str, str]:
    """Return the variants with pruning and without."""
    variant, own = grid.Variant.parse(text), text.partition(":")[2]
    for name in variant.changes.keys() & {"components", "boo_prune"}:
        raise InputError(f"{{methods}} {text}: this study varies {name} itself; leave it out")
    changes = ",".join(filter(None, [own, f"components={count}"]))
    return {
        f"{variant.label}{pruned}": f"{variant.label} {count}{pruned}={variant.method}:{changes},{setting}"
        for pruned, setting in PRUNING.items()
    }


def _best(measured: Measured, metric: str, lines: Sequence[Line]) -> dict[str, str]:
    """Say which number of components is best."""
    best = {one.label: min(one.points, key=lambda point: point[1].mean)[0] for one in lines if one.points}
    return {
        f"{measured.dataset}: {label}, best {title_of(metric)}": f"with {at:g} components per task"
        for label, at in best.items()
    }


def _kept(summary: Any) -> Spread | None:
    per_seed = [sum(kept) / len(kept) for kept in zip(*summary["kept"].values(), strict=True)]
    return spread(per_seed) if per_seed else None


COMPONENTS = Sweep(
    title="Number of components",
    at="components per task",
    values=(5, 15, 40, 80),
    methods=("boo",),
    vary=_components,
    say=_best,
    other={
        "kept": ("components kept per task", _kept),
        "seconds": ("seconds of training, all seeds together", lambda summary: spread([summary["seconds"]["train"]])),
    },
)
