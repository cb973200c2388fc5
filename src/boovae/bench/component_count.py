"""`boovae bench components`: how many learned images per task, with and without dropping the light ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from boovae.bench import cells as grid
from boovae.bench.request import Request
from boovae.bench.results import Measured
from boovae.bench.statistics import Spread, spread
from boovae.bench.study import Line, final, write_study
from boovae.bench.tables import title_of
from boovae.errors import InputError

DATASETS = ("mnist", "fashion_mnist")
#: Methods with learned components.
METHODS = ("boo",)
COUNTS = (5, 15, 40, 80)
#: With the step back, which drops components that have become light, and without.
PRUNING = {"": "boo_prune=0.001", " without pruning": "boo_prune=0.0"}
KEPT, SECONDS = "components kept per task", "seconds of training, all seeds together"


def plan(request: Request) -> list[grid.Cell]:
    """Return a cell for every number of components, with and without pruning."""
    methods = [
        f"{_label(variant.label, count, pruned)}={variant.method}:{','.join([*own, f'components={count}', change])}"
        for (variant, own), count, (pruned, change) in product(map(_parsed, request.methods), COUNTS, PRUNING.items())
    ]
    return grid.plan(request.datasets, methods, request.given, request.tasks, request.joint_tasks)


def _parsed(text: str) -> tuple[grid.Variant, list[str]]:
    """Return a method and the settings of its own, if it is a variant; what the study varies is not among them."""
    variant = grid.Variant.parse(text)
    for name in ("components", "boo_prune"):
        if name in variant.changes:
            raise InputError(f"{{methods}} {text}: this study tries {name} itself; leave it out")
    return variant, list(filter(None, [text.partition(":")[2]]))


def write(request: Request, measured: Sequence[Measured], missing: Sequence[str]) -> dict[str, str]:
    """Write figure, numbers and page, and say which number of components is best."""

    labels = [variant.label for variant, _ in map(_parsed, request.methods)]

    def lines(each: Measured, metric: str) -> list[Line]:
        return [
            Line(f"{label}{pruned}", _points(each, metric, label, pruned)) for label, pruned in product(labels, PRUNING)
        ]

    titles = {metric: title_of(metric) for metric in request.metrics} | {"kept": KEPT, "seconds": SECONDS}
    findings = {}
    for each, metric in product(measured, request.metrics):
        for one in filter(lambda line: line.points, lines(each, metric)):
            at, _ = min(one.points, key=lambda point: point[1].mean)
            findings[f"{each.dataset}: {one.label}, best {title_of(metric)}"] = f"with {at:g} components per task"
    return write_study(
        request,
        measured,
        missing,
        title="Number of components",
        at="components per task",
        titles=titles,
        lines=lines,
        findings=findings,
    )


def _label(method: str, count: int, pruned: str) -> str:
    return f"{method} {count}{pruned}"


def _points(measured: Measured, metric: str, method: str, pruned: str) -> list[tuple[float, Spread]]:
    found = [(float(count), _number(measured, metric, _label(method, count, pruned))) for count in COUNTS]
    return [(count, number) for count, number in found if number]


def _number(measured: Measured, metric: str, label: str) -> Spread | None:
    """Return a metric of a cell; how many components it kept and its seconds are not among the evaluations."""
    if metric not in ("kept", "seconds"):
        return final(measured, label, metric)
    summary = next((summary for cell, summary in measured.cells if cell.label == label), None)
    if summary is None:
        return None
    if metric == "seconds":
        return spread([summary["seconds"]["train"]])
    per_seed = [sum(kept) / len(kept) for kept in zip(*summary["kept"].values(), strict=True)]
    return spread(per_seed) if per_seed else None
