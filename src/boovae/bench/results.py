"""All numbers of a dataset's cells: every seed, task and metric; from summaries, to a CSV with how they were made."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from boovae.bench.cells import Cell, Summary
from boovae.bench.statistics import Spread, spread
from boovae.files import write_file
from boovae.metrics.diversity import class_terms
from boovae.report.tables import COLUMNS, rows

Row = tuple[int, str, Any, Any, Any]  # tasks seen, metric, task, seed, value


@dataclass
class Measured:
    """The numbers of one dataset, by (label, tasks seen, metric, task), then by seed; one of all tasks has no task."""

    dataset: str
    values: dict[tuple[str, int, str, int | None], dict[int, float]] = field(default_factory=dict)
    cells: list[tuple[Cell, Summary]] = field(default_factory=list)

    def add(self, cell: Cell, summary: Summary) -> None:
        """Take the numbers of a finished cell."""
        self.cells.append((cell, summary))
        for seen, metric, task, seed, value in cell_rows(cell, summary):
            if seed != "":
                key = (cell.label, seen, metric, None if task == "" else int(task))
                self.values.setdefault(key, {})[seed] = math.nan if value is None else float(value)

    def seeds(self, label: str, seen: int, metric: str, task: int | None = None) -> Mapping[int, float]:
        """Return a number by seed; empty if it was not measured."""
        return self.values.get((label, seen, metric, task), {})

    def spread(self, label: str, seen: int, metric: str, task: int | None = None) -> Spread | None:
        """Return a number's mean and deviation over seeds; None if it was not measured."""
        found = list(self.seeds(label, seen, metric, task).values())
        return spread(found) if any(map(math.isfinite, found)) else None

    @property
    def labels(self) -> list[str]:
        """The methods that have numbers, in the order of the bench."""
        return list(dict.fromkeys(cell.label for cell, _ in self.cells))

    def by_class(self, label: str) -> bool:
        """Whether a method's tasks are single classes, as the paper's are."""
        return all(
            cell.settings.data.classes_per_task == cell.together for cell, _ in self.cells if cell.label == label
        )

    @property
    def tasks(self) -> int:
        """The most tasks that any cell has seen."""
        return max((cell.tasks for cell, _ in self.cells), default=0)

    @property
    def task_names(self) -> list[str]:
        """The names of the tasks, from the cell that has seen most of them one by one."""
        return max((summary["tasks"] for _, summary in self.cells), key=len, default=[])

    def write_csv(self, path: Path, command: str) -> None:
        """Write every number; the lines that start with # say how they were made."""
        text = io.StringIO()
        text.writelines(f"# {name}: {value}\n" for name, value in self.made_with(command).items())
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("method", *COLUMNS))
        for cell, summary in self.cells:
            writer.writerows((cell.label, *row) for row in cell_rows(cell, summary))
        write_file(path, text.getvalue().encode())

    def made_with(self, command: str) -> dict[str, str]:
        """Return versions, devices, commits, seeds and seconds of all cells."""
        environments = [summary["environment"] for _, summary in self.cells]
        seeds = [" ".join(map(str, summary["seeds"])) for _, summary in self.cells]
        once = {cell.name: summary["seconds"] for cell, summary in self.cells}  # one cell may have several labels
        seconds = {key: sum(each[key] for each in once.values()) for key in ("train", "evaluate")}
        return {
            **{key: _all(found[key] for found in environments) for key in ("boovae", "python", "torch", "device")},
            "commit": _all(found["commit"] for found in environments),
            "command": command,
            "seeds": _all(seeds),
            "seconds": ", ".join(f"{key} {value:.1f}" for key, value in seconds.items()),
        }


def cell_rows(cell: Cell, summary: Summary) -> Iterator[Row]:
    """Yield a cell's numbers; `joint` learns T classes as one task, which count as T tasks here."""
    together = cell.together
    for evaluation in summary["evaluations"]:
        for seen, metric, task, seed, value in rows(evaluation, summary["seeds"]):
            if together == 1 or task == "":
                yield seen * together, metric, task, seed, value
        if evaluation.diversity:
            for seed, terms in zip(summary["seeds"], class_terms(evaluation.diversity).tolist(), strict=True):
                for place, term in enumerate(terms):
                    if math.isfinite(term):
                        yield evaluation.learned * together, "diversity_term", place, seed, term


def _all(found: Iterator[str] | Sequence[str]) -> str:
    """Return what is the same everywhere, or everything there is."""
    return "; ".join(dict.fromkeys(found))
