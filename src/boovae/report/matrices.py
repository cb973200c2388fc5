"""Tables: matrices of tasks over time with shaded cells, the ledger of costs, and all numbers of a run as CSV."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from boovae.metrics.evaluation import FEW, Evaluation
from boovae.metrics.metric import numbers
from boovae.metrics.schema import Floats
from boovae.report.numbers import change, deviation, duration, mean, number, size
from boovae.report.outputs import write_rows
from boovae.report.run_record import RunRecord, Timing

#: Strongest shade in per cent; text on it stays readable.
STRONGEST = 78
#: Columns of a CSV of numbers.
COLUMNS = ("tasks_seen", "metric", "task", "seed", "value")


class Cell(NamedTuple):
    """A number with its shade: `tone` warm, cool or plain, `shade` in per cent."""

    text: str
    tone: str = "plain"
    shade: int = 0
    hint: str = ""


class Table(NamedTuple):
    """A table with named rows; the first column is that of the names. Cells are texts, those of a matrix `Cell`s."""

    name: str
    columns: list[str]
    rows: Sequence[tuple[str, Sequence[Any]]]


class Matrix(NamedTuple):
    """One quantity by task and time, for every run, on a common colour scale."""

    title: str
    explanation: str
    tables: list[Table]


class _Grid(NamedTuple):
    """A quantity of a run: for each row and time the mean and deviation over replicas, and what decides the colour."""

    corner: str
    names: list[str]
    values: Floats  # 3 x rows x evaluations; NaN where there is none


Tone = Callable[[float, float, float], tuple[str, int]]
Write = Callable[[float, int], str]


def matrices(runs: Sequence[RunRecord], labels: Sequence[str]) -> list[Matrix]:
    """Return the four matrices of the page."""
    nll = "A row is a task, a column the number of tasks learned so far; stronger colour is a higher, worse NLL."
    own = "The same, scored only under the task's own part of the prior, so sharing the prior does not count."
    forgot = (
        "Change under own components since the task was learned: warm is forgotten, cool has improved; blank where it "
        f"cannot be judged, because one of the two NLLs rests on fewer than {FEW:g} effective samples."
    )
    share = "Per cent of the samples in each class: uncoloured is the fair share, warm too few, cool too many."

    def matrix(title: str, explanation: str, grids: list[_Grid], tone: Tone, write: Write = number) -> Matrix:
        span = _span(grids)
        of_runs = zip(runs, labels, grids, strict=True)
        return Matrix(title, explanation, [_table(*of_run, span, tone, write) for of_run in of_runs])

    found = [
        matrix("NLL per task", nll, [_by_task(run, "nll", "per_task") for run in runs], _sequential),
        matrix("NLL under own components", own, [_by_task(run, "nll", "own") for run in runs], _sequential),
        matrix(
            "Forgetting, nats", forgot, [_by_task(run, "forgetting", "own_claimed") for run in runs], _diverging, change
        ),
        matrix("Classes of the samples", share, [_by_class(run) for run in runs], _around_fair),
    ]
    return [matrix for matrix in found if any(table.rows for table in matrix.tables)]


def _sequential(value: float, low: float, high: float) -> tuple[str, int]:
    """Shade from the lowest to the highest value."""
    return "cool", round(STRONGEST * (value - low) / (high - low)) if high > low else 0


def _diverging(value: float, low: float, high: float) -> tuple[str, int]:
    """Shade by the distance from zero: warm above, cool below."""
    limit = max(-low, high, 1.0)  # less than a nat is not worth a strong colour
    return ("warm" if value > 0 else "cool"), round(STRONGEST * min(abs(value) / limit, 1.0))


def _around_fair(value: float, low: float, high: float) -> tuple[str, int]:
    """Shade by the distance from the fair share, whatever the other values are."""
    return _diverging(value, -1.0, 1.0)


def _by_task(run: RunRecord, section: str, name: str) -> _Grid:
    """Lay out a field (seen x [R]) of a section of every evaluation as task x time."""
    names = [run.task_name(task) for task in range(run.evaluations[-1].learned)] if run.evaluations else []
    values = np.full((3, len(names), len(run.evaluations)), np.nan)
    for column, evaluation in enumerate(run.evaluations):
        found = getattr(evaluation, section)
        if found is not None:
            scores = getattr(found, name)
            values[:, : len(scores), column] = mean(scores), deviation(scores), mean(scores)
    return _Grid("task", names if np.isfinite(values[0]).any() else [], values)


def _by_class(run: RunRecord) -> _Grid:
    """Lay out the class proportions as class x time, coloured by the distance from the fair share."""
    names = list(dict.fromkeys(name for e in run.evaluations for name in run.classes(e)))
    values = np.full((3, len(names), len(run.evaluations)), np.nan)
    for column, evaluation in enumerate(run.evaluations):
        if evaluation.diversity is not None:
            rows = [names.index(name) for name in run.classes(evaluation)]
            shares, spread = (of(evaluation.diversity.proportions, axis=0) for of in (mean, deviation))
            missing = 1 - shares * len(rows)  # 1: never drawn, 0: fair, -1: twice as often
            values[:, rows, column] = 100 * shares, 100 * spread, missing
    return _Grid("class", names, values)


def _span(grids: Sequence[_Grid]) -> tuple[float, float]:
    """Return the lowest and highest value of all runs, for a common colour scale."""
    colours = np.concatenate([grid.values[2].ravel() for grid in grids])
    colours = colours[np.isfinite(colours)]
    return (colours.min(), colours.max()) if len(colours) else (0.0, 0.0)


def _table(run: RunRecord, label: str, grid: _Grid, span: tuple[float, float], tone: Tone, write: Write) -> Table:
    def cell(middle: float, spread: float, colour: float) -> Cell:
        if not math.isfinite(middle):
            return Cell("")
        hint = f"± {number(spread)}" if math.isfinite(spread) else ""
        return Cell(write(middle, 0 if abs(middle) >= 999.5 else 1), *tone(colour, *span), hint)

    rows = [(name, [cell(*here) for here in grid.values[:, at].T.tolist()]) for at, name in enumerate(grid.names)]
    return Table(label, [grid.corner, *(str(evaluation.learned) for evaluation in run.evaluations)], rows)


def ledger(run: RunRecord, label: str) -> Table:
    """Return the costs of every task: memory by kind, stored images, parameters, seconds, steps."""
    kinds = list(dict.fromkeys(kind for e in run.evaluations for kind in e.ledger.memory))
    several = kinds if len(kinds) > 1 else []
    columns = ["after task", "memory", *several, "images kept", "parameters", "training", "evaluation", "steps"]
    rows = []
    for evaluation in run.evaluations:
        cost, timing = evaluation.ledger, run.timings.get(evaluation.task, Timing(evaluation.task))
        memory = [cost.memory_bytes, *(cost.memory.get(kind, 0) for kind in several)]
        seconds = timing.train_seconds, timing.evaluate_seconds
        counts = [number(count, 0) for count in (cost.images_stored, cost.parameters, timing.steps)]
        cells = [*map(size, memory), *counts[:2], *map(duration, seconds), counts[2]]
        rows.append((run.task_name(evaluation.task), cells))
    return Table(label, columns, rows)


# --- all numbers ----------------------------------------------------------------------------------------------------


def write_csv(run: RunRecord, out: Path) -> Path:
    """Write every seed, task and metric of a run to `out`, after lines that start with # and record how it was made."""
    seconds = ", ".join(f"{what} {run.seconds(what):.1f}" for what in ("train", "evaluate"))
    head = {**run.environment, "seeds": " ".join(map(str, run.head.seeds)), "seconds": seconds}
    return write_rows(out, COLUMNS, (row for each in run.evaluations for row in rows(each, run.head.seeds)), head)


def rows(evaluation: Evaluation, seeds: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    """Yield the numbers of an evaluation: those about all tasks, those of each task, those that all seeds share."""
    found = sorted((each for each in numbers(evaluation) if each.name), key=lambda each: each.values.ndim or 3)
    for each in found:
        if not each.values.ndim:
            yield evaluation.learned, each.name, "", "", each.values.item()
            continue
        table = {"": each.values.tolist()} if each.values.ndim == 1 else dict(enumerate(each.values.tolist()))
        for task, values in table.items():
            for seed, value in zip(seeds, values, strict=True):
                yield evaluation.learned, each.name, task, seed, value if math.isfinite(value) else None
