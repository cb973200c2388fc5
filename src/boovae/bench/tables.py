"""The paper's tables, tasks down and methods across, with our number and the paper's in each cell."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from boovae.bench.published import DECIMALS, FACES, Printed, comparable, dataset_title, is_distance, numbers
from boovae.bench.results import Measured
from boovae.bench.statistics import Spread

TITLES = {"nll": "NLL", "diversity": "Diversity", "fid": "FID"}
Better = Literal["ours", "paper", "same", ""]
#: What stands above tables and charts whose numbers cannot be held against the paper's.
NOT_COMPARABLE = (
    "The paper's numbers are FIDs, on Inception features and all images: they cannot be compared with ours, only the "
    "order of the methods can."
)


def title_of(metric: str) -> str:
    """Return what a person calls a metric; a distance carries the name of its features.

    >>> title_of("nll"), title_of("frechet_classifier")
    ('NLL', 'Fréchet distance (classifier)')
    """
    return TITLES.get(metric) or f"Fréchet distance ({metric.removeprefix('frechet_')})"


def rows_of(measured: Measured, metric: str) -> range:
    """Return the numbers of tasks that a table has rows for, as in the paper.

    The tables of grey images begin with two tasks, that of faces with one; but diversity says nothing of one class.
    """
    alone = is_distance(metric) or (measured.dataset in FACES and metric == "nll")
    return range(1 if alone else min(2, measured.tasks), measured.tasks + 1)


@dataclass(frozen=True)
class Entry:
    """A cell of a table: what we measured, what the paper prints, and who is better (lower)."""

    ours: Spread | None
    paper: Printed | None
    decimals: int
    comparable: bool = True

    @property
    def better(self) -> Better:
        """Whose mean is lower, at the decimals the paper prints; empty where that means nothing."""
        if self.ours is None or self.paper is None or not self.comparable:
            return ""
        difference = round(self.ours.mean, self.decimals) - self.paper.mean
        if abs(difference) < 0.5 * 10**-self.decimals:
            return "same"
        return "ours" if difference < 0 else "paper"

    @property
    def texts(self) -> tuple[str, str]:
        """Our number and the paper's, as the paper prints them: mean (standard deviation); empty without one."""
        return _printed(self.ours, self.decimals), self.paper.text if self.paper else ""

    @property
    def markdown(self) -> str:
        """Both numbers, the better one bold."""
        ours, paper = self.texts
        if self.better in ("ours", "same"):
            ours = f"**{ours}**"
        if self.better in ("paper", "same"):
            paper = f"**{paper}**"
        return " / ".join(filter(None, (ours or "–", paper))) if ours or paper else ""


def _printed(value: Spread | None, decimals: int) -> str:
    if value is None:
        return ""
    deviation = f" ({value.std:.{decimals}f})" if math.isfinite(value.std) else ""
    mean = round(value.mean, decimals) + 0.0  # no minus zero
    return f"{mean:.{decimals}f}{deviation}"


@dataclass(frozen=True)
class Table:
    """A metric of a dataset: rows are numbers of tasks seen, columns are methods."""

    dataset: str
    metric: str
    methods: Sequence[str]
    rows: Sequence[tuple[int, Sequence[Entry]]]

    @property
    def title(self) -> str:
        """Metric and dataset."""
        return f"{title_of(self.metric)} on {dataset_title(self.dataset)}"

    @property
    def compared(self) -> bool:
        """Whether the paper has numbers for it."""
        return any(entry.paper for _, entries in self.rows for entry in entries)

    @property
    def note(self) -> str:
        """What must be said of the two numbers of an entry; empty where nothing must."""
        return NOT_COMPARABLE if self.compared and not comparable(self.metric) else ""

    def markdown(self) -> str:
        """Return the table as Markdown."""
        lines = [f"## {self.title}", "", *((self.note, "") if self.note else ())]
        lines.append("| tasks | " + " | ".join(self.methods) + " |")
        lines.append("|" + "---|" * (len(self.methods) + 1))
        lines += [f"| {seen} | " + " | ".join(entry.markdown for entry in row) + " |" for seen, row in self.rows]
        return "\n".join(lines) + "\n"

    def records(self) -> Iterator[tuple[object, ...]]:
        """Yield one record per cell, for a CSV."""
        for seen, row in self.rows:
            for method, entry in zip(self.methods, row, strict=True):
                ours = entry.ours.record if entry.ours else ("", "", "")
                paper = (entry.paper.mean, entry.paper.std) if entry.paper else ("", "")
                if entry.ours or entry.paper:
                    yield self.dataset, method, seen, *ours, *paper, entry.better


HEAD = ("dataset", "method", "tasks_seen", "mean", "std", "seeds", "paper_mean", "paper_std", "better")


def beside(measured: Measured, metric: str) -> dict[tuple[str, int], Printed]:
    """Return the paper's numbers by method and tasks seen, for methods that learned the same tasks here."""
    return {
        (method, seen): number
        for (dataset, method, seen), number in numbers(metric).items()
        if dataset == measured.dataset and measured.by_class(method)
    }


def table(measured: Measured, metric: str) -> Table:
    """Return a metric's table."""
    printed = beside(measured, metric)

    def entry(method: str, seen: int) -> Entry:
        found, paper = measured.spread(method, seen, metric), printed.get((method, seen))
        return Entry(found, paper, DECIMALS.get(metric, 1), comparable(metric))

    rows = [(seen, [entry(method, seen) for method in measured.labels]) for seen in rows_of(measured, metric)]
    return Table(measured.dataset, metric, measured.labels, rows)


def as_csv(head: Sequence[str], records: Iterator[tuple[object, ...]]) -> bytes:
    """Return records as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(records)
    return text.getvalue().encode()
