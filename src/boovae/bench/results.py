"""The results of finished cells: their records, every number by seed, and its spread over the seeds.

A record may be copied between machines and read years later: nothing in it is trusted.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from boovae.bench.cells import Cell
from boovae.bench.request import FORMAT
from boovae.errors import InputError
from boovae.methods import from_mapping
from boovae.metrics.diversity import class_terms
from boovae.metrics.evaluation import Evaluation, read_evaluation
from boovae.metrics.schema import decode
from boovae.report.matrices import COLUMNS, rows
from boovae.report.numbers import deviation, mean
from boovae.report.outputs import write_rows

Summary = dict[str, Any]
Row = tuple[int, str, Any, Any, Any]  # tasks seen, metric, task, seed, value

#: What to do with a record that cannot be used.
AGAIN = "remove it, and its cell runs again"
DAMAGED = f"the record is damaged: {AGAIN}"
#: A PNG in base64, recognised by its first bytes.
Picture = Annotated[str, msgspec.Meta(pattern="^iVBORw0KGgo")]
#: Number of bootstrap resamples, and the quantiles at the ends of the interval.
RESAMPLES, EDGES = 10_000, ((1 - 0.95) / 2, (1 + 0.95) / 2)


# --- statistics over seeds ------------------------------------------------------------------------------------------


class Spread(NamedTuple):
    """Mean and sample standard deviation (n - 1) over `seeds` seeds; the deviation of one seed is NaN."""

    mean: float
    std: float
    seeds: int

    @property
    def record(self) -> tuple[str, str, int]:
        """Mean, deviation and seeds as written to a table; one seed has no deviation."""
        return f"{self.mean:.6g}", f"{self.std:.6g}" if math.isfinite(self.std) else "", self.seeds

    def text(self, decimals: int) -> str:
        """Write mean (deviation) with these decimals.

        >>> Spread(247.0, 2.36776, 5).text(1), Spread(-0.00235377, math.nan, 1).text(1)
        ('247.0 (2.4)', '0.0')
        """
        deviation = f" ({self.std:.{decimals}f})" if math.isfinite(self.std) else ""
        return f"{round(self.mean, decimals) + 0.0:.{decimals}f}{deviation}"  # no minus zero


class Difference(NamedTuple):
    """Mean of the differences by seed, and its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float
    seeds: int


def spread(values: Sequence[float]) -> Spread:
    """Return mean and deviation of the finite values.

    >>> spread([1.0, 2.0, 3.0])
    Spread(mean=2.0, std=1.0, seeds=3)
    """
    array = np.asarray(values, dtype=np.float64)
    return Spread(float(mean(array)), float(deviation(array)), int(np.isfinite(array).sum()))


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """Return ours minus theirs over the seeds that both have; None for fewer than two, which have no spread.

    Runs of the same seed share data order and noise, so differences by seed vary less than the numbers themselves. The
    interval is the percentile bootstrap of the mean over seeds, always with the same resamples. With few seeds it is
    too narrow: the true uncertainty is larger.
    """
    differences = np.array([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs)])
    differences = differences[np.isfinite(differences)]
    if len(differences) < 2:
        return None
    drawn = np.random.default_rng(0).integers(len(differences), size=(RESAMPLES, len(differences)))
    low, high = np.quantile(differences[drawn].mean(axis=1), EDGES)
    return Difference(float(differences.mean()), float(low), float(high), len(differences))


# --- the record of a cell -------------------------------------------------------------------------------------------


def summary_path(folder: Path, name: str) -> Path:
    """Return the path of a cell's record, which exists once the cell is finished."""
    return folder / f"{name}.json"


def read_summary(folder: Path, cell: Cell) -> Summary | None:
    """Return the record of a cell; None if it is not finished."""
    path = summary_path(folder, cell.name)
    if not path.exists():
        return None
    try:
        summary = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}; {AGAIN}") from error
    if summary.get("format") != FORMAT:
        raise InputError(f"{path} has format {summary.get('format')}, this version reads {FORMAT}: {AGAIN}")
    try:
        settings = from_mapping(dict(summary.get("settings", ())))
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: {error}; it is damaged or of another version: {AGAIN}") from error
    if settings != cell.settings:
        raise InputError(f"{path} was made with other settings than its name says: {AGAIN}")
    return summary | {"evaluations": check_record(path, summary, cell)}


def finished(folder: Path, cells: Iterable[Cell]) -> list[tuple[Cell, Summary]]:
    """Return the finished cells with their records."""
    return [(cell, summary) for cell in cells if (summary := read_summary(folder, cell)) is not None]


class Environment(msgspec.Struct, frozen=True):
    """Where a cell was measured."""

    boovae: str
    python: str
    torch: str
    device: str
    commit: str


class Seconds(msgspec.Struct, frozen=True):
    """Wall times of a cell."""

    train: float
    evaluate: float


class CellRecord(msgspec.Struct, frozen=True):
    """The part of a record that tables and pages read."""

    seeds: list[int]
    tasks: list[str]
    evaluations: list[dict[str, Any]]
    environment: Environment
    seconds: Seconds
    samples: list[Picture] = []
    components: dict[str, list[Picture]] = {}


def check_record(path: Path, summary: dict[str, Any], cell: Cell) -> list[Evaluation]:
    """Return the evaluations of a record; refuse one without all seeds after each of the cell's tasks."""
    record = decode(summary, CellRecord, str(path), lambda found: {}, DAMAGED)
    seeds, tasks = list(cell.settings.training.seeds), cell.settings.data.tasks or 1
    if record.seeds != seeds:
        raise InputError(f"{path}: 'seeds' is {record.seeds!r:.40}, not {seeds}; {DAMAGED}")
    if len(record.tasks) != tasks:
        raise InputError(f"{path}: 'tasks' has {len(record.tasks)} names of {tasks}; {DAMAGED}")
    if [each.get("seen") for each in record.evaluations] != list(range(1, tasks + 1)):
        raise InputError(f"{path}: 'evaluations' must be one after each of {tasks} tasks; {DAMAGED}")
    evaluations = [
        read_evaluation(each, f"{path}, after {each['seen']} tasks", len(seeds), DAMAGED) for each in record.evaluations
    ]
    if any(evaluation.nll is None for evaluation in evaluations):
        raise InputError(f"{path}: 'nll' is missing; {DAMAGED}")
    return evaluations


# --- the numbers of a dataset ---------------------------------------------------------------------------------------


@dataclass
class Measured:
    """The numbers of one dataset, by (label, tasks seen, metric, task), then by seed; task is None for all tasks."""

    dataset: str
    values: dict[tuple[str, int, str, int | None], dict[int, float]] = field(default_factory=dict)
    cells: list[tuple[Cell, Summary]] = field(default_factory=list)

    def add(self, cell: Cell, summary: Summary) -> None:
        """Add the numbers of a finished cell."""
        self.cells.append((cell, summary))
        for seen, metric, task, seed, value in cell_rows(cell, summary):
            if seed != "":
                key = (cell.label, seen, metric, None if task == "" else int(task))
                self.values.setdefault(key, {})[seed] = math.nan if value is None else float(value)

    def seeds(self, label: str, seen: int, metric: str, task: int | None = None) -> Mapping[int, float]:
        """Return a number by seed; empty if it was not measured."""
        return self.values.get((label, seen, metric, task), {})

    def spread(self, label: str, seen: int, metric: str, task: int | None = None) -> Spread | None:
        """Return the mean and deviation of a number over seeds; None if it was not measured."""
        found = list(self.seeds(label, seen, metric, task).values())
        return spread(found) if any(map(math.isfinite, found)) else None

    @property
    def labels(self) -> list[str]:
        """The methods that have numbers, in the order of the bench."""
        return list(dict.fromkeys(cell.label for cell, _ in self.cells))

    def by_class(self, label: str) -> bool:
        """Whether a method's tasks are single classes, as the paper's are."""
        own = [cell for cell, _ in self.cells if cell.label == label]
        return all(cell.settings.data.classes_per_task == cell.together for cell in own)

    @property
    def tasks(self) -> int:
        """The largest number of tasks that any cell has seen."""
        return max((cell.tasks for cell, _ in self.cells), default=0)

    @property
    def task_names(self) -> list[str]:
        """The names of the tasks, from the cell that learned the most of them one by one."""
        return max((summary["tasks"] for _, summary in self.cells), key=len, default=[])

    def write_csv(self, path: Path, command: str) -> None:
        """Write every number; the lines that start with # say how they were made."""
        numbers = ((cell.label, *row) for cell, summary in self.cells for row in cell_rows(cell, summary))
        write_rows(path, ("method", *COLUMNS), numbers, self.made_with(command))

    def made_with(self, command: str) -> dict[str, str]:
        """Return versions, devices, commits, seeds and seconds of all cells."""
        summaries = [summary for _, summary in self.cells]
        found = {key: [each["environment"][key] for each in summaries] for key in Environment.__struct_fields__}
        found |= {"command": [command], "seeds": [" ".join(map(str, each["seeds"])) for each in summaries]}
        once = {cell.name: summary["seconds"] for cell, summary in self.cells}.values()  # a cell may have two labels
        found["seconds"] = [", ".join(f"{key} {sum(one[key] for one in once):.1f}" for key in ("train", "evaluate"))]
        return {key: "; ".join(dict.fromkeys(texts)) for key, texts in found.items()}


def by_dataset(cells: Iterable[tuple[Cell, Summary]]) -> list[Measured]:
    """Return the numbers of finished cells, grouped by dataset."""
    found: dict[str, Measured] = {}
    for cell, summary in cells:
        found.setdefault(cell.settings.data.dataset, Measured(cell.settings.data.dataset)).add(cell, summary)
    return list(found.values())


def cell_rows(cell: Cell, summary: Summary) -> Iterator[Row]:
    """Yield the numbers of a cell; the T classes that `joint` learns as one task count as T tasks."""
    together = cell.together
    for evaluation in summary["evaluations"]:
        for seen, metric, task, seed, value in rows(evaluation, summary["seeds"]):
            if together == 1 or task == "":
                yield seen * together, metric, task, seed, value
        terms = class_terms(evaluation.diversity).tolist() if evaluation.diversity else ()
        for seed, row in zip(summary["seeds"], terms, strict=False):
            for place, term in filter(lambda pair: math.isfinite(pair[1]), enumerate(row)):
                yield evaluation.learned * together, "diversity_term", place, seed, term
