"""Tables on the terminal."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from boovae.metrics.evaluation import Evaluation
    from boovae.metrics.metric import Number
    from boovae.runs.inspection import Component

Rows = Sequence[Mapping[str, Any]]


def print_table(evaluations: Sequence[Evaluation]) -> None:
    """Print one row per number of tasks seen, with the columns that each metric defines."""
    from boovae.metrics.metric import numbers  # imported late: `--help` must not import numpy

    rows = [{number.column: _shown(number) for number in numbers(each) if number.column} for each in evaluations]
    columns = list(dict.fromkeys(name for row in reversed(rows) for name in row))
    shown = [(str(e.seen), *(row.get(name, "-") for name in columns)) for e, row in zip(evaluations, rows, strict=True)]
    print_rows(("tasks seen", *columns), shown)
    classifier = evaluations[-1].classifier
    if classifier is not None and classifier.accuracy is not None:
        accuracy = f"{classifier.accuracy:.1%}"
        print(f"Mean ± deviation over replicas. The classifier used for diversity has an accuracy of {accuracy}.")


def _shown(number: Number) -> str:
    if number.values.ndim == 0:
        return f"{number.values.item():,}"
    text = spread(number.values.tolist(), number.digits)
    return f"{text} {number.remark}" if number.remark else text


def print_components(found: Sequence[Component], names: Mapping[int, str]) -> None:
    """Print one row per component."""
    rows = [
        (
            names.get(component.task, str(component.task)),
            str(component.place),
            f"{component.weight:.1%}",
            f"{component.mass:.1%}",
            *(("the only one", "-") if component.only else (_nats(component.cost), f"{component.share:.1%}")),
        )
        for component in found
    ]
    print_rows(("task", "component", "weight in task", "in the prior", "nats to drop it", "share of them"), rows)


def _nats(cost: float) -> str:
    return "< 0.0001" if cost < 1e-4 else f"{cost:.4f}"


def spread(values: Sequence[float | None] | None, digits: int = 2) -> str:
    """Format mean ± deviation over replicas; "-" if there is no number."""
    good = [value for value in values or () if value is not None and math.isfinite(value)]
    if not good:
        return "-"
    deviation = f" ± {statistics.stdev(good):.{digits}f}" if len(good) > 1 else ""
    return f"{statistics.fmean(good):.{digits}f}{deviation}"


def grouped(rows: Rows, keys: Sequence[str], values: Sequence[str], digits: int) -> list[tuple[str, ...]]:
    """Merge rows that agree in `keys`, those of the seeds, into one with mean and deviation of `values`."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(str(row[key]) for key in keys), []).append(row)
    return [
        (*names, *(spread([row[value] for row in group], digits) for value in values))
        for names, group in groups.items()
    ]


def print_rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a plain table, no wider than the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*head, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    # Task names come from the user: "[old]" and ":cat:" are not markup.
    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, emoji=False)
    console.print(table, highlight=False)
