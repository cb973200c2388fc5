"""Tables: matrices of tasks over time with shaded cells, the ledger of costs, and all numbers of a run as CSV."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from boovae.metrics.evaluation import FEW, Evaluation
from boovae.metrics.metric import numbers
from boovae.report.findings import known
from boovae.report.numbers import change, deviation, duration, mean, number, size
from boovae.report.outputs import write_rows
from boovae.report.run_record import RunRecord

#: Strongest shade in per cent; text on it stays readable.
STRONGEST = 78
#: Columns of a CSV of numbers.
COLUMNS = ("tasks_seen", "metric", "task", "seed", "value")


@dataclass(frozen=True)
class Cell:
    """A number with its shade: `tone` warm, cool or plain, `shade` in per cent."""

    text: str
    tone: str = "plain"
    shade: int = 0
    hint: str = ""


@dataclass(frozen=True)
class Table:
    """A table of one run."""

    run: str
    corner: str
    columns: list[str]
    rows: list[tuple[str, list[Cell]]]


@dataclass(frozen=True)
class Matrix:
    """One quantity by task and time, for every run, on a common colour scale."""

    title: str
    explanation: str
    tables: list[Table]


@dataclass(frozen=True)
class _Entry:
    """The content of a cell: mean and deviation over replicas, and the value that decides its colour."""

    mean: float
    deviation: float
    colour: float


Entries = dict[tuple[int, int], _Entry]  # (row, column)


def matrices(runs: Sequence[RunRecord], labels: Sequence[str]) -> list[Matrix]:
    """Return the four matrices of the page."""
    nll = "A row is a task, a column the number of tasks learned so far; stronger colour is a higher, worse NLL."
    own = "The same, scored only under the task's own part of the prior, so sharing the prior does not count."
    forgot = (
        "Change under own components since the task was learned: warm is forgotten, cool has improved; blank where it "
        f"cannot be judged, because one of the two NLLs rests on fewer than {FEW:g} effective samples."
    )
    share = "Per cent of the samples in each class: uncoloured is the fair share, warm too few, cool too many."
    found = [
        _task_matrix(runs, labels, "NLL per task", nll, ("nll", "per_task"), _sequential, number),
        _task_matrix(runs, labels, "NLL under own components", own, ("nll", "own"), _sequential, number),
        _task_matrix(runs, labels, "Forgetting, nats", forgot, ("forgetting", "own_claimed"), _diverging, change),
        _class_matrix(runs, labels, "Classes of the samples", share),
    ]
    return [matrix for matrix in found if any(table.rows for table in matrix.tables)]


Tone = Callable[[float, float, float], tuple[str, int]]


def _sequential(value: float, low: float, high: float) -> tuple[str, int]:
    """Shade from the lowest to the highest value."""
    return "cool", round(STRONGEST * (value - low) / (high - low)) if high > low else 0


def _diverging(value: float, low: float, high: float) -> tuple[str, int]:
    """Shade by the distance from zero: warm above, cool below."""
    limit = max(-low, high, 1.0)  # less than a nat is not worth a strong colour
    return ("warm" if value > 0 else "cool"), round(STRONGEST * min(abs(value) / limit, 1.0))


def _task_matrix(
    runs: Sequence[RunRecord],
    labels: Sequence[str],
    title: str,
    explanation: str,
    field: tuple[str, str],
    tone: Tone,
    write: Callable[[float, int], str],
) -> Matrix:
    """Lay out a field (seen x [R]) of a section of every evaluation as task x time."""
    grids = [_entries(run, *field) for run in runs]
    tables = []
    for run, label, entries in zip(runs, labels, grids, strict=True):
        names = [run.task_name(task) for task in range(run.evaluations[-1].task + 1)] if run.evaluations else []
        tables.append(_table(run, label, "task", names if entries else [], entries, _span(grids), tone, write))
    return Matrix(title, explanation, tables)


def _class_matrix(runs: Sequence[RunRecord], labels: Sequence[str], title: str, explanation: str) -> Matrix:
    """Lay out the class proportions as class x time, coloured by the distance from the fair share."""
    tables = []
    for run, label in zip(runs, labels, strict=True):
        names = list(dict.fromkeys(name for e in run.evaluations for name in run.classes(e)))
        entries: Entries = {}
        for column, evaluation in enumerate(run.evaluations):
            if evaluation.diversity is None:
                continue
            proportions, classes = evaluation.diversity.proportions, run.classes(evaluation)
            shares, spread = mean(proportions, axis=0), deviation(proportions, axis=0)
            for name, share, std in zip(classes, shares, spread, strict=True):
                missing = 1 - share * len(classes)  # 1: never drawn, 0: fair, -1: twice as often
                entries[names.index(name), column] = _Entry(100 * share, 100 * std, float(missing))
        tables.append(_table(run, label, "class", names, entries, (-1.0, 1.0), _diverging, number))
    return Matrix(title, explanation, tables)


def _entries(run: RunRecord, section: str, name: str) -> Entries:
    entries: Entries = {}
    for column, evaluation in enumerate(run.evaluations):
        found = getattr(evaluation, section)
        if found is None:
            continue
        matrix = getattr(found, name)
        for task, (middle, std) in enumerate(zip(mean(matrix), deviation(matrix), strict=True)):
            if np.isfinite(middle):
                entries[task, column] = _Entry(float(middle), float(std), float(middle))
    return entries


def _span(grids: Sequence[Entries]) -> tuple[float, float]:
    """Return the lowest and highest value of all runs, for a common colour scale."""
    colours = [entry.colour for entries in grids for entry in entries.values()]
    return (min(colours), max(colours)) if colours else (0.0, 0.0)


def _table(
    run: RunRecord,
    label: str,
    corner: str,
    names: Sequence[str],
    entries: Entries,
    span: tuple[float, float],
    tone: Tone,
    write: Callable[[float, int], str],
) -> Table:
    columns = [str(evaluation.task + 1) for evaluation in run.evaluations]

    def cell(row: int, column: int) -> Cell:
        entry = entries.get((row, column))
        if entry is None or not math.isfinite(entry.mean):
            return Cell("")
        hint = f"± {number(entry.deviation)}" if math.isfinite(entry.deviation) else ""
        return Cell(write(entry.mean, 0 if abs(entry.mean) >= 999.5 else 1), *tone(entry.colour, *span), hint)

    rows = [(name, [cell(row, column) for column in range(len(columns))]) for row, name in enumerate(names)]
    return Table(label, corner, columns, rows)


def ledger(run: RunRecord, label: str) -> Table:
    """Return the costs of every task: memory by kind, stored images, parameters, seconds, steps."""
    kinds = list(dict.fromkeys(kind for e in run.evaluations for kind in e.ledger.memory))
    several = kinds if len(kinds) > 1 else []
    columns = ["memory", *several, "images kept", "parameters", "training", "evaluation", "steps"]
    rows = []
    for evaluation in run.evaluations:
        timing, cost = run.timings.get(evaluation.task), evaluation.ledger
        texts = [
            size(known(cost.memory_bytes)),
            *(size(cost.memory.get(kind, 0)) for kind in several),
            number(known(cost.images_stored), 0),
            number(known(cost.parameters), 0),
            duration(timing.train_seconds if timing else math.nan),
            duration(timing.evaluate_seconds if timing else math.nan),
            number(timing.steps if timing else math.nan, 0),
        ]
        rows.append((run.task_name(evaluation.task), [Cell(text) for text in texts]))
    return Table(label, "after task", columns, rows)


# --- all numbers ----------------------------------------------------------------------------------------------------


def write_csv(run: RunRecord, out: Path) -> Path:
    """Write every seed, task and metric of a run to `out`, after lines that start with # and record how it was made."""
    seconds = ", ".join(f"{what} {run.seconds(what):.1f}" for what in ("train", "evaluate"))
    head = {**run.environment, "seeds": " ".join(map(str, run.seeds)), "seconds": seconds}
    return write_rows(out, COLUMNS, (row for each in run.evaluations for row in rows(each, run.seeds)), head)


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
