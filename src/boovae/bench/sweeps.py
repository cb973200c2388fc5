"""Studies of one number: how the metrics after the last task depend on it.

`boovae bench coreset-size` shows how many real images per task do as well as a few learned ones, and `boovae bench
components` how many learned images per task are best, with and without dropping the light ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, product
from typing import Any, NamedTuple

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
#: Returns the variant of a method with this number.
Varied = Callable[[int], str]


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
    vary: Callable[[str], dict[str, Varied]]
    """Returns the lines of a method: their labels, and the variant for each value."""
    say: Callable[[Measured, str, Sequence[Line]], dict[str, str]]
    """Returns the findings from the lines of a dataset and metric."""
    varied: tuple[str, ...] = ()
    """Methods to vary instead of those of the request, which then become flat lines to compare with."""
    datasets: tuple[str, ...] = DATASETS
    other: Mapping[str, tuple[str, Callable[[Any], Spread | None]]] = field(default_factory=dict)
    """Numbers beside the evaluations: title, and a function that reads them from a cell's record."""

    def plan(self, request: Request) -> list[grid.Cell]:
        """Return a cell for every line and value, and for the methods to compare with."""
        lines = [self.vary(text) for text in self.varied or request.methods]
        methods = [variant(value) for each in lines for value in self.values for variant in each.values()]
        methods += request.methods if self.varied else ()
        return grid.plan(request.datasets, methods, request.given, request.tasks, request.joint_tasks)

    def lines(self, request: Request, measured: Measured, metric: str) -> list[Line]:
        """Return the lines of a metric: those over the values, then the flat ones."""
        found, swept = list[Line](), set[str]()
        for label, variant in chain(*(self.vary(text).items() for text in self.varied or request.methods)):
            cells = {value: variant(value).partition("=")[0] for value in self.values}
            points = [(float(value), self._number(measured, cell, metric)) for value, cell in cells.items()]
            found.append(Line(label, [(value, number) for value, number in points if number]))
            swept.update(cells.values())
        for label in measured.labels:
            number = None if label in swept else self._number(measured, label, metric)
            if number:
                ends = float(self.values[0]), float(self.values[-1])
                found.append(Line(label, [(end, number) for end in ends], flat=True))
        return found

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
        charts = []
        for title, found in lines.items():
            series = [line(one.points, colour, dashed=one.flat) for colour, one in enumerate(found)]
            charts.append(chart(series, f"{title} on {name}", self.at))
        charts = [drawn for drawn in charts if drawn]
        legend = [one.label for one in found]
        write_sheet(request.results / f"{stem}.svg", charts, legend, len(charts))
        seen = f"After {measured.tasks} tasks"
        how = f"{seen}; the band is one standard deviation over the seeds. Dashed: independent of {self.at}."
        how_numbers = f"{seen}: mean (standard deviation) over seeds."
        sections = [
            Section("grid", "numbers", "numbers", "Numbers", how_numbers, _numbers(self.at, lines)),
            Section("charts", "charts", "charts", "Charts", how, charts),
        ]
        return Chapter(stem, name, legend, sections, measured.made_with(request.command))


def _numbers(at: str, lines: Mapping[str, Sequence[Line]]) -> Grid | None:
    """Return the numbers of all lines, a column per metric; None without any."""
    texts: dict[tuple[str, str], dict[str, str]] = {}
    for title, found in lines.items():
        for one in found:
            for place, number in one.texts:
                texts.setdefault((one.label, place), {})[title] = _text(number)
    rows = [(*key, *(row.get(title, "") for title in lines)) for key, row in texts.items()]
    return Grid(("", at, *lines), rows) if rows else None


def _text(spread: Spread) -> str:
    """Format mean and deviation with one decimal, or three if the mean is small.

    >>> _text(Spread(247.0, 2.36776, 5)), _text(Spread(0.00235377, 0.000687216, 5)), _text(Spread(12345.6, math.nan, 1))
    ('247.0 (2.4)', '0.002 (0.001)', '12345.6')
    """
    decimals = 1 if abs(spread.mean) >= 10 else 3
    deviation = f" ({spread.std:.{decimals}f})" if math.isfinite(spread.std) else ""
    return f"{spread.mean:.{decimals}f}{deviation}"


# --- real images ----------------------------------------------------------------------------------------------------

#: Images kept per task.
SIZES = (15, 50, 100, 200, 500)


def _coresets(method: str) -> dict[str, Varied]:
    return {method: lambda size: f"{method} of {size}={method}:coreset_images={size}"}


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
    vary=_coresets,
    say=_needed,
)


# --- learned images -------------------------------------------------------------------------------------------------

#: With and without pruning, the step that drops components that have become light.
PRUNING = {"": "boo_prune=0.001", " without pruning": "boo_prune=0.0"}


def _components(text: str) -> dict[str, Varied]:
    """Return two lines, with pruning and without."""
    variant, own = grid.Variant.parse(text), text.partition(":")[2]
    for name in ("components", "boo_prune"):
        if name in variant.changes:
            raise InputError(f"{{methods}} {text}: this study varies {name} itself; leave it out")
    return {f"{variant.label}{pruned}": partial(_with_components, variant, own, pruned) for pruned in PRUNING}


def _with_components(variant: grid.Variant, own: str, pruned: str, count: int) -> str:
    changes = ",".join(filter(None, [own, f"components={count}", PRUNING[pruned]]))
    return f"{variant.label} {count}{pruned}={variant.method}:{changes}"


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
